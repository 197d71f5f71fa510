"""Index: counts of all blocks that a packing needs before its first batch. Counted once in the background, and stored.

rows per block        from the footers; with a filter or a split, from the columns that these read
row lengths           from the tokens of every block; for concat, best_fit, split rows and length buckets; with the bytes of
                      each block in the cache
bins                  from the row lengths; for best_fit

A shared store has the same files, and after a preparation a manifest, which is written once, after all blocks and counts.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from penstock.text import counted
from penstock_server.blocks.cache import PACKED
from penstock_server.blocks.loader import Blocks
from penstock_server.blocks.shared import SharedStore
from penstock_server.catalog.snapshot import Snapshot
from penstock_server.files import read_sealed, write_sealed
from penstock_server.index.counting import Counting, build_lock
from penstock_server.index.row_lengths import SUFFIX, RowLengths, count_lengths, lengths_files
from penstock_server.order.arrays import IntArray
from penstock_server.order.best_fit import Bins, PackedPools, pack
from penstock_server.problems import BadParameter
from penstock_server.recipes.split import Selection

_FORMAT = 4
_SUFFIX = ".index"
MANIFEST = ".manifest"  # suffix in the shared store
_MANIFEST_SECONDS = 60.0
_FORGET_SECONDS = 30 * 86_400.0
_BINS_KEPT = 16  # in memory, of one snapshot
# Packing takes a second of CPU for a million parts. More parts than these mean that seq_len is too short for the documents.
_FEW_PARTS, _SHORTEST_PARTS = 1 << 20, 64
_PART_BYTES = 20  # on the disk, at most
_packing = threading.Lock()


@with_config(ConfigDict(use_attribute_docstrings=True))
class Prepared(TypedDict):
    """A snapshot whose blocks and counts are all in the shared store: what its manifest says."""

    row_groups: int
    """Number of row groups."""
    rows: int
    """Rows that the filter keeps, including bad rows."""
    tokens: int
    """Tokens of these rows."""
    bad_rows: int
    """Rows that cannot be used."""
    blocks_bytes: int
    """Bytes of all blocks."""


class Index:
    """Counts of one snapshot. Its methods raise IndexNotReady while counting runs, and the error that stopped it."""

    def __init__(self, name: str, snapshot: Snapshot, blocks: Blocks) -> None:
        self._name, self._snapshot, self._blocks = name, snapshot, blocks
        num_blocks = snapshot.num_blocks
        of_shards = partial(lengths_files, snapshot, blocks)
        self.lengths = Counting(f"the tokens of {name}", num_blocks, self._count_lengths, of_shards)
        self.rows = Counting(f"the rows of {name} that are served", num_blocks, self._count_rows, lambda: [self._path("rows")])
        self._bins = OrderedDict[tuple[int, str], Counting[PackedPools]]()
        self._prepared: Prepared | None = None
        self._ask_at = 0.0  # for the manifest
        self._lock = threading.Lock()

    def rows_per_block(self, split: str) -> IntArray:
        """Returns the rows of a split in each block, after the filter, including bad rows; shape [num_blocks]."""
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
        shards = zip(selections, map(snapshot.blocks_of_shard, range(len(selections))), strict=True)
        return np.concatenate([rows[selection][blocks.start : blocks.stop] for selection, blocks in shards])

    @property
    def num_rows(self) -> int | None:
        """Rows after the filter, including bad rows; None before they are counted. Does not start the count."""
        if self._snapshot.recipe.filter:
            self.lengths.read()
            self.rows.read()
            if not (self.lengths.is_ready or self.rows.is_ready):
                return None
        return int(self.rows_per_block("all").sum())

    def bytes_per_block(self, *, sampled: bool = False) -> IntArray:
        """Returns the bytes of each block in the cache, shape [num_blocks]: counted, or estimated; `sampled`: see Blocks."""
        self.lengths.read()
        if self.lengths.is_ready:
            return self.lengths.get().bytes_per_block
        if sampled:
            self._blocks.sample()
        return self._blocks.expected_bytes

    def tokens_per_block(self, split: str) -> IntArray:
        """Returns the tokens of each block's rows, shape [num_blocks]. Raises BadRow: see row_lengths."""
        return self._sound_lengths(split).per_block(split).tokens

    def row_lengths(self, split: str) -> Callable[[int], IntArray]:
        """Returns a function from a block to its row lengths, shape [rows of the split in the block]; 0 for bad rows.

        Raises BadRow: the split has a bad row, and the recipe does not allow to leave it out.
        """
        return partial(self._sound_lengths(split).of_block, split=split)

    def parts_per_block(self, split: str, seq_len: int) -> IntArray:
        """Returns the samples of each block, shape [num_blocks], with rows longer than seq_len split. Raises BadRow."""
        return self._sound_lengths(split).parts_per_block(split, seq_len)

    def bins(self, split: str, seq_len: int) -> PackedPools:
        """Returns the bins of each pool of blocks; see best_fit. Raises BadRow."""
        self._sound_lengths(split)
        return self.counting_bins(split, seq_len).get()

    def counting_bins(self, split: str, seq_len: int) -> Counting[PackedPools]:
        """Returns the counting of bins; it needs the row lengths."""
        with self._lock:
            if (seq_len, split) not in self._bins:
                make = partial(self._count_bins, split, seq_len)
                what = f"the samples that the documents of {self._name} fill"
                self._bins[seq_len, split] = Counting(
                    what, self._snapshot.num_blocks, make, lambda: [self.bins_path(split, seq_len)]
                )
                self._drop_bins()
            self._bins.move_to_end((seq_len, split))
            return self._bins[seq_len, split]

    def _drop_bins(self) -> None:
        """Drops the counting of bins used longest ago, if there are many."""
        idle = [key for key, counting in self._bins.items() if not counting.is_running][:-1]  # without the new one
        for key in idle[: max(0, len(self._bins) - _BINS_KEPT)]:
            del self._bins[key]

    @property
    def prepared(self) -> Prepared | None:
        """The manifest of the snapshot; without one, the shared store is asked once a minute."""
        if time.monotonic() >= self._ask_at:
            self.find_manifest()
        return self._prepared

    def find_manifest(self) -> Prepared | None:
        """Returns the manifest of the snapshot from the shared store; None if it has none."""
        shared = self._blocks.shared
        if self._prepared is None and shared:
            self._ask_at = time.monotonic() + _MANIFEST_SECONDS
            body = shared.get(self._manifest_name)
            self._prepared = None if body is None else msgpack.unpackb(body)
        return self._prepared

    def share(self, shared: SharedStore) -> None:
        """Writes the counts in memory to the shared store, then the manifest, which says that the snapshot is prepared.

        Raises OSError: the store fails, or a file of counts could not be stored here.
        """
        shared.ensure(path for counting in self._countings if counting.is_ready for path in counting.files())
        lengths = self.lengths.get()
        rows, tokens, bad_rows = lengths.per_block("all").sums()
        manifest: Prepared = {
            "row_groups": len(self._snapshot.blocks_per_group),
            "rows": rows,
            "tokens": tokens,
            "bad_rows": bad_rows,
            "blocks_bytes": int(lengths.bytes_per_block.sum()),
        }
        shared.write(self._manifest_name, [msgpack.packb(manifest)])
        self._prepared = manifest

    @property
    def _manifest_name(self) -> str:
        return f"{self._blocks.names.of_all}-{_FORMAT}{MANIFEST}"

    @property
    def num_counted(self) -> int:
        """Number of blocks with counted tokens; a shard that another process counts is one step."""
        if self.lengths.is_ready:
            return self._snapshot.num_blocks
        return max(self.lengths.num_done, int(self._snapshot.first_block_of_shard[self.lengths.num_files_done]))

    @property
    def is_counting(self) -> bool:
        """Whether tokens are counted now."""
        return self.lengths.is_running

    @property
    def is_stored(self) -> bool:
        """Whether all counts are stored, so that no other process counts again."""
        return all(counting.is_stored for counting in self._countings if counting.is_ready)

    def mark_used(self) -> None:
        """Marks the stored counts as used, so that they are not dropped."""
        for counting in self._countings:
            counting.mark_used()

    @property
    def _countings(self) -> list[Counting[Any]]:
        return [self.lengths, self.rows, *list(self._bins.values())]

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
        """Counts the rows that the hash keeps and holds out per block, shape [2, num_blocks]; stored little-endian."""
        path, size = self._path("rows"), 16 * self._snapshot.num_blocks

        def parse(body: memoryview) -> IntArray | None:
            return np.frombuffer(body, "<i8").astype(np.int64).reshape(2, -1) if len(body) == size else None

        with build_lock(path), self._shared(path):
            rows = read_sealed(path, parse)
            if rows is None:
                rows = self.lengths.get().rows_by_hash() if self.lengths.is_ready else self._blocks.rows_by_hash(advance)
                write_sealed(path, [rows.astype("<i8").tobytes()], "it is counted again after a restart")
            self._blocks.quarantine.num_rows = int(rows.sum())
            return rows

    def _count_bins(self, split: str, seq_len: int, advance: Callable[[int], None]) -> PackedPools:
        starts = self._snapshot.pools.starts
        lengths = self.row_lengths(split)
        num_parts = self._num_parts(split, seq_len)
        path, cache = self.bins_path(split, seq_len), self._blocks.cache

        def pack_all() -> Iterator[Bins]:
            for start, stop in pairwise(starts.tolist()):
                yield pack(np.concatenate([lengths(block) for block in range(start, stop)]), seq_len)
                advance(stop)

        with _packing:  # one at a time: each keeps a core busy
            is_new = not os.path.exists(path)  # noqa: PTH110 - Path.exists raises if the disk fails
            if is_new:
                with suppress(OSError):  # `keep_bins` logs that nothing can be stored
                    cache.make_room_for_packing(_PART_BYTES * num_parts)
            with self._shared(path):
                bins = keep_bins(path, len(starts) - 1, pack_all)
            if is_new:
                with suppress(OSError):
                    cache.count_packing(path)
            return bins

    @contextmanager
    def _shared(self, path: Path) -> Iterator[None]:
        """Fetch a file from the shared store before the block that may make it, and write it there after that."""
        shared = self._blocks.shared
        if shared:
            shared.fetch_files([path])
        is_new = not os.path.exists(path)  # noqa: PTH110 - Path.exists raises if the disk fails
        yield
        if shared and is_new:
            shared.put_file(path)

    def _num_parts(self, split: str, seq_len: int) -> int:
        """Returns the parts of documents to pack. Raises BadParameter: seq_len cuts the documents into too many."""
        lengths = self.lengths.get()
        num_rows, num_tokens, _ = lengths.per_block(split).sums()
        num_parts = int(lengths.parts_per_block(split, seq_len).sum())
        most = _FEW_PARTS + 2 * num_rows + num_tokens // _SHORTEST_PARTS
        if num_parts > most or _PART_BYTES * num_parts > max(self._blocks.cache.budget_bytes, _PART_BYTES * _FEW_PARTS):
            raise BadParameter(
                f"packing=best_fit with samples of {counted(seq_len, 'token')} cuts the {num_rows:,} documents of {self._name} "
                f"into {num_parts:,} parts, and the limit is {most:,}, or what fits into --cache-bytes. Raise seq_len, or use "
                f"packing=concat."
            )
        return num_parts

    def bins_path(self, split: str, seq_len: int) -> Path:
        """Returns the path of the file with the bins of a packing."""
        return self._path(f"{PACKED.strip('-')}-{split}-{seq_len}")

    def _path(self, name: str) -> Path:
        return self._blocks.cache.folder / f"{self._blocks.names.of_all}-{name}-{_FORMAT}{_SUFFIX}"


