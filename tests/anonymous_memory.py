"""The anonymous memory of a process, from the kernel's own accounting."""

from __future__ import annotations

import re
import threading
from pathlib import Path

MIB = 1 << 20


def anonymous_bytes(pid: int) -> int:
    [kib] = re.findall(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(kib) * 1024


class Watch:
    """The most anonymous memory that a process had while it was watched."""

    def __init__(self, pid: int) -> None:
        self.first = self.peak = anonymous_bytes(pid)
        self._pid, self._over = pid, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.wait(0.005):
            self.peak = max(self.peak, anonymous_bytes(self._pid))

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
