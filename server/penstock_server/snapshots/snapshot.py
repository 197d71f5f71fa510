"""The snapshot: the immutable list of a dataset's shards, read from their footers alone, and the blocks in them."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from penstock_server.order.arrays import IntArray, begins_run, find, find_one, numbered, starts_of
from penstock_server.order.best_fit import Pools, pools_of
from penstock_server.recipes.recipe import DEFAULT_VALIDATION, Recipe
from penstock_server.recipes.split_hashes import Place, Selection, SplitRule, select_rows, splits_of_shards
from penstock_server.snapshots.shard import Shard

_MAX_BOUND = 2**32  # of token ids: they are served as uint32 at most
_BLOCK_BYTES, _BLOCK_ROWS = 8 << 20, 1 << 16


@dataclass(frozen=True, slots=True)
class BlockAddress:
    """Where a block lies: rows [first_row, first_row + num_rows) of one row group of one shard, from its row `row_in_shard` on.

    `index` is its number among all blocks, `group` that of its row group among all, `number` its number in the group, whose
    blocks have `rows_per_block` rows each but the last.
    """

    index: int
    shard: Shard
    row_group: int
    first_row: int
    row_in_shard: int
    num_rows: int
    group: int
    number: int
    rows_per_block: int

    @property
    def place(self) -> Place:
        """Where its rows are in the whole shard."""
        return Place(self.shard.path.name, self.row_in_shard)


class Snapshot:
    """A dataset's shards and recipe, named by a fingerprint of both; never changed once made.

    fingerprint      16 hex digits over the shards (name, size, digest) and the recipe
    rows_per_block   shape [num_blocks], in the order of shards, row groups and rows; before any filter
    blocks_per_group shape [num_groups]: a row group is one block, a very large one several
    first_block_of_shard shape [num_shards + 1]: where each shard's blocks start, and at last their number
    vocab_size       every token id is below it; None where neither the recipe nor the footers know
    token_bound      ids that are not below it make a bad row, by the recipe; see bound_in
    name             of the dataset that it is of, by which errors call it; a.b for the folder a/b
    token_dtype      the smallest of uint16 and uint32 that holds every token id
    shard_splits     the split of each shard, by its name; None: rows have splits by hash
    validation       the share of rows that the hash holds out, of all shards or of the train shards
    """

    def __init__(self, folder: Path, shards: Sequence[Shard], recipe: Recipe, *, name: str) -> None:
        self.folder = folder
        self.name = name
        self.shards = tuple(shards)
        self.recipe = recipe
        rows, nbytes = self._rows_per_group, self._bytes_per_group
        self._first_group = starts_of(np.array([len(s.rows_per_group) for s in shards], np.int64))
        self._block_size, self.blocks_per_group = _split(rows, nbytes)
        self._first_block = starts_of(self.blocks_per_group)
        self.first_block_of_shard = self._first_block[self._first_group]
        group, number = numbered(self.blocks_per_group)
        first_row = number * self._block_size[group]
        self.rows_per_block: IntArray = np.minimum(self._block_size[group], rows[group] - first_row)
        self._first_row = starts_of(self.rows_per_block)
        self.num_rows = int(self._first_row[-1])
        self.vocab_size = recipe.vocab_size or _vocab_size(self.shards, recipe)
        self.token_bound = min(recipe.vocab_size or _MAX_BOUND, _MAX_BOUND)
        self.token_dtype = "uint16" if (self.vocab_size or _MAX_BOUND) <= 2**16 else "uint32"
        self.fingerprint = fingerprint_of(self.shards, recipe)
        self.shard_splits = splits_of_shards((shard.path.name for shard in self.shards), recipe.splits)
        self.validation = _held_out_share(recipe, self.shard_splits)

    @cached_property
    def pools(self) -> Pools:
        """How best_fit packs blocks together."""
        return pools_of(self.rows_per_block, self.blocks_per_group)

    @property
    def split_rule(self) -> SplitRule:
        """What gives the splits: the names of the shards, or a hash of each row."""
        return "files" if self.shard_splits else "hash"

    @property
    def splits(self) -> list[str]:
        """The splits that rows may be in, beside all; one alone is all rows."""
        found = {*(self.shard_splits or ["train"]), *(["validation"] if self.validation else [])}
        return [split for split in ("train", "validation", "test") if split in found]

    def select(self, split: str) -> list[Selection]:
        """Which rows of each shard a split has."""
        found = {own: select_rows(split, own, self.validation) for own in {*(self.shard_splits or ["train"])}}
        return [found[own] for own in self.shard_splits] if self.shard_splits else [found["train"]] * len(self.shards)

    def split_of_shard(self, shard: int) -> str:
        """The split of a shard: train, also where a hash gives the splits, validation, test or none."""
        return self.shard_splits[shard] if self.shard_splits else "train"

    def split_of_block(self, block: int) -> str:
        """The split of the shard that a block is in."""
        return self.split_of_shard(find_one(self.first_block_of_shard, block) if self.shard_splits else 0)

    def select_in(self, block: int, split: str) -> Selection:
        """Which rows of a block a split has."""
        return select_rows(split, self.split_of_block(block), self.validation)

    @property
    def num_blocks(self) -> int:
        """Blocks of all shards."""
        return len(self.rows_per_block)

    @cached_property
    def nbytes(self) -> int:
        """The bytes of all shards' columns that are read, uncompressed."""
        return int(self._bytes_per_group.sum())

    @cached_property
    def bytes_per_block(self) -> IntArray:
        """About the bytes of each block's columns, uncompressed, shape [num_blocks]; its tokens seldom take more."""
        group, _ = numbered(self.blocks_per_group)
        found: IntArray = self._bytes_per_group[group] * self.rows_per_block // np.maximum(self._rows_per_group[group], 1)
        return found

    @cached_property
    def largest_group_bytes(self) -> int:
        """The bytes of the largest row group's columns, uncompressed."""
        return int(self._bytes_per_group.max(initial=0))

    def bound_in(self, shard: Shard) -> int:
        """Ids in a shard that are not below this make a bad row. What other shards hold changes nothing of its blocks."""
        if self.recipe.vocab_size or shard.token_range is None:
            return self.token_bound
        return min(self.token_bound, shard.token_range[1] + 1)

    @property
    def _rows_per_group(self) -> IntArray:
        """Rows of each row group, shape [num_groups]; joined anew, since shards have the same."""
        return _joined(shard.rows_per_group for shard in self.shards)

    @property
    def _bytes_per_group(self) -> IntArray:
        """The bytes of each row group's columns, uncompressed, shape [num_groups]; joined anew, likewise."""
        return _joined(shard.bytes_per_group for shard in self.shards)

    def begins_of_groups(self, blocks: Sequence[int]) -> list[int]:
        """Of some ascending blocks, the first one of each row group."""
        indices = np.array(blocks, np.int64)
        firsts: list[int] = indices[begins_run(find(self._first_block, indices))].tolist()
        return firsts

    def locate(self, row: int) -> tuple[int, int]:
        """The (block, row in the block) of row `row`, in [0, num_rows), of all shards."""
        index = find_one(self._first_row, row)
        return index, row - int(self._first_row[index])

    def block(self, index: int) -> BlockAddress:
        """Where block `index`, in [0, num_blocks), lies."""
        group = find_one(self._first_block, index)
        shard = find_one(self._first_group, group)
        number, size = index - int(self._first_block[group]), int(self._block_size[group])
        return BlockAddress(
            index=index,
            shard=self.shards[shard],
            row_group=group - int(self._first_group[shard]),
            first_row=number * size,
            row_in_shard=int(self._first_row[index] - self._first_row[self.first_block_of_shard[shard]]),
            num_rows=int(self.rows_per_block[index]),
            group=group,
            number=number,
            rows_per_block=size,
        )

    def first_row_of(self, block: int) -> int:
        """The number of a block's first row among all rows."""
        return int(self._first_row[block])

    def blocks_of_shard(self, shard: int) -> range:
        """The blocks of one shard."""
        return range(*self.first_block_of_shard[shard : shard + 2].tolist())

    def blocks_of_group(self, group: int) -> range:
        """The blocks that a row group is split into."""
        return range(int(self._first_block[group]), int(self._first_block[group + 1]))


