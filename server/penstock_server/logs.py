"""Log of a running server on stderr, one line per event, with the time."""

from __future__ import annotations

import logging
import time
from collections import defaultdict

from penstock.text import printable_lines

_SELDOM_SECONDS = 60.0


def begin_log(*, logs_changes: bool) -> None:
    """Start the log. Only one process, with `logs_changes`, logs changes of datasets, since all of them see these."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Printable("%(asctime)s %(levelname)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("penstock.dataset").setLevel(logging.INFO if logs_changes else logging.ERROR)
    logging.getLogger("uvicorn.error").addFilter(_FewWarnings())


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
    """A formatter without control characters, whatever the names of files and folders."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as logging calls it
        # Continuation lines are indented: a folder name with a line break could imitate a log line.
        return printable_lines(super().formatMessage(record)).replace("\n", "\n    ")


class _FewWarnings(logging.Filter):
    """Pass each of uvicorn's warnings once a minute: every request that is not HTTP causes one."""

    def __init__(self) -> None:
        super().__init__()
        self._seldom = defaultdict[str, Seldom](Seldom)

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.WARNING or self._seldom[str(record.msg)].is_due()
