"""The trial: a server is asked aside, in a thread, for what another gives meanwhile.

A process that answers may still have disks that hang, and a client that returned to it at once would wait for a minute.
"""

from __future__ import annotations

from penstock.threads import own_thread
from penstock.transport.connection import Connection

_CLOSE_SECONDS = 5.0


class Trial:
    """Whether a server would answer this `target`, within `seconds`. Raises RuntimeError: no thread can be started now."""

    def __init__(self, connection: Connection, server: str, target: str, seconds: float) -> None:
        self.outcome: bool | None = None  # not known yet
        self._thread = own_thread("trial", self._run, connection, server, target, seconds)
        self._thread.start()

    def close(self) -> None:
        """Waits for the thread. The connection must have been interrupted, or that may take as long as the trial may."""
        self._thread.join(_CLOSE_SECONDS)

    def _run(self, connection: Connection, server: str, target: str, seconds: float) -> None:
        outcome = False
        try:
            outcome = connection.would_answer(server, target, seconds)
        finally:  # whatever went wrong, it is tried again some time
            self.outcome = outcome
