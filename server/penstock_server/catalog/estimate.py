"""Estimates of a spec before a run: tokens, padding, what is cut off, and room in the cache. They read counts, no block."""

from __future__ import annotations

from typing import NamedTuple

from penstock_server.batches.member import Member
from penstock_server.batches.plan import Plan, advice_on_room
from penstock_server.catalog.dataset import OpenSnapshot
from penstock_server.index.row_lengths import BIN_STARTS
from penstock_server.schemas.estimates import EstimateInfo, LengthsInfo, ShareInfo


class _Yield(NamedTuple):
    """What one dataset gives an epoch on average: tokens a sample, and fractions of rows and of tokens that are cut off."""

    tokens_per_sample: float
    cut_rows: float
    cut_tokens: float


def estimate(plan: Plan) -> EstimateInfo:
    """Estimates what an epoch of a spec holds and needs."""
    spec, schedule = plan.spec, plan.schedule
    shares = samples_by_dataset(plan, 0, schedule.num_steps)
    total = max(1, sum(share["samples"] for share in shares))
    positions = spec.sample_len + (spec.target_seq_len or 0 if spec.task == "seq2seq" else 0)
    yields = [_yield(member, num_samples) for member, num_samples in zip(plan.members, plan.sizes, strict=True)]
    weighted = [(share["samples"] / total, each) for share, each in zip(shares, yields, strict=True) if each]
    mean = _Yield(*(sum(part * each[i] for part, each in weighted) for i in range(3))) if len(weighted) == len(shares) else None
    blocks_bytes = sum(int(member.index.bytes_per_block().sum()) for member in plan.members)
    num_shown = schedule.num_steps * spec.samples_per_step
    return {
        "num_steps": schedule.num_steps,
        "num_samples": schedule.num_samples,
        "positions": num_shown * positions * len(plan.members[0].snapshot.recipe.features),
        "tokens": round(mean.tokens_per_sample * num_shown) if mean else None,
        "padding": 1 - mean.tokens_per_sample / positions if mean else None,
        "cut_rows": mean.cut_rows if mean else None,
        "cut_tokens": mean.cut_tokens if mean else None,
        "batch_bytes": plan.step_nbytes,
        "cache_bytes": blocks_bytes if spec.shuffle == "global" else min(blocks_bytes, 2 * _window_bytes(plan)),
        "blocks_bytes": blocks_bytes,
        "cache_room_bytes": plan.members[0].blocks.cache.room_bytes,
        "cache_advice": advice_on_room(plan),
        "shares": shares,
    }


def samples_by_dataset(plan: Plan, epoch: int, step: int) -> list[ShareInfo]:
    """Counts the samples of each dataset in an epoch before a step, of all ranks. Raises BadParameter: see check_epoch."""
    plan.check_epoch(epoch)
    schedule = plan.schedule
    begin, shown = epoch * schedule.num_samples, min(step, schedule.num_steps) * plan.spec.samples_per_step
    end = begin + min(schedule.num_samples, schedule.num_kept_before_offset + shown)
    counts = [end - begin]
    if plan.mixture:
        numbers = range(len(plan.members))
        counts = [plan.mixture.num_before(i, end) - plan.mixture.num_before(i, begin) for i in numbers]
    total = max(1, sum(counts))
    return [
        {"dataset": member.name, "samples": count, "share": count / total, "passes": count / size}
        for member, count, size in zip(plan.members, counts, plan.sizes, strict=True)
    ]


def show_lengths(opened: OpenSnapshot) -> LengthsInfo:
    """Describes the distribution of row lengths; without bins until the tokens are counted, which this does not start."""
    opened.index.lengths.read()
    if not opened.index.lengths.is_ready:
        return {"starts": [], "rows": {}}
    histograms = opened.index.lengths.get().histograms
    used = max((int(counts.nonzero()[0].max()) + 1 for counts in histograms.values() if counts.any()), default=0)
    starts = BIN_STARTS[: used + 1].tolist()
    return {"starts": starts, "rows": {side: counts[:used].tolist() for side, counts in histograms.items()}}


def _window_bytes(plan: Plan) -> int:
    if plan.spec.shuffle == "none":
        return max(int(member.index.bytes_per_block().max()) for member in plan.members)
    return sum(member.window_bytes for member in plan.members)


def _yield(member: Member, num_samples: int) -> _Yield | None:
    """Returns the averages of one dataset; None if its tokens are not counted, or its rows have two sides."""
    order, index = member.order_key, member.index
    index.lengths.read()
    if order.packing == "concat":
        return _Yield(order.sample_len, 0.0, 0.0)
    if not index.lengths.is_ready or len(member.snapshot.recipe.features) > 1 or not num_samples:
        return None
    lengths = index.lengths.get()
    num_rows, num_tokens, num_bad = lengths.per_block(order.split).sums()
    if not order.replaces_bad_rows:  # nothing is cut off, but to make samples
        return _Yield(num_tokens / num_samples, 0.0, 0.0)
    left, num_cut = lengths.cut(order.split, order.sample_len)
    num_good = max(1, num_rows - num_bad)
    return _Yield(left / num_good, num_cut / num_good, 1 - left / max(1, num_tokens))
