"""Transport: one GET, tried on all servers in turn until one answers, all refuse, or the deadline passes."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from random import uniform
from typing import TypeVar

from penstock.access import Access
from penstock.errors import PenstockError, ServerUnavailable, WireError
from penstock.http import HttpClient
from penstock.logs import StatusLine, log
from penstock.responses import BlocksNotReady, Busy, Denied, IndexNotReady, TransientError
from penstock.servers import Servers
from penstock.text import counted, printable_lines
from penstock.waits import Reporter

T = TypeVar("T")

_FIRST_DELAY_SECONDS = 0.1
_MAX_DELAY_SECONDS = 10.0
# A server that reads or tokenizes reports it every two seconds: see BlocksNotReady. A server that sends nothing for 30 s hangs.
_READ_SECONDS = 30.0
_STUCK_SECONDS = 120.0  # of preparation without progress, before the next server is tried
_QUIET_SECONDS = 10.0  # between log lines of one kind: otherwise a network that flips bits would log each failure
_BAR_WIDTH = 20


class _Interrupted(ServerUnavailable):
    """The caller interrupted the transport."""


class Transport:
    """GETs from servers that hold the same data. `servers` records their failures, and may outlive the transport.

    After a failure the transport tries the next server at once; it waits only after all have failed. It does the same after a
    refusal: that server may have another snapshot, or a broken disk. At the `first_contact` of a run, data that cannot be
    opened, responses that no penstock server sends and refused tokens are refusals. A running loop waits for such servers, also
    while a token that was accepted is replaced.

    A server that will stop says so in its responses. The next request goes to another one: that is no failure.

    Create the transport in the process that uses it; in a fork `close` does nothing. One thread uses it at a time; only
    `interrupt` may be called from another thread. For `allocate`, `reporter` and `access` see HttpClient.

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
        allocate: Callable[[int], memoryview] | None = None,
        reporter: Reporter | None = None,
        access: Access | None = None,
    ) -> None:
        self.num_retries = self.num_corrupted = self.num_bytes = 0
        self._servers = servers
        self._retry_seconds, self._first_contact = retry_seconds, first_contact
        self._access = access or Access()
        self._process = os.getpid()
        self._log = RetryLog(retry_seconds)
        reporter = reporter or Reporter()
        self._clock = reporter.clock
        self._http = HttpClient(min(_READ_SECONDS, max(retry_seconds, 1.0)), allocate, reporter, self._access)

    def get(self, target: str, decode: Callable[[memoryview], T]) -> T:
        """Return `decode(body)` for `target` (path and query). A WireError from `decode` is a failed attempt.

        Raises:
            ServerUnavailable: for retry_seconds no attempt succeeded and no server answered "not ready" or "busy", or the
                transport was interrupted.
            PenstockError: all servers refused the request; the subclass fits the refusal.
        """
        failures: dict[str, Exception] = {}
        try:
            return self._get(target, decode, failures)
        finally:
            failures.clear()  # their tracebacks refer to this frame: the cycle would keep the body in memory

    def _get(self, target: str, decode: Callable[[memoryview], T], failures: dict[str, Exception]) -> T:
        """Implement `get`. `failures` holds the last failure of each server."""
        deadline = time.monotonic() + self._retry_seconds
        delay = _FIRST_DELAY_SECONDS
        is_last = False
        while True:
            pause = "retry"  # the stage of the pause after these attempts
            for server in self._servers.to_try(also_busy=is_last):
                try:
                    return self._attempt(server, target, decode)
                except _Interrupted:
                    raise
                except (IndexNotReady, Busy) as alive:
                    # The server answers, so retry_seconds starts again, however long it works.
                    deadline = time.monotonic() + alive.after_seconds + self._retry_seconds
                    is_last = False
                    pause = "index" if isinstance(alive, IndexNotReady) else "budget"
                    if isinstance(alive, IndexNotReady):
                        delay = _FIRST_DELAY_SECONDS
                        failures.pop(server, None)
                    else:
                        failures[server] = alive
                except (TransientError, PenstockError) as failure:
                    failures[server] = failure
                if all(isinstance(failures.get(address), PenstockError) for address in self._servers.addresses):
                    raise _refusal({address: failures[address] for address in self._servers.addresses})
            left = deadline - time.monotonic()
            if is_last or (failures and left <= 0):
                raise self._unavailable(failures)
            if len(failures) > 1:
                self._log.all_failed(failures)
            # Full jitter: otherwise a thousand ranks would return at once, also after the same Retry-After. The last attempt
            # is made at the deadline.
            wait = self._servers.seconds_until_ready() + uniform(0, delay)
            is_last = wait >= left
            self._clock.enter(pause)
            self._http.wait(max(0.0, min(wait, left)))
            if self._http.is_interrupted:
                raise _Interrupted(f"interrupted while waiting for {self._servers.current}")
            delay = min(2 * delay, _MAX_DELAY_SECONDS)

    def get_some(self, target: str, decode: Callable[[memoryview], Iterable[T]], *, then: str | None = None) -> list[T]:
        """Make one attempt; return the items that `decode` yields before the first missing or corrupted one.

        `then` is the likely next target: its request is sent ahead. The list is empty if the attempt fails, is refused, or no
        server may be asked now: call `get` to retry or to learn the reason.

        Raises ServerUnavailable: the transport was interrupted.
        """
        items: list[T] = []

        def collect(body: memoryview) -> None:
            for item in decode(body):
                items.append(item)  # noqa: PERF402 (extend promises nothing where its argument raises)

        servers = self._servers.to_try()
        if not servers:
            return []
        try:
            self._attempt(servers[0], target, collect, then)
        except _Interrupted:
            raise
        except TransientError as fault:
            with suppress(PenstockError):
                collect(memoryview(fault.received))
        except PenstockError:
            pass
        return items

    def interrupt(self) -> None:
        """Make a `get` in another thread fail now, whether it reads or waits; later calls fail, too."""
        if os.getpid() == self._process:
            self._http.interrupt()

    def close(self) -> None:
        """Close the connections."""
        if os.getpid() == self._process:  # a fork would close its parent's connections
            self._http.close()
            self._log.end_bar()

    def _attempt(self, server: str, target: str, decode: Callable[[memoryview], T], then: str | None = None) -> T:
        """Try one server. Raises TransientError: retry on another server. Raises PenstockError: the server refused."""
        try:
            result = self._ask(server, target, decode, then)
        except IndexNotReady as progress:
            self._servers.leave_alone(server, max(progress.after_seconds, _FIRST_DELAY_SECONDS))
            self._log.progress(progress)
            raise
        except (TransientError, PenstockError) as failure:
            if self._http.is_interrupted:
                raise _Interrupted(f"interrupted while reading from {server}") from failure
            if self._http.request_id:
                failure.args = (f"{failure} (request {self._http.request_id})",)
            if isinstance(failure, TransientError) or len(self._servers) > 1:
                self.num_retries += 1
                next_server = self._servers.failed(server, getattr(failure, "after_seconds", 0.0))
                self._log.failed(server, failure, next_server)
            raise
        is_preferred = not self._http.is_draining and self._servers.answered(server)
        self._log.answered(server, is_preferred=is_preferred)
        self._leave_draining(server)
        return result

    def _leave_draining(self, server: str) -> bool:
        """Go on with another server if this one will stop. Return whether there is one."""
        if not self._http.is_draining or (next_server := self._servers.leave(server)) == server:
            return False
        self._log.leaving(server, next_server)
        return True

    def _ask(self, server: str, target: str, decode: Callable[[memoryview], T], then: str | None) -> T:
        """Ask one server, again while it prepares the blocks. Raises as `_attempt` does."""
        share, since = -1.0, 0.0
        while True:
            try:
                body = self._http.get(server, target, then=then)
                self._access.was_accepted = True
                self.num_bytes += len(body)
                return decode(body)
            except BlocksNotReady as progress:
                if self._leave_draining(server):
                    raise
                self._log.progress(progress)
                if progress.share != share:
                    share, since = progress.share, time.monotonic()
                elif time.monotonic() - since > _STUCK_SECONDS:
                    raise TransientError(f"{progress} It has made no progress for {_STUCK_SECONDS:.0f} seconds") from None
            except WireError as damage:
                self.num_corrupted += 1
                self._http.close()  # a kept connection may hold the rest of another response
                raise TransientError(str(damage)) from damage
            except TransientError as fault:
                self.num_bytes += len(fault.received)
                if isinstance(fault, Denied) and self._access.read_token_again(server):
                    continue
                if fault.refusal and (self._first_contact or (isinstance(fault, Denied) and not self._access.was_accepted)):
                    raise fault.refusal(str(fault)) from None
                raise

    def _unavailable(self, failures: Mapping[str, Exception]) -> ServerUnavailable:
        return ServerUnavailable(
            f"no answer within retry_seconds={self._retry_seconds:g} from {', '.join(self._servers.addresses)}; the last "
            f"attempts failed with {_reasons(failures)}. Start the server (penstock serve DATA_DIR) or correct the address; a "
            f"run resumes from its last checkpoint."
        )


