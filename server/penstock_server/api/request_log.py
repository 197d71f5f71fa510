"""Headers of all responses: the request's id, by which a trainer's error leads to the server's log, and what a drain needs."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from secrets import token_hex

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.wire.names import DRAINING, REQUEST_ID
from penstock_server.api.service import Service
from penstock_server.logs import request_id

_NAME = REQUEST_ID.lower().encode()
_WELL_FORMED = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class RequestLog:
    """ASGI layer around the application: names each request, by the client's id if that is well-formed."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request. Its id stays set afterwards: uvicorn, which runs a task a request, logs what this raises."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == _NAME), b"")
        named = given if _WELL_FORMED.fullmatch(given) else token_hex(6).encode()
        request_id.set(named.decode())

        def send_named(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                headers = [*message["headers"], (_NAME, named)]
                message["headers"] = _as_draining(headers) if self._service.is_draining else headers
            return send(message)

        await self._app(scope, receive, send_named)


def _as_draining(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Returns the headers of a response that makes the client leave this server. A cache must not repeat them."""
    kept = (header for header in headers if header[0] != b"cache-control")
    return [*kept, (b"cache-control", b"no-store"), (b"connection", b"close"), (DRAINING.lower().encode(), b"true")]
