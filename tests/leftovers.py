"""What must not outlive the loop that it was made for: threads and sockets of this process, counted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def held() -> Counter[str]:
    """The names of the threads, and the sockets as the system numbers them."""
    return Counter(thread.name for thread in threading.enumerate()) + Counter(_sockets())


@contextmanager
def nothing_left() -> Iterator[None]:
    """Fails if a thread or a socket is there afterwards that was not there before."""
    before = held()
    yield
    left = held() - before
    assert not left, f"left: {', '.join(sorted(left))}"


def _sockets() -> Iterator[str]:
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the folder's own, which is closed by now
            if (target := str(descriptor.readlink())).startswith("socket:"):
                yield target
