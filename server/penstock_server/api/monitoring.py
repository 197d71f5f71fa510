"""Routes of the jobs and of the metrics."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from penstock_server.api.parameters import PROBLEMS, ParsedRoute
from penstock_server.api.service import identity_of, require_scope
from penstock_server.api.shown import Json
from penstock_server.monitoring.monitor import Monitor
from penstock_server.schemas.monitoring import JobsInfo

History = Annotated[Literal["false", "true"], Query(description="Whether to add the last hour.")]

router = APIRouter(responses=PROBLEMS, route_class=ParsedRoute, tags=["monitoring"])


@router.get("/v1/jobs", summary="Show which rank waits, and why", responses={200: {"model": JobsInfo}})
def list_jobs(request: Request, history: History = "false") -> Response:
    """Lists the runs that pull from this server, with what each of their ranks reports, and a verdict in one sentence."""
    jobs = _monitor_of(request).describe(identity_of(request), history=history == "true")
    return Json(jobs, headers={"Cache-Control": "no-store"})


@router.get("/metrics", summary="Get the metrics for Prometheus", response_class=PlainTextResponse)
def metrics(request: Request) -> Response:
    """Returns the metrics of all processes of this server in the text format of Prometheus."""
    require_scope(request, "metrics", "admin")
    return Response(_monitor_of(request).metrics_text(identity_of(request)), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _monitor_of(request: Request) -> Monitor:
    monitor: Monitor = request.app.state.monitor
    return monitor
