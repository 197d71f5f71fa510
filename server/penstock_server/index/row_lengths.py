"""Row lengths: tokens of each row of a snapshot, in one sealed file per shard beside the cached blocks.

A file holds, little-endian: the rows of each block of the shard, int64 [num_blocks]; the bytes of each block in the cache,
int64 [num_blocks]; one word per row, uint32 [num_rows]; if rows have prompts, the tokens of each prompt, uint32 [num_rows]. A
word is the row's tokens, 0 for a bad row; its highest bit is set for rows that the hash holds out for validation.
A new snapshot reuses the files of unchanged shards, and an interrupted count resumes after the last complete shard.

A preparation writes a file of the same layout for each row group to the shared store. The file of a shard is joined from these.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock_server.blocks.block import Block
from penstock_server.blocks.loader import Blocks
from penstock_server.catalog.snapshot import BlockAddress, Snapshot
from penstock_server.files import read_sealed, write_sealed
from penstock_server.index.counting import build_lock
from penstock_server.machine import num_cores
from penstock_server.order.arrays import IntArray, find, find_one, starts_of
from penstock_server.order.packing import SplitRows
from penstock_server.recipes.split import Selection, is_selected, is_validation

SUFFIX = ".lengths"
UNITS, UNIT_SUFFIX = "units", ".unit"  # folder and suffix of the counts of row groups in the shared store
_COLUMNS = ("block_bytes", "words", "prompts")
_FORMAT = 3  # of the files: after a change, every shard is counted again
_REMEMBERED = 16  # sums, each 8 or 24 bytes per block
_VALIDATION = np.uint32(1 << 31)
BIN_STARTS = np.unique(np.ceil(2 ** (np.arange(4 * 32 + 1) / 4)).astype(np.int64))  # tokens; four bins an octave
QUANTILES = {"median": 500, "p90": 900, "p99": 990, "longest": 1000}  # per mille of the rows
_STEP = 1 << 20  # rows per step: a shard may have any number
_SHORT = 1 << 16  # tokens; the few longer rows are kept one by one
_GROUPS_A_CORE = 4  # with fewer, cores would wait for the slowest row group of each batch
_SMALL_BYTES = 1 << 14  # smaller files are copied, since Linux gives a process 65,530 maps


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ShardLengths:
    """Counts of one shard.

    starts       the first row of each block, and the total, shape [num_blocks + 1]
    block_bytes  bytes of each block in the cache, shape [num_blocks]
    words        one word per row, shape [num_rows]
    prompts      tokens of each row's prompt, shape [num_rows]; empty if rows have no prompts
    """

    starts: IntArray
    block_bytes: IntArray
    words: npt.NDArray[np.uint32]
    prompts: npt.NDArray[np.uint32]

    @classmethod
    def of_blocks(cls, snapshot: Snapshot, blocks: Iterable[Block]) -> ShardLengths:
        """Counts blocks, one after the other."""
        num_rows, block_bytes, words, prompts = [], [], [np.zeros(0, np.uint32)], [np.zeros(0, np.uint32)]
        for block in blocks:
            num_rows.append(block.num_rows)
            block_bytes.append(block.nbytes)
            words.append(_words(block, snapshot.validation))
            if snapshot.recipe.has_prompts:
                prompts.append(block.prompt_lengths(np.arange(block.num_rows)).astype(np.uint32))
        starts = starts_of(np.array(num_rows, np.int64))
        return cls(starts, np.array(block_bytes, np.int64), np.concatenate(words), np.concatenate(prompts))

    @classmethod
    def joined(cls, parts: Sequence[ShardLengths]) -> ShardLengths:
        """Joins the counts of the row groups of a shard."""
        starts = starts_of(np.concatenate([np.diff(part.starts) for part in parts]))
        return cls(starts, *(np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS))

    def pieces(self) -> list[bytes]:
        """Returns the content of a file of these counts."""
        of_blocks = np.array([np.diff(self.starts), self.block_bytes], "<i8")
        return [of_blocks.tobytes(), *(column.astype("<u4").tobytes() for column in (self.words, self.prompts))]


class Counts(NamedTuple):
    """Counts per block, shape [num_blocks] each. `rows` includes bad rows, which have no tokens."""

    rows: IntArray
    tokens: IntArray
    bad_rows: IntArray

    def sums(self) -> list[int]:
        """Returns the totals [rows, tokens, bad_rows] over all blocks."""
        return [int(counts.sum()) for counts in self]


class RowLengths:
    """Lengths of all rows of a snapshot, by block. `select(split)` returns the selection of each shard."""

    def __init__(self, first_block: IntArray, shards: list[ShardLengths], select: Callable[[str], list[Selection]]) -> None:
        self._first_block, self._shards = first_block, shards
        self._select = lru_cache(maxsize=_REMEMBERED)(select)
        # Cached, since each call scans all rows.
        self.per_block = lru_cache(maxsize=_REMEMBERED)(self._per_block)
        self.parts_per_block = lru_cache(maxsize=_REMEMBERED)(self._parts_per_block)
        self.cut = lru_cache(maxsize=_REMEMBERED)(self._cut)

    def of_block(self, block: int, split: str) -> IntArray:
        """Returns the tokens of each row of a block in the split, shape [rows]; 0 for a bad row."""
        shard = find_one(self._first_block, block)
        starts, number = self._shards[shard].starts, block - int(self._first_block[shard])
        words = self._shards[shard].words[starts[number] : starts[number + 1]]
        lengths, inside = _selected(words, self._select(split)[shard])
        return lengths[inside]

    @cached_property
    def bytes_per_block(self) -> IntArray:
        """Bytes of each block in the cache, shape [num_blocks]."""
        return np.concatenate([shard.block_bytes for shard in self._shards])

    @property
    def quantiles(self) -> dict[str, dict[str, int]]:
        """Quantiles of tokens over the usable rows, 0 without any: of "row"; of "prompt" and "response" if rows have both."""
        return {name: quantiles for name, (quantiles, _) in self._distributions.items()}

    @property
    def histograms(self) -> dict[str, IntArray]:
        """Number of usable rows in each bin, shape of BIN_STARTS, of the same sides. The last bin holds none."""
        return {name: histogram for name, (_, histogram) in self._distributions.items()}

    @cached_property
    def _distributions(self) -> dict[str, tuple[dict[str, int], IntArray]]:
        sides = defaultdict[str, _Distribution](_Distribution)
        for shard in self._shards:
            for at in range(0, len(shard.words), _STEP):
                lengths, prompts = shard.words[at : at + _STEP] & ~_VALIDATION, shard.prompts[at : at + _STEP]
                sides["row"].add(lengths[lengths > 0])
                if len(prompts):
                    sides["prompt"].add(prompts[lengths > 0])
                    sides["response"].add((lengths - prompts)[lengths > 0])
        sides["row"]  # also without a row
        return {name: (side.quantiles(), side.histogram()) for name, side in sides.items()}

    def _per_block(self, split: str) -> Counts:
        """Returns the counts of a split per block."""
        functions = (np.ones_like, lambda lengths: lengths, lambda lengths: lengths == 0)
        return Counts(*(self._sum_per_block(split, function) for function in functions))

    def _parts_per_block(self, split: str, seq_len: int) -> IntArray:
        """Returns samples per block, shape [num_blocks], with rows longer than seq_len split."""
        return self._sum_per_block(split, lambda lengths: SplitRows.count(lengths, seq_len))

    def _cut(self, split: str, seq_len: int) -> tuple[int, int]:
        """Returns the tokens of a split if its rows are cut to seq_len, and the number of rows that are cut."""
        tokens = self._sum_per_block(split, lambda lengths: np.minimum(lengths, seq_len))
        return int(tokens.sum()), int(self._sum_per_block(split, lambda lengths: lengths > seq_len).sum())

    def _sum_per_block(self, split: str, function: Callable[[IntArray], npt.NDArray[Any]]) -> IntArray:
        """Sums `function(lengths)` over the rows of each block, shape [num_blocks]."""
        pairs = zip(self._shards, self._select(split), strict=True)
        return np.concatenate([_sums(shard, selection, function) for shard, selection in pairs])

    def rows_by_hash(self) -> IntArray:
        """Returns the rows per block that the hash keeps and holds out, shape [2, num_blocks]."""
        selections: tuple[Selection, ...] = ("train", "validation")
        return np.stack([np.concatenate([_sums(shard, each, np.ones_like) for shard in self._shards]) for each in selections])


class _Distribution:
    """Distribution of lengths that are added in batches."""

    def __init__(self) -> None:
        self._counts = np.zeros(_SHORT, np.int64)
        self._long = [np.zeros(0, np.uint32)]

    def add(self, lengths: npt.NDArray[np.uint32]) -> None:
        """Adds lengths."""
        self._counts += np.bincount(lengths[lengths < _SHORT], minlength=_SHORT)
        self._long.append(lengths[lengths >= _SHORT])

    def quantiles(self) -> dict[str, int]:
        """Returns each quantile in `QUANTILES`; 0 without lengths."""
        longer, counts = np.unique(np.concatenate(self._long), return_counts=True)
        lengths, upto = [*range(_SHORT), *longer.tolist()], np.cumsum([*self._counts, *counts])
        return {name: lengths[int(np.searchsorted(1000 * upto, share * upto[-1]))] for name, share in QUANTILES.items()}

    def histogram(self) -> IntArray:
        """Returns the number of lengths in each bin, shape of BIN_STARTS."""
        histogram = np.zeros(len(BIN_STARTS), np.int64)
        np.add.at(histogram, find(BIN_STARTS, np.arange(1, _SHORT)), self._counts[1:])
        np.add.at(histogram, find(BIN_STARTS, np.concatenate(self._long).astype(np.int64)), 1)
        return histogram


def _sums(shard: ShardLengths, selection: Selection, function: Callable[[IntArray], npt.NDArray[Any]]) -> IntArray:
    sums = np.zeros(len(shard.starts) - 1, np.int64)
    for at in range(0, len(shard.words), _STEP):
        lengths, inside = _selected(shard.words[at : at + _STEP], selection)
        first = np.searchsorted(shard.starts, at, "right") - 1
        last = np.searchsorted(shard.starts, at + len(lengths), "left")
        offsets = np.clip(shard.starts[first : last + 1] - at, 0, len(lengths))
        sums[first:last] += np.diff(starts_of(np.where(inside, function(lengths), 0))[offsets])
    return sums


def _selected(words: npt.NDArray[np.uint32], selection: Selection) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Returns the lengths in words, and the mask of selected rows."""
    return (words & ~_VALIDATION).astype(np.int64), is_selected((words & _VALIDATION) > 0, selection)


