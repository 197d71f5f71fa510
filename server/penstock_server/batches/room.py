"""Room in the block cache for all that a shuffle draws from at a time."""

from __future__ import annotations

from penstock_server.batches.plan import Plan
from penstock_server.problems import BadParameter


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
