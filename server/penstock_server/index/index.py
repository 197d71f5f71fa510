"""The index: what a packing must know of all blocks before its first batch. Counted once, in the background, and kept.

rows per block        from the footers; where a filter or a split leaves rows out, from the columns that these read
row lengths           from the tokens of every block; for concat, best_fit, split rows and batches of similar length; with what
                      each block takes in the cache
bins                  from the row lengths; for best_fit
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from penstock_server.blocks.blocks import Blocks
from penstock_server.checksummed import read_sealed, write_sealed
from penstock_server.index.bins import keep_bins
from penstock_server.index.build_lock import turn
from penstock_server.index.counting import Counting
from penstock_server.index.row_lengths import SUFFIX, RowLengths, count_lengths, lengths_files
from penstock_server.order.arrays import IntArray
from penstock_server.order.best_fit import Bins, PackedPools, pack
from penstock_server.recipes.split_hashes import Selection
from penstock_server.snapshots.snapshot import Snapshot

_FORMAT = 4
_SUFFIX = ".index"
_MARK_SECONDS = 86_400.0
_FORGET_SECONDS = 30 * _MARK_SECONDS


class Index:
    """The counts of one snapshot.

    A method that gives counts raises IndexNotReady while they are being made, and whatever stopped that.
    """

    def __init__(self, name: str, snapshot: Snapshot, blocks: Blocks) -> None:
        self._name, self._snapshot, self._blocks = name, snapshot, blocks
        num_blocks = snapshot.num_blocks
        of_shards = partial(lengths_files, snapshot, blocks)
        self.lengths = Counting(f"the tokens of {name}", num_blocks, self._count_lengths, of_shards)
        self.rows = Counting(f"the rows of {name} that are served", num_blocks, self._count_rows, lambda: [self._path("rows")])
        self._bins: dict[tuple[int, str], Counting[PackedPools]] = {}
        self._lock, self._packing = threading.Lock(), threading.Lock()
        self._mark_at = time.monotonic() + _MARK_SECONDS

    def rows_per_block(self, split: str) -> IntArray:
        """Rows of a split in each block, after the filter and with the bad ones; shape [num_blocks]."""
        snapshot, selections = self._snapshot, self._snapshot.select(split)
        rows: dict[Selection, IntArray] = {"none": np.zeros(snapshot.num_blocks, np.int64)}
        if snapshot.recipe.filter is None and {*selections} <= {"all", "none"}:
            rows["all"] = snapshot.rows_per_block
        elif self.lengths.is_ready:
            return self.lengths.get().per_block(split).rows
        else:
            kept, held_out = self.rows.get()
            rows |= {"all": kept + held_out, "train": kept, "validation": held_out}
        if len({*selections}) == 1:
            return rows[selections[0]]
        blocks = map(snapshot.blocks_of_shard, range(len(selections)))
        return np.concatenate([rows[own][some.start : some.stop] for own, some in zip(selections, blocks, strict=True)])

    @property
    def num_rows(self) -> int | None:
        """Rows after the filter, with the bad ones; None until they are counted, which is not begun here."""
        if self._snapshot.recipe.filter:
            self.lengths.read()
            self.rows.read()
            if not (self.lengths.is_ready or self.rows.is_ready):
                return None
        return int(self.rows_per_block("all").sum())

    def bytes_per_block(self, *, look: bool = False) -> IntArray:
        """What each block takes in the cache, shape [num_blocks]: as it was counted, and until then about that.

        With `look` a few blocks are read where nothing is counted, and correct what the footers tell. Raises what
        Blocks.get raises, with `look`.
        """
        self.lengths.read()
        if self.lengths.is_ready:
            return self.lengths.get().bytes_per_block
        if look:
            self._blocks.look()
        return self._blocks.expected_bytes

    def tokens_per_block(self, split: str) -> IntArray:
        """Tokens of each block's rows, shape [num_blocks]. Raises BadRow: see row_lengths."""
        return self._sound_lengths(split).per_block(split).tokens

    def row_lengths(self, split: str) -> Callable[[int], IntArray]:
        """Gives the tokens of each row of a block, shape [rows of the split in the block], 0 for bad rows.

        Raises BadRow: there is one, and the recipe does not allow to do without it.
        """
        lengths = self._sound_lengths(split)
        return lambda block: lengths.of_block(block, split)

    def parts_per_block(self, split: str, seq_len: int) -> IntArray:
        """Samples of each block, shape [num_blocks], where rows longer than seq_len are several. Raises BadRow."""
        return self._sound_lengths(split).parts_per_block(split, seq_len)

    def bins(self, split: str, seq_len: int) -> PackedPools:
        """The bins of each pool of blocks; see best_fit. Raises BadRow."""
        self._sound_lengths(split)
        return self.counting_bins(split, seq_len).get()

    def counting_bins(self, split: str, seq_len: int) -> Counting[PackedPools]:
        """The counting of bins; it needs the row lengths."""
        with self._lock:
            if (seq_len, split) not in self._bins:
                make = partial(self._count_bins, split, seq_len)
                what = f"the samples that the documents of {self._name} fill"
                self._bins[seq_len, split] = Counting(
                    what, self._snapshot.num_blocks, make, lambda: [self._bins_path(split, seq_len)]
                )
            return self._bins[seq_len, split]

    @property
    def num_counted(self) -> int:
        """Blocks whose tokens are counted."""
        return self._snapshot.num_blocks if self.lengths.is_ready else self.lengths.num_done

    @property
    def is_stored(self) -> bool:
        """Whether all that was counted is in its files, so that no other process counts it again."""
        return all(counting.is_stored for counting in self._countings() if counting.is_ready)

    def _countings(self) -> list[Counting[Any]]:
        return [self.lengths, self.rows, *list(self._bins.values())]

    def mark_used(self) -> None:
        """A job uses the snapshot now: what is counted of it is not to be dropped. Done once a day."""
        if time.monotonic() >= self._mark_at:
            self._mark_at = time.monotonic() + _MARK_SECONDS
            countings = self._countings()
            for counting in countings:
                counting.mark_used()

    def _sound_lengths(self, split: str) -> RowLengths:
        lengths = self.lengths.get()
        num_bad = lengths.per_block(split).bad_rows
        if num_bad.any() and self._snapshot.recipe.on_bad_row == "fail":
            index = int(np.flatnonzero(num_bad)[0])
            self._blocks.quarantine.check_block(self._blocks.get([index], split)[0], index)
        return lengths

    def _count_lengths(self, advance: Callable[[int], None]) -> RowLengths:
        lengths = count_lengths(self._snapshot, self._blocks, advance)
        num_rows, _, num_bad = lengths.per_block("all").sums()
        self._blocks.quarantine.num_rows, self._blocks.quarantine.num_bad_counted = num_rows, num_bad
        return lengths

    def _count_rows(self, advance: Callable[[int], None]) -> IntArray:
        """Rows that the hash keeps and holds out in each block, shape [2, num_blocks]; stored little-endian."""
        path, size = self._path("rows"), 16 * self._snapshot.num_blocks

        def parse(body: memoryview) -> IntArray | None:
            return np.frombuffer(body, "<i8").astype(np.int64).reshape(2, -1) if len(body) == size else None

        with turn(path) as get_further:
            rows = read_sealed(path, parse)
            if rows is None:
                rows = self._read_rows(get_further, advance)
                write_sealed(path, [rows.astype("<i8").tobytes()], "it is counted again after a restart")
            self._blocks.quarantine.num_rows = int(rows.sum())
            return rows

    def _read_rows(self, get_further: Callable[[], None], advance: Callable[[int], None]) -> IntArray:
        if self.lengths.is_ready:
            return self.lengths.get().rows_by_hash()
        counts = []
        for shard, of_shard in enumerate(self._blocks.rows_of_shards(get_further)):
            counts.append(of_shard)
            advance(self._snapshot.blocks_of_shard(shard).stop)
        return np.concatenate(counts, axis=1)

    def _count_bins(self, split: str, seq_len: int, advance: Callable[[int], None]) -> PackedPools:
        starts = self._snapshot.pools.starts
        lengths = self.row_lengths(split)

        def pack_all() -> Iterator[Bins]:
            for start, stop in pairwise(starts.tolist()):
                yield pack(np.concatenate([lengths(block) for block in range(start, stop)]), seq_len)
                advance(stop)

        with self._packing:  # one at a time: each keeps a core busy
            return keep_bins(self._bins_path(split, seq_len), len(starts) - 1, pack_all)

    def _bins_path(self, split: str, seq_len: int) -> Path:
        return self._path(f"bins-{split}-{seq_len}")

    def _path(self, name: str) -> Path:
        return self._blocks.cache.folder / f"{self._blocks.names.of_all}-{name}-{_FORMAT}{_SUFFIX}"


def drop_old_counts(folder: Path, now: float) -> None:
    """Removes the counts of all snapshots that no server has used for 30 days. Who has one mapped keeps it.

    `now` is of the clock that dates the folder's files. Raises OSError: it cannot be listed.
    """
    for entry in os.scandir(folder):
        if entry.name.endswith((SUFFIX, _SUFFIX)):
            with suppress(OSError):  # another server tidies up at the same time
                if now - entry.stat().st_mtime > _FORGET_SECONDS:
                    Path(entry.path).unlink()
