"""Files that people name: what their names are as text, whether they are there, and whole ones, which end."""

from __future__ import annotations

import io
import os
import re
from errno import EINVAL
from pathlib import Path
from stat import S_ISREG

_MAX_BYTES = 1 << 30  # of a tokenizer, a template or a recipe; the largest are some 20 MB


def read_file(path: Path) -> bytes:
    """All of a file. Raises OSError: it cannot be read, or is a pipe, which may be waited for, or a device without an end."""
    with open(path, "rb", opener=_without_waiting) as file:
        stat = os.fstat(file.fileno())
        check_is_file(stat, path)
        if stat.st_size > _MAX_BYTES:
            raise OSError(EINVAL, f"it has {stat.st_size:,} bytes, too many for such a file", str(path))
        return file.read()


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The text of a file, lines ending as they do in Python. Raises what `read_file` raises, and ValueError: it is no text."""
    return io.TextIOWrapper(io.BytesIO(read_file(path)), encoding).read()


def may_be_there(path: Path) -> bool:
    """Whether a file, a folder or a link has this name; also where nobody can tell: to read it tells why it cannot be."""
    # Path.exists and os.path.lexists take a mount that does not answer for a file that is not there, the former from Python
    # 3.14 on: a dataset would pass for removed, and its rows be served without their recipe.
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no file can have such a name
        return False
    except OSError:
        return True
    return True


def check_is_here(path: Path) -> None:
    """Raises ValueError: this is no path of a folder to write to, but a URL, or a name that shards could not have."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):  # a path keeps one of the two slashes
        raise ValueError(f"{path} is a URL: name a folder of this machine, and copy it from there.")
    if spelled(str(path)) != str(path):
        raise ValueError(f"{spelled(str(path))} is a name that is not UTF-8. Name another folder.")


def check_is_file(stat: os.stat_result, path: Path) -> None:
    """Raises OSError: what has this state is a folder, a device, or a pipe, whose reader waits for a writer."""
    if not S_ISREG(stat.st_mode):
        raise OSError(EINVAL, "it is neither a file nor a link to one", str(path))


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def spelled(name: str) -> str:
    """A name of a file or folder as text; bytes of it that are no UTF-8 are spelled out by a backslash."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
