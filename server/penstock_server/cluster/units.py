"""Units of a preparation: the row groups of a snapshot. A shared store has their blocks and counts.

The counts of a unit are written after its blocks, so a unit with counts is done. Names are hashes of the content: it does not
matter which machine makes a unit, or how often.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from penstock_server.blocks.shared import SharedStore
from penstock_server.catalog.dataset import OpenSnapshot
from penstock_server.catalog.snapshot import BlockAddress
from penstock_server.index.row_lengths import UNITS, ShardLengths, unit_name
from penstock_server.problems import DatasetUnavailable, Problem, ShardUnavailable, SnapshotGone

T = TypeVar("T")
log = logging.getLogger("penstock.units")

MAX_ATTEMPTS = 3
_PATIENT_SECONDS, _PAUSE_SECONDS = 600.0, 10.0  # while the data cannot be read
_Unavailable = DatasetUnavailable, ShardUnavailable


@dataclass(frozen=True, slots=True)
class Failure:
    """A unit that failed in each of its attempts, by the name of its row group."""

    place: str
    reason: str


class Units:
    """Units of one snapshot, by the number of their row group. Methods raise OSError: the store fails."""

    def __init__(self, opened: OpenSnapshot, shared: SharedStore) -> None:
        self.dataset, self.shared, self.num_threads = opened.name, shared, opened.blocks.num_threads
        self._snapshot, self._blocks = opened.snapshot, opened.blocks
        shared.is_patient = True  # otherwise a request that fails would look like a miss

    def __len__(self) -> int:
        return len(self._snapshot.blocks_per_group)

    @cached_property
    def names(self) -> list[str]:
        """Names of all units."""
        return [*map(self.name, range(len(self)))]

    def name(self, unit: int) -> str:
        """Return the name of a unit in the store: a hash of all that its content depends on."""
        return unit_name(self._blocks, self._first(unit))

    def done(self) -> set[int]:
        """Return the units that are done."""
        found = self.shared.names(UNITS)
        return {unit for unit, name in enumerate(self.names) if name in found}

    def is_done(self, unit: int) -> bool:
        """Return whether a unit is done."""
        return self.shared.has(f"{UNITS}/{self.name(unit)}")

    def claim(self, unit: int) -> str:
        """Return the name by which a worker, or a server, claims the blocks of a unit."""
        return self._blocks.names.of_group(self._first(unit))

    def place(self, unit: int) -> str:
        """Return the name of a unit for people."""
        at = self._first(unit)
        return f"row group {at.row_group} of {at.shard.path.name}"

    def make(self, unit: int) -> None:
        """Make a unit. One of its blocks at a time is in memory. Raises what Blocks.share raises."""
        counts = ShardLengths.of_blocks(self._snapshot, self._blocks.share(self.shared, unit))
        self.shared.write(f"{UNITS}/{self.name(unit)}", counts.pieces())

    def try_to_make(self, unit: int) -> Exception | None:
        """Make a unit; return the error that it fails with. Raises OSError, and SnapshotGone: the data changed.

        Raises what `patiently` raises: the data, and not this unit, fails.
        """
        try:
            patiently(lambda: self.make(unit))
        except (OSError, SnapshotGone, *_Unavailable):
            raise
        except Exception as error:
            return error
        return None

    def reason(self, unit: int, error: Exception) -> str:
        """Return an error of a unit for people. Logs the traceback of an unexpected one."""
        if isinstance(error, Problem):
            return str(error)
        log.error("%s of %s cannot be prepared", self.place(unit), self.dataset, exc_info=error)
        return repr(error)

    def _first(self, unit: int) -> BlockAddress:
        return self._snapshot.block(self._snapshot.blocks_of_group(unit).start)


def patiently(work: Callable[[], T]) -> T:
    """Return the result of work; repeat it for ten minutes while the data cannot be read.

    Raises DatasetUnavailable and ShardUnavailable after that.
    """
    failed_at = float("inf")
    while True:
        try:
            return work()
        except _Unavailable as problem:
            if failed_at == float("inf"):
                failed_at = time.monotonic()
                log.warning("%s It is tried again for up to ten minutes.", problem)
            if time.monotonic() - failed_at >= _PATIENT_SECONDS:
                raise
            time.sleep(_PAUSE_SECONDS)
