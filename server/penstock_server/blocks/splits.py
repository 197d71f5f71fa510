"""Splits: of a block the rows that are of one split. A block lies in a map, but its splits in memory, so they have a budget."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass

from penstock_server.blocks.block import Block
from penstock_server.recipes.split_hashes import Selection

_BUDGET_BYTES = 256 << 20
_MIN_BYTES = 4096  # of Python's objects

_Key = tuple[int, Selection, float]


@dataclass(frozen=True, slots=True)
class _Held:
    block: weakref.ref[Block]  # weak, or it would keep a file mapped that was evicted; the split is dropped with its block
    split: Block
    nbytes: int


class Splits:
    """The splits of blocks that were looked at last, for as long as anybody has the blocks. For any number of threads."""

    def __init__(self, budget_bytes: int = _BUDGET_BYTES) -> None:
        self._budget_bytes, self.held_bytes = budget_bytes, 0
        self._lock = threading.RLock()  # a block may go while this thread has it
        self._held = OrderedDict[_Key, _Held]()

    def of(self, block: Block, selection: Selection, share: float) -> Block:
        """The block of the rows of one split, or itself where these are all; see Block.selected."""
        if selection == "all":
            return block
        key = (id(block), selection, share)
        with self._lock:
            found = self._held.get(key)
            if found and found.block() is block:
                self._held.move_to_end(key)
                return found.split
        made = block.selected(selection, share)
        with self._lock:
            self._drop(key)
            self._held[key] = _Held(weakref.ref(block, lambda _: self._drop(key)), made, _nbytes(made))
            self.held_bytes += self._held[key].nbytes
            while self.held_bytes > self._budget_bytes and len(self._held) > 1:
                self._drop(next(iter(self._held)))
        return made

    def _drop(self, key: _Key) -> None:
        with self._lock:
            if held := self._held.pop(key, None):
                self.held_bytes -= held.nbytes


def _nbytes(split: Block) -> int:
    """About the memory that a split of a block takes: all but its tokens, which it shares."""
    lists = sum(len(feature) - feature.count(None) for feature in split.features.values())
    columns = sum(int(column.nbytes) for column in split.columns.values())
    return _MIN_BYTES + 8 * split.num_rows * (2 * lists + 4) + columns
