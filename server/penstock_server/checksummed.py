"""Sealed files: whole or absent whatever crashes. What cannot be stored, or was damaged, is made again.

A file is written under a temporary name and renamed, and ends with the xxh3-64 of its name and the bytes before it. That is
checked before any of them is parsed: a flipped bit in a length would have a parser read elsewhere, and a file under the name of
another would be taken for that. `Sound` remembers which files were checked, for a process that maps one again.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from errno import ESTALE
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO, TypeAlias, TypeVar

import pyarrow as pa
import xxhash

from penstock_server.logs import Seldom

T = TypeVar("T")
Piece: TypeAlias = bytes | memoryview | pa.Buffer

log = logging.getLogger("penstock.sealed")
_telling_unread = Seldom()

SEAL_BYTES = 8
_PIECE_BYTES = 1 << 20
TEMPORARY = ".tmp"  # after the names of files that are not yet whole
ABANDONED_SECONDS = 60.0  # one that nobody has written to for so long belongs to a process that died


class Damaged(Exception):
    """The bytes of a file are not those that were written under its name."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is damaged and will be made again")


def _seed_of(name: str) -> int:
    return xxhash.xxh3_64_intdigest(os.fsencode(name))


def is_there(path: Path) -> bool:
    """Whether there is a file, as far as can be told: what is on a disk that fails cannot be used either."""
    try:
        path.stat()
    except OSError:
        return False
    return True


class Sound:
    """The files, at most so many, whose seals were found right: to map one of them again is not to read it again.

    Damage that a disk does to them later is not noticed, as it is not in a file that stays mapped. They are known by name,
    inode and size; who removes or replaces one says so. For any number of threads.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known = set[int]()  # digests, since names would take several times as much memory

    def has(self, path: Path, stat: os.stat_result) -> bool:
        """Whether this file is one of them."""
        return _identity(path, stat) in self._known

    def add(self, path: Path, stat: os.stat_result) -> None:
        """Remembers a file, perhaps in the place of another."""
        if len(self._known) >= self._most:
            with suppress(KeyError):
                self._known.pop()
        self._known.add(_identity(path, stat))

    def forget(self, path: Path) -> None:
        """The file is no longer what it was, or will not be: another may be given its inode."""
        with suppress(OSError):
            self._known.discard(_identity(path, path.stat()))


def _identity(path: Path, stat: os.stat_result) -> int:
    return hash((path.name, stat.st_dev, stat.st_ino, stat.st_size))


def map_sealed(path: Path, sound: Sound | None = None) -> pa.Buffer | None:
    """The bytes of a file before its seal, mapped into memory. None: there is none, or it cannot be read, which is logged.

    The map stays good when the file is removed or replaced. What is among `sound` is not read. Raises Damaged.
    """
    try:
        with path.open("rb", buffering=0) as file:
            stat = os.fstat(file.fileno())
            # Arrow's map keeps no descriptor open, as Python's does: ten thousand shards would take ten thousand. It refuses a
            # file of no bytes.
            content = pa.memory_map(os.fsencode(path)).read_buffer() if stat.st_size else pa.py_buffer(b"")
            if not os.path.samestat(stat, path.stat()):
                raise OSError(ESTALE, "it was replaced just now")
            if not (sound and sound.has(path, stat)):
                if not _is_sealed(file, stat.st_size - SEAL_BYTES, path.name):
                    raise Damaged(path)
                if sound:
                    sound.add(path, stat)
    except FileNotFoundError:
        return None
    except OSError as error:  # no descriptor left, no permission, a disk that fails: the file itself may be sound
        if _telling_unread.is_due():
            log.warning("%s cannot be read: %s", path, error)
        return None
    return content.slice(0, content.size - SEAL_BYTES)


def _is_sealed(file: RawIOBase, num_bytes: int, name: str) -> bool:
    """Whether behind so many bytes a file of this name ends with their seal. Raises OSError.

    It is read, not mapped: where a disk fails, to look at a map ends the process.
    """
    seal = xxhash.xxh3_64(seed=_seed_of(name))
    piece = memoryview(bytearray(max(0, min(num_bytes, _PIECE_BYTES))))
    left = num_bytes
    while left > 0 and (count := file.readinto(piece[:left])):
        seal.update(piece[:count])
        left -= count
    return left == 0 and file.read(SEAL_BYTES) == seal.digest()


def read_sealed(path: Path, parse: Callable[[memoryview], T | None]) -> T | None:
    """What `parse` makes of the bytes of a file, which stay mapped for it, or None: there are none, or they are damaged.

    `parse` gives None, too, for bytes that are not what they should be.
    """
    try:
        body = map_sealed(path)
        if body is None:
            return None
        if (parsed := parse(memoryview(body))) is not None:
            return parsed
        raise Damaged(path)
    except Damaged as damage:
        log.warning("%s", damage)
        return None


def write_with_seal(file: BinaryIO, pieces: Iterable[Piece], name: str) -> None:
    """Writes bytes, one piece after the other, and behind them the seal that they have in a file of this name."""
    seal = xxhash.xxh3_64(seed=_seed_of(name))
    for piece in pieces:
        seal.update(piece)
        file.write(piece)
    file.write(seal.digest())


def write_sealed(path: Path, pieces: Iterable[Piece], otherwise: str) -> None:
    """Writes a file, one piece after the other. If that fails, nothing is left of it; `otherwise`, what follows, is logged.

    Raises what `pieces` raises, but for an OSError.
    """
    temporary = path.with_name(f"{uuid.uuid4().hex}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            write_with_seal(file, pieces, path.name)
        temporary.replace(path)
    except OSError as error:
        log.warning("%s cannot be stored: %s; %s", path, error, otherwise)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
