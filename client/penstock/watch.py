"""The watch: a thread that tells a server which is slow from one which hangs, by asking it aside whether it lives.

A cold server may tokenize for minutes before its first byte, so silence alone says nothing. A process that is stopped, out of
memory or cut off still lets its kernel accept connections, so neither does a connection. What hangs answers nothing at all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.connection import Connection
from penstock.prefetch import OWN_THREADS

_ANSWER_SECONDS = 5.0  # for an answer that takes a loaded server a few milliseconds
_LOOKS = 4  # in the time that a server may be silent


class Watch:
    """Hangs up on servers that are silent for `patience_seconds` and then do not answer aside.

    Of one that does, and so is only slow, `tell(server, patience_seconds)` is called once a request.
    """

    def __init__(self, connection: Connection, patience_seconds: float, tell: Callable[[str, float], None]) -> None:
        self._connection, self._patience_seconds, self._tell = connection, patience_seconds, tell
        self._watched: _Watched | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{OWN_THREADS}watch", daemon=True)
        self._thread.start()

    @contextmanager
    def over(self, server: str) -> Iterator[None]:
        """While it lasts, the connection waits for this server."""
        self._watched = _Watched(server)
        try:
            yield
        finally:
            self._watched = None

    def close(self) -> None:
        """Ends the thread. The connection must have been interrupted, or this waits for what it asks aside."""
        self._closed.set()
        self._thread.join(2 * _ANSWER_SECONDS)

    def _run(self) -> None:
        while not self._closed.wait(self._patience_seconds / _LOOKS):
            watched = self._watched
            if watched is None:
                continue
            silent_since = max(watched.since, self._connection.heard_at)
            if time.monotonic() - silent_since < self._patience_seconds:
                continue
            if self._connection.is_alive(watched.server, _ANSWER_SECONDS):
                watched.since = time.monotonic()
                if not watched.is_told and watched is self._watched:
                    watched.is_told = True
                    self._tell(watched.server, self._patience_seconds)
            elif watched is self._watched:
                silent_seconds = time.monotonic() - silent_since
                self._connection.hang_up(f"silent for {silent_seconds:.0f} seconds, and it does not answer /healthz either")


class _Watched:
    """A server that is waited for, since when it has not been known to live, and whether it is told that it is slow."""

    def __init__(self, server: str) -> None:
        self.server = server
        self.since = time.monotonic()
        self.is_told = False
