"""Bytes in flight: what responses have in memory until their readers have it, and the budget of that.

Without a budget a thousand slow readers would each keep their chunks of a few MiB in memory. Beyond it a request is told to
come back; one that was let in is never refused in its midst.
"""

from __future__ import annotations

from penstock_server.problems import Busy


class InFlight:
    """The budget of one process. Its methods, and those of its holds, are for the thread of the event loop alone."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.held_bytes = 0
        self.num_holds = 0  # that have taken their bytes

    def hold(self, num_chunks: int, chunk_bytes: int) -> Hold:
        """A hold for a response that has so many chunks in memory at a time; it has taken nothing yet.

        Raises Busy: there would be no room for it now.
        """
        hold = Hold(self, num_chunks, chunk_bytes)
        self.check(hold.nbytes)
        return hold

    def check(self, nbytes: int) -> None:
        """Raises Busy: there is no room for so many bytes. Where nothing is in flight, there is room for any number."""
        if self.num_holds and self.held_bytes + nbytes > self.budget_bytes:
            raise Busy(
                f"{self.num_holds:,} responses that are being read hold {self.held_bytes:,} bytes, this one would hold "
                f"{nbytes:,}, and the budget is {self.budget_bytes:,}. Ask again in a second. If this lasts, readers are "
                f"slower than the server: raise --inflight-bytes, add a server, or ask for fewer steps at a time."
            )


class Hold:
    """What one response holds; `nbytes` is foreseen, until a chunk turns out to be larger."""

    def __init__(self, in_flight: InFlight, num_chunks: int, chunk_bytes: int) -> None:
        self.nbytes = num_chunks * chunk_bytes
        self._in_flight, self._num_chunks = in_flight, num_chunks
        self._is_taken = False

    def take(self) -> None:
        """Takes the bytes, unless they are taken. Raises Busy: there is no room for them any more."""
        if not self._is_taken:
            self._in_flight.check(self.nbytes)
            self._in_flight.held_bytes += self.nbytes
            self._in_flight.num_holds += 1
            self._is_taken = True

    def measured(self, chunk_bytes: int) -> None:
        """A chunk has so many bytes. Where that is more than was foreseen, more is held, also beyond the budget."""
        more = self._num_chunks * chunk_bytes - self.nbytes
        if more > 0:
            self.nbytes += more
            self._in_flight.held_bytes += more

    def release(self) -> None:
        """Gives back what was taken. Idempotent."""
        if self._is_taken:
            self._in_flight.held_bytes -= self.nbytes
            self._in_flight.num_holds -= 1
            self._is_taken = False
