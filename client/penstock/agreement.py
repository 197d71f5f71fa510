"""Agreement: ranks of a job that ask for the latest snapshot while data arrives begin on one and the same.

What a rank takes it notes in the store of torch.distributed, and a rank that has not taken that yet takes it from there. One
that has, asks anew, and may note something newer. Nobody waits for anybody: a collective would hang where not every rank makes
the dataset. Nor is it counted who asks how often: one rank alone may look at a few batches of a dataset of its own.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed

from penstock.errors import PenstockError
from penstock.rank import is_distributed

_taken = dict[str, str]()  # the last answer to each question that this process took
_forked: list[bool] = []


class Agreement:
    """What the ranks of a job agree on, each time that they ask the same `question`."""

    def __init__(self, question: str) -> None:
        self._question = question
        self._first: str | None = None

    def first(self, answer: str) -> str:
        """The answer of the rank that noted one first; this rank's own while torch.distributed is not initialized."""
        if self._first is None and (store := _store()) is not None:
            try:
                self._first = _taken[self._question] = self._noted(store, answer)
            except RuntimeError:  # whoever kept it has ended, and so has the job
                self._first = answer
        return answer if self._first is None else self._first

    def _noted(self, store: Any, answer: str) -> str:
        """What is noted, if this process has not taken it yet; else the answer is noted in its place."""
        key, taken = f"penstock/{self._question}", _taken.get(self._question)
        noted = bytes(store.compare_set(key, "", answer)).decode()
        return bytes(store.compare_set(key, noted, answer)).decode() if noted == taken != answer else noted

    def check(self, answer: str) -> None:
        """Raises PenstockError: torch.distributed was initialized since, and another rank had another answer."""
        if (first := self.first(answer)) != answer:
            raise PenstockError(
                f"this rank would train on snapshot {answer}, and others do on {first}: data arrived while they started, and "
                f"torch.distributed was not initialized yet. Make the dataset later, or pass snapshot={first!r} to all ranks."
            )


def _store() -> Any:
    """The store that the ranks of this job share; None where there is none."""
    if not is_distributed() or _forked:
        return None
    from torch.distributed import distributed_c10d  # where torch was built without, it cannot be imported

    # Before torch 2.9 groups do not give it.
    return getattr(torch.distributed.group.WORLD, "get_group_store", distributed_c10d._get_default_store)()


def _note_fork() -> None:
    if is_distributed():
        _forked.append(True)  # its connection to the store is the parent's


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
