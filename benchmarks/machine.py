"""Describes the machine of a run in sentences, and says whether it was quiet enough for reliable figures."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from contextlib import suppress
from pathlib import Path

_QUIET = 0.5  # load average


def describe() -> list[str]:
    """Return sentences with processor, memory, system, versions, and the measured commit."""
    said = [
        f"{len(os.sched_getaffinity(0))} cores of {_processor()}, {_memory_gigabytes():.0f} GB of memory, {platform.system()} "
        f"{platform.release()}, Python {platform.python_version()}, {_commit()}."
    ]
    load = os.getloadavg()[0]
    if load > _QUIET:
        said.append(f"**The machine was busy when the run began (load average {load:.1f}).**")
    return said


def _processor() -> str:
    with suppress(OSError):
        found = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return str(found[0]).strip()
    return platform.machine()


def _memory_gigabytes() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True)
    return f"commit {done.stdout.strip()}" if done.returncode == 0 else "no commit known"
