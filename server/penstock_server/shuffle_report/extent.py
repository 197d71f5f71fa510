"""How much of an epoch the shuffle report measures: its first samples, or all, as far as a second or two will do.

Most epochs are planned in one go. But a mixture may show a hundred epochs of a small dataset, and each has an order of its own;
and where batches are grouped by length, every window that is met has to be sorted.
"""

from __future__ import annotations

from dataclasses import replace

from penstock_server.batches.member import Member
from penstock_server.batches.plan import Plan
from penstock_server.order.length_buckets import LengthOrder
from penstock_server.order.shuffle import EpochOrder

MAX_SCATTERED = 16_384  # samples that are looked at one by one; an epoch of no more is looked at whole
_MIN_SCATTERED = 1024
_MAX_EFFORT = 1_000_000  # about as many microseconds


def num_served(plan: Plan) -> int:
    """The samples of an epoch; those that a tail shows again do not count."""
    once = replace(plan.schedule, batch_size=1, world_size=1)
    return min(plan.schedule.num_steps * plan.spec.samples_per_step, once.num_steps)


def num_measured(plan: Plan, epoch: int) -> int:
    """How many of an epoch's first samples are measured."""
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
    """How many samples are looked at one by one; where many ranges are skipped, each has to be counted through all of them."""
    ranges = max(len(plan.schedule.skipped), 1)
    return min(MAX_SCATTERED, max(_MIN_SCATTERED, _MAX_EFFORT // ranges))


def _shown(plan: Plan, member: int, epoch: int, first: int, last: int) -> tuple[int, int]:
    """The samples [start, stop) of a member's own stream that positions [first, last] of an epoch show."""
    if plan.mixture is None:
        size = plan.sizes[member]
        return epoch * size + first, epoch * size + last + 1
    begin = epoch * plan.schedule.num_positions
    return plan.mixture.num_before(member, begin + first), plan.mixture.num_before(member, begin + last + 1)


def _effort(member: Member, start: int, stop: int) -> float:
    """About the microseconds that it takes to plan a member's epochs and, where it has to be, to sort their windows."""
    packing, order = member.epoch(0)
    num_epochs = (stop - 1) // order.num_samples - start // order.num_samples + 1 if stop > start else 0
    effort = num_epochs * (0.5 * len(packing.samples_per_pool) + 4000)
    if isinstance(order, LengthOrder):
        num_windows = 1 + (stop - start) * num_windows_of(order) // order.num_samples
        effort += num_windows * (5000 + 3 * order.num_samples / num_windows_of(order))
    return effort


def num_windows_of(order: EpochOrder | LengthOrder) -> int:
    """The windows of an order; one where it has none."""
    return order.window(order.num_samples - 1) + 1
