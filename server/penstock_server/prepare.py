"""Preparation: the index and the cache of datasets, made ahead of time. After an interrupt the command resumes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeAlias

import numpy as np
from tqdm import tqdm

from penstock.cli.output import report
from penstock.text import counted, printable, short, size
from penstock_server.blocks.shared import SharedStore
from penstock_server.catalog.dataset import OpenSnapshot
from penstock_server.catalog.describe import lengths_told, rows_held_out
from penstock_server.cluster.units import MAX_ATTEMPTS, Failure, Units
from penstock_server.cluster.worker import Attempts, run_here
from penstock_server.problems import BadParameter

Runner: TypeAlias = Callable[[Units, Callable[[int], None]], list[Failure]]  # calls its argument with the number of units done
_MOST_FAILURES = 20
_LINE_SECONDS, _LINE = 60.0, "{desc}: {percentage:.0f}%, {n_fmt} of {total_fmt}{unit}, {rate_fmt}, {remaining} left"


class NotKept(Exception):
    """A result could not be stored. The message says which, and the consequences."""


class RowGroupsFailed(NotKept):
    """Row groups failed in each attempt, and would fail again. All others are done."""


def prepare(opened: OpenSnapshot, seq_lens: list[int], run: Runner = run_here) -> Iterator[str]:
    """Count a dataset's tokens, make its blocks and pack for packing=best_fit; yield progress messages.

    If the recipe has splits, everything is also made for each split. With a shared store, `run` fills it, also together with
    other processes. Without one, the cache is filled up to its budget.

    Raises the errors of a block that cannot be read, and BadRow if the recipe does not replace bad rows. Raises NotKept at
    the end, RowGroupsFailed before it. Raises OSError: the store fails.
    """
    if shared := opened.blocks.shared:
        yield from _fill_store(opened, shared, seq_lens, run)
        return
    yield from _count(opened)
    name, index, cache, num_blocks = opened.name, opened.index, opened.blocks.cache, opened.snapshot.num_blocks
    missing = _fill(opened)
    has_failed = bool(missing) and (_num_fitting(opened, missing) > 0 or cache.room_bytes < cache.budget_bytes)
    reason = f": {_why_missing(opened, missing)}, or each use decodes the others" if missing else ""
    num_stored, blocks = num_blocks - len(missing), counted(num_blocks, "block")
    yield f"{name}: {num_stored:,} of {blocks} {'is' if num_blocks == 1 else 'are'} in the cache{reason}"
    yield from _pack_all(opened, seq_lens)
    if not_stored := ["counts"] * (not index.is_stored) + ["blocks"] * has_failed:
        raise NotKept(
            f"{name}: {' and '.join(not_stored)} could not be stored in {cache.folder}, so a server makes them again. See the "
            f"reason above, fix it, and run the command again."
        )


def plan(opened: OpenSnapshot, of: int | None) -> Iterator[str]:
    """Yield what `prepare` has to do: row groups, bytes, and the time by the speed of this machine; with `of` such machines.

    It tokenizes some rows, and writes nothing.
    """
    name, snapshot, shared = opened.name, opened.snapshot, opened.blocks.shared
    left = np.ones(len(snapshot.blocks_per_group), np.bool_)
    if shared:
        left[[*Units(opened, shared).done()]] = False
    else:
        left[:] = [not all(map(opened.blocks.is_stored, snapshot.blocks_of_group(group))) for group in range(len(left))]
    nbytes = int(snapshot.bytes_per_block[np.repeat(left, snapshot.blocks_per_group)].sum())
    num_groups, num_done = counted(len(left), "row group"), len(left) - int(left.sum())
    yield f"{name}: {num_groups}, {num_done:,} of them done; {size(nbytes)} of columns to read"
    if nbytes:
        tokens_per_second, bytes_per_second = opened.blocks.rates
        seconds = nbytes / bytes_per_second
        spread = f", or {_duration(seconds / of)} on {of:,} such machines" if of and of > 1 else ""
        tokens = f"about {short(seconds * tokens_per_second)} tokens at {short(tokens_per_second)} a second"
        yield f"{name}: {_duration(seconds)} on this machine{spread}: {tokens}, measured on some rows"


def _duration(seconds: float) -> str:
    return f"{timedelta(seconds=max(1, round(seconds)))}"


def _fill_store(opened: OpenSnapshot, shared: SharedStore, seq_lens: list[int], run: Runner) -> Iterator[str]:
    """Make all units; then one process of those that prepare the snapshot joins the counts, writes the manifest, and packs."""
    name, index, units = opened.name, opened.index, Units(opened, shared)
    if facts := index.find_manifest():
        if facts["bad_rows"]:
            yield from _count(opened)  # the recipe may allow fewer of them than when the manifest was written
    else:
        with _progress(f"{name}: preparing", len(units), "row group") as advance:
            failures = run(units, advance)
        if failures:
            raise RowGroupsFailed(_told(name, failures))
        if num_lacking := len(units) - len(units.done()):
            raise NotKept(
                f"{name}: the store {shared.place} lacks {counted(num_lacking, 'row group')} that the nodes have made, so they "
                f"write to another one. Give a URL, or a folder that all nodes mount, and run the command again."
            )
    while not _is_prepared(opened, shared, seq_lens):
        with shared.claimed(opened.blocks.names.of_all) as is_ours:
            if is_ours and not _is_prepared(opened, shared, seq_lens):
                yield from _count(opened)
                Attempts(units).forget()  # one remains if its worker is killed after its unit is done
                index.share(shared)
                yield from _pack_all(opened, seq_lens)
        if not is_ours:
            yield f"{name}: another process joins the counts of all row groups, or packs"
            shared.wait(opened.blocks.names.of_all, lambda: _is_prepared(opened, shared, seq_lens))
    if facts := index.find_manifest():
        told = f"{counted(facts['row_groups'], 'row group')}, {counted(facts['tokens'], 'token')}"
        yield f"{name}: prepared in {shared.place}: {told}, {size(facts['blocks_bytes'])}"


def _is_prepared(opened: OpenSnapshot, shared: SharedStore, seq_lens: list[int]) -> bool:
    packings = [opened.index.bins_path(split, seq_len) for split, seq_len in _packings(opened, seq_lens)]
    return bool(opened.index.find_manifest()) and all(shared.has(path.name) for path in packings)


def _told(name: str, failures: list[Failure]) -> str:
    """Return a message about failed units, with the remedy."""
    reasons = "\n".join(f"  {failure.place}: {failure.reason}" for failure in failures[:_MOST_FAILURES])
    more = f"\n  and {len(failures) - _MOST_FAILURES:,} more" if len(failures) > _MOST_FAILURES else ""
    return (
        f"{name}: {counted(len(failures), 'row group')} failed in each of {MAX_ATTEMPTS} attempts. All others are done.\n"
        f"{reasons}{more}\n"
        f"Fix the cause, then run the command again without --index: it tries them again, and finishes."
    )


def _count(opened: OpenSnapshot) -> Iterator[str]:
    """Count the tokens, and the rows of each split."""
    name, snapshot, index = opened.name, opened.snapshot, opened.index
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


def _pack_all(opened: OpenSnapshot, seq_lens: list[int]) -> Iterator[str]:
    packings = _packings(opened, seq_lens)
    if seq_lens and not packings:
        yield f"{opened.name}: preference pairs are not packed"
    for split, seq_len in packings:
        yield _pack(opened, split, seq_len)
        if shared := opened.blocks.shared:
            shared.ensure([opened.index.bins_path(split, seq_len)])


def _packings(opened: OpenSnapshot, seq_lens: list[int]) -> list[tuple[str, int]]:
    """Return the splits and the lengths of samples to pack for; none for preference pairs."""
    if len(opened.snapshot.recipe.features) > 1:
        return []
    splits = ("all", *(opened.snapshot.splits if len(opened.snapshot.splits) > 1 else ()))
    return [(split, seq_len) for seq_len in seq_lens for split in splits]


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
def _progress(description: str, total: int, unit: str = "block") -> Iterator[Callable[[int], None]]:
    """Show a bar with rate and remaining time on a terminal, else a line each minute; yields a function of the number done."""
    name, began_at = printable(description), time.monotonic()
    with tqdm(desc=name, total=total, unit=f" {unit}s", disable=None if total else True) as bar:
        first, due_at = -1, began_at + _LINE_SECONDS

        def advance(done: int) -> None:
            nonlocal first, due_at
            if first < 0:
                first = bar.initial = bar.n = done  # what was done before says nothing about the rate
            bar.update(done - bar.n)
            now = time.monotonic()
            if bar.disable and now > due_at and done < total:
                due_at = now + _LINE_SECONDS
                shape = {"prefix": name, "unit": f" {unit}s", "bar_format": _LINE}
                report(tqdm.format_meter(done, total, now - began_at, initial=first, **shape))

        yield advance
