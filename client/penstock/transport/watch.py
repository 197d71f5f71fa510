"""The watch: a thread that tells a server which is slow from one which hangs, by asking it aside whether it lives.

A cold server may tokenize for minutes before its first byte, so silence alone says nothing. A process that is stopped, out of
memory or cut off still lets its kernel accept connections, so neither does a connection. What hangs answers nothing at all.

A proxy may forget a connection and keep it open, which the kernel cannot notice. Then the same question is answered over a new
one; a server that is slow does not answer it there either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.threads import Flag, own_thread, start
from penstock.transport.connection import Connection

_ANSWER_SECONDS = 5.0  # for an answer that takes a loaded server a few milliseconds
_LOOKS = 4  # in the time that a server may be silent


class Watch:
    """Hangs up on servers that are silent for `patience_seconds` and then do not answer aside, and on lost connections.

    Of one that does answer, `tell(server, patience_seconds)` is called once a request.
    """

    def __init__(self, connection: Connection, patience_seconds: float, tell: Callable[[str, float], None]) -> None:
        self._connection, self._patience_seconds, self._tell = connection, patience_seconds, tell
        self._watched: _Watched | None = None
        self._closed = Flag()
        self._thread = own_thread("watch", self._run)
        start(self._thread, self._closed.set)

    @contextmanager
    def over(self, server: str, target: str) -> Iterator[None]:
        """While it lasts, the connection waits for this server's answer to `target`."""
        self._watched = _Watched(server, target)
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
            if self._connection.interrupted.is_set():  # whoever was to close this may have been interrupted, too
                return
            if watched is None:
                continue
            silent_since = max(watched.since, self._connection.heard_at)
            if time.monotonic() - silent_since < self._patience_seconds:
                continue
            if not self._connection.is_alive(watched.server, _ANSWER_SECONDS):
                self._hang_up(watched, silent_since, "and it does not answer /healthz either")
                continue
            watched.since = time.monotonic()
            if not watched.is_told and watched is self._watched:
                watched.is_told = True
                self._tell(watched.server, self._patience_seconds)
                if self._is_lost(watched):
                    self._hang_up(watched, silent_since, "and it gives the same over a new connection: this one is lost")

    def _is_lost(self, watched: _Watched) -> bool:
        """Whether the answer comes over a new connection, and not over the one that is waited on."""
        # The rest of an answer may take the server long, and a new one begin at once.
        if self._is_heard(watched) or not self._connection.would_answer(watched.server, watched.target, _ANSWER_SECONDS):
            return False
        self._closed.wait(self._patience_seconds / _LOOKS)  # the server may have been ready for both just now
        return not self._is_heard(watched)

    def _is_heard(self, watched: _Watched) -> bool:
        return self._connection.heard_at > watched.began

    def _hang_up(self, watched: _Watched, silent_since: float, why: str) -> None:
        if watched is self._watched:
            self._connection.hang_up(f"silent for {time.monotonic() - silent_since:.0f} seconds, {why}")


class _Watched:
    """An answer that is waited for, since when its server has not been known to live, and whether that is told to be slow."""

    def __init__(self, server: str, target: str) -> None:
        self.server, self.target = server, target
        self.began = self.since = time.monotonic()
        self.is_told = False