def keep_bins(path: Path, num_pools: int, pack: Callable[[], Iterable[Bins]]) -> PackedPools:
    """Returns the stored bins; otherwise stores those that `pack` yields per pool, or keeps them in memory if that fails.

    A file holds, little-endian: the Bins.words of each pool, uint32; then bins and parts of each pool, int64 [2, num_pools].
    """
    load = partial(read_sealed, path, partial(_parse, num_pools))
    with build_lock(path):
        stored = load()
        if stored is None:
            write_sealed(path, _pieces(pack()), "it is held in memory, and packed again after a restart")
            stored = load() or PackedPools.of(pack())
        return stored


def _pieces(pools: Iterable[Bins]) -> Iterator[bytes]:
    # Pool by pool: all pools may exceed the memory.
    sizes = []
    for bins in pools:
        yield bins.words.astype("<u4").tobytes()
        sizes.append((bins.num_bins, len(bins.rows)))
    yield np.array(sizes, "<i8").reshape(-1, 2).T.tobytes()


def _parse(num_pools: int, body: memoryview) -> PackedPools | None:
    end = len(body) - 16 * num_pools
    if end < 0:
        return None
    sizes = np.frombuffer(body[end:], "<i8").astype(np.int64).reshape(2, num_pools)
    fits = end == 4 * PackedPools.num_words(sizes)
    return PackedPools(sizes, np.frombuffer(body[:end], "<u4")) if fits else None


def drop_old_counts(folder: Path, now: float) -> None:
    """Removes the counts of all snapshots that no server has used for 30 days; maps stay valid. Raises OSError."""
    for entry in os.scandir(folder):
        if entry.name.endswith((SUFFIX, _SUFFIX)):
            with suppress(OSError):  # another server may remove it at the same time
                if now - entry.stat().st_mtime > _FORGET_SECONDS:
                    Path(entry.path).unlink()
