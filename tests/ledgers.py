"""Ledgers of runs that were never trained: written line by line, as a process would that is killed behind any of them.

And rounds, for ledgers that are written as a loop has them written.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock import Spec
from penstock.distributed import Worker
from penstock.ledger.begin import Begin, check_of
from penstock.ledger.names import ledger_path
from penstock.state.progress import Pass
from penstock.state.start import StepRange
from penstock.state.state import Position

FIRST = datetime(2025, 1, 1, tzinfo=UTC)


def round_at(
    epoch: int = 0,
    step: int = 0,
    worker: Worker | None = None,
    *,
    num_loads: int = 0,
    is_first: bool = True,
) -> Pass:
    """A round of a thousand steps that begins there."""
    return Pass(
        worker=worker, stretch=StepRange(position=Position(epoch=epoch, step=step), num_steps=1000), steps=range(step, 1000),
        number=1, num_sets=1, is_repetition=False, is_stuck=False, is_first=is_first, num_loads=num_loads,
        state_epoch=None, launch="5f0c77aa",
    )  # fmt: skip


def behind(num_rounds: int) -> Any:
    """The progress of a loop that put so many rounds on record."""
    return SimpleNamespace(num_before=lambda _: num_rounds, put_on_record=lambda *_: None)


def line(text: str, begin: str = "") -> str:
    """A line with its check; `begin` is that of its begin line."""
    return f"{text} {check_of(text, begin)}\n"


def begin_of(rank: int = 0, *, start: int = 0, epoch: int = 0, step: int = 0, num_samples: int = 100, **spec: Any) -> Begin:
    """An iteration of a run's start number `start`, which loaded a state unless it is the first."""
    settings: dict[str, Any] = {"batch_size": 5, "snapshot": "abc"} | spec
    state_epoch = epoch if start and (step or spec.get("offset")) else None  # the state is of where it goes on
    return Begin(
        launch=f"{start}-{rank}", num_loads=int(start > 0), state_epoch=state_epoch, iteration=0,
        dataset="numbers", num_samples=num_samples, rank=rank, epoch=epoch, step=step, spec=Spec(**settings),
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
