"""Begin line of an iteration: its spec, its start and the process that began it."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

from penstock import __version__
from penstock.errors import LedgerError
from penstock.spec import MAX_COUNT, Spec

MAGIC = b'begin {"ledger": '
VERSION = 3
STEP_COLUMNS = 16
_MAX_WORKERS = 1 << 16  # per loader; more than any machine has


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """An iteration over a dataset: its spec, its start and the process that began it.

    launch         names one RemoteDataset of one process, which may be a fork of another; its loader workers share the name
    num_loads      number of states loaded into it before this iteration, by the loop or by workers when they began
    state_epoch    the epoch that the loop's last loaded state had consumed in part; None without such a state
    iteration      number of iterations that the launch began before; a missing number means that nothing was recorded of that
                   iteration. Mostly equal for all workers of a pass, see round
    num_samples    samples of an epoch, over all ranks, skipped ones included
    spec           resolved; its offset is the iteration's
    step           first step; in a loader worker the pass's first step, without the worker's number added
    worker         worker number, below `num_workers`; both are 0 in the loop's process
    round          names the pass of the loop, the same for all its workers; 0 without workers
    """

    launch: str
    num_loads: int
    iteration: int
    dataset: str
    num_samples: int
    rank: int
    epoch: int
    step: int
    spec: Spec
    worker: int = 0
    num_workers: int = 0
    round: int = 0
    state_epoch: int | None = None
    time: datetime = field(default_factory=lambda: datetime.now(UTC))
    version: str = __version__

    def to_text(self) -> str:
        """Format the text of a begin line, without its checksum."""
        values = asdict(self) | {"time": self.time.isoformat(timespec="microseconds"), "spec": self.spec.to_dict()}
        return "begin " + json.dumps({"ledger": VERSION} | values)

    @classmethod
    def from_text(cls, text: str) -> Begin:
        """Parse the text of a begin line. Raises LedgerError: another version wrote it."""
        values: dict[str, Any] = {}
        try:
            values |= json.loads(text.removeprefix("begin "))
            if values["ledger"] != VERSION:
                raise ValueError(f"it is of version {values['ledger']}, and {VERSION} is known here")
            values |= {"spec": Spec(**values["spec"]), "time": datetime.fromisoformat(values["time"])}
            begin = cls(**{f.name: values[f.name] for f in fields(cls)})
            begin._check()
        except (KeyError, RecursionError, TypeError, ValueError) as error:
            raise LedgerError(f"penstock {values.get('version')} wrote it, this is {__version__}: {error}") from error
        return begin

    def _check(self) -> None:
        """Raises ValueError, which from_text reports as a LedgerError: this version does not write such a value."""
        for name, kind in _KINDS.items():
            value: Any = getattr(self, name)
            if type(value) is not kind or (isinstance(value, int) and not 0 <= value < 1 << 63):
                raise ValueError(f"{name} is {value!r}")
        if self.rank >= self.spec.world_size or not self.worker < max(1, self.num_workers) <= _MAX_WORKERS:
            raise ValueError(f"no such rank or worker: {self.rank} of {self.spec.world_size}, {self.worker}")
        if not (self.state_epoch is None or (type(self.state_epoch) is int and 0 <= self.state_epoch <= MAX_COUNT)):
            raise ValueError(f"state_epoch is {self.state_epoch!r}")
        if self.time.tzinfo is None or not 2000 < self.time.year < 9000:
            raise ValueError(f"time is {self.time}")


_KINDS = {f.name: {"str": str, "int": int}[str(f.type)] for f in fields(Begin) if f.type in ("str", "int")}


def check_of(text: str, begin: str = "") -> str:
    """Return the checksum of a line's text; `begin` is the text of the begin line before it."""
    return f"{zlib.crc32((begin + text).encode()):08x}"
