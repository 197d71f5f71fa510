"""Log of a running server on stderr, one line per event, with the time."""

from __future__ import annotations

import logging
import time

from penstock.text import printable_lines

_SELDOM_SECONDS = 60.0


def begin_log(*, logs_changes: bool) -> None:
    """Start the log. Only one process, with `logs_changes`, logs changes of datasets, since all of them see these."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Printable("%(asctime)s %(levelname)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("penstock.dataset").setLevel(logging.INFO if logs_changes else logging.ERROR)


class Seldom:
    """Rate limit of one log line a minute, for errors of every block, as in a disk outage. For all threads."""

    def __init__(self) -> None:
        self._due_at = 0.0

    def is_due(self) -> bool:
        """Return whether to log now; the minute starts with a True."""
        now = time.monotonic()
        if now < self._due_at:
            return False
        self._due_at = now + _SELDOM_SECONDS
        return True


class _Printable(logging.Formatter):
    """Formatter that escapes control characters, such as those in the name of a folder."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as logging calls it
        # A folder name with a line break could imitate a log line: indent continuation lines.
        return printable_lines(super().formatMessage(record)).replace("\n", "\n    ")
