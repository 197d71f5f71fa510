"""Snapshot: the immutable list of a dataset's shards, read from their footers alone, and their blocks."""

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

from penstock_server.catalog.shard import Shard
from penstock_server.order.arrays import IntArray, begins_run, find, find_one, numbered, starts_of
from penstock_server.order.best_fit import Pools, pools_of
from penstock_server.recipes.recipe import DEFAULT_VALIDATION, Recipe
from penstock_server.recipes.split import Place, Selection, SplitRule, select_rows, splits_of_shards

_MAX_BOUND = 2**32  # of token ids: they are served as uint32 at most
_BLOCK_BYTES, _BLOCK_ROWS = 8 << 20, 1 << 16


@dataclass(frozen=True, slots=True)
class BlockAddress:
    """Address of a block: rows [first_row, first_row + num_rows) of a row group in a shard, from its row `row_in_shard` on.

    `index` is its number among all blocks, `group` that of its row group among all, `number` its number in the group. All
    blocks of the group but the last have `rows_per_block` rows.
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
        """Return the place of its rows in the whole shard."""
        return Place(self.shard.path.name, self.row_in_shard)


class Snapshot:
    """Immutable shards and recipe of a dataset, named by a fingerprint of both.

    fingerprint      16 hex digits over the shards (name, size, digest) and the recipe
    rows_per_block   shape [num_blocks], in the order of shards, row groups and rows; before any filter
    blocks_per_group shape [num_groups]: a row group is one block, a very large one several
    first_block_of_shard shape [num_shards + 1]: the first block of each shard, then the number of blocks
    vocab_size       every token id is below it; None if neither the recipe nor the footers bound the ids
    token_bound      an id not below it makes a bad row, by the recipe; see bound_in
    name             name of the dataset, used in errors; a.b for the folder a/b
    token_dtype      the smallest of uint16 and uint32 that holds every token id
    split_rule       what decides the splits: the names of the shards, or a hash of each row
    shard_splits     the split of each shard by its name: train, validation, test or none; train if a hash splits the rows
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
        names = [shard.path.name for shard in self.shards]
        content = [[name, s.stat.size_bytes, s.digest] for name, s in zip(names, self.shards, strict=True)]
        self.fingerprint = _digest({"shards": content, **_applied(recipe, names)}, 8)
        by_name = splits_of_shards(names, recipe.splits)
        self.split_rule: SplitRule = "files" if by_name else "hash"
        self.shard_splits = by_name or ("train",) * len(self.shards)
        self.validation = _held_out_share(recipe, by_name)

    @cached_property
    def pools(self) -> Pools:
        """Return the pools of blocks that best_fit packs together."""
        return pools_of(self.rows_per_block, self.blocks_per_group)

    @property
    def splits(self) -> list[str]:
        """Return the splits of the rows, besides "all"; a single one has all rows."""
        found = {*self.shard_splits, *(["validation"] if self.validation else [])}
        return [split for split in ("train", "validation", "test") if split in found]

    def select(self, split: str) -> list[Selection]:
        """Return the rows of each shard that are in a split."""
        found = {own: select_rows(split, own, self.validation) for own in {*self.shard_splits}}
        return [found[own] for own in self.shard_splits]

    def split_of_block(self, block: int) -> str:
        """Return the split of a block's shard."""
        return "train" if self.split_rule == "hash" else self.shard_splits[find_one(self.first_block_of_shard, block)]

    def select_in(self, block: int, split: str) -> Selection:
        """Return the rows of a block that are in a split."""
        return select_rows(split, self.split_of_block(block), self.validation)

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of all shards."""
        return len(self.rows_per_block)

    @cached_property
    def nbytes(self) -> int:
        """Return the bytes of the columns read from all shards, uncompressed."""
        return int(self._bytes_per_group.sum())

    @cached_property
    def bytes_per_block(self) -> IntArray:
        """Estimate the bytes of each block's columns, uncompressed, shape [num_blocks]; its tokens seldom take more."""
        group, _ = numbered(self.blocks_per_group)
        found: IntArray = self._bytes_per_group[group] * self.rows_per_block // np.maximum(self._rows_per_group[group], 1)
        return found

    @cached_property
    def largest_group_bytes(self) -> int:
        """Return the bytes of the largest row group's columns, uncompressed."""
        return int(self._bytes_per_group.max(initial=0))

    def bound_in(self, shard: Shard) -> int:
        """Return the bound of ids in a shard; an id not below it makes a bad row. Other shards do not affect its blocks."""
        if self.recipe.vocab_size or shard.token_range is None:
            return self.token_bound
        return min(self.token_bound, shard.token_range[1] + 1)

    @property
    def _rows_per_group(self) -> IntArray:
        """Return the rows of each row group, shape [num_groups]; joined on each call, since the shards hold them already."""
        return _joined(shard.rows_per_group for shard in self.shards)

    @property
    def _bytes_per_group(self) -> IntArray:
        """Return the bytes of each row group's columns, uncompressed, shape [num_groups]; joined on each call, likewise."""
        return _joined(shard.bytes_per_group for shard in self.shards)

    def begins_of_groups(self, blocks: Sequence[int]) -> list[int]:
        """Return the first block of each row group among some ascending blocks."""
        indices = np.array(blocks, np.int64)
        firsts: list[int] = indices[begins_run(find(self._first_block, indices))].tolist()
        return firsts

    def locate(self, row: int) -> tuple[int, int]:
        """Return the (block, row in the block) of row `row`, in [0, num_rows), of all shards."""
        index = find_one(self._first_row, row)
        return index, row - int(self._first_row[index])

    def block(self, index: int) -> BlockAddress:
        """Return the address of block `index`, in [0, num_blocks)."""
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
        """Return the number of a block's first row among all rows."""
        return int(self._first_row[block])

    def blocks_of_shard(self, shard: int) -> range:
        """Return the blocks of one shard."""
        return range(*self.first_block_of_shard[shard : shard + 2].tolist())

    def blocks_of_group(self, group: int) -> range:
        """Return the blocks of a row group."""
        return range(int(self._first_block[group]), int(self._first_block[group + 1]))