def _reasons(failures: Mapping[str, Exception]) -> str:
    return "; ".join(f"{server}: {failure}".rstrip(".") for server, failure in failures.items())


def _refusal(failures: Mapping[str, Exception]) -> Exception:
    """Return the error to raise after all servers refused."""
    first = next(iter(failures.values()))
    if len(failures) == 1:
        return first
    lines = "\n".join(f"{server}: {refusal}" for server, refusal in failures.items())
    return type(first)(f"all {len(failures)} servers refuse.\n{lines}")


class RetryLog:
    """Log of one transport: a line for each stage of an outage, and a progress bar while a server prepares data.

    An outage begins with the first failure and ends with the next answer.
    """

    def __init__(self, retry_seconds: float) -> None:
        self._retrying = f"trying again for up to {retry_seconds:g} seconds"
        self._num_failures = 0
        self._stages: set[str] = set()  # logged in this outage
        self._logged_at: dict[str, float] = {}
        self._bar: StatusLine | None = None  # from the first progress on

    def failed(self, server: str, failure: Exception, next_server: str) -> None:
        """Log a failed attempt and the next server, which may be the same."""
        self._num_failures += 1
        again = "asking again until it has room" if isinstance(failure, Busy) else self._retrying
        follows = again if next_server == server else f"failing over to {next_server}"
        self._log_once("failed", f"{server}: {failure}; {follows}")

    def all_failed(self, failures: Mapping[str, Exception]) -> None:
        """Log that all servers failed, with their failures."""
        self._log_once("all failed", f"no server has answered ({_reasons(failures)}); {self._retrying}")

    def answered(self, server: str, *, is_preferred: bool) -> None:
        """Log the end of an outage: a server answered. Log also that the rank prefers it to the last one."""
        self.end_bar()
        if self._stages:
            _log(f"{server} answers after {counted(self._num_failures, 'failed attempt')}")
            self._stages.clear()
        self._num_failures = 0
        if is_preferred:
            self._log("preferred", f"{server} is ready: going on with it")

    def leaving(self, server: str, next_server: str) -> None:
        """Log that a server will stop, and which one is asked next."""
        self._log(f"leaving {server}", f"{server} will stop; going on with {next_server}")

    def progress(self, progress: IndexNotReady) -> None:
        """Draw a progress bar on the terminal of the first rank; log a line now and then elsewhere."""
        self._bar = self._bar or StatusLine()
        if self._bar.is_seen and os.environ.get("RANK", "0") == "0":
            done = round(_BAR_WIDTH * progress.share)
            self._bar.draw(f"penstock [{'#' * done}{'.' * (_BAR_WIDTH - done)}] {progress.share:4.0%} {progress}")
        else:
            self._log("progress", str(progress))

    def end_bar(self) -> None:
        """Clear the progress bar, if it is drawn."""
        if self._bar:
            self._bar.clear()

    def _log_once(self, stage: str, text: str) -> None:
        if stage not in self._stages and self._log(stage, text):
            self._stages.add(stage)

    def _log(self, stage: str, text: str) -> bool:
        now = time.monotonic()
        if now - self._logged_at.get(stage, -math.inf) < _QUIET_SECONDS:
            return False
        self._logged_at[stage] = now
        _log(text)
        return True


def _log(text: str) -> None:
    log.warning("penstock: %s", printable_lines(text))
