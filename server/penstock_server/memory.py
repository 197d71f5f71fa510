"""How much memory this process may use: that of the machine, or less in a container."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_ASSUMED_BYTES = 4 << 30  # where the system does not tell


def memory_bytes(root: Path = Path("/")) -> int:
    """The memory of the machine, or the limit of a control group that this process is in, whichever is less."""
    return min([_machine_bytes(), *_limits(root)])


def _machine_bytes() -> int:
    with suppress(AttributeError, OSError, ValueError):  # Windows has no sysconf
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return _ASSUMED_BYTES


def _limits(root: Path) -> list[int]:
    """The limits of the process's groups and of those that they are in, of both versions of Linux's control groups."""
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers in ("", "memory"):
            mount = root / "sys/fs/cgroup" / controllers
            file = "memory.limit_in_bytes" if controllers else "memory.max"
            folder = mount / group.lstrip("/")
            folders = [each for each in (folder, *folder.parents) if each.is_relative_to(mount)]
            limits += [_read(each / file).strip() for each in folders]
    return [int(limit) for limit in limits if limit.isdigit()]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
