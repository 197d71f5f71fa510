"""Room in the block cache for the blocks that a shuffle draws from: checks and advice."""

from __future__ import annotations

from penstock_server.batches.plan import Plan
from penstock_server.problems import BadParameter

_SMALL_WINDOW = 1000  # samples; fewer mix too little to be recommended
_ROUGHLY = 1.1  # estimates are accurate to about 10 %: blocks that may just fit are not refused


def check_room(plan: Plan) -> None:
    """Checks that the cache has room for all blocks with shuffle=global.

    Raises BadParameter: it has no room; the message gives both numbers.  Raises what Index.bytes_per_block raises.
    """
    if plan.spec.shuffle != "global":
        return
    needed = sum(int(member.index.bytes_per_block(look=True).sum()) for member in plan.members)
    budget = plan.members[0].blocks.cache.configured_bytes
    are_counted = all(member.index.lengths.is_ready for member in plan.members)
    if needed > (1 if are_counted else _ROUGHLY) * budget:
        raise BadParameter(
            f"shuffle=global needs every block in the cache at once: {plan.dataset} takes about {needed:,} bytes there, "
            f"and the budget is {budget:,}. Each batch would decode most of its rows anew. Raise --cache-bytes, or use "
            f"shuffle=window: with the largest window that fits it mixes nearly as well."
        )


def advice_on_room(plan: Plan) -> str | None:
    """Returns advice for a cache without room for a window; None if it has room."""
    cache = plan.members[0].blocks.cache
    if cache.failure:
        return (
            f"the server cannot store blocks in {cache.folder}: {cache.failure}. Blocks are decoded and tokenized again for "
            f"nearly every batch. Let the server write there, or name another folder with --cache-dir."
        )
    room = cache.room_bytes
    largest = max(int(member.index.bytes_per_block().max()) for member in plan.members)
    if plan.spec.shuffle == "none":
        if largest <= room:
            return None
        return (
            f"a block of {plan.dataset} takes up to about {largest:,} bytes in the server's block cache, which has room for "
            f"{room:,}: blocks are decoded and tokenized again for nearly every batch. {cache.remedy}."
        )
    needed = sum(member.window_bytes for member in plan.members)
    if needed <= room:
        return None
    # Room for a window and the next, which is loaded ahead; a window consists of whole blocks.
    fits = min(plan.spec.window, sum(plan.sizes)) * room // needed // 2
    is_window = plan.spec.shuffle == "window" and fits >= _SMALL_WINDOW and 8 * largest <= room
    or_less = f", or use smaller windows: window={fits}" if is_window else ""
    return (
        f"{plan.dataset} is shuffled in windows that take about {needed:,} bytes each in the server's block cache, "
        f"which has room for {room:,}: blocks are decoded and tokenized again for nearly every batch. {cache.remedy}{or_less}."
    )
