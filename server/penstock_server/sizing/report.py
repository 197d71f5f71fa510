"""The plan of a run's cache: reads of blocks against its size, and the rates and times that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock_server.batches.plan import Plan
from penstock_server.catalog.estimate import estimate
from penstock_server.order.arrays import IntArray
from penstock_server.problems import BadParameter
from penstock_server.schemas.estimates import CachePointInfo, EstimateInfo, PaceInfo, PlanInfo, PrepareInfo
from penstock_server.sizing.reads import BlockSizes, reads_of
from penstock_server.sizing.touches import Touches, joined, touches_of

_NUM_POINTS = 8  # of the curve, beside the smallest cache without a second read
_LEAST_SHARE = 8  # the curve begins at an eighth of two windows
_PRECISION = 1.01  # of the smallest cache without a second read


class _Epochs(NamedTuple):
    """Touches of an epoch, or of its beginning; and of this epoch and the next, if both are whole.

    `num_touches` and `num_blocks` are those of the whole epoch, `num_blocks` of them distinct.
    """

    first: Touches
    both: Touches | None
    num_touches: int
    num_blocks: int


def plan_cache(
    plan: Plan, epoch: int, tokens: int | None, tokens_per_second: int | None, prepared_per_second: int | None
) -> PlanInfo:
    """Plans the cache of a run. `tokens` are those to train on, and the rates are those of the whole job and of preparing.

    Raises:
        BadParameter: the epoch has no step, or no end.
        IndexNotReady, IndexFailed: the packing needs token counts.
    """
    if plan.schedule.num_steps == 0:
        raise BadParameter(f"offset={plan.spec.offset:,} leaves no step of the epoch: there are no reads to plan.")
    if plan.spec.stopping_strategy == "never":
        raise BadParameter("stopping_strategy=never has no end, and so no reads of an epoch. Plan with all_exhausted.")
    plan.check_epoch(epoch)
    estimated, sizes = estimate(plan), _sizes(plan)
    epochs = _epochs(plan, epoch, estimated)
    once = _read_once_bytes(epochs.first, sizes)
    everything = round(_bytes_with_neighbours(epochs.first, sizes) * epochs.num_blocks / len(epochs.first.distinct))
    least = min(once, estimated["cache_bytes"] // _LEAST_SHARE)
    budgets = sorted({*np.geomspace(least, everything, _NUM_POINTS).astype(np.int64).tolist(), once})
    here = _point(epochs, sizes, estimated["cache_room_bytes"])
    num_steps, per_epoch = estimated["num_steps"], estimated["tokens"] or estimated["positions"]
    return {
        "dataset": plan.dataset,
        "snapshot": plan.snapshot,
        "epoch": epoch,
        "num_steps": num_steps,
        "num_samples": num_steps * plan.spec.samples_per_step,
        "positions": estimated["positions"],
        "tokens": estimated["tokens"],
        "steps_of_tokens": -(-tokens * num_steps // per_epoch) if tokens else None,
        "epochs_of_tokens": tokens / per_epoch if tokens else None,
        "num_blocks": epochs.num_blocks,
        "num_touches": epochs.num_touches,
        "num_samples_planned": epochs.first.num_samples,
        "sizes": "counted" if all(member.index.lengths.is_ready for member in plan.members) else "estimated",
        "read_once_bytes": once,
        "read_ahead_bytes": max(once, estimated["cache_bytes"]),
        "everything_bytes": everything,
        "curve": [_point(epochs, sizes, budget) for budget in budgets],
        "here": here,
        "pace": _pace(plan, tokens_per_second, per_epoch / num_steps, here) if tokens_per_second else None,
        "prepare": _prepare(plan, prepared_per_second),
        "spec": plan.spec.to_dict(),
    }


def _sizes(plan: Plan) -> BlockSizes:
    snapshots = [member.snapshot for member in plan.members]
    groups = [np.repeat(np.arange(len(s.blocks_per_group)), s.blocks_per_group) for s in snapshots]
    firsts = np.cumsum([0, *(len(snapshot.blocks_per_group) for snapshot in snapshots)])
    return BlockSizes(
        np.concatenate([member.index.bytes_per_block(sampled=True) for member in plan.members]),
        np.concatenate([snapshot.bytes_per_block for snapshot in snapshots]),
        np.concatenate([first + of_member for first, of_member in zip(firsts, groups, strict=False)]),
    )


def _epochs(plan: Plan, epoch: int, estimated: EstimateInfo) -> _Epochs:
    first, num_samples = touches_of(plan, epoch), plan.schedule.num_steps * plan.spec.samples_per_step
    if first.num_samples < num_samples:
        num_blocks = _num_blocks(plan, [share["passes"] for share in estimated["shares"]])
        num_touches = len(first.blocks) * num_samples // first.num_samples
        return _Epochs(first, None, num_touches, max(num_blocks, len(first.distinct)))
    second = touches_of(plan, epoch + 1)
    both = joined([first, second]) if second.num_samples == num_samples else None
    return _Epochs(first, both, len(first.blocks), len(first.distinct))


def _num_blocks(plan: Plan, passes: Sequence[float]) -> int:
    """Estimates the blocks that an epoch touches in its passes over each member."""
    with_rows = [np.count_nonzero(member.index.rows_per_block(member.order_key.split)) for member in plan.members]
    return round(sum(min(1.0, part) * count for part, count in zip(passes, with_rows, strict=True)))


def _bytes_with_neighbours(touches: Touches, sizes: BlockSizes) -> int:
    """Returns the bytes of the touched blocks, and of the others in their row groups, which are read with them."""
    return int(sizes.cached[np.isin(sizes.groups, sizes.groups[touches.distinct])].sum())


def _read_once_bytes(touches: Touches, sizes: BlockSizes) -> int:
    """Returns the smallest cache that reads no block twice, accurate to a hundredth."""
    too_small, enough = int(sizes.cached[touches.distinct].max()), _bytes_with_neighbours(touches, sizes)
    while enough > _PRECISION * too_small:
        budget = int((too_small * enough) ** 0.5)
        reads = reads_of(touches, sizes, budget, most=len(touches.distinct))
        if reads.num_repeated or reads.num_touches < len(touches.blocks):
            too_small = budget
        else:
            enough = budget
    return enough


def _point(epochs: _Epochs, sizes: BlockSizes, budget: int) -> CachePointInfo:
    """Counts the reads with a cache of a size; scales them if they were counted over a part of the epoch."""
    touches = epochs.both or epochs.first
    reads, size = reads_of(touches, sizes, budget), len(epochs.first.blocks)
    in_first = reads.touches < size
    num_counted = min(size, reads.num_touches)
    num_first = int(np.count_nonzero(touches.before[:num_counted] < 0))
    num_units = len(np.unique(reads.units[in_first]))
    # The first touches of blocks end with the last new block; what follows reads at a constant rate.
    rate = (int(in_first.sum()) - num_units) / max(1, num_counted - num_first)
    num_repeated = rate * (epochs.num_touches - epochs.num_blocks)
    num_reads = num_units * epochs.num_blocks / num_first + num_repeated
    later = None
    if epochs.both and reads.num_touches > size:
        later = int((~in_first).sum()) * (len(touches.blocks) - size) / (reads.num_touches - size)
    return {
        "cache_bytes": budget,
        "reads": round(num_reads),
        "repeated_reads": round(num_repeated),
        "source_bytes": round(num_reads * _mean(reads.nbytes[in_first])),
        "hit_rate": max(0.0, 1 - num_reads / epochs.num_touches),
        "later_reads": None if later is None else round(later),
        "later_source_bytes": None if later is None else round(later * _mean(reads.nbytes[~in_first])),
        "is_exact": reads.num_touches == len(touches.blocks) and epochs.both is not None,
    }


def _mean(values: IntArray) -> float:
    return float(values.mean()) if len(values) else 0.0


def _pace(plan: Plan, tokens_per_second: int, tokens_per_step: float, here: CachePointInfo) -> PaceInfo:
    steps_per_second = tokens_per_second / tokens_per_step
    return {
        "tokens_per_second": tokens_per_second,
        "steps_per_second": steps_per_second,
        "batches_per_second": steps_per_second * plan.spec.world_size,
        "batch_bytes": plan.step_nbytes,
        "bytes_per_second": steps_per_second * plan.spec.world_size * plan.step_nbytes,
        "source_bytes_per_second": steps_per_second * here["source_bytes"] / plan.schedule.num_steps,
    }


def _prepare(plan: Plan, tokens_per_second: int | None) -> PrepareInfo:
    seconds, total = 0.0, 0
    for member in plan.members:
        if member.index.lengths.is_ready:
            _, num_tokens, _ = member.index.lengths.get().per_block("all").sums()
        else:
            num_tokens = int(member.index.bytes_per_block().sum()) // np.dtype(member.snapshot.token_dtype).itemsize
        total += num_tokens
        seconds += num_tokens / (tokens_per_second or member.blocks.rates[0])
    return {
        "tokens": total,
        "tokens_per_second": tokens_per_second or total / seconds,
        "seconds": seconds,
        "is_measured": tokens_per_second is None,
    }