def count_lengths(snapshot: Snapshot, blocks: Blocks, advance: Callable[[int], None]) -> RowLengths:
    """Counts the tokens of all rows, and calls `advance` with the number of blocks done. Raises what Blocks.each raises."""
    paths = list(lengths_files(snapshot, blocks))
    if blocks.shared:
        blocks.shared.fetch_files(paths)
    in_use = blocks.cache.parsed  # snapshots of a dataset that grows share most shards
    shards = []
    for together in _counted_together(snapshot):
        with build_lock(*(paths[number] for number in together)):
            known = {
                number: in_use.get(paths[number])
                or _stored(snapshot, number, paths[number])
                or _joined(snapshot, blocks, number, paths[number])
                for number in together
            }
            missing = [index for number in together if not known[number] for index in snapshot.blocks_of_shard(number)]
            with closing(blocks.each(missing)) as loaded:
                for number in together:
                    indices = snapshot.blocks_of_shard(number)
                    if (shard := known[number]) is None:
                        counted = ShardLengths.of_blocks(snapshot, _advancing(indices, loaded, advance))
                        shard = _keep(snapshot, blocks, number, paths[number], counted)
                    if shard.words.nbytes + shard.prompts.nbytes <= _SMALL_BYTES:
                        shard = replace(shard, words=shard.words.copy(), prompts=shard.prompts.copy())
                    shards.append(in_use.setdefault(paths[number], shard))
                    advance(indices.stop)
    return RowLengths(snapshot.first_block_of_shard, shards, snapshot.select)


