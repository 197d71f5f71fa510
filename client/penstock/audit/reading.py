"""Ledger reader: files -> iterations with the steps and digests of their batches, and unreadable lines."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.errors import LedgerError
from penstock.ledger.begin import MAGIC, STEP_COLUMNS, Begin, check_of
from penstock.ledger.file import check_head

IntArray = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]

_CHUNK_BYTES = 4 << 20
_MAX_LINE = 1 << 16  # bytes
_LOST = re.compile(rb"(lost \d{1,15}) ([0-9a-f]{8})")
_NEWLINE, _SPACE = 10, 32
_DIGEST = slice(STEP_COLUMNS + 1, STEP_COLUMNS + 17)
_TEXT = slice(0, _DIGEST.stop)
_CHECK = slice(_DIGEST.stop + 1, _DIGEST.stop + 9)
_LINE_COLUMNS = _CHECK.stop


@dataclass(slots=True)
class Part:
    """Records of one iteration in one file. `steps` and `digests`, shape [batches], are in the order of the file.

    `time` is the time of its begin line, but never earlier than that of a line above it, even if the clock went back.
    """

    begin: Begin
    time: datetime
    steps: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    digests: Digests = field(default_factory=lambda: np.empty(0, np.uint64))
    has_end: bool = False


@dataclass(frozen=True, slots=True)
class Damage:
    """Unreadable lines `first` to `last` (inclusive, from 1) of a file. `is_torn`: the last line of a killed process."""

    path: Path
    first: int
    last: int
    is_torn: bool


@dataclass(frozen=True, slots=True)
class Reading:
    """Contents of one file. `parts` are in the order of their begins; `num_lost` lines could not be written."""

    parts: list[Part]
    damages: list[Damage]
    num_lost: int = 0


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Convert an OSError in the block to a LedgerError that names the ledger."""
    try:
        yield
    except OSError as error:
        raise LedgerError(f"the ledger {path} cannot be read: {error.strerror or error}") from error


def rank_of(path: Path) -> int:
    """Return the rank that a file begins with; 0 if it holds none. Raises LedgerError: see read_ledger."""
    with _reading(path), path.open("rb") as file:
        line = file.readline(_MAX_LINE)
    check_head(path, line)
    begin = _begin_of(path, line.rstrip(b"\n"))
    return begin.rank if begin else 0


def read_ledger(path: Path) -> Reading:
    """Read a file. Raises LedgerError: the file cannot be read at all, or another version wrote it."""
    parser = _Parser(path)
    for first_line, lines in _chunks(path):
        parser.take(first_line, lines)
    return parser.finish()


def _chunks(path: Path) -> Iterator[tuple[int, Bytes]]:
    """Yield (number of the first line, from 1; lines) in chunks of complete lines, each ended by a newline."""
    rest, number = b"", 1
    with _reading(path), path.open("rb") as file:
        while content := file.read(_CHUNK_BYTES):
            body, newline, rest = (rest + content).rpartition(b"\n")
            if newline:
                yield number, np.frombuffer(body + newline, np.uint8)
                number += body.count(b"\n") + 1
    if rest:
        yield number, np.frombuffer(rest + b"\n", np.uint8)


