"""Integers that the training loop's process shares with its loader workers."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch

from penstock.distributed import find_worker

_known: WeakSet[SharedCells] = WeakSet()  # all cells of this process


class SharedCells:
    """`num_cells` shared integers, initially 0.

    A process that inherits them and is no loader worker, such as a fork for evaluation, gets private cells; a deep copy does,
    too. Private cells start with the current values if `handed_down`, otherwise with zeros. `owner` identifies the cells.
    """

    def __init__(self, num_cells: int, *, handed_down: bool) -> None:
        self._handed_down = handed_down
        self._own(torch.zeros(num_cells, dtype=torch.int64, device="cpu"))  # torch's default device may be a GPU

    def _own(self, memory: torch.Tensor) -> None:
        self._process, self._owner = os.getpid(), os.urandom(8).hex()
        self._memory = memory
        self._share()
        _known.add(self)

    def _share(self) -> None:
        if self._memory.is_inference():  # an inference tensor cannot be written outside of inference mode
            with torch.inference_mode(False):
                self._memory = self._memory.clone()
        with suppress(RuntimeError):  # no shared memory: this matters only with loader workers
            self._memory.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def now(self) -> torch.Tensor:
        """The cells, to read and write: int64, shape [num_cells]."""
        self.own()
        return self._memory

    @property
    def owner(self) -> str:
        """Unique name of this process's cells, shared only with its loader workers."""
        self.own()
        return self._owner

    @property
    def is_shared(self) -> bool:
        """Whether workers see writes to the cells; False if no memory could be shared."""
        return bool(self.now.is_shared())  # type: ignore[no-untyped-call]

    def own(self) -> None:
        """Switch to private cells in a process that inherited them and is no loader worker."""
        if os.getpid() != self._process and not find_worker():
            self._own(self._inherited())

    def _inherited(self) -> torch.Tensor:
        return self._memory.clone() if self._handed_down else torch.zeros_like(self._memory)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for loader workers, which share the cells with the process that starts them."""
        self.own()
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._process == os.getpid() and not find_worker():  # unpickled in the same process: a copy
            self._own(self._inherited())
            return
        self._share()  # otherwise its workers would not see its writes
        _known.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedCells:
        """Return a copy with private cells."""
        self.own()
        other = SharedCells.__new__(SharedCells)
        other._handed_down = self._handed_down
        other._own(self._inherited())
        return other


def _own_all() -> None:
    """Switch all cells to private ones before a fork: forked workers would otherwise write to the ancestor's cells."""
    for cells in list(_known):
        cells.own()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_own_all)
