"""Routes of batches: one batch, or a range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from penstock import wire
from penstock.spec import Spec
from penstock.urls import DATASETS
from penstock_server.batches import text_view as readable
from penstock_server.problems import BadParameter
from penstock_server.respond import BatchFormat, Run, respond
from penstock_server.routes.parameters import BINARY, PROBLEMS, SPEC_PARAMETERS, Epoch, Name, Rank, Step, spec_of
from penstock_server.routes.plain import PlainRoute
from penstock_server.routes.service import service_of
from penstock_server.schemas.batches import BatchAnswer, ProvenanceAnswer
from penstock_server.threads import InThread, in_waiting_threads, while_asked

# The docs page fills in the example: with the defaults a try would fetch a whole epoch, and the page would hang.
Format = Annotated[
    BatchFormat, Query(description="msgpack for trainers; json, with text, for people", json_schema_extra={"example": "json"})
]
Stop = Annotated[
    int | None,
    Query(ge=0, description="the step after the last one; default: the epoch's end", json_schema_extra={"example": 1}),
]

_BATCHES = "/{dataset}/epochs/{epoch}/ranks/{rank}/batches"
_LONG_QUERY = 1024  # bytes; parsing a long mix or skip may take a second, too long for the event loop


def _responses(shown: Any) -> dict[int | str, dict[str, Any]]:
    """Returns the documented responses of a URL of batches; `shown` is the JSON example."""
    return {
        200: {"model": shown, "content": {wire.MEDIA_TYPE: BINARY}, "description": "one or more frames, or JSON"},
        304: {"description": "the client's copy is current"},
    }


router = APIRouter(prefix=DATASETS, responses=PROBLEMS, route_class=PlainRoute)
_batch: dict[str, Any] = {"tags": ["batches"], "openapi_extra": SPEC_PARAMETERS}


@router.head(_BATCHES + "/{step}", include_in_schema=False)
@router.get(_BATCHES + "/{step}", summary="One batch", responses=_responses(BatchAnswer), **_batch)
async def one_batch(
    request: Request, dataset: Name, epoch: Epoch, rank: Rank, step: Step, format: Format = "msgpack"
) -> Response:
    """One batch. A run of batches holds the same bytes for this step."""

    def find(spec: Spec) -> Run:
        plan = service_of(request).catalog.plan(dataset, spec)
        return Run(plan, epoch, rank, range(step, step + 1), format, plan.is_named_by(spec))

    return await _answer(request, dataset, epoch, format, find, "format")


@router.head(_BATCHES, include_in_schema=False)
@router.get(_BATCHES, summary="A run of batches", responses=_responses(BatchAnswer | list[BatchAnswer]), **_batch)
async def run_of_batches(
    request: Request,
    dataset: Name,
    epoch: Epoch,
    rank: Rank,
    start: Annotated[int, Query(ge=0, description="the first step")] = 0,
    stop: Stop = None,
    stride: Annotated[int, Query(ge=1, description="the distance from one step to the next, as in range()")] = 1,
    format: Format = "msgpack",
) -> Response:
    """A run of batches, one frame after the other: the steps start, start + stride, ... that are below stop."""

    def find(spec: Spec) -> Run:
        plan = service_of(request).catalog.plan(dataset, spec)
        behind = plan.schedule.num_steps if stop is None else stop
        if start >= behind:
            raise BadParameter(f"start={start} must be below stop={behind}: a run has at least one step.")
        plan.check(epoch, behind - 1, rank)  # before the first byte is sent
        return Run(plan, epoch, rank, range(start, behind, stride), format, plan.is_named_by(spec))

    return await _answer(request, dataset, epoch, format, find, "format", "start", "stop", "stride")


@router.get(
    _BATCHES + "/{step}/provenance",
    summary="Where a batch comes from",
    responses={200: {"model": ProvenanceAnswer}},
    **_batch,
)
async def provenance(request: Request, dataset: Name, epoch: Epoch, rank: Rank, step: Step) -> Response:
    """The rows that each sample of a batch is made of; `dataset_row` is the number that the URLs of a row take."""

    def make() -> Response:
        plan = service_of(request).catalog.plan(dataset, spec_of(request))
        return JSONResponse(readable.provenance(plan, epoch, step, rank))

    return await while_asked(request, make)


async def _answer(
    request: Request, dataset: str, epoch: int, format: BatchFormat, find: Callable[[Spec], Run], *own: str
) -> Response:
    service = service_of(request)
    if format == "json" or len(request.scope["query_string"]) > _LONG_QUERY:
        return await respond(
            request,
            service.in_flight,
            service.unanswered,
            lambda: find(spec_of(request, *own)),
            in_waiting_threads,
            inline=False,
        )
    spec = spec_of(request, *own)
    # A conditional request may get a 304 without a plan.
    may_block = spec.length_bucket_size or "If-None-Match" in request.headers or service.catalog.may_block(dataset, spec)
    in_thread: InThread = in_waiting_threads if may_block else service.epochs.thread_of((dataset, spec, epoch))
    return await respond(request, service.in_flight, service.unanswered, lambda: find(spec), in_thread, inline=not may_block)
