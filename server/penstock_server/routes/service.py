"""State that the routes of one application serve from. All applications share the routes, which are made once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from fastapi import Request

from penstock_server.admission import InFlight
from penstock_server.catalog.catalog import Catalog
from penstock_server.threads import Epochs
from penstock_server.waiting import Unanswered


@dataclass(frozen=True, slots=True)
class Service:
    """One catalog, one budget of bytes in flight, and the state of their requests."""

    catalog: Catalog
    in_flight: InFlight
    epochs: Epochs = field(default_factory=Epochs)
    unanswered: Unanswered = field(default_factory=Unanswered)
    refreshing: asyncio.Lock = field(default_factory=asyncio.Lock)  # async, so that waiters take no thread


def service_of(request: Request) -> Service:
    """Returns the service of a request's application."""
    service: Service = request.app.state.service
    return service
