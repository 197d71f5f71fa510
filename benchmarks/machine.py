"""The machine that a run is of, in sentences; and whether it is quiet enough for figures that hold."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from contextlib import suppress
from pathlib import Path

_QUIET = 0.5  # load average


def describe() -> list[str]:
    """Processor, memory, system, versions, and the commit that is measured."""
    said = [
        f"{len(os.sched_getaffinity(0))} cores of {_processor()}, {_memory_gigabytes():.0f} GB of memory, {platform.system()} "
        f"{platform.release()}, Python {platform.python_version()}, {_commit()}."
    ]
    load = os.getloadavg()[0]
    if load > _QUIET:
        said.append(f"**The machine was busy with other things when it began (load average {load:.1f}).**")
    return said


def have_at_hand(nbytes: int, folder: Path) -> None:
    """Has so much free memory given to this machine, if it is a virtual one, by a file that is written and removed.

    Hosts take back what lies free for some seconds. To write to a page that has to come from there takes ten times as long.
    """
    path, zeros = folder / "at-hand", bytes(1 << 20)
    with path.open("wb", buffering=0) as file:
        for _ in range(nbytes >> 20):
            file.write(zeros)
    path.unlink()


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
