"""Begin line of an iteration: its start, its spec, its first step and the process that began it."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

from penstock import __version__
from penstock.errors import LedgerError
from penstock.numbers import is_whole
from penstock.spec import Spec
from penstock.text import cut

MAGIC = b'begin {"ledger": '
VERSION = 4
STEP_COLUMNS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """An iteration over a dataset: its start, its spec, its first step and the process that began it.

    run, start      ids; a start is what a dataset yields after it was made or loaded a state, up to its next state
    parent          id of the start that saved this start's state; "" without a state
    parent_epoch    the state's epoch, and its position in samples of that epoch; 0 without a state
    parent_samples
    num_samples     samples of an epoch, over all ranks, skipped ones included
    spec            resolved; its offset is the iteration's
    step            first step; in a loader worker the pass's first step, without the worker's number added
    worker          worker number, below `num_workers`; both are 0 in the loop's process
    pass_name       names the pass of the loop, the same for all its workers; 0 without workers
    """

    run: str
    start: str
    parent: str = ""
    parent_epoch: int = 0
    parent_samples: int = 0
    dataset: str
    num_samples: int
    rank: int
    epoch: int
    step: int
    spec: Spec
    worker: int = 0
    num_workers: int = 0
    pass_name: int = 0
    time: datetime = field(default_factory=lambda: datetime.now(UTC))
    version: str = __version__

    def to_text(self) -> str:
        """Format the text of a begin line, without its checksum."""
        values = asdict(self) | {"time": self.time.isoformat(timespec="microseconds"), "spec": self.spec.to_dict()}
        return "begin " + json.dumps({"ledger": VERSION} | values)

    @classmethod
    def from_text(cls, text: str) -> Begin:
        """Parse the text of a begin line. Raises LedgerError: another version wrote it, or it is invalid."""
        values: dict[str, Any] = {}
        try:
            values |= json.loads(text.removeprefix("begin "))
            if values["ledger"] != VERSION:
                raise ValueError(f"it is of version {values['ledger']}, and {VERSION} is known here")
            values |= {"spec": Spec(**values["spec"]), "time": datetime.fromisoformat(values["time"]).astimezone(UTC)}
            for f in fields(cls):
                if f.type == "str" and not isinstance(values[f.name], str):
                    raise TypeError(f"{f.name} is no text")
                if f.type == "int" and not (is_whole(values[f.name]) and 0 <= values[f.name] < 2**63):
                    raise TypeError(f"{f.name} is no count")
            return cls(**{f.name: values[f.name] for f in fields(cls)})
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise LedgerError(f"penstock {cut(str(values.get('version')))} wrote it, this is {__version__}: {error}") from error


def check_of(text: str, begin: str = "") -> str:
    """Return the checksum of a line's text; `begin` is the checksum of the begin line before it."""
    return f"{zlib.crc32((begin + text).encode()):08x}"
