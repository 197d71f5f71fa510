"""Extent of an epoch that the shuffle report measures: its first samples, or all, as fits into a second or two.

Most epochs need a single plan. But a mixture may show a hundred epochs of a small dataset, each in a different order. And if
batches are grouped by length, every window in the extent has to be sorted.
"""

from __future__ import annotations

from dataclasses import replace

from penstock_server.batches.member import Member
from penstock_server.batches.plan import Plan
from penstock_server.order.length_buckets import LengthOrder
from penstock_server.order.shuffle import EpochOrder

MAX_SCATTERED = 16_384  # samples looked up one by one; an epoch up to this size is measured whole
_MIN_SCATTERED = 1024
_MAX_EFFORT = 1_000_000  # about in microseconds


def num_served(plan: Plan) -> int:
    """Return the number of samples of an epoch, without those that wrap around at its end."""
    once = replace(plan.schedule, batch_size=1, world_size=1)
    return min(plan.schedule.num_steps * plan.spec.samples_per_step, once.num_steps)


def num_measured(plan: Plan, epoch: int) -> int:
    """Return the number of an epoch's first samples to measure."""
    once = replace(plan.schedule, batch_size=1, world_size=1)

    def effort(num_samples: int) -> float:
        first, last = once.positions([0, num_samples - 1], 0)[:, 0].tolist()
        shown = [_shown(plan, number, epoch, first, last) for number in range(len(plan.members))]
        return sum(_effort(member, *ends) for member, ends in zip(plan.members, shown, strict=True))

    num_samples = num_served(plan)
    least = 2 * effort(1)
    while effort(num_samples) > least + _MAX_EFFORT:
        num_samples //= 2
    return num_samples


def num_scattered(plan: Plan) -> int:
    """Return the number of samples to look up one by one; with many skipped ranges each look-up counts through all of them."""
    ranges = max(len(plan.schedule.skipped), 1)
    return min(MAX_SCATTERED, max(_MIN_SCATTERED, _MAX_EFFORT // ranges))


def _shown(plan: Plan, member: int, epoch: int, first: int, last: int) -> tuple[int, int]:
    """Return the samples [start, stop) of a member's stream that positions [first, last] of an epoch show."""
    if plan.mixture is None:
        size = plan.sizes[member]
        return epoch * size + first, epoch * size + last + 1
    begin = epoch * plan.schedule.num_positions
    return plan.mixture.num_before(member, begin + first), plan.mixture.num_before(member, begin + last + 1)


def _effort(member: Member, start: int, stop: int) -> float:
    """Estimate the microseconds to plan a member's epochs and, if necessary, to sort their windows."""
    packing, order = member.epoch(0)
    num_epochs = (stop - 1) // order.num_samples - start // order.num_samples + 1 if stop > start else 0
    effort = num_epochs * (0.5 * len(packing.samples_per_pool) + 4000)
    if isinstance(order, LengthOrder):
        num_windows = 1 + (stop - start) * num_windows_of(order) // order.num_samples
        effort += num_windows * (5000 + 3 * order.num_samples / num_windows_of(order))
    return effort


def num_windows_of(order: EpochOrder | LengthOrder) -> int:
    """Return the number of windows of an order; 1 for an order without windows."""
    return order.window(order.num_samples - 1) + 1
