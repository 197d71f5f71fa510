"""The names of blocks in the cache: hashes of all that tokens depend on, so a changed shard or recipe finds no old block."""

from __future__ import annotations

import json
from functools import cached_property
from hashlib import blake2b
from typing import Any

from penstock_server.snapshots.shard import Shard
from penstock_server.snapshots.snapshot import BlockAddress, Snapshot

_FORMAT = 6  # of the stored blocks: a change here rebuilds them


class BlockNames:
    """Those of one snapshot's blocks, and of what is made of all of them."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._shared = json.dumps(
            [_FORMAT, snapshot.recipe.identity, snapshot.token_dtype, snapshot.token_bound], sort_keys=True
        )

    def of(self, index: int) -> str:
        """The name of a block, in [0, num_blocks)."""
        address = self._snapshot.block(index)
        return name_in(self._of_group(address), address.number)

    def of_group(self, address: BlockAddress) -> list[str]:
        """The names of all blocks of the row group that a block is of."""
        group = self._of_group(address)
        return [name_in(group, number) for number in range(len(self._snapshot.blocks_of_group(address.group)))]

    @cached_property
    def of_all(self) -> str:
        """A name for the tokens and splits of all blocks: they depend on nothing else."""
        return _digest([*map(self.of_shard, range(len(self._snapshot.shards)))])

    def of_shard(self, shard: int) -> str:
        """A name for the tokens and splits of one shard's blocks."""
        blocks = self._snapshot.blocks_of_shard(shard)
        sizes = self._snapshot.rows_per_block[blocks.start : blocks.stop].tolist()
        identity = _identity_of(self._snapshot.shards[shard])
        own_split = self._snapshot.split_of_shard(shard)
        of_others = [own_split] if own_split != "train" else []
        return _digest([identity, sizes, self._shared, self._snapshot.validation, *of_others])

    def _of_group(self, address: BlockAddress) -> str:
        return _digest([*_identity_of(address.shard), address.row_group, address.rows_per_block, self._shared])


def name_in(group: str, number: int) -> str:
    """The name of a block in a row group of this name."""
    return f"{group}-{number}"


def group_of(name: str) -> str:
    """The name of the row group that a block of this name is in."""
    return name.rpartition("-")[0]


def _digest(parts: list[Any]) -> str:
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _identity_of(shard: Shard) -> list[str | int]:
    # By path and date too: the shard's digest is of samples.
    return [str(shard.path.absolute()), shard.date.size_bytes, shard.date.mtime_ns, shard.digest]
