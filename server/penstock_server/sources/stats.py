"""What identifies the version of a file: a change of its content changes its FileStat."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

SETTLED_SECONDS = 2.0  # a file this old is complete: a later write would change its FileStat


class FileStat(NamedTuple):
    """Stat fields that change when a file is written to or replaced.

    Archives preserve sizes and mtimes, and file systems reuse the inode of a removed file, but no program can set the ctime.

    An object has a size and a version only: its ETag, or a hash of its content. Stores replace objects as a whole.
    """

    size_bytes: int
    mtime_ns: int = 0
    inode: int = 0
    ctime_ns: int = 0
    version: str = ""

    @classmethod
    def of(cls, stat: os.stat_result) -> FileStat:
        """Make a FileStat from a stat result."""
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_ctime_ns)


def is_settled(file_stat: FileStat, seconds: float) -> bool:
    """Return whether a file was last written to some time before `seconds`, in seconds since the epoch.

    An mtime in the future does not show when the file was written, so such a file is not settled.
    """
    return file_stat.mtime_ns / 1e9 + SETTLED_SECONDS <= seconds


def stat_of_file(path: Path) -> FileStat | None:
    """Return the stat of a regular file, or None."""
    try:
        status = path.stat()
    except (OSError, ValueError):  # a text that is not a file name may be too long, or contain a null character
        return None
    return FileStat.of(status) if stat.S_ISREG(status.st_mode) else None
