"""Servers of a run: the choice among servers with the same data, failover, and the return to the home server."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from random import uniform

_AWAY_SECONDS = 30.0  # before a run tries its home server again; doubled after each failed try
_MAX_AWAY_SECONDS = 300.0


class Servers:
    """Addresses in the order that one rank tries them, and the health of each.

    The home of rank r is address r modulo the number of addresses. If a home is down, its ranks spread over the others.
    """

    def __init__(self, addresses: Sequence[str], rank: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        home = rank % len(addresses)
        others = [*addresses[home + 1 :], *addresses[:home]]
        first = rank // len(addresses) % max(len(others), 1)
        self.addresses = (addresses[home], *others[first:], *others[:first])
        self.current = self.home
        self._clock = clock
        self._not_before = dict.fromkeys(self.addresses, 0.0)
        self._failing: set[str] = set()  # failed since their last answer
        self._away_seconds = _AWAY_SECONDS
        self._return_at = math.inf

    @property
    def home(self) -> str:
        """The address that this rank prefers while it answers."""
        return self.addresses[0]

    def __len__(self) -> int:
        return len(self.addresses)

    def turn(self, *, also_busy: bool = False) -> list[str]:
        """Return the addresses to try now, each once, in order, without those whose Retry-After has not passed.

        If the home server failed a while ago, it comes first, to find out whether it is back.
        """
        first = self.home if self._clock() >= self._return_at else self.current
        order = [first, *(address for address in self.addresses if address != first)]
        return [address for address in order if also_busy or self._not_before[address] <= self._clock()]

    def seconds_until_ready(self) -> float:
        """Return the seconds until an address may be asked; 0 for now."""
        return max(0.0, min(self._not_before.values()) - self._clock())

    def leave_alone(self, address: str, seconds: float) -> None:
        """Record that an address requests no retry for `seconds`."""
        self._not_before[address] = self._clock() + seconds

    def failed(self, address: str, after_seconds: float = 0.0) -> str:
        """Record that an address failed and requests no retry for `after_seconds`. Return the next address."""
        self.leave_alone(address, after_seconds)
        self._failing.add(address)
        if address == self.home:
            self._return_at = math.inf  # until another server has answered
        if address == self.current:
            self.current = self.addresses[(self.addresses.index(address) + 1) % len(self)]
        return self.current

    def answered(self, address: str) -> bool:
        """Record an answer; the address becomes the current one. Return whether the run came back home."""
        is_back_home = address == self.home != self.current and self._return_at < math.inf
        self.current = address
        self._failing.discard(address)
        self._not_before[address] = 0.0
        if address == self.home:
            self._away_seconds, self._return_at = _AWAY_SECONDS, math.inf
        elif self._return_at == math.inf:
            # Ranks that lost their home together must not come back to it together.
            self._return_at = self._clock() + self._away_seconds * uniform(0.5, 1.5)
            self._away_seconds = min(2 * self._away_seconds, _MAX_AWAY_SECONDS)
        return is_back_home

    def learn_from(self, other: Servers) -> None:
        """Skip home and its successors if they failed in `other`, which got an answer from the same addresses."""
        if other is self or self.current != self.home:
            return
        while self.current in other._failing:
            self.failed(self.current)
