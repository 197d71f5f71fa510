"""Layer around all requests: counts them, and gives them ids, by which a trainer's error leads to the server's log."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable
from secrets import token_hex

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.wire.names import DRAINING, REQUEST_ID
from penstock_server.api.service import Service
from penstock_server.api.shown import ShownPaths, shown_paths
from penstock_server.logs import request_id
from penstock_server.problems import Busy

_NAME = REQUEST_ID.lower().encode()
_METHODS = ("GET", "HEAD", "POST")
_WELL_FORMED = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class RequestLog:
    """ASGI layer that counts each request, and gives it an id: the client's, if that is well-formed."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service, self._metrics = app, service, service.metrics
        self._paths = ShownPaths(service.catalog.folders)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request. Its id stays set afterwards: uvicorn, which runs a task a request, logs what this raises."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == _NAME), b"")
        named = given if _WELL_FORMED.fullmatch(given) else token_hex(6).encode()
        request_id.set(named.decode())
        shown_paths.set(self._paths)
        began_at, first_byte_at, num_bytes = time.perf_counter(), 0.0, 0

        def send_named(message: Message) -> Awaitable[None]:
            nonlocal first_byte_at, num_bytes
            if message["type"] == "http.response.start":
                headers = [*message["headers"], (_NAME, named)]
                message["headers"] = _as_draining(headers) if self._service.is_draining else headers
                first_byte_at = time.perf_counter()
            else:
                num_bytes += len(message.get("body", b""))
            return send(message)

        try:
            await self._app(scope, receive, send_named)
        finally:
            self._count(scope, first_byte_at - began_at if first_byte_at else None, num_bytes)

    def _count(self, scope: Scope, first_byte_seconds: float | None, num_bytes: int) -> None:
        """Counts a request. All labels have a fixed set of values, so a request cannot create a series."""
        route = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        problem = "aborted" if first_byte_seconds is None else scope.get("problem", "none")
        self._metrics.requests.labels(route, method, problem).inc()
        self._metrics.response_bytes.labels(route).inc(num_bytes)
        if first_byte_seconds is not None:
            self._metrics.first_byte_seconds.labels(route).observe(first_byte_seconds)
        if problem == Busy.slug:
            self._metrics.refusals.inc()


def _as_draining(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Returns the headers of a response that makes the client leave this server. A cache must not repeat them."""
    kept = (header for header in headers if header[0] != b"cache-control")
    return [*kept, (b"cache-control", b"no-store"), (b"connection", b"close"), (DRAINING.lower().encode(), b"true")]
