"""Batch responses: made chunk by chunk, as fast as the client reads, and counted in the budget of bytes in flight.

A client may limit the wait for the first chunk with `Prefer: wait=2` (RFC 7240). It then gets the progress and repeats the
request; the work continues meanwhile.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from penstock import wire
from penstock.wire.names import DATASETS
from penstock.wire.report import HEADER, TIMING_HEADER, Report, format_timing
from penstock_server.api.parameters import (
    BINARY,
    PROBLEMS,
    SPEC_PARAMETERS,
    Epoch,
    Name,
    ParsedRoute,
    Rank,
    Step,
    plan_of,
    spec_of,
)
from penstock_server.api.service import InThread, Requested, Service, catalog_of, identity_of, service_of
from penstock_server.api.shown import Json
from penstock_server.batches import text_view
from penstock_server.batches.assemble import chunks, steps_per_chunk
from penstock_server.batches.plan import Plan, is_large_mix
from penstock_server.batches.text_view import as_json
from penstock_server.batches.writer import body_of, frames_nbytes
from penstock_server.blocks.block import Block
from penstock_server.monitoring.jobs import RankRequest
from penstock_server.problems import BadParameter, BlocksNotReady, IndexNotReady
from penstock_server.schemas.batches import BatchInfo, ProvenanceInfo
from penstock_server.security.tokens import EVERYONE

BatchFormat = Literal["msgpack", "json", "tokens"]

_LONG_QUERY = 1024  # bytes; parsing a long mix or skip may take a second, too long for the event loop
_LARGE_BATCH_BYTES = 32 << 20
_WAIT = re.compile(r"(?:^|,)\s*wait\s*=\s*\"?([0-9]{1,5})\b")
# The docs page fills in the example: with the defaults a try would fetch a whole epoch, and the page would hang.
Format = Annotated[
    BatchFormat,
    Query(
        description="`msgpack` for trainers, `json` with decoded text for people, or `tokens`: JSON with each token's text.",
        json_schema_extra={"example": "json"},
    ),
]
Start = Annotated[int, Query(ge=0, description="The first step.")]
Stop = Annotated[
    int | None,
    Query(ge=0, description="The step after the last one. Default: the epoch's end.", json_schema_extra={"example": 1}),
]
Stride = Annotated[int, Query(ge=1, description="The distance between steps, as in `range()`.")]
_BATCHES = "/{dataset}/epochs/{epoch}/ranks/{rank}/batches"
router = APIRouter(prefix=DATASETS, responses=PROBLEMS, route_class=ParsedRoute, tags=["batches"])


@dataclass(frozen=True, slots=True)
class BatchRange:
    """The batches that a URL names: steps start, start + stride, ... below `stop`, which defaults to the epoch's end."""

    dataset: str
    epoch: int
    rank: int
    format: BatchFormat
    start: int = 0
    stop: int | None = None
    stride: int = 1

    def steps(self, plan: Plan) -> range:
        """Returns the steps.

        Raises:
            BadParameter: the range is empty.
            StepOutOfRange, RankOutOfRange: the epoch has no such batch.
        """
        stop = plan.schedule.num_steps if self.stop is None else self.stop
        if self.start >= stop:
            raise BadParameter(f"start={self.start} must be below stop={stop}: a range has at least one step.")
        plan.check(self.epoch, stop - 1, self.rank)
        return range(self.start, stop, self.stride)


async def respond(request: Request, batches: BatchRange) -> Response:
    """Returns the response for a range of batches, a 304 if the client has a current copy.

    Raises:
        Busy: the budget of bytes in flight has no room now.
        BlocksNotReady: the first chunk takes longer than the client's `Prefer: wait`.
        ClientDisconnect: the client has left.
        Problem: see BatchRange.steps, Catalog.plan and Blocks.get.
    """
    watched = RankRequest((batches.epoch, batches.start), request.scope.get("client") or ("", 0))
    request.scope["stages"] = watched.clock  # for the header of an error
    try:
        in_thread = await _choose_threads(request, batches)
        response: Response = await in_thread(partial(_open, request, batches, in_thread, watched))
        if isinstance(response, BatchStream):
            # The first chunk is made before the status line is sent, so its errors are problem+json. A later error closes the
            # connection; the client then requests fewer steps and gets the reason.
            try:
                await response.make_first(request)
            except BaseException:
                response.release()
                raise
    except BaseException as error:
        if isinstance(error, IndexNotReady):
            watched.clock.end_as("index")
        watched.end()
        raise
    response.headers[TIMING_HEADER] = format_timing(watched.clock.seconds())
    watched.clock.enter("receive")
    return response


