"""Bytes in flight: the memory of responses until clients have read them, and its budget.

Without a budget a thousand slow clients would each keep chunks of a few MiB in memory. Beyond the budget a request gets a 503
and retries later; a request that was admitted is never refused halfway.
"""

from __future__ import annotations

import threading

from penstock.text import counted
from penstock_server.problems import Busy


class InFlight:
    """Budget of one process, shared by all of its threads."""

    def __init__(self, budget_bytes: int) -> None:
        self.lock = threading.Lock()
        self.budget_bytes = budget_bytes
        self.reserved_bytes = 0
        self.num_responses = 0

    def reserve(self, num_chunks: int, chunk_bytes: int) -> Reservation:
        """Returns a reservation for a response with `num_chunks` chunks in memory; it takes no bytes yet.

        Raises Busy: the budget has no room for it now.
        """
        reservation = Reservation(self, num_chunks, chunk_bytes)
        self.check(reservation.nbytes)
        return reservation

    def check(self, nbytes: int) -> None:
        """Raises Busy: the budget has no room for `nbytes`. An idle process has room for any number."""
        if self.num_responses and self.reserved_bytes + nbytes > self.budget_bytes:
            raise Busy(
                f"{counted(self.num_responses, 'response')} in flight take {self.reserved_bytes:,} bytes, this one needs "
                f"{nbytes:,}, and the budget is {self.budget_bytes:,}. Retry in a second. If this lasts, clients read "
                f"more slowly than the server sends: raise --inflight-bytes, add a server, or request fewer steps at a time."
            )


class Reservation:
    """Bytes of one response; `nbytes` is an estimate until its first chunk is measured."""

    def __init__(self, in_flight: InFlight, num_chunks: int, chunk_bytes: int) -> None:
        self.nbytes = num_chunks * chunk_bytes
        self._in_flight, self._num_chunks = in_flight, num_chunks
        self._is_taken = self._is_measured = False

    def take(self) -> None:
        """Takes the bytes if they are not taken yet. Raises Busy: the budget has no more room for them."""
        with self._in_flight.lock:
            if not self._is_taken:
                self._in_flight.check(self.nbytes)
                self._in_flight.reserved_bytes += self.nbytes
                self._in_flight.num_responses += 1
                self._is_taken = True

    def measured(self, chunk_bytes: int) -> None:
        """Counts `chunk_bytes` per chunk: the first replaces the estimate; a larger one counts even beyond the budget."""
        with self._in_flight.lock:
            more = self._num_chunks * chunk_bytes - self.nbytes
            if more > 0 or not self._is_measured:
                self.nbytes += more
                self._in_flight.reserved_bytes += more
            self._is_measured = True

    def release(self) -> None:
        """Returns the bytes to the budget. Idempotent."""
        with self._in_flight.lock:
            if self._is_taken:
                self._in_flight.reserved_bytes -= self.nbytes
                self._in_flight.num_responses -= 1
                self._is_taken = False
