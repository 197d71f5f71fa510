"""The client's own threads. None of them may wait for its own end, and no interpreter waits for one when it exits."""

from __future__ import annotations

import threading
from collections.abc import Callable

_PREFIX = "penstock-"


def own_thread(name: str, run: Callable[..., None], *args: object) -> threading.Thread:
    """A thread that will run this, not yet started; penstock-NAME in a debugger."""
    return threading.Thread(target=run, args=args, name=f"{_PREFIX}{name}", daemon=True)


def is_own_thread() -> bool:
    """Whether the calling thread is one of these."""
    return threading.current_thread().name.startswith(_PREFIX)
