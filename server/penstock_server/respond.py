"""Responses of batches: made chunk by chunk, as fast as they are read, and held against the budget of bytes in flight."""

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
from penstock_server.batches.batch import frames, frames_nbytes
from penstock_server.batches.gather import chunks, steps_per_chunk
from penstock_server.batches.plan import Plan
from penstock_server.batches.text_view import as_json
from penstock_server.blocks.block import Block
from penstock_server.blocks.on_demand import PickedRows, RowsFuture
from penstock_server.blocks.store import Asked
from penstock_server.problems import BlocksNotReady
from penstock_server.threads import InThread, has_left, in_batch_threads, in_json_threads, in_waiting_threads
from penstock_server.waiting import Unanswered, preferred_wait, wait_for_all, when_all_are_there

BatchFormat = Literal["msgpack", "json"]


@dataclass(frozen=True, slots=True)
class Run:
    """What a request asks for: some steps of one rank and epoch."""

    plan: Plan
    epoch: int
    rank: int
    steps: range
    format: BatchFormat
    is_named: bool

    @property
    def is_one_chunk(self) -> bool:
        """Whether all of it is made in one go."""
        return len(self.steps) <= steps_per_chunk(self.plan)

    @property
    def etag(self) -> str:
        """Derived from the address alone."""
        address = f"{self.plan.identity} {self.epoch} {self.rank} {self.steps} {self.format}"
        return f'"{blake2b(address.encode(), digest_size=16).hexdigest()}"'

    @property
    def cache_control(self) -> str:
        """Where the URL leaves the snapshot or the mix to the server, a cache that kept it would mix two in one epoch."""
        return "public, max-age=31536000, immutable" if self.is_named else "no-cache"

    def nbytes(self) -> int | None:
        """The length of the response, or None where it depends on the rows."""
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
    """The response to a request for what `find` gives; that is called `in_thread`.

    Batches are made in the same turn if `inline`: not where that is in one of many threads, for each would hold what a chunk
    takes on the way.

    Raises Busy, what `find` and Plan.check raise, and whatever the first chunk meets. Raises ClientDisconnect.
    Raises BlocksNotReady: see waiting; what the request waited for is in `unanswered`.
    """
    # The first chunk is made before the status line is sent, so what goes wrong in it is a problem+json. Later on the
    # connection breaks off; the client asks for less then, and gets the reason.
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
            del head.headers["Content-Length"]  # 0, if nobody says otherwise
        return head
    return _HeldResponse(_bodies(making, in_thread), making, headers)


class BatchStream:
    """A run that is made chunk by chunk, in threads. It holds its bytes until `hold` is released.

    `nbytes` is the length of the response; None where it depends on the rows, and until its only chunk is made.
    Once `is_left`, its client has left, and no more is made of it.
    Raises Busy: there is no room for it now.
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
        """Whether the body of this chunk is there."""
        return self._body is not None

    def go_on(self) -> None:
        """Turns to the next chunk, and makes it, if it may, and all of its blocks are mapped, as they mostly are.

        All in one turn of a thread: to wait for another takes longer than most of what there is to do.
        """
        self.chunk = next(self._parts)
        if self.run.format == "json" or not self._inline:
            return
        blocks = self.chunk.mapped()
        if blocks is not None and not _may_block(blocks):
            self.chunk.read_ahead()
            self.make(blocks)

    def make(self, blocks: Sequence[Block | PickedRows]) -> None:
        """Makes the body of this chunk. As JSON, one batch is an object, and several are an array of them.

        Raises ClientDisconnect: nobody waits for it any more.
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
        """The body of this chunk, which is the caller's to keep or drop."""
        assert self._body is not None
        body, self._body = self._body, None
        return body

    async def watch(self, receive: Receive) -> None:
        """Waits until the client leaves."""
        await has_left(receive)
        self.is_left = True

    def check_client(self) -> None:
        """Raises ClientDisconnect: the client has left."""
        if self.is_left:
            raise ClientDisconnect


