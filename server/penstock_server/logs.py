"""Log of a running server on stderr: one line per event, or one JSON object."""

from __future__ import annotations

import json
import logging
import time
from contextvars import ContextVar
from datetime import UTC, datetime

from penstock.cli.output import complain, report
from penstock.text import printable_lines
from penstock_server.settings import LogFormat

log = logging.getLogger("penstock.serve")
request_id = ContextVar("request_id", default="")  # of the request that a thread or a task answers

_SELDOM_SECONDS = 60.0


def begin_log(log_format: LogFormat) -> None:
    """Start the log. Changes of datasets are not logged yet: see `log_events`."""
    handler = logging.StreamHandler()
    human = _Printable("%(asctime)s %(levelname)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    handler.setFormatter(_Json() if log_format == "json" else human)
    logging.basicConfig(handlers=[handler])
    logging.getLogger("uvicorn.error").addFilter(_SeldomWarnings())
    logging.captureWarnings(log_format == "json")  # Python would print them as plain text
    log.setLevel(logging.INFO)


def log_events(*, is_first: bool) -> None:
    """Log changes of datasets and the stop from now on, but only in the first of several processes: all of them see these."""
    for logger in (log, logging.getLogger("penstock.dataset"), logging.getLogger("penstock.security")):
        logger.setLevel(logging.INFO if is_first else logging.ERROR)


def greet(log_format: LogFormat, text: str) -> None:
    """Print the greeting on stdout, or log it as JSON."""
    if log_format == "json":
        log.info("%s", text)
    else:
        report(text)


def complain_at_start(log_format: LogFormat, text: object, level: int = logging.ERROR) -> None:
    """Print an error or a warning from before the server serves, or log it as JSON."""
    if log_format == "json":
        log.log(level, "%s", text)
    else:
        complain("serve", text)


class Seldom:
    """Rate limit of `most` log lines a minute, for errors of every block, as in a disk outage. For all threads."""

    def __init__(self, most: int = 1) -> None:
        self._most = self._left = most
        self._due_at = 0.0

    def is_due(self) -> bool:
        """Return whether to log now; the minute starts with a True."""
        now = time.monotonic()
        if now >= self._due_at:
            self._due_at, self._left = now + _SELDOM_SECONDS, self._most
        self._left -= 1
        return self._left >= 0


class _SeldomWarnings(logging.Filter):
    """Filter of a warning a minute: uvicorn warns of each malformed request, and anyone may send thousands."""

    def __init__(self) -> None:
        super().__init__()
        self._limit = Seldom()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno != logging.WARNING or self._limit.is_due()


class _Json(logging.Formatter):
    """Formatter of a record as one JSON object. JSON escapes control characters and all but ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        content = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "process": record.process,
        }
        if named := request_id.get():
            content["request_id"] = named
        if record.exc_info:
            content["traceback"] = self.formatException(record.exc_info)
        return json.dumps(content)


class _Printable(logging.Formatter):
    """Formatter that escapes control characters, such as those in the name of a folder."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as logging calls it
        # A folder name with a line break could imitate a log line: indent continuation lines.
        line = printable_lines(super().formatMessage(record).rstrip()).replace("\n", "\n    ")
        named = request_id.get() if record.levelno >= logging.WARNING else ""
        return f"{line} (request {named})" if named else line
