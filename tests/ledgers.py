"""Ledgers of runs that were never trained: written line by line, as a process would that is killed after any of them.

And passes, for ledgers that are written as a loop has them written.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from penstock import Spec
from penstock.distributed import Worker
from penstock.ledger.begin import Begin, check_of
from penstock.ledger.file import ledger_path
from penstock.progress import Pass
from penstock.slicing import Slicing
from penstock.state import Origin, Position, StepRange

FIRST = datetime(2025, 1, 1, tzinfo=UTC)


def pass_at(epoch: int = 0, step: int = 0, worker: Worker | None = None, *, is_first: bool = True) -> Pass:
    """A pass of a thousand steps that begins there."""
    return Pass(
        worker=worker, stretch=StepRange(position=Position(epoch=epoch, step=step), num_steps=1000), steps=range(step, 1000),
        name=1, num_sets=1, start=id_of(0), origin=Origin(), is_first=is_first,
    )  # fmt: skip


def id_of(start: int) -> str:
    return f"{start + 1:016x}"


def line(text: str, begin: str = "") -> str:
    """A line with its check; `begin` is that of its begin line."""
    return f"{text} {check_of(text, begin)}\n"


def begin_of(
    rank: int = 0,
    *,
    start: int = 0,
    parent: int | None = -1,
    epoch: int = 0,
    step: int = 0,
    num_samples: int = 100,
    **spec: Any,
) -> Begin:
    """An iteration of a run's start number `start`, which loaded a state of its `parent`: the start before it, or none."""
    settings: dict[str, Any] = {"batch_size": 5, "snapshot": "abc"} | spec
    of_spec = Spec(**settings)
    before = start - 1 if parent == -1 else parent
    has_parent = before is not None and before >= 0
    return Begin(
        run=id_of(0), start=id_of(start), parent=id_of(before) if has_parent and before is not None else "",
        parent_epoch=epoch if has_parent else 0,
        parent_samples=Slicing.of(of_spec, num_samples).position(step) if has_parent else 0,
        dataset="numbers", num_samples=num_samples, rank=rank, epoch=epoch, step=step, spec=of_spec,
        time=FIRST + timedelta(hours=start, minutes=epoch),
    )  # fmt: skip


def lines_of(begin: Begin, steps: Iterable[int], *, ends: bool = False, salt: int = 0) -> str:
    """The lines of an iteration. Digests follow from the step, and from `salt`."""
    text = begin.to_text()
    check = check_of(text)
    batches = [line(f"{step:>16} {(begin.epoch * 1000 + step) * 64 + begin.rank + salt:016x}", check) for step in steps]
    return line(text) + "".join(batches) + (line("end", check) if ends else "")


def append(ledger: Path, begin: Begin, steps: Iterable[int], *, ends: bool = False, salt: int = 0) -> Path:
    """Appends an iteration to the file of its rank."""
    path = ledger_path(ledger, begin.rank)
    with path.open("a") as file:
        file.write(lines_of(begin, steps, ends=ends, salt=salt))
    return path
