"""What the routes of one application answer from. The routes themselves are made once, by whatever number of applications."""

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
    """One catalog, one budget of bytes in flight, and what is remembered of the requests for them."""

    catalog: Catalog
    in_flight: InFlight
    epochs: Epochs = field(default_factory=Epochs)
    unanswered: Unanswered = field(default_factory=Unanswered)
    refreshing: asyncio.Lock = field(default_factory=asyncio.Lock)  # those who wait for it need no thread


def service_of(request: Request) -> Service:
    """The service of the application that a request came to."""
    service: Service = request.app.state.service
    return service
