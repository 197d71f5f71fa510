"""A ledger and what is in its files."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ledgers import pass_at
from penstock import Spec
from penstock.audit.reading import Reading
from penstock.ledger.recorder import Record, Recorder

SPEC = Spec(snapshot="abc", batch_size=3, skip="samples:0-4")


def recorder(path: Path, rank: int = 0) -> Recorder:
    return Recorder(path, "numbers", rank)


def digest(step: int) -> str:
    return f"{step * 0x9E3779B97F4A7C15 % 2**64:016x}"


def open_at(path: Path, epoch: int = 0) -> Record:
    opened = recorder(path).open(SPEC, 1000, pass_at(epoch=epoch))
    assert opened
    return opened


def record(opened: Record, *steps: int) -> None:
    for step in steps:
        opened.record(step, digest(step))


def open_files(folder: Path) -> list[Path]:
    """The files in a folder that this process has open."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the folder's own, which is closed by now
            found.append(descriptor.readlink())
    return [path for path in found if path.is_relative_to(folder)]


def entries(reading: Reading) -> list[tuple[int, str]]:
    return [(s, f"{d:016x}") for part in reading.parts for s, d in zip(part.steps.tolist(), part.digests.tolist(), strict=True)]


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
