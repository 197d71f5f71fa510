"""The log: what happens while a server runs, on stderr, a line each with its time."""

from __future__ import annotations

import logging
import time
from collections import defaultdict

from penstock.printable import printable_lines

_SELDOM_SECONDS = 60.0


def begin_log(*, tells_news: bool) -> None:
    """From now on. How datasets change is told only with `tells_news`: all processes see it, and one of them is to tell it."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Printable("%(asctime)s %(levelname)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("penstock.dataset").setLevel(logging.INFO if tells_news else logging.ERROR)
    logging.getLogger("uvicorn.error").addFilter(_FewWarnings())


class Seldom:
    """When to tell of what fails for each block, as on a disk that is away: once a minute. For all threads."""

    def __init__(self) -> None:
        self._due_at = 0.0

    def is_due(self) -> bool:
        """Whether to tell it now; from then on it is told."""
        now = time.monotonic()
        if now < self._due_at:
            return False
        self._due_at = now + _SELDOM_SECONDS
        return True


class _Printable(logging.Formatter):
    """Lines that a terminal does not obey, whatever files and folders are called."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as logging calls it
        # What is one message begins no second line with a time: that could be in the name of a folder.
        return printable_lines(super().formatMessage(record)).replace("\n", "\n    ")


class _FewWarnings(logging.Filter):
    """Lets each of uvicorn's warnings through once a minute: whoever sends it what is no HTTP has it write one each time."""

    def __init__(self) -> None:
        super().__init__()
        self._seldom = defaultdict[str, Seldom](Seldom)

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.WARNING or self._seldom[str(record.msg)].is_due()