class _Parser:
    """Parser of a file, chunk by chunk. It parses adjacent lines of batches with vector operations."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts: dict[bytes, Part] = {}  # by begin line, which an iteration repeats after lines of another
        self._found: dict[bytes, list[tuple[IntArray, Digests]]] = {}
        self._begin = b""
        self._time = datetime.min.replace(tzinfo=UTC)
        self._bad: list[tuple[int, bool]] = []  # line number, and whether the line looks torn
        self._last_line = self._num_lost = 0
        self._torn_before: set[int] = set()  # line numbers whose previous line may be torn

    def take(self, first_line: int, content: Bytes) -> None:
        """Parse the next chunk."""
        ends = np.flatnonzero(content == _NEWLINE)
        starts = np.append(0, ends[:-1] + 1)
        is_batch = (ends - starts == _LINE_COLUMNS) & (content[starts] != MAGIC[0])
        done = 0
        for index in [*np.flatnonzero(~is_batch).tolist(), len(ends)]:
            if index > done:
                self._batches(first_line + done, content, starts[done:index])
            if index < len(ends):
                self._line(first_line + index, content[starts[index] : ends[index]].tobytes())
            done = index + 1
        self._last_line = first_line + len(ends) - 1

    def finish(self) -> Reading:
        """Return the parsed contents."""
        for begin, part in self._parts.items():
            if found := self._found[begin]:
                part.steps = np.concatenate([steps for steps, _ in found])
                part.digests = np.concatenate([digests for _, digests in found])
        self._torn_before.add(self._last_line + 1)
        return Reading(list(self._parts.values()), self._damages(), self._num_lost)

    @property
    def _check(self) -> str:
        return self._begin[-8:].decode()

    def _damages(self) -> list[Damage]:
        merged: list[Damage] = []
        for number, looks_torn in self._bad:
            if looks_torn and number + 1 in self._torn_before:
                merged.append(Damage(self._path, number, number, is_torn=True))
            elif merged and merged[-1].last == number - 1:
                merged[-1] = Damage(self._path, merged[-1].first, number, is_torn=False)
            else:
                merged.append(Damage(self._path, number, number, is_torn=False))
        return merged

    def _line(self, number: int, line: bytes) -> None:
        """Parse a line that is no batch line."""
        if begin := _begin_of(self._path, line):
            self._begin = line
            self._time = max(self._time, begin.time)
            self._parts.setdefault(line, Part(begin, self._time))
            self._found.setdefault(line, [])
            self._torn_before.add(number)
        elif self._begin and line == f"end {check_of('end', self._check)}".encode():
            self._parts[self._begin].has_end = True
        elif (lost := _LOST.fullmatch(line)) and lost[2].decode() == check_of(lost[1].decode(), self._check):
            self._num_lost += int(lost[1].split()[1])
        elif line:
            is_begin = line.startswith(MAGIC) or MAGIC.startswith(line)
            if is_begin:  # a process begins here: the line before may be the torn end of another
                self._torn_before.add(number)
            self._bad.append((number, is_begin or (number > 1 and len(line) < _LINE_COLUMNS) or 0 in line))

    def _batches(self, first_line: int, content: Bytes, starts: IntArray) -> None:
        lines = np.lib.stride_tricks.sliding_window_view(content, _LINE_COLUMNS)[starts]
        # Column by column: the number of numpy operations does not grow with the number of lines.
        columns = np.ascontiguousarray(lines.T)
        sound = (columns[_CHECK.start - 1] == _SPACE) & (_hex(columns[_CHECK]) == _crc(columns[_TEXT], self._check))
        sound &= (_HEX[columns[_CHECK]] < 16).all(axis=0) & bool(self._begin)
        self._bad += [(first_line + index, False) for index in np.flatnonzero(~sound).tolist()]
        if self._begin:
            self._found[self._begin].append((_steps(columns[:STEP_COLUMNS, sound]), _hex(columns[_DIGEST][:, sound])))


def _begin_of(path: Path, line: bytes) -> Begin | None:
    """Parse a begin line; None for another or a damaged line. Raises LedgerError: another version wrote it."""
    text, _, check = line.rpartition(b" ")
    if not text.startswith(MAGIC) or f"{zlib.crc32(text):08x}".encode() != check:
        return None
    try:
        return Begin.from_text(text.decode("ascii", "replace"))
    except LedgerError as error:
        raise LedgerError(f"the ledger {path} cannot be read: {error}. Audit it with the penstock that wrote it") from error


def _table() -> npt.NDArray[np.uint32]:
    """Build the CRC-32 table of zlib, one entry per byte."""
    values = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = np.where(values & 1, (values >> 1) ^ np.uint32(0xEDB88320), values >> 1)
    return values


_CRC = _table()
_HEX = np.full(256, 255, np.uint8)
_HEX[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)


def _crc(columns: Bytes, before: str) -> npt.NDArray[np.uint32]:
    """Compute the CRC-32 of each line prefixed with a text; shape [lines]."""
    crc = np.full(columns.shape[1], ~np.uint32(zlib.crc32(before.encode())), np.uint32)
    for column in columns:
        crc = _CRC[(crc ^ column) & 0xFF] ^ (crc >> np.uint32(8))
    return ~crc


def _hex(columns: Bytes) -> Digests:
    """Parse each line's columns as a hexadecimal number."""
    number = np.zeros(columns.shape[1], np.uint64)
    for column in columns:
        number = (number << np.uint64(4)) | _HEX[column]
    return number


def _steps(columns: Bytes) -> IntArray:
    """Parse each line's columns as a decimal number after spaces; a digit's or a space's low four bits are its value."""
    number = np.zeros(columns.shape[1], np.int64)
    for column in columns:
        number = number * 10 + (column & 15)
    return number
