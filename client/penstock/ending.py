"""How a command ends: by signals, and without the interpreter's teardown.

Process 1 of a container is special: no signal ends it that it does not ask for.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys

_NOT_WRITTEN = 120  # Python's own status where stdout cannot be flushed


class ExitWithoutTeardown:
    """Ends this process with `status` after all other exit handlers, without the interpreter's teardown.

    Make it before other modules register handlers, since the last one registered runs first. Threads of libraries may still run
    during the teardown, which ends each of them where it next takes the interpreter's lock. pyarrow takes that lock in C++
    destructors, when it drops a buffer of Python's. There the end of a thread is "terminate called without an active
    exception", and the process aborts although its command succeeded.
    """

    def __init__(self) -> None:
        self.status = 1  # as of an exception that nothing catches
        atexit.register(self._exit)

    def _exit(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                self.status = self.status or _NOT_WRITTEN
        os._exit(self.status)


def ends_at(number: signal.Signals) -> None:
    """From now on this signal ends the process at once, whatever its threads do."""
    # What the system itself does needs no thread of Python's, which may be in the middle of something long.
    signal.signal(number, _end if _is_process_1() else signal.SIG_DFL)


def ends_as_usual() -> None:
    """Make SIGTERM end the process even if it is process 1; Python handles SIGINT."""
    if _is_process_1():
        ends_at(signal.SIGTERM)


def _is_process_1() -> bool:
    return os.getpid() == 1


def _end(number: int, _: object) -> None:
    os._exit(128 + number)  # as shells tell a signal
