"""The client's own threads. None of them may wait for its own end, and no interpreter waits for one when it exits.

A signal's handler may raise between any two steps of Python, as Ctrl-C does, and what a step that is left out would have given
back is lost. So what threads share are locks that are taken and given back by `with` alone: those of threading that are made in
C. Its Condition and its Event are not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

_PREFIX = "penstock-"


def own_thread(name: str, run: Callable[..., object], *args: object) -> threading.Thread:
    """A thread that will run this, not yet started; penstock-NAME in a debugger."""
    return threading.Thread(target=run, args=args, name=f"{_PREFIX}{name}", daemon=True)


def start(thread: threading.Thread, give_up: Callable[[], None]) -> None:
    """Starts a thread. If a signal's handler breaks in, it may be running by then, and `give_up` is to end it.

    Raises RuntimeError: there can be no more threads. Then, too, `give_up` is called.
    """
    try:
        thread.start()
    except BaseException as error:
        give_up()
        # It waits until the thread runs: see signal_of.
        raise signal_of(error) or error from None


def signal_of(error: BaseException) -> BaseException | None:
    """What a signal's handler raised while a Condition waited, where that is hidden by what followed: a RuntimeError.

    The Condition was about to take its lock again, which is then released without having been taken.
    """
    hidden = error.__context__
    return hidden if isinstance(error, RuntimeError) and isinstance(hidden, KeyboardInterrupt | SystemExit) else None


def is_own_thread() -> bool:
    """Whether the calling thread is one of these."""
    return threading.current_thread().name.startswith(_PREFIX)


class Flag:
    """As threading.Event, but that no lock is left behind by a signal's handler that raises while it is set."""

    def __init__(self) -> None:
        self._is_set, self._closed_until_then = False, threading.Lock()
        self._closed_until_then.acquire()

    def is_set(self) -> bool:
        """Whether it is."""
        return self._is_set

    def set(self) -> None:
        """Wakes all who wait. Idempotent."""
        self._is_set = True
        with suppress(RuntimeError):  # it was set before
            self._closed_until_then.release()

    def wait(self, seconds: float) -> bool:
        """Whether it is set, after so many seconds at most."""
        if not self._is_set and self._closed_until_then.acquire(timeout=min(max(0.0, seconds), threading.TIMEOUT_MAX)):
            self.set()  # the others wait for the same
        return self._is_set
