"""Threads of the client. A thread must not join itself, and the interpreter does not wait for them at exit.

A signal handler may raise between any two bytecodes, as Ctrl-C does, and the release in a skipped bytecode is lost. So threads
share only the locks of threading that are implemented in C, taken with `with`. Condition and Event are not implemented in C.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

_PREFIX = "penstock-"


def own_thread(name: str, run: Callable[..., object], *args: object) -> threading.Thread:
    """Create a daemon thread for `run`, not started; a debugger shows it as penstock-NAME."""
    return threading.Thread(target=run, args=args, name=f"{_PREFIX}{name}", daemon=True)


def start(thread: threading.Thread, give_up: Callable[[], None]) -> None:
    """Start a thread. If a signal handler raises meanwhile, call `give_up`, which must end the thread: it may run.

    Raises RuntimeError: no more threads can start; `give_up` is called, too.
    """
    try:
        thread.start()
    except BaseException as error:
        give_up()
        # start() waits in a Condition until the thread runs: see signal_of.
        raise signal_of(error) or error from None


def signal_of(error: BaseException) -> BaseException | None:
    """Return a signal handler's exception that a RuntimeError of a waiting Condition hides; None otherwise.

    The handler raised before the Condition took its lock again; the release of the untaken lock raises RuntimeError.
    """
    hidden = error.__context__
    return hidden if isinstance(error, RuntimeError) and isinstance(hidden, KeyboardInterrupt | SystemExit) else None


def is_own_thread() -> bool:
    """Whether the calling thread is a thread of the client."""
    return threading.current_thread().name.startswith(_PREFIX)


class Flag:
    """Event like threading.Event, but a signal handler that raises during `set` leaves no lock taken."""

    def __init__(self) -> None:
        self._is_set, self._closed_until_then = False, threading.Lock()
        self._closed_until_then.acquire()

    def is_set(self) -> bool:
        """Whether the flag is set."""
        return self._is_set

    def set(self) -> None:
        """Set the flag and wake all waiters. Idempotent."""
        self._is_set = True
        with suppress(RuntimeError):  # it was set before
            self._closed_until_then.release()

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`; return whether the flag is set."""
        if not self._is_set and self._closed_until_then.acquire(timeout=min(max(0.0, seconds), threading.TIMEOUT_MAX)):
            self.set()  # wakes the next waiter
        return self._is_set
