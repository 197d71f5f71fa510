"""Ids of requests: in the response, in the log, and in problems, so that a trainer's error leads to the server's log."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from secrets import token_hex

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.wire.names import REQUEST_ID
from penstock_server.logs import request_id

_NAME = REQUEST_ID.lower().encode()
_WELL_FORMED = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class RequestLog:
    """ASGI layer around the application: names each request, by the client's id if that is well-formed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

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
                message["headers"] = [*message["headers"], (_NAME, named)]
            return send(message)

        await self._app(scope, receive, send_named)
