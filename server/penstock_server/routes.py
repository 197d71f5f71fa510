"""The HTTP surface: each route parses its parameters, calls the data path and serialises. No logic lives here."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from hashlib import blake2b
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool

from penstock import wire
from penstock.spec import LARGEST_COUNT, Spec, describe
from penstock_server.batch import frames, frames_nbytes, gather
from penstock_server.catalog import Catalog, Dataset
from penstock_server.plan import Plan
from penstock_server.problems import BadParameter
from penstock_server.readable import batch_as_json

Index = Annotated[int, Path(ge=0, le=LARGEST_COUNT)]
Format = Annotated[Literal["msgpack", "json"], Query(description="msgpack for trainers; json, with text, for people")]

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
_BATCH_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {wire.MEDIA_TYPE: {}, "application/json": {}}, "description": "one or more frames"},
    304: {"description": "the client's copy is current"},
}


def make_router(catalog: Catalog) -> APIRouter:
    """The routes of version 1, over one catalog."""
    router = APIRouter(prefix="/v1/datasets")

    def plan_of(request: Request, dataset: str, *own: str) -> Plan:
        pairs = [(name, value) for name, value in request.query_params.multi_items() if name not in own]
        return catalog[dataset].plan(Spec.from_query(pairs))

    @router.get("", tags=["datasets"])
    def list_datasets() -> dict[str, Any]:
        """Every dataset, and those that could not be opened, with the reason."""
        refused = [{"name": name, "error": reason} for name, reason in catalog.refused.items()]
        return {"datasets": [_describe(d) for d in catalog.datasets.values()], "refused": refused}

    @router.get("/{dataset}", tags=["datasets"])
    def show_dataset(dataset: str) -> dict[str, Any]:
        """Rows, shards, columns, recipe and snapshot."""
        return _describe(catalog[dataset])

    @router.get("/{dataset}/spec", tags=["datasets"], openapi_extra=_SPEC_PARAMETERS)
    def show_spec(request: Request, dataset: str) -> dict[str, Any]:
        """The spec with every parameter resolved, the number of steps and the tensors of a batch."""
        plan = plan_of(request, dataset)
        tensors = [
            {"name": tensor.name, "dtype": tensor.dtype, "shape": shape}
            for tensor, shape in zip(plan.tensors, plan.shapes, strict=True)
        ]
        return {
            "snapshot": plan.snapshot.fingerprint,
            "num_steps": plan.schedule.num_steps,
            "num_sequences": plan.schedule.num_positions,
            "vocab_size": plan.snapshot.token_bound,
            "tensors": tensors,
            "spec": plan.spec.to_dict(),
        }

    batches = "/{dataset}/epochs/{epoch}/ranks/{rank}/batches"

    @router.get(batches + "/{step}", tags=["batches"], openapi_extra=_SPEC_PARAMETERS, responses=_BATCH_RESPONSES)
    async def one_batch(
        request: Request, dataset: str, epoch: Index, rank: Index, step: Index, format: Format = "msgpack"
    ) -> Response:
        """One batch. Its bytes are those of the same step in a run."""
        plan = await run_in_threadpool(plan_of, request, dataset, "format")
        return await _respond(request, plan, epoch, rank, range(step, step + 1), format)

    @router.get(batches, tags=["batches"], openapi_extra=_SPEC_PARAMETERS, responses=_BATCH_RESPONSES)
    async def run_of_batches(
        request: Request,
        dataset: str,
        epoch: Index,
        rank: Index,
        start: Annotated[int, Query(ge=0, description="the first step")] = 0,
        stop: Annotated[int | None, Query(ge=1, description="the step behind the last; default: all")] = None,
        stride: Annotated[int, Query(ge=1, description="every how manieth step, as in range()")] = 1,
        format: Format = "msgpack",
    ) -> Response:
        """A run of batches, one frame behind the other: steps start, start + stride, ... below stop."""
        plan = await run_in_threadpool(plan_of, request, dataset, "format", "start", "stop", "stride")
        stop = plan.schedule.num_steps if stop is None else stop
        if start >= stop:
            raise BadParameter(f"start={start} must be below stop={stop}: a run has at least one step.")
        plan.schedule.positions(stop - 1, rank)  # raises before the first byte is sent
        return await _respond(request, plan, epoch, rank, range(start, stop, stride), format)

    @router.get(batches + "/{step}/provenance", tags=["batches"], openapi_extra=_SPEC_PARAMETERS)
    def provenance(request: Request, dataset: str, epoch: Index, rank: Index, step: Index) -> dict[str, Any]:
        """For each sequence of a batch the rows it is made of."""
        [sequences] = gather(plan_of(request, dataset), epoch, rank, [step])
        lines = [{"index": i, "sources": [asdict(sequence.source)]} for i, sequence in enumerate(sequences)]
        return {"step": step, "rank": rank, "sequences": lines}

    return router


async def _respond(request: Request, plan: Plan, epoch: int, rank: int, steps: range, format: str) -> Response:
    plan.schedule.positions(steps[0], rank)  # an address that does not exist has no ETag either
    headers = {"ETag": _etag(plan, epoch, rank, steps, format), "Cache-Control": _cache_control(request)}
    if _matches(request, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    if format == "json":
        bodies: Iterator[Any] = (batch_as_json(plan, epoch, rank, step).encode() for step in steps)
        media_type = "application/json"
    else:
        bodies = (memoryview(body) for body in frames(plan, epoch, rank, steps))
        media_type = wire.MEDIA_TYPE
    # The first chunk is made before the status line is sent, so what goes wrong in it is a problem+json. Later on the
    # connection breaks off; the client asks again from that step and gets the reason then.
    first = await run_in_threadpool(next, bodies)
    if len(steps) == 1:
        return Response(first, media_type=media_type, headers=headers)
    nbytes = frames_nbytes(plan, epoch, rank, steps) if format == "msgpack" else None
    if nbytes is not None:
        headers["Content-Length"] = str(nbytes)
    return StreamingResponse(_chain(first, bodies), media_type=media_type, headers=headers)


async def _chain(first: Any, rest: Iterator[Any]) -> AsyncIterator[Any]:
    yield first
    async for chunk in iterate_in_threadpool(rest):
        yield chunk


def _describe(dataset: Dataset) -> dict[str, Any]:
    snapshot = dataset.snapshot
    return {
        "name": dataset.name,
        "rows": snapshot.num_rows,
        "shards": len(snapshot.shards),
        "blocks": snapshot.num_blocks,
        "size_bytes": sum(shard.size_bytes for shard in snapshot.shards),
        "columns": list(snapshot.recipe.columns),
        "recipe": snapshot.recipe.describe(),
        "token_dtype": snapshot.token_dtype,
        "snapshot": snapshot.fingerprint,
    }


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
