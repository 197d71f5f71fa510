"""Admission: limits on what one caller may use, so that the others are served.

A caller is the name of a token. On a server without tokens it is the address of a client.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from contextvars import ContextVar

from penstock_server.problems import Busy, LimitExceeded

current_caller = ContextVar("current_caller", default="")  # of the request that a thread or a task works on

_UNFAIR_SECONDS = 0.5  # wait for its client after which a response is closed for a caller within its share
_STALLED_SECONDS = 5.0  # likewise, for a request of the same caller, or of one that holds less


class InFlight:
    """Budget of one process for the bytes of responses, which callers share fairly.

    A client may leave a response unread while its loop works. If a request finds no room, responses that wait for their clients
    are aborted, the longest wait first. After _UNFAIR_SECONDS, those of callers above an equal share are aborted for a caller
    within its share. After _STALLED_SECONDS, those of a caller that holds as much as the requesting one are. A client whose
    response is aborted keeps the whole frames, and requests the rest again.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.lock = threading.Lock()
        self.budget_bytes = budget_bytes
        self.reserved_bytes = 0
        self._taken = dict[Reservation, None]()

    @property
    def num_responses(self) -> int:
        """Number of responses that hold bytes."""
        return len(self._taken)

    def admit(self, num_chunks: int, chunk_bytes: int) -> Reservation:
        """Returns a reservation for a response with `num_chunks` chunks in memory; it takes no bytes yet.

        Raises Busy: the budget has no room for it now.
        """
        reservation = Reservation(self, num_chunks, chunk_bytes)
        with self.lock:
            self.make_room(reservation)
        return reservation

    def make_room(self, wanted: Reservation) -> None:
        """Makes room for a response: aborts stalled ones if that is needed. Call it with the lock.

        Raises Busy: too few responses may be aborted. An idle process has room for any number of bytes.
        """
        missing = self.reserved_bytes + wanted.nbytes - self.budget_bytes
        if missing <= 0 or not self._taken:
            return
        held, now, aborted = Counter[str](), time.monotonic(), list[Reservation]()
        for reservation in self._taken:
            held[reservation.caller] += reservation.nbytes
        needs = held[wanted.caller] + wanted.nbytes
        share = self.budget_bytes / len({*held, wanted.caller})
        for stalled in sorted(self._taken, key=lambda reservation: reservation.waits_since):
            if missing <= 0 or stalled.waits_since > now:
                break
            is_unfair = held[stalled.caller] > share >= needs
            if now - stalled.waits_since >= (_UNFAIR_SECONDS if is_unfair else _STALLED_SECONDS) and (
                is_unfair or stalled.caller == wanted.caller or held[stalled.caller] >= needs
            ):
                held[stalled.caller] -= stalled.nbytes
                missing -= stalled.nbytes
                aborted.append(stalled)
        if missing > 0:
            raise Busy(  # without the bytes of others, which a caller may not know
                f"the budget of {self.budget_bytes:,} bytes for responses in flight is used up, and this one needs "
                f"{wanted.nbytes:,}. Retry in a second. If it persists, clients read more slowly than the server sends: raise "
                f"--inflight-bytes, add a server, or request fewer steps at a time."
            )
        for reservation in aborted:
            self.give_back(reservation)
            reservation.abort()

    def take(self, reservation: Reservation) -> None:
        """Counts the bytes of a reservation. Call it with the lock."""
        self._taken[reservation] = None
        self.reserved_bytes += reservation.nbytes

    def give_back(self, reservation: Reservation) -> None:
        """Returns the bytes of a reservation to the budget. Call it with the lock."""
        del self._taken[reservation]
        self.reserved_bytes -= reservation.nbytes

    def has_taken(self, reservation: Reservation) -> bool:
        """Returns whether a reservation holds its bytes."""
        return reservation in self._taken


class Reservation:
    """Bytes of one response. `nbytes` is an estimate until its first chunk is measured.

    waits_since  monotonic time since which the response waits for its client; infinity if it does not, or cannot be aborted
    abort        closes the connection; any thread may call it
    """

    def __init__(self, in_flight: InFlight, num_chunks: int, chunk_bytes: int) -> None:
        self.nbytes = num_chunks * chunk_bytes
        self.caller = current_caller.get()
        self.waits_since = math.inf
        self.abort: Callable[[], object] = lambda: None
        self._in_flight, self._num_chunks = in_flight, num_chunks
        self._is_measured = False

    def take(self) -> None:
        """Takes the bytes if they are not taken yet. Raises Busy: the budget no longer has room for them."""
        with self._in_flight.lock:
            if not self._in_flight.has_taken(self):
                self._in_flight.make_room(self)
                self._in_flight.take(self)

    def measured(self, chunk_bytes: int) -> None:
        """Counts `chunk_bytes` per chunk: the first replaces the estimate; a larger one counts even beyond the budget."""
        with self._in_flight.lock:
            more = self._num_chunks * chunk_bytes - self.nbytes
            if more > 0 or not self._is_measured:
                self.nbytes += more
                if self._in_flight.has_taken(self):  # false if it was aborted meanwhile
                    self._in_flight.reserved_bytes += more
            self._is_measured = True

    def release(self) -> None:
        """Returns the bytes to the budget. Idempotent."""
        with self._in_flight.lock:
            if self._in_flight.has_taken(self):
                self._in_flight.give_back(self)


class DistinctLimit:
    """Limit of `most` different values from one caller in each period of `seconds`. Messages call the values `what`."""

    def __init__(self, most: int, seconds: float, what: str) -> None:
        self._most, self._seconds, self._what = most, seconds, what
        self._lock = threading.Lock()
        self._begun_at, self._seen = 0.0, dict[str, set[int]]()

    def check(self, caller: str, value: Hashable) -> None:
        """Notes a value of a caller. Raises LimitExceeded: it would be one too many in this period."""
        with self._lock:
            now = time.monotonic()
            if now - self._begun_at >= self._seconds:
                self._begun_at = now
                self._seen.clear()
            seen = self._seen.setdefault(caller, set())
            if (number := hash(value)) in seen:
                return
            if len(seen) >= self._most:
                left = math.ceil(self._begun_at + self._seconds - now)
                raise LimitExceeded(
                    f"this caller has used {self._most:,} different {self._what}, the limit for {self._seconds:g} seconds. "
                    f"Retry in {left} seconds, or reuse one of them.",
                    left,
                )
            seen.add(number)
