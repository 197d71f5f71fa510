"""The client's log, and a progress line. Each log line names its host and rank: ranks often share one log."""

from __future__ import annotations

import logging
import os
import socket
import sys
import warnings
from shutil import get_terminal_size
from typing import TextIO

log = logging.getLogger("penstock")

_PREFIX = "penstock: "


class _ProcessName(logging.Filter):
    """Puts the name of this process before each line."""

    rank: int | None = None  # None: the only rank, or unknown

    def filter(self, record: logging.LogRecord) -> bool:
        process = f"on {socket.gethostname()}" if self.rank is None else f"rank {self.rank} on {socket.gethostname()}"
        record.msg, record.args = f"{_PREFIX}{process}: {record.getMessage().removeprefix(_PREFIX)}", ()
        return True


_process_name = _ProcessName()  # one rank trains in a process
log.addFilter(_process_name)


def name_rank(rank: int, world_size: int) -> None:
    """Name this rank in later lines. A dataset of one rank, as for an evaluation, changes nothing."""
    if world_size > 1:
        _process_name.rank = rank


def warn(text: str) -> None:
    """Warn at the line of the user's code that led here, also through a loader or a compiled function of torch."""
    frame, level = sys._getframe(), 1
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in ("penstock", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


class StatusLine:
    """Progress line on stderr, redrawn in place; only on a terminal that can clear it."""

    def __init__(self) -> None:
        self._drawn_on: TextIO | None = None

    @property
    def is_seen(self) -> bool:
        """Whether a terminal shows the line."""
        return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def draw(self, text: str) -> None:
        """Draw or redraw the line."""
        if self.is_seen:
            self._drawn_on = sys.stderr
            sys.stderr.write(f"\r{text[: get_terminal_size().columns - 1]}\x1b[K")
            sys.stderr.flush()

    def clear(self) -> None:
        """Clear the line, if it is drawn."""
        if self._drawn_on:
            self._drawn_on.write("\r\x1b[K")
            self._drawn_on.flush()
            self._drawn_on = None
