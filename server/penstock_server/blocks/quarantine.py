"""Quarantine: unusable rows and unreadable row groups found so far, with reasons."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass

from penstock.wire.names import dataset_path
from penstock_server.blocks.block import Block
from penstock_server.catalog.snapshot import Snapshot
from penstock_server.problems import BadRow, DatasetInvalid, ShardUnreadable

log = logging.getLogger("penstock.quarantine")

_LISTED_ROWS = 100_000  # with reasons; further rows are only counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantined:
    """A row that cannot be used."""

    row: int
    """The number of the row, counted over all shards."""
    shard: str
    """The name of the Parquet file."""
    row_group: int
    """The row group in the file."""
    row_in_group: int
    """The number of the row in its row group."""
    reason: str
    """Why the row cannot be used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BadGroup:
    """A row group that cannot be read."""

    shard: str
    """The name of the Parquet file."""
    row_group: int
    """The row group in the file."""
    reason: str
    """The reason, and what to do."""


class Quarantine:
    """Known bad rows and row groups of one snapshot. Every block is checked once, when it is made or mapped."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._lock = threading.Lock()
        # Cached, since every request needs it: summing ten thousand footers takes longer than a batch.
        self._num_in_footers = sum(nulls for shard in snapshot.shards for nulls in shard.null_rows)
        self.num_rows = snapshot.num_rows  # rows that the filter keeps, after they are counted
        self.num_bad_counted = 0  # bad rows of the whole dataset, after all tokens are counted
        self._num_met = 0
        self._rows: dict[int, list[Quarantined]] = {}  # by block with bad rows
        self._num_listed = 0
        self._groups: dict[tuple[str, int], BadGroup] = {}  # unreadable row groups, by shard and number

    def note_load(self, index: int, loaded: Future[Block]) -> None:
        """Records the bad rows of a loaded block, or the failure to load it."""
        if loaded.cancelled():
            return
        at, error = self._snapshot.block(index), loaded.exception()
        key = at.shard.path.name, at.row_group
        if isinstance(error, ShardUnreadable):
            with self._lock:
                is_known = key in self._groups
                self._groups[key] = BadGroup(shard=key[0], row_group=at.row_group, reason=str(error))
            if not is_known:  # batches request the row group again and again
                log.warning("%s", error)
        elif error is None:
            with self._lock:
                self._groups.pop(key, None)  # it can be read again, as after a disk outage
            self.note_block(index, loaded.result())

    def note_block(self, index: int, block: Block) -> None:
        """Records the bad rows of a block."""
        if not block.bad or self.has_met(index):
            return
        at, first, numbers = self._snapshot.block(index), self._snapshot.first_row_of(index), block.stored_rows
        with self._lock:
            if self.has_met(index):
                return
            self._num_met += len(block.bad)
            self._rows[index] = [
                Quarantined(
                    row=first + int(numbers[row]),
                    shard=at.shard.path.name,
                    row_group=at.row_group,
                    row_in_group=at.first_row + int(numbers[row]),
                    reason=reason,
                )
                for row, reason in sorted(block.bad.items())[: max(0, _LISTED_ROWS - self._num_listed)]
            ]
            self._num_listed += len(self._rows[index])

    @property
    def is_full(self) -> bool:
        """Whether the list of rows is full."""
        return self._num_listed >= _LISTED_ROWS

    def has_met(self, index: int) -> bool:
        """Returns whether the bad rows of a block are recorded."""
        return index in self._rows

    @property
    def num_bad_rows(self) -> int:
        """Number of bad rows: found so far or from the footers; exact after counting."""
        return max(self._num_in_footers, self._num_met, self.num_bad_counted)

    def rows(self) -> list[Quarantined]:
        """Returns the first 100,000 bad rows found so far, in the order of the dataset."""
        with self._lock:
            return [row for index in sorted(self._rows) for row in self._rows[index]]

    def groups(self) -> list[BadGroup]:
        """Returns the unreadable row groups."""
        with self._lock:
            return [self._groups[key] for key in sorted(self._groups)]

    def check_block(self, block: Block, index: int) -> None:
        """Raises BadRow: block `index` has a bad row, and on_bad_row is "fail"."""
        if block.bad and self._snapshot.recipe.on_bad_row == "fail":
            raise self.bad_row(block, index, min(block.bad))

    def bad_row(self, block: Block, index: int, row: int) -> BadRow:
        """Returns the error for an unusable row of block `index`."""
        address, reason = self._snapshot.block(index), block.bad[row]
        number = address.first_row + int(block.stored_rows[row])
        place = f"row {number} of row group {address.row_group} in {address.shard.path.name}"
        remedy = (
            f'Correct the shard or {self._snapshot.folder / "penstock.toml"}; or set on_bad_row = "replace" there, to serve a '
            f"neighbour in place of each, up to max_bad_share of the rows: no other batch changes, so a run can go on."
        )
        return BadRow(
            f"{self._snapshot.name}: {place}: {reason}; {len(block.bad):,} of the {block.num_rows:,} rows there cannot be "
            f"used. {remedy}"
        )

    def check(self) -> None:
        """Raises DatasetInvalid: more bad rows are known than the recipe allows to replace."""
        if self.refusal:
            raise DatasetInvalid(self.refusal)

    @property
    def refusal(self) -> str | None:
        """Reason why every batch is refused; None if batches are served."""
        recipe, name, num_bad = self._snapshot.recipe, self._snapshot.name, self.num_bad_rows
        if recipe.on_bad_row == "fail" or num_bad <= recipe.max_bad_share * self.num_rows:
            return None
        return (
            f"{name}: {num_bad:,} of {self.num_rows:,} rows ({num_bad / self.num_rows:.2%}) are known to be bad, more than "
            f"max_bad_share = {recipe.max_bad_share:g} allows to replace. GET {dataset_path(name)}/quarantine lists them. "
            f"Correct the data, or raise max_bad_share in penstock.toml."
        )

    @property
    def num_unread_groups(self) -> int:
        """Number of row groups that could not be read when needed."""
        return len(self._groups)
