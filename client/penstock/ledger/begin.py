"""The begin line of an iteration: what it gives, from where on, and who began it."""

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
_MAX_WORKERS = 1 << 16  # of a loader; no machine has so many


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """An iteration over a dataset: what it gives, from where on, and who began it.

    launch         names one RemoteDataset of one process, which may be a fork of another; the workers of its loader share it
    num_loads      how often a state was loaded into it before this iteration, by the loop or by workers when they began
    state_epoch    the epoch of which something was consumed in the last state that the loop loaded; None if there is none
    iteration      how many the launch began before it; of one that is missing in these nothing was recorded. For workers mostly
                   equal, see round
    num_samples  of an epoch, over all ranks, skipped ones included
    spec           resolved; its offset is the iteration's
    step           the first one; in a loader's worker that of the round, to which its own number is added
    worker         its number, of `num_workers`; 0 of 0 in the process of the loop itself
    round          names the pass of the loop whose workers these are, the same for all of them; 0 without workers
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
        """The text of a begin line, without its check."""
        values = asdict(self) | {"time": self.time.isoformat(timespec="microseconds"), "spec": self.spec.to_dict()}
        return "begin " + json.dumps({"ledger": VERSION} | values)

    @classmethod
    def from_text(cls, text: str) -> Begin:
        """What such a text says. Raises LedgerError: it is in the words of another version."""
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
        """Raises what is told as a LedgerError: a value is none that this version writes."""
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
    """The check of a line's text; `begin` is that of the begin line before it."""
    return f"{zlib.crc32((begin + text).encode()):08x}"
