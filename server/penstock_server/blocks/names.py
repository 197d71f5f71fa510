"""Names of blocks in the cache: hashes of all inputs of the tokens, so that a changed shard or recipe gets new blocks."""

from __future__ import annotations

import json
from functools import cached_property
from hashlib import blake2b
from typing import Any

from penstock_server.snapshots.shard import Shard
from penstock_server.snapshots.snapshot import BlockAddress, Snapshot

_FORMAT = 6  # of the stored blocks: after a change, they are rebuilt


class BlockNames:
    """Cache names of one snapshot's blocks, and of the files derived from all of them."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._shared = json.dumps(
            [_FORMAT, snapshot.recipe.identity, snapshot.token_dtype, snapshot.token_bound], sort_keys=True
        )

    def of(self, index: int) -> str:
        """Returns the name of a block; `index` is in [0, num_blocks)."""
        address = self._snapshot.block(index)
        return name_in(self._of_group(address), address.number)

    def of_group(self, address: BlockAddress) -> list[str]:
        """Returns the names of all blocks in the row group of a block."""
        group = self._of_group(address)
        return [name_in(group, number) for number in range(len(self._snapshot.blocks_of_group(address.group)))]

    @cached_property
    def of_all(self) -> str:
        """Returns a name for the tokens and splits of all blocks, which depend on nothing else."""
        return _digest([*map(self.of_shard, range(len(self._snapshot.shards)))])

    def of_shard(self, shard: int) -> str:
        """Returns a name for the tokens and splits of one shard's blocks."""
        blocks = self._snapshot.blocks_of_shard(shard)
        sizes = self._snapshot.rows_per_block[blocks.start : blocks.stop].tolist()
        identity = _identity_of(self._snapshot.shards[shard])
        own_split = self._snapshot.split_of_shard(shard)
        of_others = [own_split] if own_split != "train" else []
        return _digest([identity, sizes, self._shared, self._snapshot.validation, *of_others])

    def _of_group(self, address: BlockAddress) -> str:
        return _digest([*_identity_of(address.shard), address.row_group, address.rows_per_block, self._shared])


def name_in(group: str, number: int) -> str:
    """Returns the name of a block from the name of its row group."""
    return f"{group}-{number}"


def group_of(name: str) -> str:
    """Returns the name of a block's row group."""
    return name.rpartition("-")[0]


def _digest(parts: list[Any]) -> str:
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _identity_of(shard: Shard) -> list[str | int]:
    # Includes path and mtime, since the shard's digest covers only samples of its bytes.
    return [str(shard.path.absolute()), shard.date.size_bytes, shard.date.mtime_ns, shard.digest]
