"""Batch responses: made chunk by chunk, as fast as the client reads, and counted in the budget of bytes in flight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, Literal

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from penstock import wire
from penstock_server.admission import InFlight
from penstock_server.batches.assemble import chunks, steps_per_chunk
from penstock_server.batches.plan import Plan
from penstock_server.batches.text_view import as_json
from penstock_server.batches.writer import frames, frames_nbytes
from penstock_server.blocks.block import Block
from penstock_server.blocks.on_demand import PickedRows, RowsFuture
from penstock_server.blocks.store import Asked
from penstock_server.problems import BlocksNotReady
from penstock_server.threads import InThread, has_left, in_batch_threads, in_json_threads, in_waiting_threads
from penstock_server.waiting import Unanswered, preferred_wait, wait_for_all, when_all_are_there

BatchFormat = Literal["msgpack", "json"]


@dataclass(frozen=True, slots=True)
class Run:
    """A requested range of batches: some steps of one rank and epoch."""

    plan: Plan
    epoch: int
    rank: int
    steps: range
    format: BatchFormat
    is_named: bool

    @property
    def is_one_chunk(self) -> bool:
        """Whether the response is one chunk."""
        return len(self.steps) <= steps_per_chunk(self.plan)

    @property
    def etag(self) -> str:
        """Derived from the address alone."""
        address = f"{self.plan.identity} {self.epoch} {self.rank} {self.steps} {self.format}"
        return f'"{blake2b(address.encode(), digest_size=16).hexdigest()}"'

    @property
    def cache_control(self) -> str:
        """A cacheable URL pins snapshot and mix; otherwise a cache could mix two snapshots in one epoch."""
        return "public, max-age=31536000, immutable" if self.is_named else "no-cache"

    def nbytes(self) -> int | None:
        """Returns the length of the response in bytes, or None if it depends on the rows."""
        return frames_nbytes(self.plan, self.epoch, self.rank, self.steps) if self.format == "msgpack" else None


async def respond(
    request: Request,
    in_flight: InFlight,
    unanswered: Unanswered,
    find: Callable[[], Run],
    in_thread: InThread,
    *,
    inline: bool,
) -> Response:
    """Returns the response for the range that `find` returns; calls `find` `in_thread`.

    With `inline`, the same thread call makes the batches. Do not use it with a pool of many threads: each thread would hold
    the temporary memory of a chunk.

    Raises:
        Busy, ClientDisconnect, and what `find`, Plan.check and the first chunk raise.
        BlocksNotReady: see waiting; `unanswered` keeps the blocks that the request waited for.
    """
    # The first chunk is made before the status line is sent, so its errors are problem+json. A later error closes the
    # connection; the client then requests fewer steps and gets the reason.
    headers, making = await in_thread(partial(_begin, request, in_flight, find, inline=inline))
    if making is None:
        return Response(status_code=304, headers=headers)
    try:
        if not making.is_made:
            await _load_first(making, in_thread, request, unanswered)
    except BaseException:
        making.hold.release()
        raise
    if making.nbytes is not None:
        headers["Content-Length"] = str(making.nbytes)
    if request.method == "HEAD":
        making.hold.release()
        head = Response(headers=headers, media_type=_media_type(making.run))
        if making.nbytes is None:
            del head.headers["Content-Length"]  # Starlette sets 0
        return head
    return _HeldResponse(_bodies(making, in_thread), making, headers)


class BatchStream:
    """A range of batches, made chunk by chunk in threads. It holds its bytes until `hold` is released.

    `nbytes` is the length of the response; None if it depends on the rows, and until the only chunk is made.
    `is_left` is set after the client disconnected; no more chunks are made then.
    Raises Busy: the budget has no room now.
    """

    def __init__(self, run: Run, in_flight: InFlight, *, inline: bool) -> None:
        self.run = run
        self._inline = inline
        self.nbytes = None if run.is_one_chunk else run.nbytes()
        chunk_bytes = min(len(run.steps), steps_per_chunk(run.plan)) * run.plan.step_nbytes
        self.hold = in_flight.hold(_held_chunks(run, self.nbytes), chunk_bytes)
        self._parts = chunks(run.plan, run.epoch, run.rank, run.steps)
        self._body: memoryview | None = None
        self.is_left = False
        try:
            self.go_on()
        except BaseException:
            self.hold.release()
            raise

    @property
    def is_last(self) -> bool:
        """Whether no chunk comes after this one."""
        return self.chunk.steps[-1] == self.run.steps[-1]

    @property
    def is_made(self) -> bool:
        """Whether the body of this chunk is ready."""
        return self._body is not None

    def go_on(self) -> None:
        """Moves to the next chunk, and makes it if `inline` and all of its blocks are mapped, the common case.

        All in one thread call: waiting for a second one takes longer than most chunks.
        """
        self.chunk = next(self._parts)
        if self.run.format == "json" or not self._inline:
            return
        blocks = self.chunk.mapped()
        if blocks is not None and not _may_block(blocks):
            self.chunk.read_ahead()
            self.make(blocks)

    def make(self, blocks: Sequence[Block | PickedRows]) -> None:
        """Makes the body of this chunk. In JSON, one batch is an object, several batches are an array.

        Raises ClientDisconnect: the client has left.
        """
        self.check_client()
        self.hold.take()
        if self.run.format == "msgpack":
            self._body = frames(self.chunk, blocks)
        else:
            before, after = ("", "\n") if len(self.run.steps) == 1 else ("[\n", "\n]\n")
            before = before if self.chunk.steps[0] == self.run.steps[0] else ",\n"
            text = before + ",\n".join(as_json(self.chunk, blocks, self.check_client)) + (after if self.is_last else "")
            self._body = memoryview(text.encode())
        self.hold.measured(len(self._body))
        if self.run.is_one_chunk:
            self.nbytes = len(self._body)

    def take_body(self) -> memoryview:
        """Returns the body of this chunk and drops the reference to it."""
        assert self._body is not None
        body, self._body = self._body, None
        return body

    async def watch(self, receive: Receive) -> None:
        """Waits until the client disconnects."""
        await has_left(receive)
        self.is_left = True

    def check_client(self) -> None:
        """Raises ClientDisconnect: the client has left."""
        if self.is_left:
            raise ClientDisconnect


class _HeldResponse(StreamingResponse):
    """A response that holds its bytes until the client has them, disconnects or fails."""

    def __init__(self, bodies: AsyncGenerator[memoryview, None], making: BatchStream, headers: dict[str, str]) -> None:
        super().__init__(bodies, media_type=_media_type(making.run), headers=headers)
        self._bodies, self._making = bodies, making

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A stream sends its final empty message after all bytes left the buffer. A plain response would end, and release
        # its bytes, while they are still in memory.
        try:
            async with aclosing(self._bodies):
                if self._making.run.is_one_chunk:  # no need to watch for a disconnect: no chunk is left to make
                    await self.stream_response(send)
                else:
                    await super().__call__(scope, receive, send)
        finally:
            self._making.hold.release()

    async def listen_for_disconnect(self, receive: Receive) -> None:
        """Waits until the client disconnects; also stops the thread that makes its text."""
        await self._making.watch(receive)


def _begin(
    request: Request, in_flight: InFlight, find: Callable[[], Run], *, inline: bool
) -> tuple[dict[str, str], BatchStream | None]:
    """Returns the headers and the stream; no stream if the client's copy is current."""
    run = find()
    run.plan.check(run.epoch, run.steps[0], run.rank)  # an address that does not exist has no ETag
    headers = {"ETag": run.etag, "Cache-Control": run.cache_control}
    return headers, None if _matches(request, headers["ETag"]) else BatchStream(run, in_flight, inline=inline)


