"""The transport: one GET, tried over all servers in turn until one answers, all refuse, or time is up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from random import uniform
from typing import Generic, TypeVar

from penstock.errors import DataError, PenstockError, ServerUnavailable, WireError
from penstock.text import without_passwords
from penstock.transport.connection import Connection
from penstock.transport.responses import Busy, NotReady, Preparing, TransientError, Unavailable, UnexpectedServer
from penstock.transport.retry_log import RetryLog
from penstock.transport.servers import Servers

T = TypeVar("T")

_FIRST_DELAY_SECONDS = 0.1
_MAX_DELAY_SECONDS = 10.0
# A server that reads or tokenizes says so every two seconds: see Preparing. One that sends nothing for so long hangs.
_READ_SECONDS = 30.0
_STUCK_SECONDS = 120.0  # of preparing without progress; then the next server is asked


class _Interrupted(ServerUnavailable):
    """Whoever asked does not want the answer any more."""


@dataclass(frozen=True, slots=True)
class _Question(Generic[T]):
    """What is asked for, and what is to be made of the answer. See Connection.fetch for `then`."""

    target: str
    decode: Callable[[memoryview], T]
    then: str | None = None


class Transport:
    """GETs from servers that hold the same data. What they do is remembered in `servers`, which may outlive this.

    A server that fails gives way to the next at once, and only after all have failed does the run wait. One that refuses gives
    way, too: it may have another snapshot than the others, or a broken disk. With `first_contact` an answer that no penstock
    server would give is a refusal; a run that is under way takes it for a load balancer whose servers are away. Without
    `is_awaited` data that cannot be opened now is refused, too.

    Connections survive no fork: make it in the process that uses it; in another one closing it does nothing. One thread uses
    it at a time; `interrupt` alone may come from another. `num_retries` counts attempts that failed, after which others are
    made while there is time, `num_corrupted` those of them whose body came and was not what had been asked for, and `num_bytes`
    what came in bodies, those that broke off included. For `allocate` see Connection.
    """

    def __init__(
        self,
        servers: Servers,
        *,
        retry_seconds: float,
        first_contact: bool = False,
        is_awaited: bool = False,
        allocate: Callable[[int], memoryview] | None = None,
    ) -> None:
        self.num_retries = self.num_corrupted = self.num_bytes = 0
        self._servers = servers
        self._retry_seconds, self._first_contact, self._is_awaited = retry_seconds, first_contact, is_awaited
        self._process = os.getpid()
        self._log = RetryLog(retry_seconds, first_contact=first_contact)
        self._connection = Connection(allocate)
        self._read_seconds = min(_READ_SECONDS, max(retry_seconds, 1.0))

    def get(self, target: str, decode: Callable[[memoryview], T]) -> T:
        """What `decode` makes of the body at `target`, path and query. A WireError of `decode` counts as a failed attempt.

        Raises ServerUnavailable: no attempt succeeded, and no server said "not yet" or "busy", within retry_seconds, or the
        transport was interrupted.
        Raises the PenstockError that fits the refusal: all servers answered that they will not, whoever asks.
        """
        failures: dict[str, Exception] = {}
        try:
            return self._get(_Question(target, decode), failures)
        finally:
            failures.clear()  # this call is in their tracebacks: with what came it would wait for the garbage collector

    def _get(self, question: _Question[T], failures: dict[str, Exception]) -> T:
        """As `get`. `failures` holds the last one of each server."""
        deadline = time.monotonic() + self._retry_seconds
        delay = _FIRST_DELAY_SECONDS
        is_last = False
        while True:
            for server in self._servers.turn(also_busy=is_last):
                try:
                    return self._attempt(server, question)
                except _Interrupted:
                    raise
                except NotReady as progress:
                    # However long it takes: the server answers, so retry_seconds does not run.
                    deadline = time.monotonic() + progress.after_seconds + self._retry_seconds
                    is_last, delay = False, _FIRST_DELAY_SECONDS
                    failures.pop(server, None)
                except (TransientError, PenstockError) as failure:
                    failures[server] = failure
                    if isinstance(failure, Busy):  # it lives, so that time is not up either
                        deadline, is_last = time.monotonic() + failure.after_seconds + self._retry_seconds, False
                if sum(isinstance(failure, PenstockError) for failure in failures.values()) == len(self._servers):
                    raise _refusal(failures)
            left = deadline - time.monotonic()
            if is_last or (failures and left <= 0):
                raise self._unavailable(failures)
            if failures:
                self._log.nobody(failures)
            # Full jitter, so that a thousand ranks do not come back as one, also if all were asked to at the same moment. The
            # last round is made when time is up.
            wait = self._servers.seconds_until_ready() + uniform(0, delay)
            is_last = wait >= left
            if self._connection.interrupted.wait(min(wait, left)):
                raise _Interrupted(f"interrupted while waiting for {self._servers.current}")
            delay = min(2 * delay, _MAX_DELAY_SECONDS)

    def get_some(self, target: str, decode: Callable[[memoryview], Iterable[T]], *, then: str | None = None) -> list[T]:
        """What one attempt brings: the items that `decode` makes of the body, up to the first that is missing or damaged.

        `then` is the target that will be asked for next, if all goes well: the server is told at once.
        Nothing, where it fails altogether, is refused, or no server is to be asked now: `get` then tells more.
        Raises ServerUnavailable: the transport was interrupted.
        """
        items: list[T] = []

        def collect(body: memoryview) -> None:
            for item in decode(body):
                items.append(item)  # noqa: PERF402 (extend promises nothing where its argument raises)

        turn = self._servers.turn()
        if not turn:
            return []
        try:
            self._attempt(turn[0], _Question(target, collect, then))
        except _Interrupted:
            raise
        except TransientError as fault:
            with suppress(PenstockError):
                collect(fault.received)
        except PenstockError:
            pass
        return items

    def interrupt(self) -> None:
        """Makes a `get` in another thread fail now, whether it reads or waits; nothing can be fetched afterwards."""
        if os.getpid() == self._process:
            self._connection.interrupt()

    def close(self) -> None:
        """Closes the connections; nothing can be fetched afterwards."""
        if os.getpid() == self._process:  # a fork would close those of the process that it came from
            self._connection.close()
            self._log.end_bar()

    def _attempt(self, server: str, question: _Question[T]) -> T:
        """Raises TransientError: it failed, and another may not. Raises a PenstockError: it was refused."""
        try:
            result = self._ask_until_prepared(server, question)
        except NotReady as progress:
            self._servers.leave_alone(server, max(progress.after_seconds, _FIRST_DELAY_SECONDS))
            self._log.progress(progress)
            raise
        except (TransientError, PenstockError) as failure:
            if self._connection.interrupted.is_set():
                raise _Interrupted(f"interrupted while reading from {server}") from failure
            if isinstance(failure, TransientError) or len(self._servers) > 1:
                self.num_retries += 1
                after_seconds = failure.after_seconds if isinstance(failure, TransientError) else 0.0
                self._log.failed(server, failure, self._servers.failed(server, after_seconds))
            raise
        is_back_home = self._servers.answered(server)
        self._log.answered(server)
        if is_back_home:
            self._log.came_home(server)
        return result

    def _ask_until_prepared(self, server: str, question: _Question[T]) -> T:
        share, since = -1.0, 0.0
        while True:
            try:
                return self._ask(server, question)
            except Preparing as progress:
                self._log.progress(progress)
                if progress.share != share:
                    share, since = progress.share, time.monotonic()
                elif time.monotonic() - since > _STUCK_SECONDS:
                    raise TransientError(f"{progress} It has made no progress for {_STUCK_SECONDS:.0f} seconds") from None

    def _ask(self, server: str, question: _Question[T]) -> T:
        try:
            body = self._connection.fetch(server, question.target, silence_seconds=self._read_seconds, then=question.then)
            self.num_bytes += len(body)
            return question.decode(body)
        except WireError as damage:
            self.num_corrupted += 1
            raise TransientError(str(damage)) from damage
        except Unavailable as away:
            if not self._is_awaited:
                raise DataError(without_passwords(str(away))) from None
            raise
        except UnexpectedServer as stranger:
            if self._first_contact:
                raise PenstockError(without_passwords(str(stranger))) from None
            raise
        except TransientError as fault:
            self.num_bytes += len(fault.received)
            raise

    def _unavailable(self, failures: Mapping[str, Exception]) -> ServerUnavailable:
        reasons = "; ".join(f"{server}: {failure}".removesuffix(".") for server, failure in failures.items())
        is_silent = any(isinstance(failure, TransientError) and failure.is_silence for failure in failures.values())
        advice = "Start the server (penstock serve DATA_DIR) or correct the address; a" if is_silent else "A"
        return ServerUnavailable(
            without_passwords(
                f"no answer within retry_seconds={self._retry_seconds:g} from {', '.join(self._servers.addresses)}; the last "
                f"attempts failed with {reasons.removesuffix('?')}{'?' if reasons.endswith('?') else '.'} {advice} run resumes "
                f"from its last checkpoint."
            )
        )


def _refusal(failures: Mapping[str, Exception]) -> Exception:
    """What to raise where all servers refuse."""
    first, *others = failures.values()
    if not others:
        return first
    words = "\n".join(f"{server}: {refusal}" for server, refusal in failures.items())
    return type(first)(without_passwords(f"all {len(failures)} servers refuse.\n{words}"))
