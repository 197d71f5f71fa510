"""Room in the block cache for what an order draws from at a time: all blocks, or those of a window."""

from __future__ import annotations

from penstock_server.batches.plan import Plan
from penstock_server.problems import BadParameter

_SMALL_WINDOW = 1000  # sequences; fewer mix too little to be recommended


def check_room(plan: Plan) -> None:
    """Whether the cache has room for what the shuffle needs. Raises BadParameter: it has not; both numbers are told."""
    if plan.spec.shuffle != "global":
        return
    needed = sum(member.blocks.estimated_bytes for member in plan.members)
    budget = plan.members[0].blocks.cache.configured_bytes
    if needed > budget:
        raise BadParameter(
            f"shuffle=global needs every block in the cache at once: {plan.dataset} takes about {needed:,} bytes there, "
            f"and the budget is {budget:,}. Each batch would decode most of its rows anew. Raise --cache-bytes, or use "
            f"shuffle=window: with the largest window that fits it mixes nearly as well."
        )


def advice(plan: Plan) -> list[str]:
    """What a run should be told before it begins: that the cache has no room for its windows, if so."""
    needed, budget = plan.window_bytes, plan.members[0].blocks.cache.budget_bytes
    if needed <= budget:
        return []
    # Room for a window and the next, which is loaded ahead; a window is whole blocks.
    fits = min(plan.spec.window, sum(plan.sizes)) * budget // needed // 2
    has_small_blocks = 8 * max(member.snapshot.largest_block_bytes for member in plan.members) <= budget
    or_less = f", or mix in smaller windows: window={fits}" if fits >= _SMALL_WINDOW and has_small_blocks else ""
    return [
        f"{plan.dataset} is mixed in windows that take about {needed:,} bytes each in the server's block cache, and the budget "
        f"of that is {budget:,}: blocks are decoded and tokenized again for nearly every batch. Raise --cache-bytes{or_less}."
    ]
