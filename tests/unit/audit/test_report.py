"""Runs that change the order of their samples, or what they mix; and ledgers of several runs."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock.audit.report import audit
from penstock.ledger.begin import Begin
from penstock.ledger.file import find_ledgers
from support.ledgers import FIRST, append, begin_of, report_on, words, write_run

MIXED: dict[str, Any] = {"snapshot": "one+two", "stopping_strategy": "first_exhausted"}


@pytest.mark.parametrize(("name", "values"), [("seed", [0, 9]), ("num_samples", [100, 104])])
def test_orders_of_samples_are_accounted_for_separately(ledger: Path, name: str, values: list[int]) -> None:
    write_run(ledger, epochs=1)
    for rank in range(2):
        append(ledger, begin_of(rank, start=5, parent=None, world_size=2, **{name: values[1]}), range(rank, 10), ends=True)
    found = [(dict(order.key)[name], order.is_proven) for order in report_on(ledger).orders]
    assert found == [(values[0], True), (values[1], False)]


@pytest.mark.parametrize("parent", [0, None])
@pytest.mark.parametrize("order", [{"seed": 1}, {"snapshot": "later"}])
def test_epoch_lacks_its_rest_when_another_order_follows(ledger: Path, order: dict[str, Any], parent: int | None) -> None:
    append(ledger, begin_of(), range(10))
    left_at = (
        begin_of(start=1, parent=parent, step=10, **order) if parent is not None else begin_of(start=1, parent=None, **order)
    )
    append(ledger, replace(left_at, epoch=1, step=0), range(20), ends=True)
    assert words(ledger).startswith("NOT PROVEN: samples not trained on: 50\n")
    place = "steps 10-19 of start 1, rank 0: 50 samples" if parent is None else "50 samples"
    assert f"MISSING epoch 0, {place} at positions 50-99" in words(ledger)
    assert ("If its weights were new: --assume-fresh-weights" in words(ledger)) == (parent is None)
    assert report_on(ledger, assume_fresh_weights=True).is_proven == (parent is None)


def test_order_that_restarts_an_epoch_discards_its_samples(ledger: Path) -> None:
    append(ledger, begin_of(), range(20), ends=True)
    append(ledger, begin_of(epoch=1), range(7))
    append(ledger, begin_of(start=1, epoch=1, seed=1), range(20), ends=True)
    assert report_on(ledger).is_proven


def test_order_or_epoch_without_a_batch_is_not_missing(ledger: Path) -> None:
    append(ledger, begin_of(), range(20), ends=True)
    append(ledger, begin_of(epoch=1), [])
    append(ledger, begin_of(start=1, parent=None, epoch=1, seed=1), range(7))
    append(ledger, begin_of(start=2, parent=None, epoch=1, seed=2), [])
    assert report_on(ledger).is_proven


def test_mistaken_order_is_discarded_when_the_run_resumes_before_it(ledger: Path) -> None:
    append(ledger, begin_of(), range(20), ends=True)
    append(ledger, begin_of(epoch=1), range(9))
    append(ledger, begin_of(start=1, parent=None, seed=1), range(4))
    append(ledger, begin_of(start=2, parent=0, epoch=1, step=7), range(7, 20), ends=True)
    assert report_on(ledger).is_proven


def test_other_split_leaves_nothing_missing(ledger: Path) -> None:
    append(ledger, begin_of(split="train"), range(10))
    append(ledger, replace(begin_of(start=1, parent=None, split="validation")), range(20), ends=True)
    append(ledger, begin_of(start=2, parent=0, step=10, split="train"), range(10, 20), ends=True)
    assert report_on(ledger).is_proven


def test_rank_that_left_the_run_is_not_apart(ledger: Path) -> None:
    for rank in range(2):
        append(ledger, begin_of(rank, world_size=2), range(4))
    append(ledger, begin_of(1, world_size=2, start=1, step=4), [4])  # rank 0 came to no batch
    append(ledger, begin_of(start=2, parent=0, offset=40), range(12), ends=True)
    assert report_on(ledger).is_proven


@pytest.mark.parametrize("num_ahead", [0, 3])
def test_order_continues_when_the_mix_changes_after_the_consumed_samples(ledger: Path, num_ahead: int) -> None:
    def begin(rank: int, start: int, step: int, mix: str, snapshot: str, num_samples: int) -> Begin:
        spec = MIXED | {"mix": mix, "snapshot": snapshot}
        return begin_of(rank, start=start, step=step, world_size=2, num_samples=num_samples, **spec)

    first, second, third = "a:7,b:3", "a:7,b:3;a:1,b:1@40", "a:7,b:3;a:1,b:1@40;a:1,c:1@80"
    for rank in range(2):
        append(ledger, begin(rank, 0, 0, first, "one+two", 100), range(4 + num_ahead))
        append(ledger, begin(rank, 1, 4, second, "one+two", 150), range(4, 8 + num_ahead))
        append(ledger, begin(rank, 2, 8, third, "one+two+three", 120), range(8, 12), ends=True)
    report = report_on(ledger)
    assert report.is_proven
    [order] = report.orders
    assert [(epoch.num_due, epoch.num_samples, epoch.is_finished) for epoch in order.epochs] == [(120, 120, True)]


def test_abandoned_mix_is_discarded(ledger: Path) -> None:
    append(ledger, begin_of(mix="a:7,b:3", **MIXED), range(12))
    append(ledger, begin_of(mix="a:7,b:3;b:1@40", start=1, step=8, num_samples=80, **MIXED), range(8, 11))
    second = begin_of(mix="a:7,b:3;a:1,b:1@60", start=2, parent=0, step=12, num_samples=120, **MIXED)
    append(ledger, second, range(12, 24), ends=True)
    report = report_on(ledger)
    assert report.is_proven
    assert [[epoch.num_due for epoch in order.epochs] for order in report.orders] == [[120], []]
    assert "epoch 0, steps 8-10 of start 2" in words(ledger)


def test_samples_lost_by_a_state_loaded_without_strict_are_missing(ledger: Path) -> None:
    """The run had passed the sample where the mix changes."""
    append(ledger, begin_of(mix="a:7,b:3", **MIXED), range(12))
    append(ledger, begin_of(mix="a:7,b:3;a:1,b:1@40", start=1, step=12, **MIXED), range(12, 20), ends=True)
    assert [[e.missing.tolist() for e in order.epochs] for order in report_on(ledger).orders] == [[[[60, 100]]], [[[0, 60]]]]


@pytest.mark.parametrize(
    ("mix", "values"),
    [
        ("a:7,b:3;a:1,b:1@39", {}),  # among the consumed samples
        ("a:7,b:3;a:1,b:1@119", {"epoch": 1, "step": 4}),  # the start of an epoch depends on the mix
        ("a:7,b:3;a:1,b:1@40", {"snapshot": "one+three"}),
        ("a:7,b:3;a:1,b:1@40", {"seed": 1}),
        ("a:7,b:3;a:1,b:1@40", {"step": 0, "parent": None}),
    ],
)
def test_mix_that_does_not_continue_the_run_is_another_order(ledger: Path, mix: str, values: dict[str, Any]) -> None:
    append(ledger, begin_of(mix="a:7,b:3", **MIXED), range(8))
    append(ledger, begin_of(mix=mix, **({"start": 1, "step": 8} | MIXED | values)), range(8, 20), ends=True)
    assert len(report_on(ledger).orders) == 2


def test_files_may_be_named_in_any_order(ledger: Path) -> None:
    paths = [append(ledger, begin_of(mix="a:7,b:3", batch_size=10, **MIXED), range(4))]
    for start, steps in ((1, range(4, 6)), (2, range(6, 10))):
        for rank in range(2):
            begin = begin_of(rank, start=start, step=steps[0], world_size=2, mix="a:7,b:3;a:1,b:1@40", **MIXED)
            begin = replace(begin, time=FIRST + timedelta(hours=start - 3 * rank))
            paths.append(append(ledger.with_name(f"{start}"), begin, steps, ends=start == 2))
    for named in (paths, paths[::-1]):
        assert audit(named).is_proven


@pytest.mark.parametrize("is_joined_first", [True, False])
def test_audit_counts_batches_once_when_a_joined_ledger_and_its_parts_are_named(ledger: Path, is_joined_first: bool) -> None:
    write_run(ledger, epochs=1)
    parts = find_ledgers(ledger)
    joined = ledger.with_name("joined")
    joined.write_bytes(b"".join(path.read_bytes() for path in parts))
    append(ledger, begin_of(1, epoch=1, world_size=2), range(10), ends=True)
    append(ledger, begin_of(0, epoch=1, world_size=2), range(10), ends=True)
    report = audit([joined, *parts] if is_joined_first else [*parts, joined])
    assert (report.num_batches, [len(epoch.twice) for epoch in report.epochs]) == (40, [0, 0])
    assert report.is_proven
