"""Amounts over time: the last hour in buckets of equal length, and sums that fade."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from operator import add

BUCKET_SECONDS = 30.0
NUM_BUCKETS = 120
_FADE_SECONDS = 10.0  # half of an amount is forgotten after this


def bucket_of(time: float) -> int:
    """Return the number of the bucket of a time, in seconds since 1970."""
    return int(time // BUCKET_SECONDS)


class Buckets:
    """Amounts of the last hour, in buckets by the time. `newest` is the number of the last bucket that has an amount."""

    def __init__(self, newest: int = 0, amounts: bytes = bytes(4 * NUM_BUCKETS)) -> None:
        self.newest = newest
        self._amounts = array("f", amounts)

    def add(self, bucket: int, amount: float) -> None:
        """Add an amount to a bucket; older ones than an hour are ignored."""
        if bucket > self.newest:
            for passed in range(max(self.newest + 1, bucket - NUM_BUCKETS + 1), bucket + 1):
                self._amounts[passed % NUM_BUCKETS] = 0.0
            self.newest = bucket
        if bucket > self.newest - NUM_BUCKETS:
            self._amounts[bucket % NUM_BUCKETS] += amount

    def set(self, bucket: int, amount: float) -> None:
        """Replace the amount of a bucket."""
        self.add(bucket, 0.0)
        self.add(bucket, amount - self._amounts[bucket % NUM_BUCKETS])

    def until(self, bucket: int) -> list[float]:
        """Return the amounts of the last hour until a bucket, oldest first."""
        last, later = (self.newest + 1) % NUM_BUCKETS, bucket - self.newest
        amounts = self._amounts[last:].tolist() + self._amounts[:last].tolist()
        nothing = [0.0] * min(abs(later), NUM_BUCKETS)
        return amounts[later:] + nothing if later >= 0 else nothing + amounts[:later]

    def __add__(self, other: Buckets) -> Buckets:
        """Return the sums of both. Fast: /v1/jobs adds two for each rank and process."""
        newest = max(self.newest, other.newest)
        amounts = list(map(add, self.until(newest), other.until(newest)))
        first = -(newest + 1) % NUM_BUCKETS  # the amount at the start of the array
        return Buckets(newest, array("f", amounts[first:] + amounts[:first]).tobytes())

    def pack(self) -> tuple[int, bytes]:
        """Return the arguments that make this object again."""
        return self.newest, self._amounts.tobytes()


def summed(several: Iterable[Buckets], bucket: int) -> list[float]:
    """Return the sums of several objects' amounts of the last hour until a bucket, oldest first."""
    return sum(several, Buckets()).until(bucket)


class Fading:
    """Sums by name that weigh recent amounts more: an amount counts half after 10 seconds. Only their ratios mean anything."""

    def __init__(self, at: float = 0.0, amounts: Mapping[str, float] | None = None) -> None:
        self.at = at
        self.amounts = dict(amounts or {})  # as of `at`

    def add(self, now: float, amounts: Mapping[str, float]) -> None:
        """Add amounts of now."""
        faded = self.values(now)
        for name, amount in amounts.items():
            faded[name] = faded.get(name, 0.0) + amount
        self.at, self.amounts = now, faded

    def __getitem__(self, name: str) -> float:
        """Return a sum as of the last amount."""
        return self.amounts.get(name, 0.0)

    def values(self, now: float) -> dict[str, float]:
        """Return the sums at a time that is not before the last amount."""
        factor = 0.5 ** (max(0.0, now - self.at) / _FADE_SECONDS)
        return {name: amount * factor for name, amount in self.amounts.items()}

    def pack(self) -> tuple[float, dict[str, float]]:
        """Return the arguments that make this object again."""
        return self.at, self.amounts
