"""Having a disk write what it was given."""

from __future__ import annotations

import os
import sys
from errno import EBADF, EINVAL, ENOTSUP
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Has the disk write the names in a folder, where its file system can. Raises OSError: it does not take them."""
    if sys.platform == "win32":
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (EBADF, EINVAL, ENOTSUP):  # as some say whose folders cannot be synced
            raise
    finally:
        os.close(fd)
