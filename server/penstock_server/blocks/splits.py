"""Splits: the rows of a block in one split. A block is mapped, but its splits are in memory, so they have a budget."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass

from penstock_server.blocks.block import Block
from penstock_server.recipes.split import Selection

_BUDGET_BYTES = 256 << 20
_MIN_BYTES = 4096  # of Python objects per split

_Key = tuple[int, Selection, float]


@dataclass(frozen=True, slots=True)
class _Held:
    block: weakref.ref[Block]  # weak, so that evicted files can be unmapped; the split is dropped with its block
    split: Block
    nbytes: int


class Splits:
    """Least recently used cache of the splits of live blocks, for any number of threads."""

    def __init__(self, budget_bytes: int = _BUDGET_BYTES) -> None:
        self._budget_bytes, self.held_bytes = budget_bytes, 0
        self._lock = threading.RLock()  # reentrant: a block may be collected while this thread holds the lock
        self._held = OrderedDict[_Key, _Held]()

    def of(self, block: Block, selection: Selection, share: float) -> Block:
        """Returns the rows of one split as a block; the block itself if the split has all rows. See Block.selected."""
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
    """Estimates the memory of a split, without the tokens, which it shares with the block."""
    lists = sum(len(feature) - feature.count(None) for feature in split.features.values())
    columns = sum(int(column.nbytes) for column in split.columns.values())
    return _MIN_BYTES + 8 * split.num_rows * (2 * lists + 4) + columns