def recipe_key(recipe: Recipe, names: Iterable[str]) -> str:
    """Return a hash of the recipe as it applies to shards of these names."""
    return _digest(_applied(recipe, names), 16)


def _digest(content: dict[str, Any], num_bytes: int) -> str:
    return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=num_bytes).hexdigest()


def _joined(numbers: Iterable[array[int]]) -> IntArray:
    return np.concatenate([np.zeros(0, np.int64), *map(np.asarray, numbers)])


def _applied(recipe: Recipe, names: Iterable[str]) -> dict[str, Any]:
    """Return the identity of the recipe as it applies to shards of these names."""
    shard_splits = splits_of_shards(names, recipe.splits)
    content = {"recipe": recipe.identity, "validation": _held_out_share(recipe, shard_splits)}
    return content | ({"splits": "files"} if shard_splits else {})


def _held_out_share(recipe: Recipe, shard_splits: tuple[str, ...] | None) -> float:
    if recipe.validation is not None:
        return recipe.validation
    return 0.0 if shard_splits else DEFAULT_VALIDATION


def _split(rows: IntArray, nbytes: IntArray) -> tuple[IntArray, IntArray]:
    """Return the rows per block and the number of blocks of each row group; a block has bounded bytes and rows."""
    # Bytes alone are not enough: a column of few distinct values is small in the file, whatever its number of rows.
    wanted = np.maximum(-(-nbytes // _BLOCK_BYTES), -(-rows // _BLOCK_ROWS)).clip(1)
    size = np.maximum(-(-rows // wanted), 1)
    return size, np.maximum(-(-rows // size), 1)


def _vocab_size(shards: Sequence[Shard], recipe: Recipe) -> int | None:
    known = [s.token_range for s in shards if s.token_range is not None]
    if len(known) < len(shards):
        return None
    special = [token for token in (recipe.bos_id, recipe.eos_id, recipe.pad_id) if token is not None]
    return max(*(high for _, high in known), *special) + 1
