"""Transport: one GET, tried on all servers in turn until one answers, all refuse, or the deadline passes."""

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
# A server that reads or tokenizes reports it every two seconds: see Preparing. A server that sends nothing for 30 s hangs.
_READ_SECONDS = 30.0
_STUCK_SECONDS = 120.0  # of preparation without progress, before the next server is tried


class _Interrupted(ServerUnavailable):
    """The caller interrupted the transport."""


@dataclass(frozen=True, slots=True)
class _Question(Generic[T]):
    """A target to GET, and the decoder of its body. See Connection.fetch for `then`."""

    target: str
    decode: Callable[[memoryview], T]
    then: str | None = None


class Transport:
    """GETs from servers that hold the same data. `servers` records their failures, and may outlive the transport.

    After a failure the transport tries the next server at once; it waits only after all have failed. It does the same after a
    refusal: that server may have another snapshot, or a broken disk. A response that no penstock server sends is a refusal
    with `first_contact`; a running loop takes it for a load balancer without servers. Without `is_awaited`, data that cannot
    be opened now is a refusal, too.

    Connections do not survive a fork: create the transport in the process that uses it; in another process `close` does
    nothing. One thread uses it at a time; only `interrupt` may be called from another thread. For `allocate` see Connection.

    num_retries    failed attempts; others follow until the deadline
    num_corrupted  failed attempts whose body arrived, but was invalid
    num_bytes      bytes of bodies received, truncated bodies included
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
        """Return `decode(body)` for `target` (path and query). A WireError from `decode` is a failed attempt.

        Raises:
            ServerUnavailable: for retry_seconds no attempt succeeded and no server answered "not ready" or "busy", or the
                transport was interrupted.
            PenstockError: all servers refused the request; the subclass fits the refusal.
        """
        failures: dict[str, Exception] = {}
        try:
            return self._get(_Question(target, decode), failures)
        finally:
            failures.clear()  # their tracebacks refer to this frame: the cycle would keep the body in memory

    def _get(self, question: _Question[T], failures: dict[str, Exception]) -> T:
        """Implement `get`. `failures` holds the last failure of each server."""
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
                    # The server answers, so retry_seconds starts again, however long it prepares.
                    deadline = time.monotonic() + progress.after_seconds + self._retry_seconds
                    is_last, delay = False, _FIRST_DELAY_SECONDS
                    failures.pop(server, None)
                except (TransientError, PenstockError) as failure:
                    failures[server] = failure
                    if isinstance(failure, Busy):  # the server answers, so retry_seconds starts again
                        deadline, is_last = time.monotonic() + failure.after_seconds + self._retry_seconds, False
                if sum(isinstance(failure, PenstockError) for failure in failures.values()) == len(self._servers):
                    raise _refusal(failures)
            left = deadline - time.monotonic()
            if is_last or (failures and left <= 0):
                raise self._unavailable(failures)
            if failures:
                self._log.nobody(failures)
            # Full jitter: otherwise a thousand ranks would return at once, also after the same Retry-After. The last attempt
            # is made at the deadline.
            wait = self._servers.seconds_until_ready() + uniform(0, delay)
            is_last = wait >= left
            if self._connection.interrupted.wait(min(wait, left)):
                raise _Interrupted(f"interrupted while waiting for {self._servers.current}")
            delay = min(2 * delay, _MAX_DELAY_SECONDS)

    def get_some(self, target: str, decode: Callable[[memoryview], Iterable[T]], *, then: str | None = None) -> list[T]:
        """Make one attempt; return the items that `decode` yields before the first missing or damaged one.

        `then` is the likely next target: its request is sent ahead. The list is empty if the attempt fails, is refused, or no
        server may be asked now: call `get` to retry or to learn the reason.

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
        """Make a `get` in another thread fail now, whether it reads or waits; later calls fail, too."""
        if os.getpid() == self._process:
            self._connection.interrupt()

    def close(self) -> None:
        """Close the connections; later calls fail."""
        if os.getpid() == self._process:  # a fork would close its parent's connections
            self._connection.close()
            self._log.end_bar()

    def _attempt(self, server: str, question: _Question[T]) -> T:
        """Try one server. Raises TransientError: retry on another server. Raises PenstockError: the server refused."""
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
    """Return the error to raise after all servers refused."""
    first, *others = failures.values()
    if not others:
        return first
    words = "\n".join(f"{server}: {refusal}" for server, refusal in failures.items())
    return type(first)(without_passwords(f"all {len(failures)} servers refuse.\n{words}"))
