"""The retry log: a line for each stage of an outage while a run waits, and a bar for work of a server that takes its time."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping

from penstock.display.status_line import StatusLine
from penstock.logs import log
from penstock.printable import printable_lines
from penstock.text import counted, without_passwords
from penstock.transport.responses import Busy, NotReady, TransientError

_QUIET_SECONDS = 10.0  # between two lines of one kind: a line that flips bits would else write a line for each
_BAR_WIDTH = 20


class RetryLog:
    """The log lines of one transport; an outage begins with the first failure and ends with the next answer.

    At the `first_contact` of a run nobody has answered yet: perhaps nobody ever will.
    """

    def __init__(self, retry_seconds: float, *, first_contact: bool = False) -> None:
        self._first_contact = first_contact
        self._retrying = f"trying again for up to {retry_seconds:g} seconds"
        self._num_failures = 0
        self._said: set[str] = set()  # of this outage
        self._said_at: dict[str, float] = {}
        self._bar = StatusLine()

    def failed(self, server: str, failure: Exception, next_server: str) -> None:
        """An attempt failed; another server is asked next, or the same once more."""
        self._num_failures += 1
        again = "asking again until it has room" if isinstance(failure, Busy) else self._retrying
        follows = again if next_server == server else f"failing over to {next_server}"
        if self._first_contact and isinstance(failure, TransientError) and failure.is_silence:
            follows += ". Is it started (penstock serve DATA_DIR), and is this its address?"
        self._say_once("failed", f"{server}: {failure}; {follows}")

    def nobody(self, failures: Mapping[str, Exception]) -> None:
        """All servers were tried, and failed with this."""
        if len(failures) > 1:
            reasons = "; ".join(f"{server}: {failure}" for server, failure in failures.items())
            self._say_once("nobody", f"no server has answered ({reasons}); {self._retrying}")

    def answered(self, server: str) -> None:
        """A server gave what was asked for."""
        self.end_bar()
        if self._num_failures:
            if self._said:
                _log(f"{server} answers after {counted(self._num_failures, 'failed attempt')}")
            self._num_failures = 0
            self._said.clear()

    def came_home(self, server: str) -> None:
        """The rank's home server answered again."""
        self._say("home", f"{server} answers again: back to it")

    def progress(self, progress: NotReady) -> None:
        """A bar that grows in its line of a terminal; elsewhere a line now and then."""
        if self._bar.is_seen and _is_first_rank():
            done = round(_BAR_WIDTH * progress.share)
            self._bar.draw(f"penstock [{'#' * done}{'.' * (_BAR_WIDTH - done)}] {progress.share:4.0%} {progress}")
        else:
            self._say("progress", str(progress))

    def end_bar(self) -> None:
        """Clears the bar's line, if there is one."""
        self._bar.clear()

    def _say_once(self, stage: str, text: str) -> None:
        if stage not in self._said and self._say(stage, text):
            self._said.add(stage)

    def _say(self, stage: str, text: str) -> bool:
        now = time.monotonic()
        if now - self._said_at.get(stage, -math.inf) < _QUIET_SECONDS:
            return False
        self._said_at[stage] = now
        _log(text)
        return True


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _log(text: str) -> None:
    log.warning("penstock: %s", printable_lines(without_passwords(text)))
