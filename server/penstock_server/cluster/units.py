"""Units of a preparation: the row groups of a snapshot. A shared store has their blocks and counts.

The counts of a unit are written after its blocks, so a unit with counts is done. Names are hashes of the content: it does not
matter which machine makes a unit, or how often.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from penstock_server.blocks.shared import SharedStore
from penstock_server.catalog.dataset import OpenSnapshot
from penstock_server.catalog.snapshot import BlockAddress
from penstock_server.index.row_lengths import UNITS, ShardLengths, unit_name
from penstock_server.problems import Problem, SnapshotGone

log = logging.getLogger("penstock.units")

MAX_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Failure:
    """A unit that failed in each of its attempts, by the name of its row group."""

    place: str
    reason: str


class Units:
    """Units of one snapshot, by the number of their row group. Methods raise OSError: the store fails."""

    def __init__(self, opened: OpenSnapshot, shared: SharedStore) -> None:
        self.dataset, self.fingerprint = opened.name, opened.snapshot.fingerprint
        self.shared, self.num_threads = shared, opened.blocks.num_threads
        self._snapshot, self._blocks = opened.snapshot, opened.blocks
        self.names = [unit_name(opened.blocks, self._first(unit)) for unit in range(len(self))]

    def __len__(self) -> int:
        return len(self._snapshot.blocks_per_group)

    def done(self) -> set[int]:
        """Return the units that are done."""
        found = self.shared.names(UNITS)
        return {unit for unit, name in enumerate(self.names) if name in found}

    def is_done(self, unit: int) -> bool:
        """Return whether a unit is done."""
        return self.shared.has(f"{UNITS}/{self.names[unit]}")

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
        self.shared.write(f"{UNITS}/{self.names[unit]}", counts.pieces())

    def try_to_make(self, unit: int) -> Exception | None:
        """Make a unit; return the error that it fails with. Raises OSError, and SnapshotGone: the data changed."""
        try:
            self.make(unit)
        except (OSError, SnapshotGone):
            raise
        except Problem as problem:
            return problem
        except Exception as error:
            log.exception("%s of %s cannot be prepared", self.place(unit), self.dataset)
            return error
        return None

    def _first(self, unit: int) -> BlockAddress:
        return self._snapshot.block(self._snapshot.blocks_of_group(unit).start)
