"""The application: routes, probes, documentation page, and one shape for every error."""

from __future__ import annotations

import logging
from typing import Any

import swagger_ui_bundle
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.staticfiles import StaticFiles

from penstock import __version__
from penstock.errors import SpecError
from penstock.text import cut
from penstock_server.admission import InFlight
from penstock_server.catalog.catalog import Catalog
from penstock_server.logs import Seldom
from penstock_server.openapi import for_page
from penstock_server.problems import MORE_THREADS, BadParameter, BlocksNotReady, NotReady, OutOfMemory, Problem, lacks_threads
from penstock_server.routes import batches, datasets, probes
from penstock_server.routes.service import Service

log = logging.getLogger("penstock.app")
_telling_of_memory = Seldom()

_DESCRIPTION = "Feeds shuffled, pre-tokenized batches from Parquet shards to GPU trainers. A batch is a URL."


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        if not self.openapi_schema:
            self.openapi_schema = for_page(super().openapi())
        return self.openapi_schema


def create_app(catalog: Catalog, in_flight: InFlight) -> FastAPI:
    """Creates the service over one catalog and one budget of bytes in flight. Batches do not depend on earlier requests."""
    tags = [{"name": name} for name in ("datasets", "batches", "rows", "probes")]  # in the order of the docs page
    app = _App(
        title="Penstock", version=__version__, description=_DESCRIPTION, openapi_tags=tags, docs_url=None, redoc_url=None
    )
    app.openapi_version = "3.0.3"  # the newest that the bundled Swagger UI can render
    app.state.service = Service(catalog, in_flight)
    # Batches first, since routes are tried in order. Added directly: include_router would create each route again, and delay
    # the server's first request.
    for part in (batches, datasets, probes):
        app.router.routes.extend(part.router.routes)
    _add_documentation(app)
    _add_error_handlers(app)
    return app


def _add_documentation(app: FastAPI) -> None:
    # FastAPI's page loads its scripts from a CDN, which training clusters can seldom reach.
    app.mount("/docs/assets", StaticFiles(directory=swagger_ui_bundle.swagger_ui_path))

    @app.get("/", include_in_schema=False)
    async def root() -> RedirectResponse:
        return RedirectResponse("/docs")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return get_swagger_ui_html(
            openapi_url="/openapi.json",
            title="Penstock",
            swagger_js_url="/docs/assets/swagger-ui-bundle.js",
            swagger_css_url="/docs/assets/swagger-ui.css",
            swagger_favicon_url="/docs/assets/favicon-32x32.png",
            swagger_ui_parameters={"defaultModelRendering": "model", "defaultModelExpandDepth": 5},  # shows each field's text
        )


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(Problem)
    async def problem(request: Request, error: Problem) -> JSONResponse:
        more: dict[str, int | None] = {}
        if isinstance(error, NotReady):
            more = {"done": error.num_done, "total": error.total, "seconds_left": error.seconds_left}
        answer = _problem_json(request, error.type, error.title, error.status, str(error), **more)
        if isinstance(error, OutOfMemory) and _telling_of_memory.is_due():
            log.warning("%s", error, exc_info=error.__cause__)
        if error.status == 503:
            answer.headers["Retry-After"] = "0" if isinstance(error, BlocksNotReady) else "1"
        return answer

    @app.exception_handler(SpecError)
    async def wrong_spec(request: Request, error: SpecError) -> JSONResponse:
        return await problem(request, BadParameter(f"{error}."))

    @app.exception_handler(RequestValidationError)
    async def wrong_parameter(request: Request, error: RequestValidationError) -> JSONResponse:
        wrong = [f"{fault['loc'][-1]}={cut(str(fault['input']))!r}: {fault['msg']}" for fault in error.errors()]
        return await problem(request, BadParameter(f"{'; '.join(wrong)}."))

    @app.exception_handler(MemoryError)
    async def out_of_memory(request: Request, error: MemoryError) -> JSONResponse:
        return await lack(request, error, "for this answer", "ask for less at a time")

    @app.exception_handler(RuntimeError)
    async def out_of_threads(request: Request, error: RuntimeError) -> JSONResponse:
        if not lacks_threads(error):
            raise error
        return await lack(request, error, "for another thread", MORE_THREADS)

    async def lack(request: Request, error: Exception, what: str, advice: str) -> JSONResponse:
        told = OutOfMemory(what, error, advice)
        told.__cause__ = error
        return await problem(request, told)

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:  # noqa: ARG001
        return Response(status_code=499)  # the client has left; its loads are released

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        detail = f"{request.method} {request.url.path}: {error.detail}. The page /docs lists every URL."
        answer = _problem_json(request, "about:blank", str(error.detail), error.status_code, detail)
        answer.headers.update(error.headers or {})  # such as Allow
        return answer

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> JSONResponse:
        detail = f"{type(error).__name__}: {error}. This is a fault of the server; its log has the details."
        return _problem_json(request, "urn:penstock:problem:internal-error", "Internal error", 500, detail)


def _problem_json(request: Request, type_: str, title: str, status: int, detail: str, **more: int | None) -> JSONResponse:
    content = {"type": type_, "title": title, "status": status, "detail": detail, "instance": request.url.path}
    return JSONResponse(content | more, status, media_type="application/problem+json")