def _held_chunks(run: Run, nbytes: int | None) -> int:
    """Returns the maximum number of chunks in memory while the client reads slowly."""
    if run.is_one_chunk:
        return 1
    return 2 if nbytes is not None else 3  # one being sent and the next; without a length uvicorn copies the first


async def _bodies(making: BatchStream, in_thread: InThread) -> AsyncGenerator[memoryview, None]:
    """Yields the bodies of the chunks; the first is made already."""
    yield making.take_body()
    while not making.is_last:
        await in_thread(making.go_on)
        if not making.is_made:
            await _load(making, in_thread)
        yield making.take_body()


async def _load_first(making: BatchStream, in_thread: InThread, request: Request, unanswered: Unanswered) -> None:
    """Makes the first chunk as soon as its blocks are loaded.

    Raises BlocksNotReady: that takes longer than the client's `Prefer: wait`.  Raises ClientDisconnect.
    """
    asked = unanswered.take(making.run.etag) or await in_thread(making.chunk.request)
    futures = _futures(asked)
    is_over = when_all_are_there(futures)
    watching = asyncio.create_task(_watch(making, request.receive, is_over))
    has_text = any(member.snapshot.recipe.tokenizer for member in making.run.plan.members)
    work = "tokenizing" if has_text and not any(isinstance(future, RowsFuture) for future in futures) else "reading"
    forget = partial(making.chunk.forget, futures)
    try:
        await wait_for_all(is_over, futures, preferred_wait(request.headers.get("Prefer", "")), work)
        await _make(making, in_thread, asked)
    except BlocksNotReady:
        unanswered.keep(making.run.etag, asked, forget)
        raise
    except BaseException:
        forget()
        raise
    finally:
        watching.cancel()
    forget()


