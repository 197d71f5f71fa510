"""Row lengths: how many tokens each row of a snapshot has, in a sealed file a shard beside the cached blocks.

A file is, little-endian: the rows of each block of the shard, int64 [num_blocks]; what each block takes in the cache, int64
[num_blocks]; a word a row, uint32 [num_rows]; where rows have prompts, the tokens of each prompt, uint32 [num_rows]. A word is
the row's tokens, 0 for a bad row; its highest bit is set for rows that the hash holds out for validation.
Files of shards that stay are used again when others come, and what was counted before an interruption is not counted again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from penstock_server.blocks.block import Block
from penstock_server.blocks.blocks import Blocks
from penstock_server.blocks.cache import CacheFolder
from penstock_server.checksummed import read_sealed, write_sealed
from penstock_server.index.build_lock import turn
from penstock_server.machine import num_cores
from penstock_server.order.arrays import IntArray, find_one, starts_of
from penstock_server.order.packing import SplitRows
from penstock_server.recipes.split_hashes import Selection, is_selected, is_validation
from penstock_server.snapshots.snapshot import Snapshot

SUFFIX = ".lengths"
_FORMAT = 3  # of the files: a change here counts anew
_REMEMBERED = 16  # sums, of 8 bytes a block or 24
_VALIDATION = np.uint32(1 << 31)
QUANTILES = {"median": 500, "p90": 900, "p99": 990, "longest": 1000}  # of a thousand rows
_STEP = 1 << 20  # rows that are looked at at a time: a shard may have any number
_SHORT = 1 << 16  # tokens; of longer rows there are few, for they have so many
_GROUPS_A_CORE = 4  # with fewer, cores would wait for the slowest of each few
# Linux gives a process 65,530 maps. Small files of counts are copied instead, but not more than so many bytes of them.
_SMALL_BYTES, _COPIED_BYTES = 1 << 16, 1 << 28


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _ShardLengths:
    """What is counted of one shard.

    starts       where the rows of each of its blocks start
    block_bytes  what each block takes in the cache
    words        of its rows
    prompts      the tokens of each row's prompt; none where rows have no prompts
    """

    starts: IntArray
    block_bytes: IntArray
    words: npt.NDArray[np.uint32]
    prompts: npt.NDArray[np.uint32]

    @property
    def nbytes(self) -> int:
        """The bytes of what there is of each row."""
        return self.words.nbytes + self.prompts.nbytes


# What is read already, by cache folder and file, while anybody uses it: snapshots of a dataset that grows share most shards.
_read: WeakValueDictionary[tuple[CacheFolder, Path], _ShardLengths] = WeakValueDictionary()


class Counts(NamedTuple):
    """What there is in each block, shape [num_blocks] each. Bad rows are rows, too, and have no tokens."""

    rows: IntArray
    tokens: IntArray
    bad_rows: IntArray

    def sums(self) -> list[int]:
        """Rows, tokens and bad rows of all blocks."""
        return [int(counts.sum()) for counts in self]


class RowLengths:
    """The lengths of all rows of a snapshot, by block. `select` gives which rows of each shard a split has."""

    def __init__(self, first_block: IntArray, shards: list[_ShardLengths], select: Callable[[str], list[Selection]]) -> None:
        self._first_block, self._shards = first_block, shards
        self._select = lru_cache(maxsize=_REMEMBERED)(select)
        # Each takes a look at all rows.
        self.per_block = lru_cache(maxsize=_REMEMBERED)(self._per_block)
        self.parts_per_block = lru_cache(maxsize=_REMEMBERED)(self._parts_per_block)

    def of_block(self, block: int, split: str) -> IntArray:
        """Tokens of each row of a block that is in the split, shape [rows]; 0 for a bad row."""
        shard = find_one(self._first_block, block)
        found, number = self._shards[shard], block - int(self._first_block[shard])
        selection = self._select(split)[shard]
        lengths, inside = _selected(found.words[found.starts[number] : found.starts[number + 1]], selection)
        return lengths[inside]

    @cached_property
    def bytes_per_block(self) -> IntArray:
        """What each block takes in the cache, shape [num_blocks]."""
        return np.concatenate([shard.block_bytes for shard in self._shards])

    @cached_property
    def quantiles(self) -> dict[str, dict[str, int]]:
        """The tokens that so many of the rows that can be used have at most, by `QUANTILES`; 0 if there is no such row.

        Of rows, and of their prompts and their responses where they have both.
        """
        found = {"row": _Quantiles()}
        if any(len(shard.prompts) for shard in self._shards):
            found |= {"prompt": _Quantiles(), "response": _Quantiles()}
        for shard in self._shards:
            for at in range(0, len(shard.words), _STEP):
                lengths = shard.words[at : at + _STEP] & ~_VALIDATION
                is_good = lengths > 0
                found["row"].add(lengths[is_good])
                if len(shard.prompts):
                    prompts = shard.prompts[at : at + _STEP]
                    found["prompt"].add(prompts[is_good])
                    found["response"].add((lengths - prompts)[is_good])
        return {name: quantiles.found() for name, quantiles in found.items()}

    def _per_block(self, split: str) -> Counts:
        """What there is of a split in each block; the last few splits asked for are remembered."""
        functions = (np.ones_like, lambda lengths: lengths, lambda lengths: lengths == 0)
        return Counts(*(self._sum_per_block(split, function) for function in functions))

    def _parts_per_block(self, split: str, seq_len: int) -> IntArray:
        """Samples of each block, shape [num_blocks], where rows longer than seq_len are several; the last few remembered."""
        return self._sum_per_block(split, lambda lengths: SplitRows.count(lengths, seq_len))

    def _sum_per_block(self, split: str, function: Callable[[IntArray], npt.NDArray[Any]]) -> IntArray:
        """The sums over each block of what a function makes of its rows' lengths, shape [num_blocks]."""
        pairs = zip(self._shards, self._select(split), strict=True)
        return np.concatenate([_sums(shard, selection, function) for shard, selection in pairs])

    def rows_by_hash(self) -> IntArray:
        """Rows that the hash keeps and holds out in each block, shape [2, num_blocks]."""
        selections: tuple[Selection, ...] = ("train", "validation")
        return np.stack([np.concatenate([_sums(shard, each, np.ones_like) for shard in self._shards]) for each in selections])