def lengths_files(snapshot: Snapshot, blocks: Blocks) -> Iterator[Path]:
    """Yields the path of each shard's file of row lengths, existing or not."""
    for shard in range(len(snapshot.shards)):
        yield blocks.cache.folder / f"{blocks.names.of_shard(shard)}-{_FORMAT}{SUFFIX}"


def _counted_together(snapshot: Snapshot) -> Iterator[range]:
    """Yields ranges of shards with enough row groups for every core, even if each shard has only one."""
    enough = _GROUPS_A_CORE * num_cores()
    first = num_groups = 0
    for number, shard in enumerate(snapshot.shards, start=1):
        num_groups += len(shard.rows_per_group)
        if num_groups >= enough or number == len(snapshot.shards):
            yield range(first, number)
            first, num_groups = number, 0


def _stored(snapshot: Snapshot, shard: int, path: Path) -> ShardLengths | None:
    return read_sealed(path, partial(_parse, len(snapshot.blocks_of_shard(shard)), snapshot.recipe.has_prompts))


def _advancing(indices: range, blocks: Iterator[Block], advance: Callable[[int], None]) -> Iterator[Block]:
    """Yields a block for each index, and calls `advance` after it."""
    for index in indices:
        yield next(blocks)
        advance(index + 1)


def _keep(snapshot: Snapshot, blocks: Blocks, shard: int, path: Path, counted: ShardLengths) -> ShardLengths:
    """Stores the counts of a shard, also for other servers; maps the file if it was stored."""
    write_sealed(path, counted.pieces(), "it is counted again after a restart")
    if blocks.shared:
        blocks.shared.put_file(path)
    return _stored(snapshot, shard, path) or counted


