"""Ledgers of runs that were never trained, their files, and what the audit reports about them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from penstock import Spec
from penstock.audit.reading import Reading
from penstock.audit.report import Report, audit
from penstock.audit.text import lines_of as words_of
from penstock.distributed import LoaderWorker
from penstock.ledger.begin import Begin, check_of
from penstock.ledger.file import find_ledgers, ledger_path
from penstock.ledger.recorder import IterationRecord, Recorder
from penstock.progress import Pass
from penstock.slicing import Slicing
from penstock.state import Cursor, StateOrigin

FIRST = datetime(2025, 1, 1, tzinfo=UTC)
SPEC = Spec(snapshot="abc", batch_size=3, skip="samples:0-4")


def pass_at(epoch: int = 0, step: int = 0, worker: LoaderWorker | None = None, *, is_first: bool = True) -> Pass:
    """A pass of a thousand steps that begins there."""
    return Pass(
        worker=worker, cursor=Cursor(epoch=epoch, step=step, num_steps=1000), steps_per_epoch=1000,
        name=1, num_sets=1, start=id_of(0), origin=StateOrigin(), is_first=is_first,
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


def recorder(path: Path, rank: int = 0) -> Recorder:
    return Recorder(path, "numbers", rank)


def digest(step: int) -> str:
    return f"{step * 0x9E3779B97F4A7C15 % 2**64:016x}"


def open_at(path: Path, epoch: int = 0) -> IterationRecord:
    opened = recorder(path).open(SPEC, 1000, pass_at(epoch=epoch))
    assert opened
    return opened


def record(opened: IterationRecord, *steps: int) -> None:
    for step in steps:
        opened.record(opened.epoch, step, digest(step))


def open_files(folder: Path) -> list[Path]:
    """The files in a folder that this process has open."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the folder's own, which is closed by now
            found.append(descriptor.readlink())
    return [path for path in found if path.is_relative_to(folder)]


def entries(reading: Reading) -> list[tuple[int, str]]:
    return [
        (s, f"{d:016x}")
        for section in reading.sections
        for s, d in zip(section.steps.tolist(), section.digests.tolist(), strict=True)
    ]


def fails_with(code: int, after_bytes: int = 0) -> Callable[[int, bytes], int]:
    """A write to a disk that takes a little more, and then none."""
    left = [after_bytes]
    real = os.write

    def write(fd: int, content: bytes) -> int:
        if not left[0]:
            raise OSError(code, os.strerror(code))
        taken = real(fd, bytes(content[: left[0]]))
        left[0] -= taken
        return taken

    return write


def report_on(ledger: Path, **settings: bool) -> Report:
    return audit(find_ledgers(ledger), **settings)


def words(ledger: Path, **settings: bool) -> str:
    return "\n".join(words_of(report_on(ledger, **settings)))


def write_run(ledger: Path, *, world_size: int = 2, epochs: int = 2, steps: int = 10, **spec: Any) -> None:
    """Whole epochs of 100 samples."""
    for rank in range(world_size):
        for epoch in range(epochs):
            append(ledger, begin_of(rank, epoch=epoch, world_size=world_size, **spec), range(steps), ends=True)


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
