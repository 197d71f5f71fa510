"""Company: whether the ranks of a job give batches of one order, from one place on. Otherwise they share no epoch.

Each that begins an iteration notes that in the store of torch.distributed; nobody waits for anybody. After a while the first
rank looks whether the others have begun where it has.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress

from penstock.agreement import job_store
from penstock.place.state import Position
from penstock.spec import Spec
from penstock.wording import listed

_FIRST_LOOK = 16  # batches; from one look to the next they double
_MOST_TOLD = 4  # ranks
_WHILE_SECONDS = 30.0  # that others may begin later; ranks that train together wait for each other at every step


class Company:
    """The ranks beside this one, which has begun an iteration."""

    def __init__(self, dataset: str, spec: Spec, at: Position, rank: int) -> None:
        self._began_at, self._next_look = time.monotonic(), _FIRST_LOOK
        self._others = [other for other in range(spec.world_size) if other != rank]
        self._own = {"epoch": at.epoch, "step": at.step, **spec.to_dict()}
        self._here = f"penstock/{dataset}/begun/{spec.digest}/{at.epoch}/{at.step}/"
        self._last = f"penstock/{dataset}/began/"
        self._store = job_store()
        with suppress(RuntimeError):  # whoever kept it has ended, and so has the job
            if self._store is not None:
                self._store.set(f"{self._here}{rank}", "")
                self._store.set(f"{self._last}{rank}", json.dumps(self._own))

    def elsewhere(self, num_batches: int) -> str:
        """Which ranks have begun elsewhere, or not at all, now that this one gave so many batches; "" for none, and mostly."""
        if num_batches != self._next_look or self._store is None:
            return ""
        self._next_look *= 2
        if time.monotonic() < self._began_at + _WHILE_SECONDS:
            return ""
        with suppress(RuntimeError):
            if not self._store.check([f"{self._here}{other}" for other in self._others]):
                missing = [other for other in self._others if not self._store.check([f"{self._here}{other}"])]
                told = [self._told(other) for other in missing[:_MOST_TOLD]]
                return listed([*told, *map(str, missing[_MOST_TOLD:])], _MOST_TOLD)
        return ""

    def _told(self, rank: int) -> str:
        if not self._store.check([f"{self._last}{rank}"]):
            return f"rank {rank} (not at all)"
        theirs = json.loads(self._store.get(f"{self._last}{rank}"))
        differing = [name for name in {**self._own, **theirs} if self._own.get(name) != theirs.get(name)]
        return f"rank {rank} ({', '.join(f'{name}={theirs.get(name)}, not {self._own.get(name)}' for name in differing)})"
