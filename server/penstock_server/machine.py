"""Memory and cores of this process, which a container may lower; and a parallel map over them."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TypeVar

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


def memory_bytes(root: Path = Path("/")) -> int:
    """Return the memory of the machine, or the lowest limit of this process's control groups if that is less."""
    limits = [
        text
        for version, group in _groups("memory", root)
        if (text := _read(group / ("memory.max" if version == 2 else "memory.limit_in_bytes"))).isdigit()
    ]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *map(int, limits)])


def num_cores(root: Path = Path("/")) -> int:
    """Return the cores of this process by affinity, or by the CPU quota of its control groups if less; at least 1.

    PENSTOCK_CORES lowers them, for processes that share a machine without such limits, as tasks of Ray do.
    """
    limits = [_machine_cores(), *map(int, filter(str.isdigit, [os.environ.get("PENSTOCK_CORES", "")]))]
    for version, group in _groups("cpu", root):
        if version == 2:
            quota, _, period = _read(group / "cpu.max").partition(" ")
        else:
            quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):  # without a limit the quota is "max" or -1
            limits.append(math.ceil(int(quota) / int(period)))
    return max(1, min(limits))


def _machine_cores() -> int:
    with suppress(AttributeError, OSError):  # only on Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _groups(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """Yield the process's control groups and their parents, each with its cgroup version."""
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


def map_ordered(threads: Executor, num_threads: int, make: Callable[[_Item], _Made], items: Iterable[_Item]) -> Iterator[_Made]:
    """Yield `make(item)` in order; `num_threads` calls run at a time, and one more waits. Raises what `make` raises.

    It takes items only shortly before their turn, so `items` may be endless.
    """
    ahead = deque[Future[_Made]]()
    rest = iter(items)
    try:
        while True:
            ahead += (threads.submit(make, item) for item in islice(rest, num_threads + 1 - len(ahead)))
            if not ahead:
                return
            yield ahead.popleft().result()
    finally:
        for future in ahead:
            future.cancel()
