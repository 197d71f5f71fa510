"""The report of an audit as JSON has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from penstock.audit.account import Epoch, Gap
from penstock.audit.history import Thrown
from penstock.audit.intervals import size
from penstock.audit.reading import IntArray
from penstock.audit.report import Order, Report

_MAX_LISTED = 1000  # intervals of positions; a separate field gives their total number


def facts_of(report: Report) -> dict[str, Any]:
    """The report as JSON has it. Positions are [start, stop) of the epoch, the first 1,000 ranges of each kind."""
    return {
        "proven": report.is_proven,
        "by_workers": report.by_workers,
        "batches": report.num_batches,
        "lost_iterations": report.num_lost,
        "ledgers": [str(path) for path in report.paths],
        "damages": [asdict(damage) | {"path": str(damage.path)} for damage in report.damages],
        "orders": [_order(order) for order in report.orders],
    }


def _order(order: Order) -> dict[str, Any]:
    num_ranks = Counter(start.in_run for history in order.ranks for start in history.starts)
    return {
        "proven": order.is_proven,
        **dict(order.key),
        "ranks": [history.rank for history in order.ranks],
        "absent_ranks": order.absent,
        "apart": [
            {"rank": a.rank, "epoch": a.start.begin.epoch, "step": a.start.begin.step}
            | {"leader_epoch": a.leader.begin.epoch, "leader_step": a.leader.begin.step}
            for a in order.apart
        ],
        "passed_over": [{"epoch": p.epoch, "resumed_by": p.resumed.number + 1} for p in order.passed],
        "starts": [
            {
                "time": start.begin.time.isoformat(),
                "resumed": start.begin.num_loads > 0,
                "epoch": start.begin.epoch,
                "step": start.begin.step,
                "offset": start.slicing.offset,
                "batch_size": start.slicing.batch_size,
                "world_size": start.slicing.world_size,
                "ranks": num_ranks[start.number],
            }
            for start in order.leader.starts
        ],
        "thrown_away": [_thrown(thrown) for thrown in order.leader.thrown],
        "epochs": [_epoch(epoch) for epoch in order.epochs],
        "changed": [asdict(changed) for changed in order.changed],
    }


def _thrown(thrown: Thrown) -> dict[str, Any]:
    first, stop = thrown.steps
    return {"epoch": thrown.epoch, "first_step": first, "last_step": stop - 1, "start": thrown.started.number + 1} | (
        {"resumed_by": thrown.resumed.number + 1} if thrown.resumed else {}
    )


def _epoch(epoch: Epoch) -> dict[str, Any]:
    counts = ("num_samples", "num_due", "num_skipped", "num_dropped", "num_repeated", "num_ahead")
    return {
        "epoch": epoch.epoch,
        "proven": epoch.is_proven,
        **{name: getattr(epoch, name) for name in (*counts, "is_finished", "steps_done")},
        "missing": _samples(epoch.missing),
        "twice": _samples(epoch.twice),
        "gaps": [_gap(gap) for gap in epoch.gaps],
    }


def _samples(positions: IntArray) -> dict[str, Any]:
    return {"samples": size(positions), "ranges": len(positions), "positions": positions[:_MAX_LISTED].tolist()}


def _gap(gap: Gap) -> Mapping[str, Any]:
    first, stop = gap.steps
    slicing = gap.leg.slicing
    return {
        "first_step": first,
        "last_step": stop - 1,
        "ranks": gap.ranks,
        "world_size": slicing.world_size,
        "batch_size": slicing.batch_size,
        "offset": slicing.offset,
    }