def fingerprint_of(shards: Sequence[Shard], recipe: Recipe) -> str:
    """The fingerprint of the snapshot of these shards and this recipe."""
    content = {
        "shards": [[s.path.name, s.date.size_bytes, s.digest] for s in shards],
        **_applied(recipe, (s.path.name for s in shards)),
    }
    return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()


def recipe_key(recipe: Recipe, names: Iterable[str]) -> str:
    """A name for what fingerprints are of beside the shards, which have these names."""
    return blake2b(json.dumps(_applied(recipe, names), sort_keys=True).encode(), digest_size=16).hexdigest()


def _joined(numbers: Iterable[array[int]]) -> IntArray:
    return np.concatenate([np.zeros(0, np.int64), *map(np.asarray, numbers)])


def _applied(recipe: Recipe, names: Iterable[str]) -> dict[str, Any]:
    """The recipe as it applies to shards of these names."""
    shard_splits = splits_of_shards(names, recipe.splits)
    content = {"recipe": recipe.identity, "validation": _held_out_share(recipe, shard_splits)}
    return content | ({"splits": "files"} if shard_splits else {})


def _held_out_share(recipe: Recipe, shard_splits: tuple[str, ...] | None) -> float:
    if recipe.validation is not None:
        return recipe.validation
    return 0.0 if shard_splits else DEFAULT_VALIDATION


def _split(rows: IntArray, nbytes: IntArray) -> tuple[IntArray, IntArray]:
    """The rows of a block in each row group, and the blocks that makes; a block is a bounded number of bytes and of rows."""
    # Bytes alone would not do: a column of few different values is small in the file, however many rows it has.
    wanted = np.maximum(-(-nbytes // _BLOCK_BYTES), -(-rows // _BLOCK_ROWS)).clip(1)
    size = np.maximum(-(-rows // wanted), 1)
    return size, np.maximum(-(-rows // size), 1)


def _vocab_size(shards: Sequence[Shard], recipe: Recipe) -> int | None:
    known = [s.token_range for s in shards if s.token_range is not None]
    if len(known) < len(shards):
        return None
    special = [token for token in (recipe.bos_id, recipe.eos_id, recipe.pad_id) if token is not None]
    return max(*(high for _, high in known), *special) + 1
