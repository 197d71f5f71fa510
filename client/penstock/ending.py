"""End of a command: by signals, and without the interpreter's teardown.

A signal ends process 1 of a container only if the process handles it.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from contextlib import suppress


class ExitWithoutTeardown:
    """Exit handler that ends this process with `status`, after all other handlers and without the interpreter's teardown.

    Create it before other modules register handlers: the first one registered runs last. During a teardown, threads of
    libraries end where they next take the interpreter's lock. pyarrow takes it in C++ destructors, where the end of a thread
    aborts the process ("terminate called without an active exception"), although the command succeeded.
    """

    def __init__(self) -> None:
        self.status = 1  # as after an uncaught exception
        atexit.register(self._exit)

    def _exit(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(self.status)


def ends_at(number: signal.Signals) -> None:
    """Let this signal end the process at once, whatever its threads do."""
    # The system's default needs no Python thread, which may be inside a long call.
    signal.signal(number, _end if os.getpid() == 1 else signal.SIG_DFL)


def ends_as_usual() -> None:
    """Let SIGTERM end the process even if it is process 1; Python handles SIGINT."""
    if os.getpid() == 1:
        ends_at(signal.SIGTERM)


def _end(number: int, _: object) -> None:
    os._exit(128 + number)  # as shells report a signal
