"""Preparation: the index and the cache of datasets, made ahead of time. After an interrupt the command resumes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from tqdm import tqdm

from penstock.text import counted, printable
from penstock_server.catalog.dataset import OpenSnapshot
from penstock_server.catalog.describe import lengths_told, rows_held_out
from penstock_server.problems import BadParameter


class NotKept(Exception):
    """A result could not be stored. The message says which, and the consequences."""


def prepare(opened: OpenSnapshot, seq_lens: list[int]) -> Iterator[str]:
    """Count a dataset's tokens, fill the cache up to its budget and pack for packing=best_fit; yield progress messages.

    If the recipe has splits, everything is also made for each split.

    Raises the errors of a block that cannot be read, and BadRow if the recipe does not replace bad rows. Raises NotKept at
    the end.
    """
    name, snapshot, index, cache = opened.name, opened.snapshot, opened.index, opened.blocks.cache
    with _progress(f"{name}: counting tokens", snapshot.num_blocks) as advance:
        lengths = index.lengths.make(advance)
    rows, tokens, bad = lengths.per_block("all").sums()
    held_out = {split: int(lengths.per_block(split).rows.sum()) for split in ("validation", "test")}
    yield (f"{name}: {counted(rows, 'row')}, {counted(tokens, 'token')}, {counted(bad, 'bad row')}; {rows_held_out(held_out)}")
    if tokens:
        yield from (f"{name}: {line}" for line in lengths_told(lengths.quantiles))
    if not rows:
        raise BadParameter(f"{name} has no row that its filter keeps. Correct the filter in penstock.toml, or the data.")
    index.row_lengths("all")
    opened.blocks.quarantine.check()
    index.rows.make(lambda _: None)  # cheap: follows from the lengths
    missing = _fill(opened)
    has_failed = bool(missing) and (_num_fitting(opened, missing) > 0 or cache.room_bytes < cache.budget_bytes)
    reason = f": {_why_missing(opened, missing)}, or each use decodes the others" if missing else ""
    num_stored, num_blocks = snapshot.num_blocks - len(missing), counted(snapshot.num_blocks, "block")
    yield f"{name}: {num_stored:,} of {num_blocks} {'is' if snapshot.num_blocks == 1 else 'are'} in the cache{reason}"
    is_paired = len(snapshot.recipe.features) > 1
    if seq_lens and is_paired:
        yield f"{name}: preference pairs are not packed"
    for seq_len in seq_lens if not is_paired else ():
        for split in ("all", *(snapshot.splits if len(snapshot.splits) > 1 else ())):
            yield _pack(opened, split, seq_len)
    if not_stored := ["counts"] * (not index.is_stored) + ["blocks"] * has_failed:
        raise NotKept(
            f"{name}: {' and '.join(not_stored)} could not be stored in {cache.folder}, so a server makes them again. See the "
            f"reason above, fix it, and run the command again."
        )


def _pack(opened: OpenSnapshot, split: str, seq_len: int) -> str:
    of_split = "" if split == "all" else f" of split={split}"
    with _progress(f"{opened.name}: packing{of_split} for seq_len={seq_len}", opened.snapshot.num_blocks) as advance:
        num_bins = int(opened.index.counting_bins(split, seq_len).make(advance).bins_per_pool.sum())
    padding = 1 - int(opened.index.tokens_per_block(split).sum()) / max(1, num_bins * seq_len)
    samples, tokens = counted(num_bins, "sample"), counted(seq_len, "token")
    return f"{opened.name}: {samples} of {tokens}{of_split}, {padding:.1%} of them padding"


def _fill(opened: OpenSnapshot) -> list[int]:
    """Load missing blocks until the cache's budget is used. Return the blocks that are still missing."""
    missing, num_done = _missing(opened), 0
    with _progress(f"{opened.name}: filling the cache", len(missing)) as advance:
        while fitting := missing[num_done : num_done + _num_fitting(opened, missing[num_done:])]:
            for _ in opened.blocks.each(fitting):
                num_done += 1
                advance(num_done)
    return _missing(opened)


def _missing(opened: OpenSnapshot) -> list[int]:
    """Return the blocks that are not in the cache."""
    return [index for index in range(opened.snapshot.num_blocks) if not opened.blocks.is_stored(index)]


def _num_fitting(opened: OpenSnapshot, missing: list[int]) -> int:
    """Return the number of these blocks that fit into the cache: beyond its budget they would evict each other."""
    needed, cache = np.cumsum(opened.index.bytes_per_block()[missing]), opened.blocks.cache
    return int(np.searchsorted(needed, cache.room_bytes - cache.used_bytes, side="right"))


def _why_missing(opened: OpenSnapshot, missing: list[int]) -> str:
    """Return why these blocks are not in the cache, and the remedy."""
    if _num_fitting(opened, missing):
        return "some could not be stored there, for the reason above. Fix that"
    cache = opened.blocks.cache
    return f"its budget, {cache.room_bytes:,} bytes, is full. {cache.remedy}"


@contextmanager
def _progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar with rate and remaining time on a terminal; yields a function that takes the number of blocks done."""
    with tqdm(desc=printable(description), total=total, unit="block", disable=None if total else True) as bar:

        def advance(done: int) -> None:
            bar.update(done - bar.n)

        yield advance