async def _choose_threads(request: Request, batches: BatchRange) -> InThread:
    """Chooses how to plan a chunk: in threads for plans if that may take long, otherwise in the two that make batches.

    These also make the chunk at once if its blocks are mapped: most chunks take less time than waiting for another thread.
    """
    service, executors = service_of(request), service_of(request).executors
    if len(request.scope["query_string"]) > _LONG_QUERY:
        spec = await executors.make_plan(partial(spec_of, request))
    else:
        spec = spec_of(request)
    check = partial(service.check_new, batches.dataset, spec)
    # Any request of an epoch may sort a window by length, or make a large mixture again. Waiting for a poll may block, too.
    if spec.length_bucket_size or is_large_mix(spec) or catalog_of(request).may_block(batches.dataset, spec):
        check()
        return executors.make_plan
    return partial(executors.make_of_epoch, (batches.dataset, spec, batches.epoch), before_plan=check)


def _open(request: Request, batches: BatchRange, in_thread: InThread, watched: RankRequest) -> Response:
    """Returns the stream of a range of batches, or a 304."""
    service, catalog, spec = service_of(request), catalog_of(request), spec_of(request)
    watched.clock.enter("make")
    report = Report.from_header(request.headers.get(HEADER, ""))
    job = None
    if report and batches.dataset in catalog and batches.rank < spec.world_size:
        job = service.jobs.add(report, batches.dataset, spec, batches.rank, watched)
        service.metrics.add_report(report, batches.dataset)
    plan = catalog.plan(batches.dataset, spec)
    if job:
        job.num_steps, job.step_nbytes = plan.schedule.num_steps, plan.step_nbytes
    steps = batches.steps(plan)
    if batches.format != "msgpack":
        text_view.check_text(plan, len(steps))
    address = f"{plan.identity} {batches.epoch} {batches.rank} {steps} {batches.format}"
    etag = f'"{blake2b(address.encode(), digest_size=16).hexdigest()}"'
    # A cacheable URL pins snapshot and mix; otherwise a cache could mix two snapshots in one epoch.
    shared = "public" if identity_of(request) is EVERYONE else "private"
    cache_control = f"{shared}, max-age=31536000, immutable" if plan.is_named_by(spec) else "no-cache"
    headers = {"ETag": etag, "Cache-Control": cache_control}
    tags = [tag.strip().removeprefix("W/") for tag in request.headers.get("If-None-Match", "").split(",")]
    if etag in tags or "*" in tags:
        watched.end()
        return Response(status_code=304, headers=headers)
    stream = BatchStream(service, plan, batches, steps, in_thread, headers, watched)
    stream.begin()
    return stream


