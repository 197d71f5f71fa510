"""Check that all ranks of a job iterate over one order from one position. Otherwise they do not share an epoch.

Each rank that begins an iteration notes it in the store of torch.distributed; no rank waits for another. After a while rank 0
checks whether the others began at the same position.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from penstock.agreement import job_store
from penstock.spec import Spec
from penstock.state.state import Position
from penstock.text import listed

_FIRST_LOOK = 16  # batches before the first check; doubled for each further check
_MAX_TOLD = 4  # ranks
_WHILE_SECONDS = 30.0  # tolerated delay between the ranks' begins


class Company:
    """The other ranks, as seen by this one, which has begun an iteration."""

    def __init__(self, dataset: str, spec: Spec, at: Position, rank: int) -> None:
        self._began_at, self._next_look = time.monotonic(), _FIRST_LOOK
        self._others = range(1, spec.world_size if rank == 0 else 1)  # only rank 0 checks other ranks
        self._own = {"epoch": at.epoch, "step": at.step, **spec.to_dict()}
        self._here = f"penstock/{dataset}/begun/{spec.digest}/{at.epoch}/{at.step}/"
        self._last = f"penstock/{dataset}/began/"
        self._store = _quick_store()
        with suppress(RuntimeError):  # the store's process has ended, and so has the job
            if self._store is not None:
                self._store.set(f"{self._here}{rank}", "")
                self._store.set(f"{self._last}{rank}", json.dumps(self._own))

    def elsewhere(self, num_batches: int) -> str:
        """Describe ranks that began elsewhere, after `num_batches` batches of this one; "" without any.

        It omits ranks that are only late, as in a job whose ranks do not synchronize.
        """
        if num_batches != self._next_look or not self._others or self._store is None:
            return ""
        self._next_look *= 2
        if time.monotonic() < self._began_at + _WHILE_SECONDS:
            return ""
        with suppress(RuntimeError):
            if not self._has_all(f"{self._here}{other}" for other in self._others):
                late = [other for other in self._others if not self._has_all([f"{self._here}{other}"])]
                return listed([f"rank {other} ({told})" for other in late if (told := self._differing(other))], _MAX_TOLD)
        return ""

    def _differing(self, rank: int) -> str:
        """Describe how a rank's last begin differs from this one; "" if the rank is only late."""
        if not self._has_all([f"{self._last}{rank}"]):
            return ""
        theirs = json.loads(self._store.get(f"{self._last}{rank}"))
        names = [name for name in {**self._own, **theirs} if self._own.get(name) != theirs.get(name)]
        if theirs["epoch"] < self._own["epoch"] and {*names} <= {"epoch", "step", "offset"}:
            return ""
        return ", ".join(f"{name}={theirs.get(name)}, not {self._own.get(name)}" for name in names)

    def _has_all(self, keys: Iterable[str]) -> bool:
        return bool(self._store.check([*keys]))


def _quick_store() -> Any:
    """Return the job's store if it is a TCPStore: a file store blocks for minutes if its file is gone."""
    if (store := job_store()) is None:
        return None
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # missing if built without distributed

    own = store
    while isinstance(own, PrefixStore):
        own = own.underlying_store
    return store if isinstance(own, TCPStore) else None
