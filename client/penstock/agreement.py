"""Agreement: ranks of a job that ask for the latest snapshot while data arrives begin on one and the same.

The first that has an answer notes it in the store of torch.distributed, and the others take it from there. Nobody waits for
anybody: a collective would hang where not every rank makes the dataset.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import torch.distributed

from penstock.errors import PenstockError
from penstock.rank import is_distributed

_asked = Counter[str]()  # by this process; a job may ask for the same again later, and get what is the latest then
_forked: list[bool] = []


class Agreement:
    """What the ranks of a job agree on, once for each time that they ask the same `question`."""

    def __init__(self, question: str) -> None:
        _asked[question] += 1
        self._key = f"penstock/{question}/{_asked[question]}"
        self._first: str | None = None

    def first(self, answer: str) -> str:
        """The answer of the rank that had one first; this rank's own while torch.distributed is not initialized."""
        if self._first is None and (store := _store()) is not None:
            try:
                self._first = bytes(store.compare_set(self._key, "", answer)).decode()
            except RuntimeError:  # whoever kept it has ended, and so has the job
                self._first = answer
        return answer if self._first is None else self._first

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
    # Older versions of torch do not give it.
    return getattr(torch.distributed.group.WORLD, "get_group_store", lambda: None)()


def _note_fork() -> None:
    if is_distributed():
        _forked.append(True)  # its connection to the store is the parent's


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
