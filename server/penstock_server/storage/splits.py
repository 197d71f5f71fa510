"""Splits: the rows of blocks that are of one split. What they take is memory, while a block is mapped; so it has a budget."""

from __future__ import annotations

import threading
from collections import OrderedDict

from penstock_server.storage.block import Block

_BUDGET_BYTES = 128 << 20
_LEAST_BYTES = 4096  # of Python's objects


class Splits:
    """The splits of blocks that were looked at last. For any number of threads."""

    def __init__(self, budget_bytes: int = _BUDGET_BYTES) -> None:
        self._budget_bytes, self.held_bytes = budget_bytes, 0
        self._lock = threading.Lock()
        # By the block's id, and with the block, so that nobody else is given that id.
        self._held: OrderedDict[tuple[int, str, float], tuple[Block, Block]] = OrderedDict()

    def of(self, block: Block, split: str, share: float) -> Block:
        """The block of the rows of one split, "train" or "validation", or itself for "all"; see Block.of_split."""
        if split == "all":
            return block
        key = (id(block), split, share)
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key][1]
        made = block.of_split(split, share)
        with self._lock:
            if key not in self._held:
                self._held[key] = block, made
                self.held_bytes += _nbytes(made)
            while self.held_bytes > self._budget_bytes and len(self._held) > 1:
                _, (_, oldest) = self._held.popitem(last=False)
                self.held_bytes -= _nbytes(oldest)
        return made


def _nbytes(split: Block) -> int:
    """About the memory that a split of a block takes: all but its tokens, which it shares."""
    lists = sum(1 + (feature.turns is not None) for feature in split.features.values())
    columns = sum(int(column.nbytes) for column in split.columns.values())
    return _LEAST_BYTES + 8 * split.num_rows * (2 * lists + 2) + columns
