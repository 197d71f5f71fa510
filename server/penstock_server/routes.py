"""The HTTP surface: each route parses its parameters, calls the data path and serialises. No logic lives here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from penstock import wire
from penstock.spec import LARGEST_COUNT, Spec, describe
from penstock_server.batches.gather import chunks, gather, load
from penstock_server.batches.plan import Plan
from penstock_server.datasets.catalog import Catalog
from penstock_server.datasets.describe import describe_dataset, describe_held, describe_mixture, describe_spec
from penstock_server.datasets.lookup import find_row, show_quarantine, show_row
from penstock_server.inflight import InFlight
from penstock_server.problems import BadParameter
from penstock_server.respond import BatchFormat, Run, respond
from penstock_server.shuffling.picture import draw_png
from penstock_server.shuffling.report import report
from penstock_server.threads import Epochs, in_one_of_many

Name = Annotated[str, Path(description="its name in the list of datasets")]
Epoch = Annotated[int, Path(ge=0, le=LARGEST_COUNT, description="from 0; each has an order of its own")]
Rank = Annotated[int, Path(ge=0, le=LARGEST_COUNT, description="from 0, below world_size")]
Row = Annotated[int, Path(ge=0, le=LARGEST_COUNT, description="from 0, below the number of rows")]
Step = Annotated[int, Path(ge=0, le=LARGEST_COUNT, description="from 0, below the spec's num_steps")]
Format = Annotated[BatchFormat, Query(description="msgpack for trainers; json, with text, for people")]

_LONG_QUERY = 1024  # bytes; to parse a mix or a skip of many may take a second, and on the event loop all would wait for it

_SPEC_PARAMETERS = {
    "parameters": [
        {
            "name": p["name"],
            "in": "query",
            "description": p["doc"],
            "schema": {"type": p["kind"], "default": p["default"]}
            | ({"minimum": p["low"], "maximum": p["high"]} if "low" in p else {})
            | ({"enum": p["options"]} if "options" in p else {}),
        }
        for p in describe()
    ]
}
_PROBLEM_FIELDS = {"type": "string", "title": "string", "status": "integer", "detail": "string", "instance": "string"}
_PROBLEM_SCHEMA = {"type": "object", "properties": {name: {"type": kind} for name, kind in _PROBLEM_FIELDS.items()}}
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/problem+json": {"schema": _PROBLEM_SCHEMA}}}
    for status, text in {
        404: "no such dataset, step or rank",
        409: "the data changed",
        422: "a parameter is wrong",
        500: "data that cannot be used; the detail names the place",
        503: "not now; try again",
    }.items()
}
_BATCH_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {wire.MEDIA_TYPE: {}, "application/json": {}}, "description": "one or more frames"},
    304: {"description": "the client's copy is current"},
}


def make_router(catalog: Catalog, in_flight: InFlight) -> APIRouter:
    """The routes of version 1, over one catalog; batches are held against one budget of bytes in flight."""
    router = APIRouter(prefix="/v1/datasets", responses=_PROBLEMS)

    def spec_of(request: Request, *own: str) -> Spec:
        return Spec.from_query((name, value) for name, value in request.query_params.multi_items() if name not in own)

    def plan_of(request: Request, dataset: str, *own: str) -> Plan:
        return catalog.plan(dataset, spec_of(request, *own))

    def check_parameters(request: Request, *known: str) -> None:
        if unknown := [name for name in request.query_params if name not in known]:
            takes = f"takes {' and '.join(known)}" if known else "takes no parameter"
            raise BadParameter(f"{', '.join(unknown)}: this URL {takes}. Remove the rest of what follows the '?'.")

    def no_parameters(request: Request) -> None:
        check_parameters(request)

    plain = [Depends(no_parameters)]
    epochs = Epochs()

    async def answer(
        request: Request, dataset: str, epoch: int, format: BatchFormat, find: Callable[[Spec], Run], *own: str
    ) -> Response:
        if format == "json" or len(request.scope["query_string"]) > _LONG_QUERY:
            return await respond(request, in_flight, lambda: find(spec_of(request, *own)), in_one_of_many)
        spec = spec_of(request, *own)
        # Who may have a copy may be told so without anything being planned.
        may_wait = spec.group_by_length or "If-None-Match" in request.headers or catalog.may_wait(dataset, spec)
        in_thread = in_one_of_many if may_wait else epochs.thread_of((dataset, spec, epoch))
        return await respond(request, in_flight, lambda: find(spec), in_thread)

    @router.get("", summary="List the datasets", tags=["datasets"], dependencies=plain)
    def list_datasets() -> dict[str, Any]:
        """Every dataset, and those that could not be opened, with the reason."""
        refused = [{"name": name, "error": reason} for name, reason in catalog.refused.items()]
        mixtures = [describe_mixture(mixture) for mixture in catalog.mixtures.values()]
        return {"datasets": [describe_dataset(d) for d in catalog.datasets.values()], "mixtures": mixtures, "refused": refused}

    @router.get("/{dataset}", summary="Show a dataset", tags=["datasets"], dependencies=plain)
    def show_dataset(dataset: Name) -> dict[str, Any]:
        """Rows, shards, columns, recipe and snapshot; the older snapshots that are served; what keeps new data out."""
        if mixture := catalog.mixtures.get(dataset):
            return describe_mixture(mixture)
        found = catalog[dataset]
        return describe_dataset(found.latest) | describe_held(found.held)

    refreshing = asyncio.Lock()  # those who wait for it need no thread

    @router.post("/{dataset}/refresh", summary="Look for new data", tags=["datasets"], dependencies=plain)
    async def refresh(dataset: Name) -> dict[str, Any]:
        """Takes in at once what changed in the folder: shards that were added, removed or rewritten, and the recipe."""
        async with refreshing:
            return asdict(await run_in_threadpool(catalog.refresh, dataset))

    @router.get("/{dataset}/spec", summary="Resolve a spec", tags=["datasets"], openapi_extra=_SPEC_PARAMETERS)
    def show_spec(request: Request, dataset: Name) -> Response:
        """The spec with every parameter resolved, the number of steps and the tensors of a batch."""
        plan = plan_of(request, dataset)
        plan.check_room()
        answer = JSONResponse(describe_spec(plan))
        # A run counts its steps by it: with a digit flipped on the way it would end early, and nobody would notice.
        answer.headers["Content-Digest"] = wire.content_digest(bytes(answer.body))
        return answer

    @router.get(
        "/{dataset}/shuffle-report",
        summary="How well an order mixes",
        tags=["datasets"],
        responses={200: {"content": {"image/png": {}}, "description": "the measures and a verdict, or a picture of them"}},
        openapi_extra=_SPEC_PARAMETERS,
    )
    def shuffle_report(
        request: Request,
        dataset: Name,
        epoch: Annotated[int, Query(ge=0, le=LARGEST_COUNT, description="which epoch")] = 0,
        format: Annotated[Literal["json", "png"], Query(description="json: numbers and sentences; png: a picture")] = "json",
    ) -> Any:
        """How far apart neighbours in the source are served, how evenly shards are spread, and a verdict."""
        found = report(plan_of(request, dataset, "epoch", "format"), epoch)
        return found.to_dict() if format == "json" else Response(draw_png(found), media_type="image/png")

    batches = "/{dataset}/epochs/{epoch}/ranks/{rank}/batches"
    batch: dict[str, Any] = {"tags": ["batches"], "openapi_extra": _SPEC_PARAMETERS}

    @router.head(batches + "/{step}", include_in_schema=False)
    @router.get(batches + "/{step}", summary="One batch", responses=_BATCH_RESPONSES, **batch)
    async def one_batch(
        request: Request, dataset: Name, epoch: Epoch, rank: Rank, step: Step, format: Format = "msgpack"
    ) -> Response:
        """One batch. Its bytes are those of the same step in a run."""

        def find(spec: Spec) -> Run:
            return Run(catalog.plan(dataset, spec), epoch, rank, range(step, step + 1), format)

        return await answer(request, dataset, epoch, format, find, "format")

    @router.head(batches, include_in_schema=False)
    @router.get(batches, summary="A run of batches", responses=_BATCH_RESPONSES, **batch)
    async def run_of_batches(
        request: Request,
        dataset: Name,
        epoch: Epoch,
        rank: Rank,
        start: Annotated[int, Query(ge=0, description="the first step")] = 0,
        stop: Annotated[int, Query(ge=0, description="the step behind the last; default, 0: all")] = 0,
        stride: Annotated[int, Query(ge=1, description="every how manieth step, as in range()")] = 1,
        format: Format = "msgpack",
    ) -> Response:
        """A run of batches, one frame behind the other: steps start, start + stride, ... below stop."""

        def find(spec: Spec) -> Run:
            plan = catalog.plan(dataset, spec)
            behind = stop or plan.schedule.num_steps
            if start >= behind:
                raise BadParameter(f"start={start} must be below stop={behind}: a run has at least one step.")
            plan.check(epoch, behind - 1, rank)  # before the first byte is sent
            return Run(plan, epoch, rank, range(start, behind, stride), format)

        return await answer(request, dataset, epoch, format, find, "format", "start", "stop", "stride")

    @router.get(batches + "/{step}/provenance", summary="Where a batch comes from", **batch)
    def provenance(request: Request, dataset: Name, epoch: Epoch, rank: Rank, step: Step) -> dict[str, Any]:
        """For each sequence of a batch the rows it is made of."""
        plan = plan_of(request, dataset)
        plan.check(epoch, step, rank)
        [chunk] = chunks(plan, epoch, rank, range(step, step + 1))
        sequences = gather(chunk, load(chunk))
        lines = [{"index": i, "sources": [asdict(s) for s in sequences.sources(i)]} for i in range(sequences.count)]
        return {"step": step, "rank": rank, "sequences": lines}

    @router.get("/{dataset}/rows/{row}", summary="One row", tags=["rows"], dependencies=plain)
    def one_row(dataset: Name, row: Row) -> dict[str, Any]:
        """A row with its tokens and its text; rows are counted over all shards in their order."""
        return show_row(catalog[dataset].latest, row)

    @router.get("/{dataset}/rows/{row}/schedule", summary="When a row is seen", tags=["rows"], openapi_extra=_SPEC_PARAMETERS)
    def schedule(
        request: Request,
        dataset: Name,
        row: Row,
        epoch: Annotated[int, Query(ge=0, le=LARGEST_COUNT, description="which epoch")] = 0,
    ) -> dict[str, Any]:
        """Every (step, rank, index) at which an epoch shows a row or a part of it; of many, the first ones."""
        return {"occurrences": find_row(plan_of(request, dataset, "epoch"), dataset, row, epoch)}

    @router.get("/{dataset}/quarantine", summary="What is bad in a dataset", tags=["datasets"])
    def quarantine(
        request: Request,
        dataset: Name,
        start: Annotated[int, Query(ge=0, description="leave out so many rows")] = 0,
        limit: Annotated[int, Query(ge=1, le=10_000, description="list so many rows at most")] = 1000,
    ) -> dict[str, Any]:
        """Rows that cannot be used and row groups that cannot be read, with the reasons; those that were met so far."""
        check_parameters(request, "start", "limit")
        return show_quarantine(catalog[dataset].latest, start, limit)

    return router
