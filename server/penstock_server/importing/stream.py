"""Byte stream of a text file: decompressed, counted, and cut at the ends of lines."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from penstock_server.importing.source import TABLE_BYTES, ImportRefused

CODECS = {".gz": "gzip", ".zst": "zstd"}
_MAGIC = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}  # first bytes of such a file
_UNREAD = {"bzip2": b"BZh", "xz": b"\xfd7zX", "zip": b"PK\x03\x04"}  # unsupported compression formats
# Byte order marks of other encodings. Without one, some versions of iconv take UTF-16 for little-endian, others for big-endian.
_WIDE = {
    "UTF-32": re.compile(rb"\xff\xfe\0\0|\0\0\xfe\xff"),
    "UTF-32BE": re.compile(rb"\0\0\0[^\0]"),
    "UTF-32LE": re.compile(rb"[^\0]\0\0\0"),
    "UTF-16": re.compile(rb"(\xff\xfe|\xfe\xff).*", re.DOTALL),
    "UTF-16BE": re.compile(rb"\0[^\0].*", re.DOTALL),
    "UTF-16LE": re.compile(rb"[^\0]\0.*", re.DOTALL),
}
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # Windows writes it before UTF-8
_MAX_LINE_BYTES = 16 << 20  # a longer one is refused: memory must be bounded
_FIRST_PORTION_BYTES = 64 << 10


class Stream:
    """Bytes of a text file, decompressed if its name ends in .gz or .zst. Raises OSError: it cannot be read.

    Both files are pyarrow's: a pyarrow thread that still reads a Python file while Python exits would abort the process.
    Nor are they closed explicitly, since such a thread may still read; they close with their last reference.
    """

    def __init__(self, path: Path) -> None:
        self._file = pa.OSFile(os.fsencode(path))
        codec = CODECS.get(path.suffix.lower())
        self.bytes: pa.NativeFile = pa.CompressedInputStream(self._file, codec) if codec else self._file

    @property
    def position(self) -> int:
        """Return the number of bytes read of the file as stored, before decompression."""
        position: int = self._file.tell()
        return position


@contextmanager
def opened(path: Path) -> Iterator[Stream]:
    """Yield the stream of a file.

    Raises ImportRefused: the file cannot be read or decompressed, is compressed despite its ending, or is UTF-16 or
    UTF-32.
    """
    try:
        begin = Stream(path).bytes.read(4)
        if encoding := next((name for name, pattern in _WIDE.items() if pattern.fullmatch(begin)), ""):
            raise ImportRefused(
                f"{path} is {encoding[:6]}, and penstock reads UTF-8. Nothing was written. Convert it: iconv -f {encoding} -t "
                f"UTF-8 FILE > NEW_FILE"
            )
        for ending, magic in _MAGIC.items():
            if begin.startswith(magic):
                raise ImportRefused(
                    f"{path} is compressed, which its ending does not say. Nothing was written. Rename it to "
                    f"{path.name}{ending}."
                )
        for name, magic in _UNREAD.items():
            if begin.startswith(magic):
                raise ImportRefused(
                    f"{path} is compressed by {name}, which is not read. Nothing was written. Unpack it, or pack it as "
                    f"{' or '.join(CODECS)}."
                )
        yield Stream(path)
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> ImportRefused:
    """Return the error for a file that cannot be read or decompressed."""
    if error.errno:
        return ImportRefused(f"{path} cannot be read: {os.strerror(error.errno)}. Check the path and its permissions.")
    return ImportRefused(f"{path} cannot be read: {error}. It is damaged, or not what its ending says: copy or write it again.")


@dataclass(frozen=True, slots=True)
class Portion:
    """Whole lines of a text file, with the number of the first, counted from 1."""

    first_line: int
    data: bytes


def portions(path: Path, stream: Stream) -> Iterator[Portion]:
    """Yield a text file some MiB at a time. Raises ImportRefused: a line is too long for memory."""
    # Small at first, to detect objects whose keys are data before ten thousand columns are in memory.
    line, size, rest = 1, _FIRST_PORTION_BYTES, b""
    while block := stream.bytes.read(size):
        size = min(2 * size, TABLE_BYTES)
        first, cut = block.find(b"\n"), block.rfind(b"\n") + 1
        if len(rest) + (first if cut else len(block)) > _MAX_LINE_BYTES:
            raise ImportRefused(
                f"{path}, line {line:,}: the line is longer than {_MAX_LINE_BYTES >> 20} MiB, the most that is read at a "
                f"time. Nothing was written. Split the row, or leave it out."
            )
        if cut:
            portion = Portion(line, rest + block[:cut])
            line += portion.data.count(b"\n")
            rest = block[cut:]
            yield portion
        else:
            rest += block
    if rest:
        yield Portion(line, rest)
