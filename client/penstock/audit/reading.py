"""Ledger reader: files -> iterations with the steps and digests of their batches, and unreadable lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt

from penstock.errors import LedgerError
from penstock.ledger.begin import MAGIC, STEP_COLUMNS, Begin
from penstock.ledger.file import check_head

IntArray = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint64]

_MAX_BEGIN = 1 << 16  # bytes
_BATCH = STEP_COLUMNS + 17  # bytes of a batch line before its checksum
_LINE = _BATCH + 10  # bytes of a batch line, with its newline
_MIN_RUN, _MAX_RUN = 512, 1 << 14  # batch lines in a row; after fewer, numpy is slower than one line at a time
_CRC_TABLE = np.array([crc32(bytes([byte]), 0xFFFFFFFF) ^ 0xFFFFFFFF for byte in range(256)], np.uint32)
_HEX = np.array([b"%02x" % byte for byte in range(256)])
_COLUMNS = np.dtype([("step", f"S{STEP_COLUMNS}"), ("space", "S1"), ("digest", "S16")])


@dataclass(slots=True)
class Section:
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
    """Contents of one file. `sections` are in the order of their begins; `num_lost` lines could not be written."""

    sections: list[Section]
    damages: list[Damage]
    num_lost: int


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Convert an error of the block to a LedgerError that names the ledger: of the disk, or of a line that is forged."""
    try:
        yield
    except (OSError, ValueError, OverflowError) as error:
        raise LedgerError(f"the ledger {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def ranks_of(path: Path) -> set[int]:
    """Return the ranks that a file holds records of: several if files were joined. Raises LedgerError: see read_ledger."""
    with _reading(path), path.open("rb") as file:
        check_head(path, file.readline(_MAX_BEGIN))
        file.seek(0)
        lines = {line for line in file if line.startswith(MAGIC)}
    return {begin.rank for line in lines if (begin := _begin_of(path, line))}


def read_ledger(path: Path) -> Reading:
    """Read a file. Raises LedgerError: the file cannot be read at all, or another version wrote it."""
    sections: dict[bytes, Section] = {}  # by begin line, which an iteration repeats after lines of another
    batches: dict[bytes, bytearray] = {}
    begin_line, seed, of_section = b"", 0, bytearray()  # `seed`: CRC-32 of the begin line's checksum
    time, number, num_lost, run = datetime.min.replace(tzinfo=UTC), 0, 0, 0
    bad: list[tuple[int, bool]] = []  # line number, and whether the line looks torn
    begins = set[int]()  # numbers of lines that begin a process: each line before may be torn
    with _reading(path), path.open("rb") as file:
        for line in file:
            number, text = number + 1, line[:_BATCH]
            if line[_BATCH:] == b" %08x\n" % crc32(text, seed):
                of_section += text
                run += 1
                if run >= _MIN_RUN:
                    here, ahead = file.tell(), min(run, _MAX_RUN)
                    sound = _sound_batches(file.read(ahead * _LINE), seed)
                    of_section += sound.tobytes()
                    number, run = number + len(sound), run + ahead if len(sound) == ahead else 0
                    file.seek(here + len(sound) * _LINE)
                continue
            run = 0
            body = line.removesuffix(b"\n")
            text, _, check = body.rpartition(b" ")
            is_sound = bool(begin_line) and check == b"%08x" % crc32(text, seed)
            if begin := _begin_of(path, line):
                begin_line, seed, time = text, crc32(check), max(time, begin.time)
                sections.setdefault(text, Section(begin, time))
                of_section = batches.setdefault(text, bytearray())
                begins.add(number)
            elif is_sound and text == b"end":
                sections[begin_line].has_end = True
            elif is_sound and text.startswith(b"lost "):
                num_lost += int(text[5:])
            elif is_sound and len(text) == _BATCH:  # the last line, without its newline
                of_section += text
            elif body:
                is_begin = body.startswith(MAGIC) or MAGIC.startswith(body)
                if is_begin:
                    begins.add(number)
                bad.append((number, is_begin or len(body) < _BATCH + 9 or 0 in body))
        for key, section in sections.items():
            columns = np.frombuffer(batches[key], _COLUMNS)
            section.steps = columns["step"].astype(np.int64)
            section.digests = np.frombuffer(bytes.fromhex(columns["digest"].tobytes().decode()), ">u8").astype(np.uint64)
    begins.add(number + 1)
    return Reading(list(sections.values()), _damages(path, bad, begins), num_lost)


def _sound_batches(content: bytes, seed: int) -> npt.NDArray[np.uint8]:
    """Return the batch lines before the first that is damaged or none, without checksums, shape [lines, _BATCH]."""
    lines = np.frombuffer(content, np.uint8, len(content) // _LINE * _LINE).reshape(-1, _LINE)
    crc = np.full(len(lines), seed ^ 0xFFFFFFFF, np.uint32)
    for column in np.ascontiguousarray(lines[:, :_BATCH].T):
        crc = _CRC_TABLE[(crc ^ column) & 0xFF] ^ (crc >> 8)
    checks = _HEX[(~crc).astype(">u4").view(np.uint8)].view(np.uint8).reshape(-1, 8)
    ends = np.pad(checks, ((0, 0), (1, 1)), constant_values=((0, 0), (ord(" "), ord("\n"))))
    is_sound = (lines[:, _BATCH:] == ends).all(axis=1)
    return lines[: np.argmin(np.append(is_sound, False)), :_BATCH]


def _damages(path: Path, bad: list[tuple[int, bool]], begins: set[int]) -> list[Damage]:
    damages: list[Damage] = []
    for number, looks_torn in bad:
        is_torn, first = looks_torn and number + 1 in begins, number
        if damages and damages[-1].last == number - 1 and not is_torn:
            first = damages.pop().first
        damages.append(Damage(path, first, number, is_torn))
    return damages


def _begin_of(path: Path, line: bytes) -> Begin | None:
    """Parse a begin line; None for another or a damaged line. Raises LedgerError: another version wrote it."""
    text, _, check = line.removesuffix(b"\n").rpartition(b" ")
    if not text.startswith(MAGIC) or check != b"%08x" % crc32(text):
        return None
    try:
        return Begin.from_text(text.decode("ascii", "replace"))
    except LedgerError as error:
        raise LedgerError(f"the ledger {path} cannot be read: {error}. Audit it with the penstock that wrote it") from error
