"""Several processes take connections from one socket, each as many as the others."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from unittest.mock import Mock

import pytest

from penstock_server.serving import accepting
from penstock_server.serving.accepting import WorkerSlot, accept_in_turn


class Clock:
    """Seconds that pass when a test says so."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(accepting, "time", clock)
    return clock


class Open(asyncio.Protocol):
    """A connection, which is among those that are open."""

    def __init__(self, connections: set[Open]) -> None:
        self.connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.connections.add(self)


@contextmanager
def accepts(listener: socket.socket, seat: WorkerSlot) -> Iterator[set[Open]]:
    """The connections that are open at this seat, which takes more meanwhile."""
    connections = set[Open]()
    task = asyncio.create_task(accept_in_turn(listener, seat, connections, lambda: Open(connections)))
    try:
        yield connections
    finally:
        task.cancel()
        for connection in connections:
            connection.transport.abort()  # type: ignore[attr-defined]


async def until_taken(number: int, *open_: Collection[Open]) -> None:
    async with asyncio.timeout(60):
        while sum(map(len, open_)) < number:
            await asyncio.sleep(0.001)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        yield listener


def test_a_process_takes_no_more_than_another_that_is_alive(clock: Clock) -> None:
    one, other = WorkerSlot.of(2)
    assert one.tell(0)
    assert one.tell(5)  # the other has never told anything
    assert other.tell(0)
    assert not one.tell(5)
    assert other.tell(5)
    assert one.tell(5)
    assert not one.tell(6)
    other.leave()
    assert one.tell(6)
    assert other.tell(5)
    clock.now += 0.9
    assert not one.tell(6)
    clock.now += 0.2
    assert one.tell(6)  # the other hangs


def test_of_many_connections_one_process_may_have_a_few_more() -> None:
    one, other = WorkerSlot.of(2)
    other.tell(500)
    assert one.tell(520)
    assert not one.tell(540)


def test_connections_are_spread_evenly(listener: socket.socket) -> None:
    async def main() -> None:
        seats = WorkerSlot.of(3)
        for seat in seats:
            seat.tell(0)
        with ExitStack() as stack:
            taken = [stack.enter_context(accepts(listener, seat)) for seat in seats]
            for _ in range(60):
                stack.enter_context(socket.create_connection(listener.getsockname()))
            await until_taken(60, *taken)
            assert max(map(len, taken)) - min(map(len, taken)) <= 2

    asyncio.run(main())


@pytest.mark.usefixtures("clock")
def test_a_process_that_is_alive_but_takes_nothing_holds_up_nobody(listener: socket.socket) -> None:
    async def main() -> None:
        one, slow = WorkerSlot.of(2)
        slow.tell(0)  # and no time passes in which it could be taken for hung
        with ExitStack() as stack, accepts(listener, one) as taken:
            for _ in range(5):
                stack.enter_context(socket.create_connection(listener.getsockname()))
            await until_taken(5, taken)

    asyncio.run(main())


@pytest.mark.usefixtures("clock")
def test_connections_that_one_process_cannot_hold_go_to_another(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accepting, "_MAX_LOOKS", math.inf)  # so that they go there at once or never

    async def main() -> None:
        full, other = WorkerSlot.of(2)
        refuses = Mock(wraps=listener)
        refuses.fileno = listener.fileno
        refuses.accept.side_effect = OSError(errno.EMFILE, "Too many open files")
        with (
            ExitStack() as stack,
            caplog.at_level(logging.WARNING),
            accepts(refuses, full) as none,
            accepts(listener, other) as all_,
        ):
            for _ in range(10):
                stack.enter_context(socket.create_connection(listener.getsockname()))
            await until_taken(10, all_)
            assert not none
        assert "no connection can be taken: [Errno 24] Too many open files" in caplog.text

    asyncio.run(main())


def test_who_goes_while_it_is_taken_holds_up_nobody(listener: socket.socket, caplog: pytest.LogCaptureFixture) -> None:
    gone = ConnectionAbortedError(errno.ECONNABORTED, "Software caused connection abort")

    async def main() -> None:
        loop, accepts_some = asyncio.get_running_loop(), Mock(wraps=listener)
        accepts_some.fileno = listener.fileno
        accepts_some.accept.side_effect = chain([gone], iter(listener.accept, None))
        open_, goes = loop.connect_accepted_socket, [gone]

        async def opening(protocol: Callable[[], asyncio.Protocol], accepted: socket.socket) -> object:
            if goes:
                accepted.close()
                raise goes.pop()
            return await open_(protocol, accepted)

        loop.connect_accepted_socket = opening  # type: ignore[method-assign, assignment]
        [seat] = WorkerSlot.of(1)
        with ExitStack() as stack, accepts(accepts_some, seat) as taken:
            stack.enter_context(socket.create_connection(listener.getsockname()))
            async with asyncio.timeout(60):
                while goes:
                    await asyncio.sleep(0.001)
            stack.enter_context(socket.create_connection(listener.getsockname()))
            await until_taken(1, taken)

    asyncio.run(main())
    assert not caplog.records  # a crowd that goes would fill the log
