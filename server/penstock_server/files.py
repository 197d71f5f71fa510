"""Files named by users: reads whole regular files, checks existence, and converts names to text."""

from __future__ import annotations

import io
import os
import re
from errno import EINVAL
from pathlib import Path
from stat import S_ISREG

_MAX_BYTES = 1 << 30  # limit for tokenizers, templates and recipes; the largest are some 20 MB


def read_file(path: Path) -> bytes:
    """Read a whole file. Raises OSError: it is unreadable, or a pipe, which may block, or a device without an end."""
    with open(path, "rb", opener=_without_waiting) as file:
        stat = os.fstat(file.fileno())
        check_is_file(stat, path)
        if stat.st_size > _MAX_BYTES:
            raise OSError(EINVAL, f"it has {stat.st_size:,} bytes, too many for such a file", str(path))
        return file.read()


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """Read a text file with universal newlines. Raises what `read_file` raises, and ValueError: it is not text."""
    return io.TextIOWrapper(io.BytesIO(read_file(path)), encoding).read()


def may_be_there(path: Path) -> bool:
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


def check_is_here(path: Path) -> None:
    """Check an output folder. Raises ValueError: its path is a URL, or is not UTF-8."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):  # Path keeps only one of the two slashes
        raise ValueError(f"{path} is a URL: name a folder of this machine, and copy it from there.")
    if spelled(str(path)) != str(path):
        raise ValueError(f"{spelled(str(path))} is a name that is not UTF-8. Name another folder.")


def check_is_file(stat: os.stat_result, path: Path) -> None:
    """Check for a regular file. Raises OSError: it is a folder, a device, or a pipe, whose reader waits for a writer."""
    if not S_ISREG(stat.st_mode):
        raise OSError(EINVAL, "it is neither a file nor a link to one", str(path))


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def spelled(name: str) -> str:
    """Return the name of a file or folder as text, with backslash escapes for bytes that are not UTF-8."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
