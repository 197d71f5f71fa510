"""Flushing of folders to the disk."""

from __future__ import annotations

import os
import sys
from errno import EBADF, EINVAL, ENOTSUP
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, if its file system can. Raises OSError: the disk cannot be written."""
    if sys.platform == "win32":
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (EBADF, EINVAL, ENOTSUP):  # file systems that cannot sync folders
            raise
    finally:
        os.close(fd)
