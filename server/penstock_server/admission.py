"""Bytes in flight: what responses have in memory until their readers have it, and the budget of that.

Without a budget a thousand slow readers would each keep their chunks of a few MiB in memory. Beyond it a request is told to
come back; one that was let in is never refused in its midst.
"""

from __future__ import annotations

import threading

from penstock.text import counted
from penstock_server.problems import Busy


class InFlight:
    """The budget of one process, for all of its threads."""

    def __init__(self, budget_bytes: int) -> None:
        self.lock = threading.Lock()
        self.budget_bytes = budget_bytes
        self.held_bytes = 0
        self.num_holds = 0  # that have taken their bytes

    def hold(self, num_chunks: int, chunk_bytes: int) -> Reservation:
        """A hold for a response that has so many chunks in memory at a time; it has taken nothing yet.

        Raises Busy: there would be no room for it now.
        """
        hold = Reservation(self, num_chunks, chunk_bytes)
        self.check(hold.nbytes)
        return hold

    def check(self, nbytes: int) -> None:
        """Raises Busy: there is no room for so many bytes. Where nothing is in flight, there is room for any number."""
        if self.num_holds and self.held_bytes + nbytes > self.budget_bytes:
            raise Busy(
                f"{self.held_bytes:,} bytes are held by {counted(self.num_holds, 'response')} not yet read, this one would "
                f"hold {nbytes:,}, and the budget is {self.budget_bytes:,}. Ask again in a second. If this lasts, readers "
                f"are slower than the server: raise --inflight-bytes, add a server, or ask for fewer steps at a time."
            )


class Reservation:
    """What one response holds; `nbytes` is foreseen, until its first chunk is measured."""

    def __init__(self, in_flight: InFlight, num_chunks: int, chunk_bytes: int) -> None:
        self.nbytes = num_chunks * chunk_bytes
        self._in_flight, self._num_chunks = in_flight, num_chunks
        self._is_taken = self._is_measured = False

    def take(self) -> None:
        """Takes the bytes, unless they are taken. Raises Busy: there is no room for them any more."""
        with self._in_flight.lock:
            if not self._is_taken:
                self._in_flight.check(self.nbytes)
                self._in_flight.held_bytes += self.nbytes
                self._in_flight.num_holds += 1
                self._is_taken = True

    def measured(self, chunk_bytes: int) -> None:
        """Counts these bytes for each chunk: the first one's for those foreseen, a larger one's even beyond the budget."""
        with self._in_flight.lock:
            more = self._num_chunks * chunk_bytes - self.nbytes
            if more > 0 or not self._is_measured:
                self.nbytes += more
                self._in_flight.held_bytes += more
            self._is_measured = True

    def release(self) -> None:
        """Gives back what was taken. Idempotent."""
        with self._in_flight.lock:
            if self._is_taken:
                self._in_flight.held_bytes -= self.nbytes
                self._in_flight.num_holds -= 1
                self._is_taken = False