async def _load(making: BatchStream, in_thread: InThread) -> None:
    """Makes a chunk as soon as its blocks are loaded. No thread waits for blocks: warm requests need the few threads.

    Raises ClientDisconnect.
    """
    asked = await in_thread(making.chunk.request)
    futures = _futures(asked)
    try:
        await when_all_are_there(futures).wait()
        await _make(making, in_thread, asked)
    finally:
        making.chunk.forget(futures)


async def _make(making: BatchStream, in_thread: InThread, asked: Sequence[Asked | RowsFuture]) -> None:
    """Makes a chunk from loaded blocks, unless one failed or the client has left."""
    making.check_client()
    for future in _futures(asked):  # a failed load is raised while others are still loading
        if future.done() and (error := future.exception()):
            raise error.with_traceback(None)  # all waiters raise this instance, and each would extend its traceback
    blocks = [found if isinstance(found, Block) else found.result() for found in asked]
    if making.run.format == "json":
        await in_json_threads(partial(making.make, blocks))
    else:
        await (in_waiting_threads if _may_block(blocks) else in_batch_threads)(partial(making.make, blocks))
    await in_thread(making.chunk.read_ahead)  # last: a client that has left by now needs no more blocks


def _futures(asked: Sequence[Asked | RowsFuture]) -> list[Future[Any]]:
    return [found for found in asked if isinstance(found, Future)]


async def _watch(making: BatchStream, receive: Receive, is_over: asyncio.Event) -> None:
    """Ends the wait for blocks when the client disconnects."""
    await making.watch(receive)
    is_over.set()


def _may_block(blocks: Sequence[Block | PickedRows]) -> bool:
    """Returns whether making a chunk of these may load the blocks of replacement rows."""
    return any(isinstance(block, Block) and block.bad for block in blocks)


def _media_type(run: Run) -> str:
    return "application/json" if run.format == "json" else wire.MEDIA_TYPE


def _matches(request: Request, etag: str) -> bool:
    asked = [tag.strip().removeprefix("W/") for tag in request.headers.get("If-None-Match", "").split(",")]
    return etag in asked or "*" in asked
