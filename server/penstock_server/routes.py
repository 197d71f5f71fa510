"""The HTTP surface: each route parses its parameters, calls the data path and serialises. No logic lives here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from hashlib import blake2b
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.requests import ClientDisconnect

from penstock import wire
from penstock.spec import LARGEST_COUNT, Spec, describe
from penstock_server.batches.batch import frames, frames_nbytes
from penstock_server.batches.gather import Chunk, chunks, gather, load
from penstock_server.batches.plan import Plan
from penstock_server.batches.readable import as_json
from penstock_server.datasets.catalog import Catalog
from penstock_server.datasets.describe import describe_dataset, describe_held, describe_mixture, describe_spec
from penstock_server.datasets.lookup import find_row, show_quarantine, show_row
from penstock_server.problems import BadParameter
from penstock_server.shuffling.picture import draw_png
from penstock_server.shuffling.report import report
from penstock_server.storage.block import Block

Name = Annotated[str, Path(description="its name in the list of datasets")]
Epoch = Annotated[int, Path(ge=0, le=LARGEST_COUNT, description="from 0; each has an order of its own")]
Rank = Annotated[int, Path(ge=0, le=LARGEST_COUNT, description="from 0, below world_size")]
Row = Annotated[int, Path(ge=0, le=LARGEST_COUNT, description="from 0, below the number of rows")]
Step = Annotated[int, Path(ge=0, le=LARGEST_COUNT, description="from 0, below the spec's num_steps")]
Format = Annotated[Literal["msgpack", "json"], Query(description="msgpack for trainers; json, with text, for people")]

_LOOK_SECONDS = 1.0  # how often a request that waits for blocks looks whether its client still does

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


def make_router(catalog: Catalog) -> APIRouter:
    """The routes of version 1, over one catalog."""
    router = APIRouter(prefix="/v1/datasets", responses=_PROBLEMS)

    def plan_of(request: Request, dataset: str, *own: str) -> Plan:
        pairs = [(name, value) for name, value in request.query_params.multi_items() if name not in own]
        return catalog.plan(dataset, Spec.from_query(pairs))

    def check_parameters(request: Request, *known: str) -> None:
        if unknown := [name for name in request.query_params if name not in known]:
            takes = f"takes {' and '.join(known)}" if known else "takes no parameter"
            raise BadParameter(f"{', '.join(unknown)}: this URL {takes}. Remove the rest of what follows the '?'.")

    def no_parameters(request: Request) -> None:
        check_parameters(request)

    plain = [Depends(no_parameters)]

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

    @router.get(batches + "/{step}", summary="One batch", responses=_BATCH_RESPONSES, **batch)
    async def one_batch(
        request: Request, dataset: Name, epoch: Epoch, rank: Rank, step: Step, format: Format = "msgpack"
    ) -> Response:
        """One batch. Its bytes are those of the same step in a run."""
        plan = await run_in_threadpool(plan_of, request, dataset, "format")
        return await _respond(request, plan, epoch, rank, range(step, step + 1), format)

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
        plan = await run_in_threadpool(plan_of, request, dataset, "format", "start", "stop", "stride")
        stop = stop or plan.schedule.num_steps
        if start >= stop:
            raise BadParameter(f"start={start} must be below stop={stop}: a run has at least one step.")
        plan.check(epoch, stop - 1, rank)  # before the first byte is sent
        return await _respond(request, plan, epoch, rank, range(start, stop, stride), format)

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


async def _respond(request: Request, plan: Plan, epoch: int, rank: int, steps: range, format: str) -> Response:
    plan.check(epoch, steps[0], rank)  # an address that does not exist has no ETag either
    headers = {"ETag": _etag(plan, epoch, rank, steps, format), "Cache-Control": _cache_control(request)}
    if _matches(request, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    media_type = "application/json" if format == "json" else wire.MEDIA_TYPE
    bodies = _json(request, plan, epoch, rank, steps) if format == "json" else _frames(request, plan, epoch, rank, steps)
    # The first chunk is made before the status line is sent, so what goes wrong in it is a problem+json. Later on the
    # connection breaks off; the client asks for less then, and gets the reason.
    first = await anext(bodies)
    if len(steps) == 1:
        return Response(first, media_type=media_type, headers=headers)
    nbytes = frames_nbytes(plan, epoch, rank, steps) if format == "msgpack" else None
    if nbytes is not None:
        headers["Content-Length"] = str(nbytes)
    return StreamingResponse(_chain(first, bodies), media_type=media_type, headers=headers)


async def _frames(request: Request, plan: Plan, epoch: int, rank: int, steps: range) -> AsyncIterator[memoryview]:
    async for chunk, blocks in _loaded(request, plan, epoch, rank, steps):
        yield memoryview(await run_in_threadpool(frames, chunk, blocks))


async def _json(request: Request, plan: Plan, epoch: int, rank: int, steps: range) -> AsyncIterator[bytes]:
    """One batch as an object, several as an array of them."""
    before, after = ("", "\n") if len(steps) == 1 else ("[\n", "\n]\n")
    async for chunk, blocks in _loaded(request, plan, epoch, rank, steps):
        text = before + ",\n".join(await run_in_threadpool(as_json, chunk, blocks))
        before = ",\n"
        yield (text + after if chunk.steps[-1] == steps[-1] else text).encode()


async def _loaded(
    request: Request, plan: Plan, epoch: int, rank: int, steps: range
) -> AsyncIterator[tuple[Chunk, list[Block]]]:
    """The chunks with their blocks. No thread waits for blocks: threads are few, and warm requests need them."""
    streams = False  # from then on the response itself sees a client that leaves, and closes this generator
    async for chunk in iterate_in_threadpool(chunks(plan, epoch, rank, steps)):
        futures = await run_in_threadpool(chunk.request)
        if all(future.done() for future in futures):  # warm, as they mostly are
            streams = True
            yield chunk, [future.result() for future in futures]
            continue
        try:
            # Only waited for, never cancelled: a client that leaves must not take a block from others.
            pending = {asyncio.wrap_future(future) for future in futures}
            while pending:
                done, pending = await asyncio.wait(pending, timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
                for future in done:
                    future.result()  # raises what its load raised
                if pending and not streams and await request.is_disconnected():
                    raise ClientDisconnect
            streams = True
            yield chunk, [future.result() for future in futures]
        finally:
            chunk.forget(futures)


async def _chain(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    yield first
    async for chunk in rest:
        yield chunk


def _etag(plan: Plan, epoch: int, rank: int, steps: range, format: str) -> str:
    address = [
        wire.VERSION,
        plan.dataset,
        plan.spec.to_dict(),
        epoch,
        rank,
        steps.start,
        steps.stop,
        steps.step,
        format,
    ]
    return f'"{blake2b(json.dumps(address).encode(), digest_size=16).hexdigest()}"'


def _cache_control(request: Request) -> str:
    # Without a snapshot the URL means "the latest": a cache that kept it would mix two snapshots in one epoch.
    named = "snapshot" in request.query_params
    return "public, max-age=31536000, immutable" if named else "no-cache"


def _matches(request: Request, etag: str) -> bool:
    asked = [tag.strip().removeprefix("W/") for tag in request.headers.get("If-None-Match", "").split(",")]
    return etag in asked or "*" in asked
