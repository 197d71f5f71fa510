"""What of the machine this process may use: all of it, or less in a container."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def memory_bytes(root: Path = Path("/")) -> int:
    """The memory of the machine, or the limit of a control group that this process is in, whichever is less."""
    limits = [
        text
        for version, group in _groups("memory", root)
        if (text := _read(group / ("memory.max" if version == 2 else "memory.limit_in_bytes"))).isdigit()
    ]
    return min([_machine_bytes(), *map(int, limits)])


def num_cores(root: Path = Path("/")) -> int:
    """The cores that this process may run on, or as many as a control group leaves it the time of; one at least."""
    limits = [_machine_cores()]
    for version, group in _groups("cpu", root):
        if version == 2:
            quota, _, period = _read(group / "cpu.max").partition(" ")
        else:
            quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):  # without a limit it is "max", or -1
            limits.append(math.ceil(int(quota) / int(period)))
    return max(1, min(limits))


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _machine_cores() -> int:
    with suppress(AttributeError, OSError):  # only Linux tells
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _groups(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """The process's control groups and those that they are in, each with the version of Linux's groups that it is of."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controllers
            group = mount / name.lstrip("/")
            yield from ((1 if controllers else 2, each) for each in (group, *group.parents) if each.is_relative_to(mount))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