class BatchStream(StreamingResponse):
    """The response for a range of batches. It holds its bytes until the client has them, disconnects or fails."""

    def __init__(
        self,
        service: Service,
        plan: Plan,
        batches: BatchRange,
        steps: range,
        in_thread: InThread,
        headers: dict[str, str],
        watched: RankRequest,
    ) -> None:
        super().__init__((), headers=headers, media_type=wire.MEDIA_TYPE if batches.format == "msgpack" else "application/json")
        self._service, self._plan, self._batches, self._steps = service, plan, batches, steps
        self._in_thread, self._watched = in_thread, watched
        # Others take long, or much memory: threads for texts make them.
        self._is_quick = batches.format == "msgpack" and plan.step_nbytes <= _LARGE_BATCH_BYTES
        self._is_one_chunk = len(steps) <= steps_per_chunk(plan)
        self._body: memoryview | None = None
        self._is_left = False  # the client has disconnected: no more chunks are made

    def begin(self) -> None:
        """Moves to the first chunk, and makes it if that is quick. Raises Busy: the budget has no room now."""
        plan, batches, steps, nbytes = self._plan, self._batches, self._steps, None
        if not self._is_one_chunk and batches.format == "msgpack":
            nbytes = frames_nbytes(plan, batches.epoch, batches.rank, steps)
        if nbytes is not None:
            self.headers["Content-Length"] = str(nbytes)
        # While the client reads slowly: a chunk being sent and the next; without a length uvicorn copies the first.
        num_chunks = 1 if self._is_one_chunk else 2 if nbytes is not None else 3
        chunk_bytes = min(len(steps), steps_per_chunk(plan)) * plan.step_nbytes
        self._reservation = self._service.in_flight.admit(num_chunks, chunk_bytes)
        self._chunks = chunks(plan, batches.epoch, batches.rank, steps)
        try:
            self._next_chunk()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Returns the bytes to the budget, and ends the watch. Idempotent."""
        self._reservation.release()
        self._watched.end()

    async def make_first(self, request: Request) -> None:
        """Makes the first chunk as soon as its blocks are loaded. Raises BlocksNotReady, ClientDisconnect."""
        if self._body is not None:
            return
        kept, etag = self._service.kept_for_retry, self.headers["ETag"]
        requested = kept.take(etag) or await self._request_blocks()
        is_over = requested.when_done()
        watching = asyncio.create_task(self._watch(request.receive, is_over))
        try:
            wait = self._watched.wait_for(requested.futures)
            try:
                await self._wait(requested, is_over, preferred_wait(request.headers.get("Prefer", "")))
            finally:
                self._watched.waited(wait, "make")
            await self._make_from(requested)
        except BlocksNotReady:
            kept.keep(etag, requested)
            raise
        except BaseException:
            requested.forget()
            raise
        finally:
            watching.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response."""
        # A stream sends its final empty message after all bytes left the buffer. A plain response would end, and release
        # its bytes, while they are still in memory.
        reservation = self._reservation
        if "abort" in scope:
            reservation.abort = partial(asyncio.get_running_loop().call_soon_threadsafe, self._abort, scope["abort"])

        async def send_watched(message: Message) -> None:
            reservation.waits_since = time.monotonic() if "abort" in scope else math.inf
            await send(message)
            reservation.waits_since = math.inf

        try:
            async with aclosing(self._bodies(scope["method"])) as self.body_iterator:
                if self._is_one_chunk:  # no need to watch for a disconnect: no chunk is left to make
                    await self.stream_response(send_watched)
                else:
                    await super().__call__(scope, receive, send_watched)
        finally:
            self.release()

    def _abort(self, close: Callable[[], object]) -> None:
        self._service.metrics.limits.labels("inflight_bytes").inc()
        close()

    async def listen_for_disconnect(self, receive: Receive) -> None:
        """Waits until the client disconnects; also stops the thread that makes its text."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._is_left = True

    async def _watch(self, receive: Receive, is_over: asyncio.Event) -> None:
        """Ends the wait for blocks when the client disconnects."""
        await self.listen_for_disconnect(receive)
        is_over.set()

    def _check_client(self) -> None:
        if self._is_left:
            raise ClientDisconnect

    async def _bodies(self, method: str) -> AsyncGenerator[memoryview, None]:
        """Yields the bodies of the chunks; the first is made already. HEAD has none."""
        while method != "HEAD":
            body, self._body = self._body, None
            assert body is not None
            yield body
            if self._is_last:
                return
            await self._in_thread(self._next_chunk)
            if self._body is None:
                # No thread waits for blocks: warm requests need the few threads.
                requested = await self._request_blocks()
                try:
                    wait = self._watched.wait_for(requested.futures)
                    await requested.when_done().wait()
                    self._watched.waited(wait, "receive")
                    await self._make_from(requested)
                except BaseException:
                    requested.forget()
                    raise

    @property
    def _is_last(self) -> bool:
        return bool(self._chunk.steps[-1] == self._steps[-1])

    def _next_chunk(self) -> None:
        """Moves to the next chunk, and makes it if that is quick."""
        self._chunk = next(self._chunks)
        if self._is_quick and self._in_thread != self._service.executors.make_plan:
            blocks = self._chunk.mapped()
            if blocks is not None and not _may_block(blocks):
                self._chunk.read_ahead()
                self._make(blocks)

    async def _request_blocks(self) -> Requested:
        return Requested(await self._in_thread(self._chunk.request))

    async def _wait(self, requested: Requested, is_over: asyncio.Event, limit: float | None) -> None:
        """Waits for the blocks of the first chunk. Raises BlocksNotReady: that takes more than `limit` seconds."""
        began_at, num_before = time.monotonic(), requested.num_done
        try:
            async with asyncio.timeout(limit):
                await is_over.wait()
        except TimeoutError:
            total, num_done = len(requested.futures), requested.num_done
            seconds_left = None
            if num_done > num_before:
                seconds_left = round((time.monotonic() - began_at) / (num_done - num_before) * (total - num_done))
            left = f", about {max(1, seconds_left)} s left" if seconds_left else ""
            has_text = any(member.snapshot.recipe.tokenizer for member in self._plan.members)
            work = "tokenizing" if has_text else "reading"
            text = f"The server is {work}: {num_done} of {total} row groups{left}."
            raise BlocksNotReady(text, num_done, total, seconds_left) from None

    async def _make_from(self, requested: Requested) -> None:
        """Makes the chunk from its blocks, unless one failed or the client has left."""
        self._check_client()
        blocks, executors = requested.result(), self._service.executors
        run = executors.run_blocking if _may_block(blocks) else executors.make_batches
        await (run if self._is_quick else executors.make_text)(partial(self._make, blocks))
        await self._in_thread(self._chunk.read_ahead)  # last: a client that has left by now needs no more blocks

    def _make(self, blocks: Sequence[Block]) -> None:
        """Makes the body of this chunk. In JSON, one batch is an object, several batches are an array."""
        self._check_client()
        self._reservation.take()
        if self._batches.format == "msgpack":
            self._body = self._frames(blocks)
        else:
            before, after = ("", "\n") if len(self._steps) == 1 else ("[\n", "\n]\n")
            before = before if self._chunk.steps[0] == self._steps[0] else ",\n"
            has_token_texts = self._batches.format == "tokens"
            texts = as_json(self._chunk, blocks, self._check_client, has_token_texts=has_token_texts)
            self._body = memoryview((before + ",\n".join(texts) + (after if self._is_last else "")).encode())
        self._reservation.measured(len(self._body))
        if self._is_one_chunk:
            self.headers["Content-Length"] = str(len(self._body))

    def _frames(self, blocks: Sequence[Block]) -> memoryview:
        """Makes the frames of this chunk, and counts them."""
        dataset, metrics, num_batches = self._plan.dataset, self._service.metrics, len(self._chunk.steps)
        began_at = time.perf_counter()
        body = body_of(self._chunk, blocks)
        metrics.make_seconds.labels(dataset).observe(time.perf_counter() - began_at)
        metrics.batches.labels(dataset).inc(num_batches)
        metrics.samples.labels(dataset).inc(num_batches * self._plan.spec.batch_size)
        metrics.tokens.labels(dataset).inc(body.num_tokens)
        if body.num_replaced:
            metrics.replaced_samples.labels(dataset).inc(body.num_replaced)
        return body.content


def preferred_wait(header: str) -> float | None:
    """Returns the seconds in a `Prefer: wait` header; None means no limit."""
    wait = _WAIT.search(header)
    return float(wait[1]) if wait else None


def _may_block(blocks: Sequence[Block]) -> bool:
    """Returns whether making a chunk of these may load the blocks of replacement rows."""
    return any(block.bad for block in blocks)


def _responses(shown: Any) -> dict[int | str, dict[str, Any]]:
    """Returns the documented responses of a URL of batches; `shown` is the JSON example."""
    return {
        200: {"model": shown, "content": {wire.MEDIA_TYPE: BINARY}, "description": "One or several frames, or JSON."},
        304: {"description": "The client's copy is current."},
    }


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
        plan = plan_of(request, dataset)
        return Json(text_view.provenance(plan, epoch, step, rank))

    return await service_of(request).executors.make_text(make)