class _Quantiles:
    """How long the most of so many lengths are, which come some at a time."""

    def __init__(self) -> None:
        self._counts = np.zeros(_SHORT, np.int64)
        self._long: list[npt.NDArray[np.uint32]] = []

    def add(self, lengths: npt.NDArray[np.uint32]) -> None:
        """Some more."""
        self._counts += np.bincount(lengths[lengths < _SHORT], minlength=_SHORT)
        self._long.append(lengths[lengths >= _SHORT])

    def found(self) -> dict[str, int]:
        """What so many of them are at most, by `QUANTILES`; 0 if there are none."""
        upto, longer = self._counts.cumsum(), np.sort(np.concatenate([np.zeros(0, np.uint32), *self._long]))
        num_short, number = int(upto[-1]), int(upto[-1]) + len(longer)
        if not number:
            return dict.fromkeys(QUANTILES, 0)
        places = {name: max(0, -(-share * number // 1000) - 1) for name, share in QUANTILES.items()}
        return {
            name: int(np.searchsorted(upto, at, "right") if at < num_short else longer[at - num_short])
            for name, at in places.items()
        }


def _sums(shard: _ShardLengths, selection: Selection, function: Callable[[IntArray], npt.NDArray[Any]]) -> IntArray:
    sums = np.zeros(len(shard.starts) - 1, np.int64)
    for at in range(0, len(shard.words), _STEP):
        lengths, inside = _selected(shard.words[at : at + _STEP], selection)
        first = np.searchsorted(shard.starts, at, "right") - 1
        last = np.searchsorted(shard.starts, at + len(lengths), "left")
        borders = np.clip(shard.starts[first : last + 1] - at, 0, len(lengths))
        sums[first:last] += np.diff(starts_of(np.where(inside, function(lengths), 0))[borders])
    return sums


def _selected(words: npt.NDArray[np.uint32], selection: Selection) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """The lengths that words tell, and which of them are of selected rows."""
    return (words & ~_VALIDATION).astype(np.int64), is_selected((words & _VALIDATION) > 0, selection)


def count_lengths(snapshot: Snapshot, blocks: Blocks, advance: Callable[[int], None]) -> RowLengths:
    """Counts the tokens of all rows, by loading every block of which they are not known; `advance` is told the blocks done.

    Raises what a block raises that cannot be read.
    """
    paths = list(lengths_files(snapshot, blocks))
    shards = []
    small = [own.nbytes for ref in _read.valuerefs() if (own := ref()) and own.nbytes <= _SMALL_BYTES]
    spare_bytes = _COPIED_BYTES - sum(small)
    for some in _counted_together(snapshot):
        with turn(*(paths[number] for number in some)) as get_further, ExitStack() as opened:
            known = {n: _read.get((blocks.cache, paths[n])) or _stored(snapshot, n, paths[n]) for n in some}
            missing = [index for n in some if known[n] is None for index in snapshot.blocks_of_shard(n)]
            loaded = opened.enter_context(closing(blocks.each(missing)))
            for number in some:
                path, indices = paths[number], snapshot.blocks_of_shard(number)
                shard = known[number] or _count_shard(
                    snapshot, number, path, islice(loaded, len(indices)), get_further, advance
                )
                if (blocks.cache, path) not in _read:
                    if shard.nbytes <= min(_SMALL_BYTES, spare_bytes):
                        shard = replace(shard, words=shard.words.copy(), prompts=shard.prompts.copy())
                        spare_bytes -= shard.nbytes
                    _read[blocks.cache, path] = shard
                shards.append(shard)
                advance(indices.stop)
    return RowLengths(snapshot.first_block_of_shard, shards, snapshot.select)


def lengths_files(snapshot: Snapshot, blocks: Blocks) -> Iterator[Path]:
    """Where the lengths of each shard's rows are, or will be."""
    for shard in range(len(snapshot.shards)):
        yield blocks.cache.folder / f"{blocks.names.of_shard(shard)}-{_FORMAT}{SUFFIX}"


def _counted_together(snapshot: Snapshot) -> Iterator[range]:
    """The shards, some at a time: so many that each core has row groups to decode, also where a shard has but one."""
    enough = _GROUPS_A_CORE * num_cores()
    first = num_groups = 0
    for number, shard in enumerate(snapshot.shards, start=1):
        num_groups += len(shard.rows_per_group)
        if num_groups >= enough or number == len(snapshot.shards):
            yield range(first, number)
            first, num_groups = number, 0


def _stored(snapshot: Snapshot, shard: int, path: Path) -> _ShardLengths | None:
    return read_sealed(path, partial(_parse, len(snapshot.blocks_of_shard(shard)), snapshot.recipe.has_prompts))


def _count_shard(
    snapshot: Snapshot,
    shard: int,
    path: Path,
    blocks: Iterable[Block],
    get_further: Callable[[], None],
    advance: Callable[[int], None],
) -> _ShardLengths:
    """The lengths of a shard's rows, which its blocks tell, stored, and mapped if they could be."""
    num_rows, block_bytes, words, prompts = [], [], [np.zeros(0, np.uint32)], [np.zeros(0, np.uint32)]
    for done, block in enumerate(blocks, start=snapshot.blocks_of_shard(shard).start + 1):
        num_rows.append(block.num_rows)
        block_bytes.append(block.nbytes)
        words.append(_words(block, snapshot.validation))
        if snapshot.recipe.has_prompts:
            prompts.append(block.prompt_lengths(np.arange(block.num_rows)).astype(np.uint32))
        get_further()
        advance(done)
    counted = _ShardLengths(
        starts_of(np.array(num_rows, np.int64)), np.array(block_bytes, np.int64), np.concatenate(words), np.concatenate(prompts)
    )
    of_rows = (column.astype("<u4").tobytes() for column in (counted.words, counted.prompts))
    pieces = [np.array([num_rows, block_bytes], "<i8").tobytes(), *of_rows]
    write_sealed(path, pieces, "it is counted again after a restart")
    return _stored(snapshot, shard, path) or counted


def _words(block: Block, validation: float) -> npt.NDArray[np.uint32]:
    words = block.row_lengths.astype(np.uint32)
    words[is_validation(block.splits, validation)] |= _VALIDATION
    return words


def _parse(num_blocks: int, has_prompts: bool, body: memoryview) -> _ShardLengths | None:
    head = 16 * num_blocks
    if len(body) < head:
        return None
    num_rows, block_bytes = np.frombuffer(body[:head], "<i8").astype(np.int64).reshape(2, -1)
    starts = starts_of(num_rows)
    column_bytes = 4 * int(starts[-1])
    if len(body) != head + column_bytes * (1 + has_prompts):
        return None
    words, prompts = body[head : head + column_bytes], body[head + column_bytes :]
    return _ShardLengths(starts, block_bytes, np.frombuffer(words, "<u4"), np.frombuffer(prompts, "<u4"))
