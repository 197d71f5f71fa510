"""Agreement: ranks of a job that ask for the latest snapshot while data arrives begin on one and the same.

What a rank takes it notes in the store of torch.distributed, with a mark that no other note has. A rank that has not taken that
note yet takes it; one that has is the first to ask anew, and notes what it has by now. Nobody waits for anybody: a collective
would hang where not every rank makes the dataset. Nor is it counted who asks how often: one rank alone may look at a few
batches of a dataset of its own.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import torch.distributed

from penstock.errors import PenstockError
from penstock.rank import is_distributed

_taken = dict[str, str]()  # the last note on each question that this process took
_forked: list[bool] = []


class Agreement:
    """What the ranks of a job agree on, each time that they ask the same `question`."""

    def __init__(self, question: str) -> None:
        self._question, self._key = question, f"penstock/{question}"
        self._note: str | None = None
        self._is_settled = False

    def first(self, answer: str) -> str:
        """The answer of the rank that noted one first; this rank's own while torch.distributed is not initialized."""
        if self._note is None and (store := job_store()) is not None:
            try:
                self._note = _taken[self._question] = self._noted(store, answer)
            except RuntimeError:  # whoever kept it has ended, and so has the job
                self._note = answer
        return answer if self._note is None else _answer_of(self._note)

    def _noted(self, store: Any, answer: str) -> str:
        """The note, if this process has not taken it yet; else one of its own in its place."""
        own = f"{answer} {os.urandom(8).hex()}"
        noted = bytes(store.compare_set(self._key, "", own)).decode()
        return bytes(store.compare_set(self._key, noted, own)).decode() if noted == _taken.get(self._question) else noted

    def check(self, answer: str) -> None:
        """Raises PenstockError: torch.distributed was initialized since, and another rank had another answer."""
        self._compare(answer, self.first(answer))

    def settle(self, answer: str) -> None:
        """What was agreed on is about to be used, and is not asked for again.

        Raises PenstockError: another rank had another answer, also if it noted that since. What this process has taken since,
        for another dataset, is no matter.
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
    """What a note says, without its mark."""
    return note.partition(" ")[0]


def job_store() -> Any:
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
