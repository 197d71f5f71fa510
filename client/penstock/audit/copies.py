"""Copies of ledgers: one of each day beside the file itself, say. By its name such a file is another rank's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.audit.reading import told_of

_MAX_LINE = 1 << 16  # bytes
_PIECE_BYTES = 1 << 20


def without_copies(paths: Sequence[Path]) -> list[Path]:
    """Those that hold more than what another one begins with: no two processes write the same line.

    Raises LedgerError: one cannot be read.
    """
    kept: dict[bytes, list[Path]] = {}
    for path in sorted(paths, key=_size, reverse=True):
        alike = kept.setdefault(_first_line(path), [])
        if not any(_begins_with(other, path) for other in alike):
            alike.append(path)
    left = {path for alike in kept.values() for path in alike}
    return [path for path in paths if path in left]


def _size(path: Path) -> int:
    with told_of(path):
        return path.stat().st_size


def _first_line(path: Path) -> bytes:
    with told_of(path), path.open("rb") as file:
        return file.readline(_MAX_LINE)


def _begins_with(path: Path, other: Path) -> bool:
    """Whether a file begins with what another one holds."""
    with told_of(path), path.open("rb") as longer, told_of(other), other.open("rb") as shorter:
        while piece := shorter.read(_PIECE_BYTES):
            if longer.read(len(piece)) != piece:
                return False
    return True
