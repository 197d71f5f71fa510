"""Waits of a training loop: how long it waits, what the fetching thread does meanwhile, and the report of both."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from penstock.wire.report import HEADER, STAGES, Report, parse_timing


class Span:
    """Seconds in one state of a thread, the current stay in it included. Any thread may read them."""

    def __init__(self) -> None:
        # (seconds of the earlier stays, start of the current one). One tuple: a reader must not count a stay twice.
        self._stays: tuple[float, float | None] = (0.0, None)

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        before, since = self._stays
        return before if since is None else before + time.perf_counter() - since

    def begin(self, now: float) -> None:
        """Enter the state at a time of the performance counter."""
        self._stays = self._stays[0], now

    def end(self, now: float) -> None:
        """Leave the state; does nothing outside of it."""
        before, since = self._stays
        if since is not None:
            self._stays = before + now - since, None


class LoopClock:
    """Time of a loop, and what it was spent on.

    loop     seconds that it waited for batches, seconds that it worked with them, both before its current state; the start of
             that state, None between them; whether it waits now. One tuple, replaced twice a batch, as other threads read it
    blocked  the part of its waits in which the buffer is empty

    The fetching thread calls `enter` and `answered`. Each moment in which the loop is blocked belongs to the stage that the
    thread is in then; the rest of the waits is the stage `client`.
    """

    def __init__(self) -> None:
        self.loop: tuple[float, float, float | None, bool] = (0.0, 0.0, None, False)
        self.blocked = Span()
        self._stage = "client"
        self._attributed_at = 0.0  # seconds of `blocked` that are attributed
        self._seconds = {stage: 0.0 for stage in STAGES if stage != "client"}

    @property
    def wait_seconds(self) -> float:
        """Seconds that the loop waited for batches, a current wait included."""
        waited, _, since, waits = self.loop
        return waited if since is None or not waits else waited + time.perf_counter() - since

    @property
    def compute_seconds(self) -> float:
        """Seconds that the loop worked with batches, the current one included."""
        _, computed, since, waits = self.loop
        return computed if since is None or waits else computed + time.perf_counter() - since

    def enter(self, stage: str) -> None:
        """Begin a stage of the fetching thread."""
        spent = self._spent()
        if self._stage != "client":
            self._seconds[self._stage] += spent
        self._stage = stage

    def answered(self, server_timing: str) -> None:
        """End the wait for the first byte. The response says what the server spent its part on. The body follows."""
        spent, timing = self._spent(), parse_timing(server_timing)
        total = sum(timing.values())
        share = min(1.0, spent / total) if total else 0.0
        for stage, seconds in timing.items():
            self._seconds[stage] += share * seconds
        self._seconds["network"] += spent - share * total
        self._stage = "receive"

    def _spent(self) -> float:
        """Return the seconds in which the loop was blocked since the last call."""
        now = self.blocked.seconds
        spent, self._attributed_at = now - self._attributed_at, now
        return max(0.0, spent)

    def wait_stages(self) -> dict[str, float]:
        """Return `wait_seconds` by stage, without those of the fetching thread's current stage."""
        seconds = dict(self._seconds)
        waited = self.wait_seconds
        under_way = self.blocked.seconds - self._attributed_at if self._stage != "client" else 0.0
        return seconds | {"client": max(0.0, waited - sum(seconds.values()) - max(0.0, under_way))}


NOTHING = Report(job="")


class Reporter:
    """Report of a rank, in the requests of one transport. Without a job it only attributes the waits.

    `look` returns the report with all amounts since the loop's start. `unreported` is what the loop before it left.
    """

    def __init__(
        self,
        clock: LoopClock | None = None,
        look: Callable[[], Report] | None = None,
        unreported: Report = NOTHING,
    ) -> None:
        self.clock = clock or LoopClock()
        self._look = look
        self._sent = self._delivered = NOTHING.since(unreported)
        self._pending = deque[Report]()  # what requests without a response have reported, in their order

    def headers(self) -> dict[str, str]:
        """Return the header of a request, with the amounts since the last report."""
        if self._look is None:
            return {}
        now = self._look()
        before, self._sent = self._sent, now
        self._pending.append(now)
        return {HEADER: now.since(before).to_header()}

    def answered(self, server_timing: str) -> None:
        """Note that the response of the oldest request arrived, with this Server-Timing: the server has its report."""
        self.clock.answered(server_timing)
        if self._pending:
            self._delivered = self._pending.popleft()

    def failed(self) -> None:
        """Note that the requests without a response failed: the next one reports their amounts again."""
        self._pending.clear()
        self._sent = self._delivered

    def end(self) -> Report | None:
        """Return the amounts that no server has got. None without a job, and from the second call on."""
        look, self._look = self._look, None
        return look().since(self._delivered) if look else None
