"""Error responses: one shape for all, a problem+json."""

from __future__ import annotations

import logging
from collections import defaultdict

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from penstock.errors import SpecError
from penstock.wire.report import TIMING_HEADER, format_timing
from penstock_server.api.shown import Json
from penstock_server.logs import Seldom, request_id
from penstock_server.problems import (
    MORE_THREADS,
    BadParameter,
    BlocksNotReady,
    Busy,
    LimitExceeded,
    NotReady,
    NotServing,
    OutOfMemory,
    Problem,
    TooManyAttempts,
    Unauthorized,
    lacks_threads,
)

log = logging.getLogger("penstock.app")

_MAX_LOGGED = 20  # failed requests a minute, of each kind of problem


def add_error_handlers(app: FastAPI) -> None:
    """Add a handler for each kind of error."""
    log_limits = defaultdict[type[Problem], Seldom](lambda: Seldom(_MAX_LOGGED))

    @app.exception_handler(Problem)
    async def problem(request: Request, error: Problem) -> Json:
        # What makes a client wait is no fault. A trainer's error has the id of its request, which leads to this line.
        if error.status >= 500 and not isinstance(error, NotReady | NotServing | Busy) and log_limits[type(error)].is_due():
            cause = error.__cause__ if isinstance(error, OutOfMemory) else None
            log.warning("%s %s: %s: %s", request.method, request.url.path, error.slug, error, exc_info=cause)
        return problem_response(request.scope, error)

    @app.exception_handler(SpecError)
    async def wrong_spec(request: Request, error: SpecError) -> Json:
        return await problem(request, BadParameter(f"{error}."))

    @app.exception_handler(MemoryError)
    async def out_of_memory(request: Request, error: MemoryError) -> Json:
        return await scarce(request, error, "for this response", "request less at a time")

    @app.exception_handler(RuntimeError)
    async def out_of_threads(request: Request, error: RuntimeError) -> Json:
        if not lacks_threads(error):
            raise error
        return await scarce(request, error, "for another thread", MORE_THREADS)

    async def scarce(request: Request, error: Exception, purpose: str, remedy: str) -> Json:
        shortage = OutOfMemory(purpose, error, remedy)
        shortage.__cause__ = error
        return await problem(request, shortage)

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:  # noqa: ARG001
        request.scope["problem"] = "other"
        return Response(status_code=499)  # the client has left; its loads are released

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Json:
        detail = f"{request.method} {request.url.path}: {error.detail}. The page /docs lists every URL."
        response = _problem_json(request.scope, "about:blank", str(error.detail), error.status_code, detail)
        response.headers.update(error.headers or {})  # such as Allow
        return response

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Json:
        detail = f"{type(error).__name__}: {error}. This is a fault of the server; its log has the details."
        return _problem_json(request.scope, "urn:penstock:problem:internal-error", "Internal error", 500, detail)


def problem_response(scope: Scope, error: Problem) -> Json:
    """Return the response for a problem."""
    progress: dict[str, int | None] = {}
    if isinstance(error, NotReady):
        progress = {"done": error.num_done, "total": error.total, "seconds_left": error.seconds_left}
    response = _problem_json(scope, error.type, error.title, error.status, str(error), **progress)
    if error.status == 503:
        response.headers["Retry-After"] = "0" if isinstance(error, BlocksNotReady) else "1"
    elif isinstance(error, Unauthorized):
        response.headers["WWW-Authenticate"] = 'Bearer realm="penstock"'  # not Basic: browsers would open their own dialog
    elif isinstance(error, TooManyAttempts | LimitExceeded):
        response.headers["Retry-After"] = str(error.after_seconds)
    return response


def _problem_json(scope: Scope, type_: str, title: str, status: int, detail: str, **progress: int | None) -> Json:
    content = {
        "type": type_,
        "title": title,
        "status": status,
        "detail": detail,
        "instance": scope["path"],
        "request_id": request_id.get(),
    }
    scope["problem"] = "other" if type_ == "about:blank" else type_.rpartition(":")[2]
    response = Json(content | progress, status, media_type="application/problem+json")
    if clock := scope.get("stages"):
        response.headers[TIMING_HEADER] = format_timing(clock.seconds())
    return response