def unit_name(blocks: Blocks, first: BlockAddress) -> str:
    """Returns the name of the counts of a row group in the folder UNITS of the shared store, by the group's first block."""
    return f"{blocks.names.of_unit(first)}-{_FORMAT}{UNIT_SUFFIX}"


def _joined(snapshot: Snapshot, blocks: Blocks, shard: int, path: Path) -> ShardLengths | None:
    """Joins and stores the counts that a preparation has left for each row group of a shard; None without all of them."""
    shared, firsts = blocks.shared, snapshot.begins_of_groups(snapshot.blocks_of_shard(shard))
    addresses = [*map(snapshot.block, firsts)]
    names = [f"{UNITS}/{unit_name(blocks, first)}" for first in addresses]
    if not shared or not names or (body := shared.get(names[0])) is None:
        return None
    parts = []
    for first, content in zip(addresses, [body, *shared.map(shared.get, names[1:])], strict=True):
        num_blocks = int(snapshot.blocks_per_group[first.group])
        if content is None or (part := _parse(num_blocks, snapshot.recipe.has_prompts, content)) is None:
            return None
        parts.append(part)
    return _keep(snapshot, blocks, shard, path, ShardLengths.joined(parts))


def _words(block: Block, validation: float) -> npt.NDArray[np.uint32]:
    words = block.row_lengths.astype(np.uint32)
    words[is_validation(block.splits, validation)] |= _VALIDATION
    return words


def _parse(num_blocks: int, has_prompts: bool, body: memoryview) -> ShardLengths | None:
    head = 16 * num_blocks
    if len(body) < head:
        return None
    num_rows, block_bytes = np.frombuffer(body[:head], "<i8").astype(np.int64).reshape(2, -1)
    starts = starts_of(num_rows)
    column_bytes = 4 * int(starts[-1])
    if len(body) != head + column_bytes * (1 + has_prompts):
        return None
    words, prompts = body[head : head + column_bytes], body[head + column_bytes :]
    return ShardLengths(starts, block_bytes, np.frombuffer(words, "<u4"), np.frombuffer(prompts, "<u4"))
