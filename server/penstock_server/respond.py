"""Responses of batches: made chunk by chunk, as fast as they are read, and held against the budget of bytes in flight."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from penstock import wire
from penstock_server.batches.batch import frames, frames_nbytes
from penstock_server.batches.gather import Chunk, chunks, steps_per_chunk
from penstock_server.batches.plan import Plan
from penstock_server.batches.readable import as_json
from penstock_server.inflight import Hold, InFlight
from penstock_server.storage.block import Block

BatchFormat = Literal["msgpack", "json"]

_LOOK_SECONDS = 1.0  # how often a request that waits for blocks looks whether its client still does


@dataclass(frozen=True, slots=True)
class Run:
    """What a request asks for: some steps of one rank and epoch."""

    plan: Plan
    epoch: int
    rank: int
    steps: range
    format: BatchFormat

    @property
    def is_one_chunk(self) -> bool:
        """Whether all of it is made in one go."""
        return len(self.steps) <= steps_per_chunk(self.plan)

    @property
    def etag(self) -> str:
        """Derived from the address alone."""
        spec = self.plan.spec.to_dict()
        steps = (self.steps.start, self.steps.stop, self.steps.step)
        address = [wire.VERSION, self.plan.dataset, spec, self.epoch, self.rank, *steps, self.format]
        return f'"{blake2b(json.dumps(address).encode(), digest_size=16).hexdigest()}"'

    def nbytes(self) -> int | None:
        """The length of the response, or None where it depends on the rows."""
        return frames_nbytes(self.plan, self.epoch, self.rank, self.steps) if self.format == "msgpack" else None


async def respond(request: Request, in_flight: InFlight, run: Run) -> Response:
    """The response to a request for batches. Raises Busy, what Plan.check raises, and whatever the first chunk meets."""
    run.plan.check(run.epoch, run.steps[0], run.rank)  # an address that does not exist has no ETag either
    headers = {"ETag": run.etag, "Cache-Control": _cache_control(request)}
    if _matches(request, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    nbytes = run.nbytes()
    hold = in_flight.hold(_held_chunks(run, nbytes), min(len(run.steps), steps_per_chunk(run.plan)) * run.plan.step_nbytes)
    bodies = _bodies(request, run, hold)
    try:
        # The first chunk is made before the status line is sent, so what goes wrong in it is a problem+json. Later on the
        # connection breaks off; the client asks for less then, and gets the reason.
        made = [await anext(bodies)]
    except BaseException:
        hold.release()
        raise
    if run.is_one_chunk:
        nbytes = len(made[0])
    if nbytes is not None:
        headers["Content-Length"] = str(nbytes)
    media_type = "application/json" if run.format == "json" else wire.MEDIA_TYPE
    return _HeldResponse(made, bodies, hold, media_type, headers)


class _HeldResponse(StreamingResponse):
    """A response that holds its bytes until the reader has them, leaves or fails."""

    def __init__(
        self,
        made: list[memoryview],
        rest: AsyncGenerator[memoryview, None],
        hold: Hold,
        media_type: str,
        headers: dict[str, str],
    ) -> None:
        super().__init__(_chain(made, rest), media_type=media_type, headers=headers)
        self._rest, self._hold = rest, hold

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The empty message that ends a stream is sent when all before it is on its way: a response in one piece would be
        # done, and release its bytes, while they are still in memory.
        try:
            async with aclosing(self._rest):
                await super().__call__(scope, receive, send)
        finally:
            self._hold.release()


def _held_chunks(run: Run, nbytes: int | None) -> int:
    """How many chunks a response has in memory at most, while its reader is slow."""
    if run.is_one_chunk:
        return 1
    return 2 if nbytes is not None else 3  # one on its way and the next; without a length the first is copied, too


async def _bodies(request: Request, run: Run, hold: Hold) -> AsyncGenerator[memoryview, None]:
    """The bytes of each chunk. As JSON, one batch is an object, and several are an array of them."""
    before, after = ("", "\n") if len(run.steps) == 1 else ("[\n", "\n]\n")
    async with aclosing(_loaded(request, run)) as loaded:
        async for chunk, blocks in loaded:
            hold.take()
            if run.format == "msgpack":
                body = memoryview(await run_in_threadpool(frames, chunk, blocks))
            else:
                text = before + ",\n".join(await run_in_threadpool(as_json, chunk, blocks))
                before = ",\n"
                body = memoryview((text + after if chunk.steps[-1] == run.steps[-1] else text).encode())
            hold.measured(len(body))
            yield body


async def _loaded(request: Request, run: Run) -> AsyncGenerator[tuple[Chunk, list[Block]], None]:
    """The chunks with their blocks. No thread waits for blocks: threads are few, and warm requests need them."""
    streams = False  # from then on the response itself sees a client that leaves, and closes this generator
    parts, is_last = chunks(run.plan, run.epoch, run.rank, run.steps), False
    while not is_last:
        chunk, blocks = await run_in_threadpool(_planned, parts)
        is_last = chunk.steps[-1] == run.steps[-1]
        if blocks is not None:  # warm, as they mostly are
            streams = True
            yield chunk, blocks
            continue
        futures = await run_in_threadpool(_requested, chunk)
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


def _planned(parts: Iterator[Chunk]) -> tuple[Chunk, list[Block] | None]:
    """The next chunk, and its blocks if all of them are mapped."""
    chunk = next(parts)
    blocks = chunk.mapped()
    if blocks is not None:
        chunk.read_ahead()
    return chunk, blocks


def _requested(chunk: Chunk) -> list[Future[Block]]:
    """The blocks of a chunk, and behind them those that come next."""
    futures = chunk.request()
    chunk.read_ahead()
    return futures


async def _chain(made: list[memoryview], rest: AsyncGenerator[memoryview, None]) -> AsyncGenerator[memoryview, None]:
    yield made.pop()  # and so it is not held until the last has been sent
    async for chunk in rest:
        yield chunk


def _cache_control(request: Request) -> str:
    # Without a snapshot the URL means "the latest": a cache that kept it would mix two snapshots in one epoch.
    named = "snapshot" in request.query_params
    return "public, max-age=31536000, immutable" if named else "no-cache"


def _matches(request: Request, etag: str) -> bool:
    asked = [tag.strip().removeprefix("W/") for tag in request.headers.get("If-None-Match", "").split(",")]
    return etag in asked or "*" in asked
