"""The transport: one GET, tried again over all servers until it succeeds, is refused, or time is up."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx

from penstock.errors import (
    AddressError,
    DataError,
    PenstockError,
    ServerUnavailable,
    SnapshotGone,
    SpecError,
    UnknownDataset,
    WireError,
)

T = TypeVar("T")

log = logging.getLogger("penstock")

_FIRST_DELAY_SECONDS = 0.1
_LONGEST_DELAY_SECONDS = 10.0
_REPORT_SECONDS = 10.0
_BAR_WIDTH = 20
_CONNECT_TIMEOUT_SECONDS = 5.0
_READ_TIMEOUT_SECONDS = 120.0  # of silence: a cold server may tokenize a large row group before its first byte

_EXCEPTIONS: Mapping[str, type[PenstockError]] = {
    "bad-parameter": SpecError,
    "unknown-dataset": UnknownDataset,
    "step-out-of-range": AddressError,
    "rank-out-of-range": AddressError,
    "row-out-of-range": AddressError,
    "snapshot-gone": SnapshotGone,
    "dataset-refused": DataError,
    "shard-unreadable": DataError,
    "bad-row": DataError,
    "index-failed": DataError,
}


class _TryAgain(Exception):
    """This attempt failed in a way that another may not; `after_seconds` is how long the server asks to be left alone."""

    def __init__(self, reason: str, after_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.after_seconds = after_seconds


class _NotYet(_TryAgain):
    """The server is at work on what was asked for, and says how far it is: `share` of it, from 0 to 1, is done."""

    def __init__(self, reason: str, after_seconds: float, share: float) -> None:
        super().__init__(reason, after_seconds)
        self.share = share


class Transport:
    """GETs from one or more servers that hold the same data.

    Connections survive no fork: make it in the process that uses it. One thread uses it at a time; `interrupt` alone may
    come from another. `num_retries` counts attempts that failed and were made again, `num_bytes` what came in bodies.
    """

    def __init__(self, servers: Sequence[str], *, retry_seconds: float) -> None:
        self.num_retries = self.num_bytes = 0
        self._servers = servers
        self._retry_seconds = retry_seconds
        self._interrupted = threading.Event()
        self._socket: socket.socket | None = None
        self._server = 0
        self._last_report = -_REPORT_SECONDS
        self._has_bar = False
        self._not_before = dict.fromkeys(servers, 0.0)
        timeout = httpx.Timeout(_READ_TIMEOUT_SECONDS, connect=_CONNECT_TIMEOUT_SECONDS)
        # Token ids do not shrink enough to pay for the CPU of a compressed transfer.
        self._client = httpx.Client(timeout=timeout, headers={"Accept-Encoding": "identity"})

    def get(self, path: str, query: Mapping[str, str], decode: Callable[[bytes], T]) -> T:
        """What `decode` makes of the body at `path`. A WireError of `decode` counts as a failed attempt.

        Raises ServerUnavailable: no attempt succeeded within retry_seconds, or the transport was interrupted.
        Raises the PenstockError that fits the refusal: the server answered that it will not, whoever asks.
        """
        deadline = time.monotonic() + self._retry_seconds
        delay = _FIRST_DELAY_SECONDS
        failures = 0
        while True:
            server = self._servers[self._server]
            try:
                result = self._attempt(server, path, query, decode)
            except _NotYet as progress:
                # However long it takes: the server answers, so retry_seconds does not run.
                deadline = time.monotonic() + self._retry_seconds
                self._report(progress)
                if self._interrupted.wait(max(progress.after_seconds, _FIRST_DELAY_SECONDS)):
                    raise ServerUnavailable(f"interrupted while waiting for {server}") from None
                continue
            except _TryAgain as failure:
                reason = f"{server}: {failure}"
            else:
                if failures:
                    log.warning("penstock: %s answers again after %d failed attempts", server, failures)
                return result
            failures += 1
            left = deadline - time.monotonic()
            if left <= 0:
                raise ServerUnavailable(
                    f"no answer within retry_seconds={self._retry_seconds:g} from {', '.join(self._servers)}; the last attempt "
                    f"failed with {reason}. Start the server (penstock serve DATA_DIR) or correct the address; a run resumes "
                    f"from its last checkpoint."
                )
            if failures == 1:
                log.warning("penstock: %s; trying again for up to %g seconds", reason, self._retry_seconds)
            asked = self._not_before[self._servers[self._server]] - time.monotonic()
            # Full jitter, so that a thousand ranks do not come back as one. The last attempt is made when time is up.
            if self._interrupted.wait(min(max(random.uniform(0, delay), asked), left)):
                raise ServerUnavailable(f"interrupted while waiting for {server}")
            delay = min(2 * delay, _LONGEST_DELAY_SECONDS)

    def get_once(self, path: str, query: Mapping[str, str], decode: Callable[[bytes], T]) -> T | None:
        """One attempt of `get`: None if it failed in a way that another may not."""
        try:
            return self._attempt(self._servers[self._server], path, query, decode)
        except _TryAgain:
            return None

    def _attempt(self, server: str, path: str, query: Mapping[str, str], decode: Callable[[bytes], T]) -> T:
        """Raises _TryAgain: it failed; the next attempt is another server's turn."""
        try:
            return decode(self._fetch(server + path, query))
        except (httpx.RequestError, WireError, _TryAgain) as error:
            if self._interrupted.is_set():
                raise ServerUnavailable(f"interrupted while reading from {server}") from error
            if isinstance(error, _NotYet):
                raise
            after_seconds = error.after_seconds if isinstance(error, _TryAgain) else 0.0
            self._not_before[server] = time.monotonic() + after_seconds
            self._server = (self._server + 1) % len(self._servers)
            self.num_retries += 1
            raise _TryAgain(str(error) or type(error).__name__, after_seconds) from error

    def _report(self, progress: _NotYet) -> None:
        """A bar that grows in its line of a terminal; elsewhere a line now and then."""
        if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":  # of many ranks one draws
            done = round(_BAR_WIDTH * progress.share)
            bar = f"penstock [{'#' * done}{'.' * (_BAR_WIDTH - done)}] {progress.share:4.0%} {progress}"
            sys.stderr.write(f"\r{bar[: shutil.get_terminal_size().columns - 1]}\x1b[K")
            sys.stderr.flush()
            self._has_bar = True
        elif time.monotonic() - self._last_report >= _REPORT_SECONDS:
            self._last_report = time.monotonic()
            log.warning("penstock: %s", progress)

    def _end_bar(self) -> None:
        if self._has_bar:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._has_bar = False

    def interrupt(self) -> None:
        """Makes a `get` in another thread fail now, whether it reads or waits; nothing can be fetched afterwards."""
        self._interrupted.set()
        if self._socket:
            # Closing it would not wake a thread that is blocked in it; shutting it down does.
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connections."""
        self._end_bar()
        self._client.close()

    def _fetch(self, url: str, query: Mapping[str, str]) -> bytes:
        response = self._client.get(url, params=dict(query), extensions={"trace": self._remember_socket})
        if response.status_code == 200:
            self.num_bytes += len(response.content)
            return response.content
        problem = _problem(response)
        detail = problem.get("detail") or f"HTTP status {response.status_code}"
        kind = _EXCEPTIONS.get(problem.get("type", "").rpartition(":")[2])
        if kind:
            raise kind(detail)
        if problem.get("type", "").endswith(":index-not-ready"):
            raise _NotYet(detail, _seconds(response.headers.get("Retry-After", "")), _share(problem))
        if response.status_code in (408, 425, 429) or response.status_code >= 500:
            raise _TryAgain(detail, _seconds(response.headers.get("Retry-After", "")))
        raise PenstockError(
            f"{url} answered {response.status_code}: {detail} Is there a penstock server at this address, and nothing behind "
            f"its port, as in http://localhost:8000?"
        )

    def _remember_socket(self, event: str, info: Mapping[str, Any]) -> None:
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._socket = info["return_value"].get_extra_info("socket")
            if self._interrupted.is_set():  # while this connection was being made
                self.interrupt()


def _problem(response: httpx.Response) -> dict[str, str]:
    try:
        content = json.loads(response.content)
    except ValueError:
        return {}
    return {str(k): str(v) for k, v in content.items()} if isinstance(content, dict) else {}


def _share(problem: Mapping[str, str]) -> float:
    """How much of it is done, from 0 to 1; 0 where the server does not tell."""
    try:
        return min(max(int(problem["done"]) / int(problem["total"]), 0.0), 1.0)
    except (KeyError, ValueError, ZeroDivisionError):
        return 0.0


def _seconds(retry_after: str) -> float:
    """The seconds that a Retry-After header asks for: a number of them, or a date."""
    if retry_after.isascii() and retry_after.isdigit():
        return float(retry_after)
    with suppress(ValueError):
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    return 0.0
