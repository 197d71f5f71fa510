"""Signals that end a command at once. Process 1 of a container is special: no signal ends it that it does not ask for."""

from __future__ import annotations

import os
import signal


def ends_at(number: signal.Signals) -> None:
    """From now on this signal ends the process at once, whatever its threads do."""
    # What the system itself does needs no thread of Python's, which may be in the middle of something long.
    signal.signal(number, _end if _is_process_1() else signal.SIG_DFL)


def ends_as_usual() -> None:
    """SIGTERM ends the process, as it does every other one, also where it is process 1; SIGINT is Python's own to handle."""
    if _is_process_1():
        ends_at(signal.SIGTERM)


def _is_process_1() -> bool:
    return os.getpid() == 1


def _end(number: int, _: object) -> None:
    os._exit(128 + number)  # as shells tell a signal