class _HeldResponse(StreamingResponse):
    """A response that holds its bytes until the reader has them, leaves or fails."""

    def __init__(self, bodies: AsyncGenerator[memoryview, None], making: BatchStream, headers: dict[str, str]) -> None:
        super().__init__(bodies, media_type=_media_type(making.run), headers=headers)
        self._bodies, self._making = bodies, making

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The empty message that ends a stream is sent when all before it is on its way: a response in one piece would be
        # done, and release its bytes, while they are still in memory.
        try:
            async with aclosing(self._bodies):
                if self._making.run.is_one_chunk:  # nobody need look whether the reader leaves: nothing more would be made
                    await self.stream_response(send)
                else:
                    await super().__call__(scope, receive, send)
        finally:
            self._making.hold.release()

    async def listen_for_disconnect(self, receive: Receive) -> None:
        """Waits until the reader leaves; the thread that makes text for it is told, too."""
        await self._making.watch(receive)


def _begin(
    request: Request, in_flight: InFlight, find: Callable[[], Run], *, inline: bool
) -> tuple[dict[str, str], BatchStream | None]:
    """The headers, and what is made of the run; nothing where the client's copy is current."""
    run = find()
    run.plan.check(run.epoch, run.steps[0], run.rank)  # an address that does not exist has no ETag either
    headers = {"ETag": run.etag, "Cache-Control": run.cache_control}
    return headers, None if _matches(request, headers["ETag"]) else BatchStream(run, in_flight, inline=inline)


def _held_chunks(run: Run, nbytes: int | None) -> int:
    """How many chunks a response has in memory at most, while its reader is slow."""
    if run.is_one_chunk:
        return 1
    return 2 if nbytes is not None else 3  # one on its way and the next; without a length uvicorn copies the first


async def _bodies(making: BatchStream, in_thread: InThread) -> AsyncGenerator[memoryview, None]:
    """The bodies of the chunks, of which the first is made."""
    yield making.take_body()
    while not making.is_last:
        await in_thread(making.go_on)
        if not making.is_made:
            await _load(making, in_thread)
        yield making.take_body()


async def _load_first(making: BatchStream, in_thread: InThread, request: Request, unanswered: Unanswered) -> None:
    """Makes the first chunk once its blocks are there.

    Raises BlocksNotReady: that takes longer than the client wants to wait without a word.  Raises ClientDisconnect.
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
    """Makes a chunk once its blocks are there. No thread waits for blocks: threads are few, and warm requests need them.

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
    """Makes a chunk of blocks that are there, unless one of them failed, or the client has left."""
    making.check_client()
    for future in _futures(asked):  # what a load raised is told while others are still being loaded
        if future.done() and (error := future.exception()):
            raise error.with_traceback(None)  # all who wait for it raise this one, and each would add to its traceback
    blocks = [found if isinstance(found, Block) else found.result() for found in asked]
    if making.run.format == "json":
        await in_json_threads(partial(making.make, blocks))
    else:
        await (in_waiting_threads if _may_block(blocks) else in_batch_threads)(partial(making.make, blocks))
    await in_thread(making.chunk.read_ahead)  # not before: a client that has left by now needs no more blocks


def _futures(asked: Sequence[Asked | RowsFuture]) -> list[Future[Any]]:
    return [found for found in asked if isinstance(found, Future)]


async def _watch(making: BatchStream, receive: Receive, is_over: asyncio.Event) -> None:
    """Once the client leaves, nobody need wait for blocks any more."""
    await making.watch(receive)
    is_over.set()


def _may_block(blocks: Sequence[Block | PickedRows]) -> bool:
    """Whether to make a chunk of these may take the blocks of rows that stand in for bad ones."""
    return any(isinstance(block, Block) and block.bad for block in blocks)


def _media_type(run: Run) -> str:
    return "application/json" if run.format == "json" else wire.MEDIA_TYPE


def _matches(request: Request, etag: str) -> bool:
    asked = [tag.strip().removeprefix("W/") for tag in request.headers.get("If-None-Match", "").split(",")]
    return etag in asked or "*" in asked
