"""Agreement of a job's ranks on the latest snapshot while data arrives.

A rank notes its snapshot in the store of torch.distributed, with a unique mark. A rank that has not taken that note yet takes
it. A rank that has taken it is the first to ask again, and notes its current snapshot. No rank waits for another: a collective
would hang if some rank does not make the dataset. The notes do not count requests either: one rank alone may make another
dataset to inspect a few batches.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import torch.distributed

from penstock.errors import PenstockError
from penstock.rank import is_distributed

_taken = dict[str, str]()  # by question: the last note that this process took
_forked: list[bool] = []


class Agreement:
    """One agreement among the ranks of a job, on their answer to the same `question`."""

    def __init__(self, question: str) -> None:
        self._question, self._key = question, f"penstock/{question}"
        self._note: str | None = None
        self._is_settled = False

    def first(self, answer: str) -> str:
        """Return the first noted answer; this rank's `answer` while torch.distributed is not initialized."""
        if self._note is None and (store := job_store()) is not None:
            try:
                self._note = _taken[self._question] = self._noted(store, answer)
            except RuntimeError:  # the store's process has ended, and so has the job
                self._note = answer
        return answer if self._note is None else _answer_of(self._note)

    def _noted(self, store: Any, answer: str) -> str:
        """Return the store's note if it is new to this process; otherwise replace it with this rank's note."""
        own = f"{answer} {os.urandom(8).hex()}"
        noted = bytes(store.compare_set(self._key, "", own)).decode()
        return bytes(store.compare_set(self._key, noted, own)).decode() if noted == _taken.get(self._question) else noted

    def check(self, answer: str) -> None:
        """Raises PenstockError: since torch.distributed was initialized, another rank noted another answer."""
        self._compare(answer, self.first(answer))

    def settle(self, answer: str) -> None:
        """Check the agreed answer for the last time, right before its use.

        Notes that this process has taken since then, for another dataset, do not count.

        Raises PenstockError: another rank noted another answer, before or since.
        """
        self.check(answer)
        if self._is_settled or self._note is None or (store := job_store()) is None:
            return
        with suppress(RuntimeError):  # the job has ended
            noted = bytes(store.compare_set(self._key, "", self._note)).decode()
            if noted != _taken.get(self._question):
                self._compare(answer, _answer_of(noted))
        self._is_settled = True

    def _compare(self, answer: str, noted: str) -> None:
        if noted != answer:
            raise PenstockError(
                f"this rank would train on snapshot {answer}, and others do on {noted}: data arrived while they started, and "
                f"torch.distributed was not initialized yet, or one rank has made one dataset more than the others. Make the "
                f"dataset after init_process_group, or pass snapshot={noted!r} to all ranks."
            )


def _answer_of(note: str) -> str:
    """Return a note's answer without its mark."""
    return note.partition(" ")[0]


def job_store() -> Any:
    """Return the store that the ranks of this job share; None without torch.distributed or in a fork."""
    if not is_distributed() or _forked:
        return None
    from torch.distributed import distributed_c10d  # not importable if torch was built without distributed

    # Before torch 2.9 groups have no get_group_store.
    return getattr(torch.distributed.group.WORLD, "get_group_store", distributed_c10d._get_default_store)()


def _note_fork() -> None:
    if is_distributed():
        _forked.append(True)  # the child must not use the parent's connection to the store


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
