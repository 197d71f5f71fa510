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


def prepare(served: OpenSnapshot, seq_lens: list[int]) -> Iterator[str]:
    """Count a dataset's tokens, fill the cache up to its budget and pack for packing=best_fit; yield progress messages.

    If the recipe has splits, everything is also made for each split.

    Raises the errors of a block that cannot be read, and BadRow if the recipe does not replace bad rows. Raises NotKept at
    the end.
    """
    with _progress(f"{served.name}: counting tokens", served.snapshot.num_blocks) as advance:
        lengths = served.index.lengths.make(advance)
    rows, tokens, bad = lengths.per_block("all").sums()
    held_out = {split: int(lengths.per_block(split).rows.sum()) for split in ("validation", "test")}
    yield (
        f"{served.name}: {counted(rows, 'row')}, {counted(tokens, 'token')}, {counted(bad, 'bad row')}; "
        f"{rows_held_out(held_out)}"
    )
    if tokens:
        yield from (f"{served.name}: {line}" for line in lengths_told(lengths.quantiles))
    if not rows:
        raise BadParameter(f"{served.name} has no row that its filter keeps. Mend that in penstock.toml, or the data.")
    served.index.row_lengths("all")
    served.blocks.quarantine.check()
    served.index.rows.make(lambda _: None)  # cheap: follows from the lengths
    missing, num_blocks = _fill(served), served.snapshot.num_blocks
    cache = served.blocks.cache
    has_failed = bool(missing) and (_num_fitting(served, missing) > 0 or cache.budget_bytes < cache.configured_bytes)
    blocks = f"{counted(num_blocks, 'block')} {'is' if num_blocks == 1 else 'are'}"
    reason = f": {_reason(served, missing)}, or the others are decoded each time they are needed" if missing else ""
    yield f"{served.name}: {num_blocks - len(missing):,} of {blocks} in the cache{reason}"
    is_paired = len(served.snapshot.recipe.features) > 1
    if seq_lens and is_paired:
        yield f"{served.name}: preference pairs are not packed"
    for seq_len in seq_lens if not is_paired else ():
        for split in ("all", *(served.snapshot.splits if len(served.snapshot.splits) > 1 else ())):
            yield _pack(served, split, seq_len)
    if unkept := ["counts"] * (not served.index.is_stored) + ["blocks"] * has_failed:
        raise NotKept(
            f"{served.name}: {' and '.join(unkept)} could not be stored in {cache.folder}, as a line above says: a server "
            f"makes them anew. Mend that, and run the command again."
        )


def _pack(served: OpenSnapshot, split: str, seq_len: int) -> str:
    of_split = "" if split == "all" else f" of split={split}"
    with _progress(f"{served.name}: packing{of_split} for seq_len={seq_len}", served.snapshot.num_blocks) as advance:
        num_bins = int(served.index.counting_bins(split, seq_len).make(advance).bins_per_pool.sum())
    padding = 1 - int(served.index.tokens_per_block(split).sum()) / max(1, num_bins * seq_len)
    samples, tokens = counted(num_bins, "sample"), counted(seq_len, "token")
    return f"{served.name}: {samples} of {tokens}{of_split}, {padding:.1%} of them padding"


def _fill(served: OpenSnapshot) -> list[int]:
    """Load missing blocks until the cache's budget is used. Return the blocks that are still missing."""
    blocks, missing = served.blocks, _missing(served)
    with _progress(f"{served.name}: filling the cache", len(missing)) as advance:
        num_done = 0
        while some := missing[num_done : num_done + _num_fitting(served, missing[num_done:])]:
            for _ in blocks.each(some):
                num_done += 1
                advance(num_done)
    return _missing(served)


def _missing(served: OpenSnapshot) -> list[int]:
    """Return the blocks that are not in the cache."""
    return [index for index in range(served.snapshot.num_blocks) if not served.blocks.is_stored(index)]


def _num_fitting(served: OpenSnapshot, missing: list[int]) -> int:
    """Return how many of these blocks fit into the cache: beyond its budget they would evict each other."""
    needed = np.cumsum(served.index.bytes_per_block()[missing])
    cache = served.blocks.cache
    return int(np.searchsorted(needed, cache.budget_bytes - cache.used_bytes, side="right"))


def _reason(served: OpenSnapshot, missing: list[int]) -> str:
    """Return why these blocks are not in the cache, and the remedy."""
    cache = served.blocks.cache
    if _num_fitting(served, missing):
        return "some could not be stored there, as a line above says. Mend that"
    return f"its budget, {cache.budget_bytes:,} bytes, is full. {cache.remedy}"


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar with rate and remaining time on a terminal; yields a function that takes the number of blocks done."""
    with tqdm(desc=printable(what), total=total, unit="block", disable=None if total else True) as bar:

        def advance(done: int) -> None:
            bar.update(done - bar.n)

        yield advance
