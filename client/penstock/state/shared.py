"""Whole numbers that the training loop's process shares with its loader workers."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch

from penstock.rank import find_worker

_known: WeakSet[SharedCells] = WeakSet()  # in this process


class SharedCells:
    """So many of them, all 0 at first.

    A process that inherits them and is no loader worker, such as a fork that evaluates, goes on with cells of its own, and so
    does a copy: with what these hold by then, or where they are not `handed_down` with zeros. `owner` names whose they are.
    """

    def __init__(self, num_cells: int, *, handed_down: bool) -> None:
        self._handed_down = handed_down
        self._own(torch.zeros(num_cells, dtype=torch.int64, device="cpu"))  # whatever torch's default is

    def _own(self, memory: torch.Tensor) -> None:
        self._process, self._owner = os.getpid(), os.urandom(8).hex()
        self._memory = memory
        self._share()
        _known.add(self)

    def _share(self) -> None:
        if self._memory.is_inference():  # outside of inference mode nobody could write to it
            with torch.inference_mode(False):
                self._memory = self._memory.clone()
        with suppress(RuntimeError):  # no memory can be shared: without loader workers that does not matter
            self._memory.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def now(self) -> torch.Tensor:
        """They themselves, to be read and written, int64 of shape [num_cells]."""
        self.own()
        return self._memory

    @property
    def owner(self) -> str:
        """A name that is this process's and its loader workers' alone."""
        self.own()
        return self._owner

    @property
    def is_shared(self) -> bool:
        """Whether workers see what is written to them; not where no memory could be shared."""
        return bool(self.now.is_shared())  # type: ignore[no-untyped-call]

    def own(self) -> None:
        """A process that inherited them, and is no loader worker, goes on with cells of its own."""
        if os.getpid() != self._process and not find_worker():
            self._own(self._inherited())

    def _inherited(self) -> torch.Tensor:
        return self._memory.clone() if self._handed_down else torch.zeros_like(self._memory)

    def __getstate__(self) -> dict[str, Any]:
        """What goes along to loader workers, which share them with the process that starts them."""
        self.own()
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._process == os.getpid() and not find_worker():  # it was sent nowhere, and is a copy
            self._own(self._inherited())
            return
        self._share()  # or it would tell its own workers nothing
        _known.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedCells:
        """Cells of its own."""
        self.own()
        other = SharedCells.__new__(SharedCells)
        other._handed_down = self._handed_down
        other._own(self._inherited())
        return other


def _own_all() -> None:
    """Workers that are forked share what is in this process by then: else they would write to those of whoever made them."""
    for cells in list(_known):
        cells.own()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_own_all)
