"""Files: those that users name, and sealed files, which are complete or absent after any crash.

A sealed file is written under a temporary name and renamed. It ends with a seal, the xxh3-64 of its name and the bytes before
it. The seal is checked before parsing: a flipped bit in a length would make a parser read elsewhere. A file that is damaged is
made again.
"""

from __future__ import annotations

import logging
import os
import stat
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from errno import EINVAL, ESTALE
from io import BytesIO, RawIOBase
from pathlib import Path
from typing import BinaryIO, TypeAlias, TypeVar

import pyarrow as pa
import xxhash

T = TypeVar("T")
Piece: TypeAlias = bytes | memoryview | pa.Buffer
log = logging.getLogger("penstock.sealed")
SEAL_BYTES = 8
_PIECE_BYTES = 1 << 20
TEMPORARY = ".tmp"  # suffix of files that are not complete yet
ABANDONED_SECONDS = 3600.0  # a temporary file unchanged for this long belongs to a dead process, even if clocks differ


def may_exist(path: Path) -> bool:
    """Return whether the path exists; True if that is unknown, so that reading it raises the reason."""
    # os.path.lexists, and Path.exists from Python 3.14 on, return False for a mount that does not respond: a dataset would
    # count as removed, and its rows be served without their recipe.
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no file can have such a name
        return False
    except OSError:
        return True
    return True


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError: it cannot be opened, or is a pipe or a device, which may block forever."""
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(EINVAL, "it is not a regular file", str(path))
    return file


class Damaged(Exception):
    """A file whose bytes do not match its seal."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is damaged and will be made again")


def _seed_of(name: str) -> int:
    return xxhash.xxh3_64_intdigest(os.fsencode(name))


def identity_of(path: Path) -> int:
    """Returns a hash of a file's name, inode and size: names would take several times the memory. -1, no hash, on OSError."""
    try:
        return _identity(path, path.stat())
    except OSError:
        return -1


def _identity(path: Path, stat: os.stat_result) -> int:
    return hash((path.name, stat.st_dev, stat.st_ino, stat.st_size))


def sealed(pieces: Iterable[Piece], name: str) -> bytes:
    """Return the pieces, joined, with the seal of a file of this name."""
    file = BytesIO()
    write_with_seal(file, pieces, name)
    return file.getvalue()


def unsealed(content: memoryview, name: str) -> memoryview:
    """Return the content of a sealed file without its seal. Raises Damaged."""
    body, seal = content[:-SEAL_BYTES], content[-SEAL_BYTES:]
    if len(content) < SEAL_BYTES or xxhash.xxh3_64(body, seed=_seed_of(name)).digest() != bytes(seal):
        raise Damaged(Path(name))
    return body


def map_sealed(path: Path, sound: set[int] | None = None) -> pa.Buffer | None:
    """Maps the bytes of a file before its seal; None if it does not exist.

    Adds its identity to `sound` after reading it; files in there are not read again. Discard an identity before its file is
    removed or replaced. The map stays valid after that. Raises Damaged. Raises OSError: the file cannot be read now.
    """
    try:
        with path.open("rb", buffering=0) as file:
            stat = os.fstat(file.fileno())
            # Arrow's map keeps no descriptor open; Python's does, and ten thousand shards would take ten thousand. Arrow
            # refuses an empty file.
            content = pa.memory_map(os.fsencode(path)).read_buffer() if stat.st_size else pa.py_buffer(b"")
            if not os.path.samestat(stat, path.stat()):
                raise OSError(ESTALE, "it was replaced just now")
            if sound is None or _identity(path, stat) not in sound:
                if not _is_sealed(file, stat.st_size - SEAL_BYTES, path.name):
                    raise Damaged(path)
                if sound is not None:
                    sound.add(_identity(path, stat))
    except FileNotFoundError:
        return None
    return content.slice(0, content.size - SEAL_BYTES)


def _is_sealed(file: RawIOBase, num_bytes: int, name: str) -> bool:
    """Returns whether the file ends, after `num_bytes`, with the seal of these bytes and this name. Raises OSError.

    It reads the file and does not map it: if the disk fails, access to a map kills the process.
    """
    seal = xxhash.xxh3_64(seed=_seed_of(name))
    piece = memoryview(bytearray(max(0, min(num_bytes, _PIECE_BYTES))))
    left = num_bytes
    while left > 0 and (count := file.readinto(piece[:left])):
        seal.update(piece[:count])
        left -= count
    return left == 0 and file.read(SEAL_BYTES) == seal.digest()


def read_sealed(path: Path, parse: Callable[[memoryview], T | None]) -> T | None:
    """Returns `parse` of the mapped bytes of a file; None, which is logged, if it is damaged or cannot be read.

    None also if it does not exist. `parse` returns None for bytes with an unexpected layout.
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
    except OSError as error:
        log.warning("%s cannot be read: %s", path, error)
    return None


def write_with_seal(file: BinaryIO, pieces: Iterable[Piece], name: str) -> None:
    """Writes the pieces, then their seal for a file of this name."""
    seal = xxhash.xxh3_64(seed=_seed_of(name))
    for piece in pieces:
        seal.update(piece)
        file.write(piece)
    file.write(seal.digest())


def write_sealed(path: Path, pieces: Iterable[Piece], otherwise: str) -> bool:
    """Writes a sealed file. On an OSError it keeps the old file, logs the consequence, `otherwise`, and returns False."""
    temporary = path.with_name(f"{uuid.uuid4().hex}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            write_with_seal(file, pieces, path.name)
        temporary.replace(path)
    except OSError as error:
        log.warning("%s cannot be stored: %s; %s", path, error, otherwise)
        return False
    else:
        return True
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
