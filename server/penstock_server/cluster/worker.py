"""Worker: makes units as one of several processes that share a store, and nothing else.

It makes its own share first, in threads, then what the others have not begun. A claim keeps two from making the same unit. At
the end it makes one unit at a time: those whose worker died, those that failed before, and those that take another one long.

An attempt is written to the store before it begins, and removed after a success. So a unit that kills its process does not kill
it forever: with three attempts it has failed. A unit with an attempt runs alone, or its neighbours would count as killers, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice

from penstock_server.blocks.shared import SeenClaims
from penstock_server.cluster.units import MAX_ATTEMPTS, Failure, Units

ATTEMPTS, ATTEMPT_SUFFIX = "attempts", ".attempt"  # folder and suffix in the store
_POLL_SECONDS = 2.0
_STOP_SECONDS = 2.0  # for requests of a process that stops
_REFRESH_SECONDS, _LISTING_SHARE = 60.0, 50  # a list of a million units takes a thousand requests
_WATCHED = 32  # units of others, at the end
_LONG_SECONDS = 60.0  # then a unit of another worker is made a second time
_KILLED = "its process ended in each attempt, as when it takes too much memory"


class Attempts:
    """Attempts at units, in the store. Methods raise OSError."""

    def __init__(self, units: Units) -> None:
        self._units, self._shared = units, units.shared

    def begin(self, unit: int) -> int | None:
        """Write the next attempt and return its number, from 1; None if the unit has failed."""
        numbers = range(1, MAX_ATTEMPTS + 1)
        return next((number for number in numbers if self._shared.write(self._name(unit, number), [])), None)

    def fail(self, unit: int, number: int, reason: str) -> None:
        """Write why an attempt failed."""
        self._shared.write(self._name(unit, number), [reason.encode()], replaces=True)

    def reason(self, unit: int) -> str:
        """Return why a unit has failed."""
        bodies = [self._shared.get(self._name(unit, number)) for number in range(MAX_ATTEMPTS, 0, -1)]
        return next((bytes(body).decode() for body in bodies if body), _KILLED)

    def remove(self, unit: int, numbers: range) -> None:
        """Remove attempts at a unit."""
        for number in numbers:
            self._shared.remove(self._name(unit, number))

    def withdraw(self, unit: int, number: int) -> None:
        """Remove an attempt if the store responds soon."""
        self._shared.remove(self._name(unit, number), _STOP_SECONDS)

    def forget(self) -> None:
        """Remove all attempts. Units that have failed are tried again."""
        stems = {name.rpartition(".")[0] for name in self._units.names}
        for name in self._shared.names(ATTEMPTS):
            if name.rpartition("-")[0] in stems:
                self._shared.remove(f"{ATTEMPTS}/{name}")

    def _name(self, unit: int, number: int) -> str:
        return f"{ATTEMPTS}/{self._units.names[unit].rpartition('.')[0]}-{number}{ATTEMPT_SUFFIX}"


class Worker:
    """Worker `index` of `of`."""

    def __init__(self, units: Units, index: int, of: int) -> None:
        self._units, self._shared, self._attempts = units, units.shared, Attempts(units)
        self._index, self._of = index, of
        self._done, self._failed = units.done(), dict[int, str]()
        self._seen: SeenClaims = {}  # by the thread that makes the rest
        self._beginning = set[int]()  # units that a thread claims now
        self._running = dict[int, int]()  # number of the attempt at each unit of this process
        self._turn, self._stopped = threading.Lock(), threading.Event()
        self._error: BaseException | None = None
        self._longest_seconds = 0.0  # that a unit took

    def run(self, advance: Callable[[int], None]) -> list[Failure]:
        """Make units until each is done or has failed; calls `advance` with the number done. Returns the failures.

        Raises OSError: the store fails. Raises SnapshotGone.
        """
        try:
            units = iter(self._in_turn())
            self._run_in_threads(self._units.num_threads, lambda: self._make_all(units), advance)
            self._run_in_threads(1, self._make_rest, advance)
        finally:
            self._stop()
        failed = [unit for unit in sorted(self._failed) if not self._units.is_done(unit)]  # another one may have succeeded
        return [Failure(self._units.place(unit), self._failed[unit]) for unit in failed]

    def _run_in_threads(self, num_threads: int, work: Callable[[], None], advance: Callable[[int], None]) -> None:
        # Daemons: Ctrl-C and SIGTERM need not wait for a unit.
        threads = [threading.Thread(target=self._guarded, args=(work,), daemon=True) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        refresh_at = time.monotonic() + _REFRESH_SECONDS
        while (alive := [thread for thread in threads if thread.is_alive()]) and not self._is_over:
            alive[0].join(_POLL_SECONDS)
            if self._of > 1 and (began_at := time.monotonic()) > refresh_at:
                self._refresh()
                refresh_at = time.monotonic() + max(_REFRESH_SECONDS, _LISTING_SHARE * (time.monotonic() - began_at))
            advance(len(self._done))
        if self._error:
            raise self._error
        advance(len(self._done))

    @property
    def _is_over(self) -> bool:
        """Whether nothing is left to do. Other workers may have made the unit of a thread that hangs."""
        return self._stopped.is_set() or len(self._done | self._failed.keys()) == len(self._units)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
            self._stopped.set()

    def _in_turn(self) -> Iterator[int]:
        """Yield the units of this worker, then those of the others, of the next one first."""
        for turn in range(self._of):
            if turn == 1:
                self._refresh()
            yield from range((self._index + turn) % self._of, len(self._units), self._of)

    def _refresh(self) -> None:
        self._done |= self._units.done()

    def _make_all(self, units: Iterator[int]) -> None:
        while not self._stopped.is_set():
            with self._turn:
                unit = next(units, None)
            if unit is None:
                return
            if unit not in self._done:
                with self._claimed(unit, self._units.claim(unit)) as is_ours:
                    if is_ours:
                        self._try(unit, is_alone=False)

    def _make_rest(self) -> None:
        since = dict[int, float]()  # when another worker was first seen to make a unit
        while not self._stopped.is_set() and (watched := [*islice(self._left(), _WATCHED)]):
            is_idle = True
            for unit in watched:
                if self._units.is_done(unit):
                    self._done.add(unit)
                    continue
                claim, now = self._units.claim(unit), time.monotonic()
                is_long = now - since.setdefault(unit, now) > max(_LONG_SECONDS, 2 * self._longest_seconds)
                is_second = self._shared.is_claimed(claim, self._seen)
                # Also without a first claim: the maker may be dead, while the second one still works.
                if (is_second and not is_long) or self._shared.is_claimed(_again(claim), self._seen):
                    continue
                with self._claimed(unit, _again(claim) if is_second else claim) as is_ours:
                    if is_ours:
                        is_idle = False
                        self._try(unit, is_alone=True, is_second=is_second)
                        since.pop(unit)
            if is_idle:
                self._stopped.wait(_POLL_SECONDS)

    @contextmanager
    def _claimed(self, unit: int, claim: str) -> Iterator[bool]:
        """Claim a unit, unless the worker stops."""
        self._beginning.add(unit)
        try:
            if self._stopped.is_set():
                yield False
                return
            with self._shared.claimed(claim) as is_ours:
                yield is_ours
        finally:
            self._beginning.discard(unit)

    def _left(self) -> Iterator[int]:
        for turn in range(self._of):
            units = range((self._index + turn) % self._of, len(self._units), self._of)
            yield from (unit for unit in units if unit not in self._done and unit not in self._failed)

    def _try(self, unit: int, *, is_alone: bool, is_second: bool = False) -> None:
        """Make a unit that this worker has claimed. If it was tried before, only if it `is_alone`.

        With `is_second`, another worker makes it, too, and may yet succeed.
        """
        if self._units.is_done(unit):
            self._done.add(unit)
            return
        number = self._attempts.begin(unit)
        if number is None:
            if is_alone and not is_second:  # otherwise another worker may still make it
                self._failed[unit] = self._attempts.reason(unit)
            return
        self._running[unit] = number
        self._beginning.discard(unit)
        if number > 1 and not is_alone:
            self._attempts.remove(unit, range(number, number + 1))
        else:
            began_at = time.monotonic()
            error = self._units.try_to_make(unit)
            self._longest_seconds = max(self._longest_seconds, time.monotonic() - began_at)
            if self._stopped.is_set():
                return  # `_stop` has removed the attempt. A process that ends makes units fail
            if error:
                self._attempts.fail(unit, number, self._units.reason(unit, error))
            else:
                self._attempts.remove(unit, range(1, number + 1))
                self._done.add(unit)
        self._running.pop(unit, None)

    def _stop(self) -> None:
        """Remove the attempts and claims of this process: an interrupted unit has not failed."""
        self._stopped.set()
        deadline = time.monotonic() + _STOP_SECONDS
        while self._beginning and time.monotonic() < deadline:  # otherwise claims and attempts would stay
            time.sleep(0.01)
        with suppress(OSError):  # without the store, attempts stay, and claims end after some seconds
            for unit, number in list(self._running.items()):
                self._attempts.withdraw(unit, number)
                self._shared.release(self._units.claim(unit))
                self._shared.release(_again(self._units.claim(unit)))


def _again(claim: str) -> str:
    """Return the claim of the worker that makes a unit a second time."""
    return f"{claim}-again"


def run_here(units: Units, advance: Callable[[int], None], index: int | None = None, of: int | None = None) -> list[Failure]:
    """Make units in this process; see Worker.run. Without an index it is the only worker, and tries failed units again."""
    if index is None or of is None:
        Attempts(units).forget()
        index, of = 0, 1
    return Worker(units, index, of).run(advance)
