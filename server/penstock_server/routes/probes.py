"""Routes of probes for load balancers and monitoring."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request

from penstock import __version__, wire
from penstock_server.routes.service import service_of
from penstock_server.schemas.service import HealthAnswer, ReadyAnswer

router = APIRouter(tags=["probes"])


# Load balancers and `wget --spider` send HEAD.
@router.head("/healthz", include_in_schema=False)
@router.get("/healthz")
async def healthz() -> HealthAnswer:
    """Whether the process is alive; its versions, and its clock in seconds since 1970."""
    return {"status": "ok", "version": __version__, "wire": wire.VERSION, "time": time.time()}


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz")
async def readyz(request: Request) -> ReadyAnswer:
    """Whether datasets are served: how many are, and how many were refused."""
    catalog = service_of(request).catalog
    return {"status": "ready", "datasets": len(catalog.datasets), "refused": len(catalog.refused)}
