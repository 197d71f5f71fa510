"""The application: routes, probes, documentation page, and one shape for every error."""

from __future__ import annotations

import time
from typing import Any

import swagger_ui_bundle
from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from penstock import __version__, wire
from penstock.wire.names import DATASETS
from penstock_server.api import batches, datasets, monitoring
from penstock_server.api.admission import InFlight
from penstock_server.api.errors import add_error_handlers
from penstock_server.api.gate import SECURITY_SCHEMES, Gate
from penstock_server.api.parameters import PROBLEMS
from penstock_server.api.request_log import RequestLog
from penstock_server.api.service import Service, catalog_of, identity_of, service_of
from penstock_server.catalog.catalog import Catalog
from penstock_server.monitoring.monitor import Monitor
from penstock_server.monitoring.place import Place
from penstock_server.page.routes import add_page
from penstock_server.problems import NotServing
from penstock_server.schemas.monitoring import HealthInfo, ReadyInfo
from penstock_server.security.tokens import STRANGER, Tokens

_DESCRIPTION = "Feeds shuffled, pre-tokenized batches from Parquet shards to GPU trainers. A batch is a URL."
_NULL = {"type": "null"}
_OPEN = {"security": list[str]()}  # no token is needed


def create_app(
    catalog: Catalog,
    in_flight: InFlight,
    place: Place | None = None,
    tokens: Tokens | None = None,
    *,
    for_this_machine: bool = False,
) -> FastAPI:
    """Creates the service over one catalog and one budget of bytes in flight. Batches do not depend on earlier requests.

    `place` is where several processes of a server share their status. Without `tokens` every caller may do everything.
    With `for_this_machine` requests must be for localhost or an IP address: see Gate.
    """
    tags = [{"name": name} for name in ("datasets", "batches", "rows", "monitoring", "probes")]  # in the order of the docs page
    app = _App(
        title="Penstock",
        version=__version__,
        description=_DESCRIPTION,
        openapi_tags=tags,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # the redirect would lead to the host that the request names
    )
    app.openapi_version = "3.0.3"  # the newest that the bundled Swagger UI can render
    app.state.service = Service(catalog, in_flight)
    app.state.tokens, app.state.for_this_machine = tokens, for_this_machine
    app.state.monitor = Monitor(catalog, in_flight, app.state.service.jobs, place)
    # Batches first, since routes are tried in order. Added directly: include_router would create each route again, and delay
    # the server's first request.
    for part in (batches, datasets, monitoring):
        app.router.routes.extend(part.router.routes)
    _add_probes(app)
    _add_documentation(app)
    add_page(app)
    add_error_handlers(app)
    return app


class _App(FastAPI):
    def build_middleware_stack(self) -> ASGIApp:
        # Around Starlette's own layers, which respond to faults: no route is reached without the gate.
        gate = Gate(super().build_middleware_stack(), self.state.tokens, for_this_machine=self.state.for_this_machine)
        return RequestLog(gate, self.state.service)

    def openapi(self) -> dict[str, Any]:
        if not self.openapi_schema:
            self.openapi_schema = document = _as_version_3_0(super().openapi())
            if self.state.tokens:
                document["components"]["securitySchemes"] = SECURITY_SCHEMES
                document["security"] = [{name: []} for name in SECURITY_SCHEMES]
        return self.openapi_schema


def _add_probes(app: FastAPI) -> None:
    # Load balancers and `wget --spider` send HEAD.
    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", summary="Check that the process is alive", tags=["probes"], openapi_extra=_OPEN)
    async def healthz(request: Request) -> HealthInfo:
        """Returns the versions of the server, and its clock."""
        if identity_of(request) is STRANGER:
            return {"status": "ok"}
        return {"status": "ok", "version": __version__, "wire": wire.VERSION, "time": time.time()}

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", summary="Check that datasets are served", tags=["probes"], openapi_extra=_OPEN, responses=PROBLEMS)
    async def readyz(request: Request) -> ReadyInfo:
        """Returns the number of datasets that are served, and of those that cannot be. 503: send requests elsewhere."""
        service = service_of(request)
        if service.is_draining:
            raise NotServing("The server is about to stop. It still serves requests; send new ones to another server.")
        if not service.catalog.is_serving:
            raise NotServing(f"No dataset can be served now. GET {DATASETS} has the reason of each.")
        catalog = catalog_of(request)
        if identity_of(request) is STRANGER:
            return {"status": "ready"}
        return {"status": "ready", "datasets": len(catalog.datasets), "refused": len(catalog.refused)}


def _add_documentation(app: FastAPI) -> None:
    # FastAPI's page loads its scripts from a CDN, which training clusters can seldom reach.
    app.mount("/docs/assets", StaticFiles(directory=swagger_ui_bundle.swagger_ui_path))

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return get_swagger_ui_html(
            openapi_url="openapi.json",  # relative, like the others: a proxy may serve all of this below a prefix
            title="Penstock",
            swagger_js_url="docs/assets/swagger-ui-bundle.js",
            swagger_css_url="docs/assets/swagger-ui.css",
            swagger_favicon_url="docs/assets/favicon-32x32.png",
            swagger_ui_parameters={"defaultModelRendering": "model", "defaultModelExpandDepth": 5},  # shows each field's text
        )


def _as_version_3_0(node: Any) -> Any:
    """Converts an OpenAPI 3.1 document, or a part of it, to version 3.0.

    Version 3.0 has no type null, only `nullable`, and ignores siblings of a reference. The result has no schema titles: they
    repeat the field names, and the page would collapse the descriptions below them.
    """
    if isinstance(node, list):
        return [_as_version_3_0(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {name: _as_version_3_0(value) for name, value in node.items()}
    if _NULL in node.get("anyOf", ()):
        first, *others = (option for option in node.pop("anyOf") if option != _NULL)
        first["nullable"] = True  # allows null beside the type
        node = {"anyOf": [first, *others]} | node if others else first | node
    if "$ref" in node and len(node) > 1:
        of_object = {"type": "object"} if "nullable" in node else {}  # nullable has a meaning only beside a type
        node = {"allOf": [{"$ref": node.pop("$ref")}]} | of_object | node
    if isinstance(node.get("title"), str) and "version" not in node:  # the document itself keeps its title
        del node["title"]
    return node
