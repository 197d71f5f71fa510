"""Retry log: one line per stage of an outage, and a progress bar while a server prepares data."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping

from penstock.logs import StatusLine, log
from penstock.printable import printable_lines
from penstock.text import counted, without_passwords
from penstock.transport.responses import Busy, NotReady, TransientError

_QUIET_SECONDS = 10.0  # between lines of one kind: otherwise a network that flips bits would log each failure
_BAR_WIDTH = 20


class RetryLog:
    """Log lines of one transport; an outage begins with the first failure and ends with the next answer.

    At the `first_contact` of a run no server has answered yet, and the address may be wrong.
    """

    def __init__(self, retry_seconds: float, *, first_contact: bool = False) -> None:
        self._first_contact = first_contact
        self._retrying = f"trying again for up to {retry_seconds:g} seconds"
        self._num_failures = 0
        self._said: set[str] = set()  # of this outage
        self._said_at: dict[str, float] = {}
        self._bar = StatusLine()

    def failed(self, server: str, failure: Exception, next_server: str) -> None:
        """Log a failed attempt and the next server, which may be the same."""
        self._num_failures += 1
        again = "asking again until it has room" if isinstance(failure, Busy) else self._retrying
        follows = again if next_server == server else f"failing over to {next_server}"
        if self._first_contact and isinstance(failure, TransientError) and failure.is_silence:
            follows += ". Is it started (penstock serve DATA_DIR), and is this its address?"
        self._say_once("failed", f"{server}: {failure}; {follows}")

    def nobody(self, failures: Mapping[str, Exception]) -> None:
        """Log that all servers failed, with their failures."""
        if len(failures) > 1:
            reasons = "; ".join(f"{server}: {failure}" for server, failure in failures.items())
            self._say_once("nobody", f"no server has answered ({reasons}); {self._retrying}")

    def answered(self, server: str) -> None:
        """Log the end of an outage: a server answered."""
        self.end_bar()
        if self._num_failures:
            if self._said:
                _log(f"{server} answers after {counted(self._num_failures, 'failed attempt')}")
            self._num_failures = 0
            self._said.clear()

    def came_home(self, server: str) -> None:
        """Log that the rank's home server answers again."""
        self._say("home", f"{server} answers again: back to it")

    def progress(self, progress: NotReady) -> None:
        """Draw a progress bar on a terminal; log a line now and then elsewhere."""
        if self._bar.is_seen and _is_first_rank():
            done = round(_BAR_WIDTH * progress.share)
            self._bar.draw(f"penstock [{'#' * done}{'.' * (_BAR_WIDTH - done)}] {progress.share:4.0%} {progress}")
        else:
            self._say("progress", str(progress))

    def end_bar(self) -> None:
        """Clear the progress bar, if it is drawn."""
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
