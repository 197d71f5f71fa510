"""Limits of connections: their number, and the size and duration of a request.

uvicorn has no such limits: with httptools, the head of a request may have any size and take any time.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock_server.monitoring.metrics import Metrics
from penstock_server.security.tls import subject_of

MAX_HEAD_BYTES = 64 << 10  # of the request line with its query, and the headers
MAX_BODY_BYTES = 64 << 10  # no request needs one
REQUEST_SECONDS = 30.0  # from the first byte of a request, or the start of its connection after TLS, to its last byte
MAX_PIPELINED = 16  # requests that wait on one connection


class Connections:
    """Number of open connections of one process: at most `most`, and half of that from one address."""

    def __init__(self, most: int, metrics: Metrics) -> None:
        self.most, self.most_per_address = most, max(1, most // 2)
        self.metrics = metrics
        self._by_address = Counter[str]()
        self._total = 0

    def open(self, address: str) -> str | None:
        """Counts a connection, and returns None. If there are too many, returns the reason instead."""
        if self._total >= self.most:
            self.metrics.limits.labels("connections").inc()
            return f"this process of the server has {self._total:,} connections, and its limit is {self.most:,}."
        if self._by_address[address] >= self.most_per_address:
            self.metrics.limits.labels("connections_per_address").inc()
            return f"this address has {self._by_address[address]:,} connections, and one may have half of {self.most:,}."
        self._by_address[address] += 1
        self._total += 1
        return None

    def close(self, address: str) -> None:
        """Counts a connection no more."""
        self._total -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


class BoundedProtocol(HttpToolsProtocol):
    """Protocol of one connection. A request beyond a limit gets a problem, and the connection closes.

    The state of each request has the subject of the client certificate.
    """

    def __init__(self, connections: Connections, **settings: Any) -> None:
        super().__init__(**settings)
        self._bounds = connections
        self._address = ""
        self._is_counted = self._is_refused = False
        self._in_head = True
        self._num_bytes = 0  # of the head, then of the body
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Counts the connection, or refuses it."""
        super().connection_made(transport)
        if certificate := transport.get_extra_info("peercert"):
            self.app_state = {**self.app_state, "certificate": subject_of(certificate)}
        self._address = self.client[0] if self.client else ""
        if reason := self._bounds.open(self._address):
            self._refuse(429, f"{reason} Retry in a second; if it persists, raise --max-connections.")
            return
        self._is_counted = True
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Counts the connection no more."""
        self._disarm()
        if self._is_counted:
            self._is_counted = False
            self._bounds.close(self._address)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses data, unless the head or the body is too large."""
        if self._is_refused:
            return
        self._num_bytes += len(data)
        if self._in_head and self._num_bytes > MAX_HEAD_BYTES:
            self._limited("head_bytes", 431, f"the head of a request has at most {MAX_HEAD_BYTES:,} bytes. Shorten the URL.")
        elif self._num_bytes > MAX_HEAD_BYTES + MAX_BODY_BYTES:
            self._limited(
                "body_bytes", 413, f"the body of a request has at most {MAX_BODY_BYTES:,} bytes. No request needs one."
            )
        else:
            # The parser skips empty lines before a request, but with any data uvicorn ends its limit of the time between two.
            if not self._deadline and (self.cycle is None or self.cycle.response_complete):
                self._expect_request()
            super().data_received(data)

    def on_message_begin(self) -> None:
        """Starts the deadline of a request."""
        super().on_message_begin()
        if not self._deadline:
            self._expect_request()
        self.scope["abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        """Starts to answer a request, unless too many wait."""
        self._in_head = False
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            raise ValueError("too many pipelined requests")  # the parser stops, and uvicorn responds with a 400

    def on_message_complete(self) -> None:
        """Ends the deadline of a request."""
        self._disarm()
        self._in_head, self._num_bytes = True, 0
        super().on_message_complete()

    def _expect_request(self) -> None:
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self._too_late)

    def _disarm(self) -> None:
        if self._deadline:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        self._deadline = None
        self._limited("request_seconds", 408, f"a request must arrive within {REQUEST_SECONDS:g} seconds. Retry.")

    def _limited(self, limit: str, status: int, reason: str) -> None:
        self._bounds.metrics.limits.labels(limit).inc()
        self._refuse(status, reason)

    def _refuse(self, status: int, reason: str) -> None:
        self._disarm()
        self._is_refused = True
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_refusal(status, reason))
            self.transport.close()
        else:  # another response is being sent
            self.transport.abort()


def _refusal(status: int, reason: str) -> bytes:
    slug = "limit-exceeded" if status == HTTPStatus.TOO_MANY_REQUESTS else "bad-request"
    content = {"type": f"urn:penstock:problem:{slug}", "title": HTTPStatus(status).phrase, "status": status, "detail": reason}
    body = json.dumps(content).encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "content-type: application/problem+json",
        f"content-length: {len(body)}",
        "connection: close",
        *(("retry-after: 1",) if status == HTTPStatus.TOO_MANY_REQUESTS else ()),
    )
    return "\r\n".join((*head, "", "")).encode() + body


def protocol_of(connections: Connections) -> Callable[..., BoundedProtocol]:
    """Returns a factory of protocols, one for each connection."""
    return lambda **settings: BoundedProtocol(connections, **settings)
