"""Routes of batches: one batch, a range of batches, and where a batch comes from."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from penstock import wire
from penstock.urls import DATASETS
from penstock_server.api.parameters import BINARY, PROBLEMS, SPEC_PARAMETERS, Epoch, Name, ParsedRoute, Rank, Step, spec_of
from penstock_server.api.service import service_of
from penstock_server.api.streaming import BatchFormat, BatchRange, respond
from penstock_server.batches import text_view
from penstock_server.schemas import BatchInfo, ProvenanceInfo

# The docs page fills in the example: with the defaults a try would fetch a whole epoch, and the page would hang.
Format = Annotated[
    BatchFormat,
    Query(description="`msgpack` for trainers, or `json` with decoded text for people.", json_schema_extra={"example": "json"}),
]
Start = Annotated[int, Query(ge=0, description="The first step.")]
Stop = Annotated[
    int | None,
    Query(ge=0, description="The step after the last one. Default: the epoch's end.", json_schema_extra={"example": 1}),
]
Stride = Annotated[int, Query(ge=1, description="The distance between steps, as in `range()`.")]

_BATCHES = "/{dataset}/epochs/{epoch}/ranks/{rank}/batches"


def _responses(shown: Any) -> dict[int | str, dict[str, Any]]:
    """Returns the documented responses of a URL of batches; `shown` is the JSON example."""
    return {
        200: {"model": shown, "content": {wire.MEDIA_TYPE: BINARY}, "description": "One or several frames, or JSON."},
        304: {"description": "The client's copy is current."},
    }


router = APIRouter(prefix=DATASETS, responses=PROBLEMS, route_class=ParsedRoute, tags=["batches"])


@router.head(_BATCHES + "/{step}", include_in_schema=False, openapi_extra=SPEC_PARAMETERS)
@router.get(_BATCHES + "/{step}", summary="Get a batch", responses=_responses(BatchInfo), openapi_extra=SPEC_PARAMETERS)
async def one_batch(
    request: Request, dataset: Name, epoch: Epoch, rank: Rank, step: Step, format: Format = "msgpack"
) -> Response:
    """Returns one batch. A range of batches holds the same bytes for this step."""
    return await respond(request, BatchRange(dataset, epoch, rank, format, step, step + 1))


@router.head(_BATCHES, include_in_schema=False, openapi_extra=SPEC_PARAMETERS)
@router.get(
    _BATCHES,
    summary="Get a range of batches",
    responses=_responses(BatchInfo | list[BatchInfo]),
    openapi_extra=SPEC_PARAMETERS,
)
async def several_batches(
    request: Request,
    dataset: Name,
    epoch: Epoch,
    rank: Rank,
    start: Start = 0,
    stop: Stop = None,
    stride: Stride = 1,
    format: Format = "msgpack",
) -> Response:
    """Returns the batches of steps start, start + stride, ... below stop, one frame after the other."""
    return await respond(request, BatchRange(dataset, epoch, rank, format, start, stop, stride))


@router.get(
    _BATCHES + "/{step}/provenance",
    summary="Show where a batch comes from",
    responses={200: {"model": ProvenanceInfo}},
    openapi_extra=SPEC_PARAMETERS,
)
async def provenance(request: Request, dataset: Name, epoch: Epoch, rank: Rank, step: Step) -> Response:
    """Returns the rows that make up each sample of a batch. `dataset_row` is the row number in URLs."""

    def make() -> Response:
        plan = service_of(request).catalog.plan(dataset, spec_of(request))
        return JSONResponse(text_view.provenance(plan, epoch, step, rank))

    return await service_of(request).executors.make_text(make)
