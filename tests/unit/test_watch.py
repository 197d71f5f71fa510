"""Servers that hang, beside servers that are slow: real sockets, and a patience of a fraction of a second."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

import penstock.transport.transport
import penstock.transport.watch
from answering import pages, response, server
from logged import without_process
from penstock import ServerUnavailable
from penstock.transport.connection import Connection
from penstock.transport.servers import Servers
from penstock.transport.transport import Transport

SLOW_SECONDS = 2.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.transport.transport, "_PATIENCE_SECONDS", 0.3)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch, impatient: None) -> None:
    """For tests in which a server that answers at once must not be taken for one that hangs, however busy the machine is."""
    monkeypatch.setattr(penstock.transport.transport, "_PATIENCE_SECONDS", 4.0)


@pytest.fixture
def curt(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which no server lives that is asked whether it does."""
    monkeypatch.setattr(penstock.transport.watch, "_ANSWER_SECONDS", 0.3)


@contextmanager
def alive(answer: Callable[[], bytes]) -> Iterator[str]:
    """A server that says at once that it lives, and takes its time with the rest."""
    with pages(lambda path: (200, b"ok" if path == "/healthz" else answer())) as url:
        yield url


def slowly() -> bytes:
    time.sleep(SLOW_SECONDS)
    return b"slow"


def get(*servers: str, retry_seconds: float = 60.0) -> tuple[bytes, int]:
    with closing(Transport(Servers(servers), retry_seconds=retry_seconds)) as transport:
        return transport.get("/path", bytes), transport.num_retries


def test_a_watch_that_nobody_closes_ends_once_the_connection_was_interrupted() -> None:
    transport = Transport(Servers(("http://127.0.0.1:9",)), retry_seconds=1.0)
    transport.interrupt()
    transport._watch._thread.join(20)
    assert not transport._watch._thread.is_alive()
    transport.close()


@pytest.mark.usefixtures("curt", "patient")
def test_a_server_that_hangs_gives_way_to_the_next() -> None:
    with server() as hanging, pages(lambda _: (200, b"here")) as good:
        assert get(hanging, good) == (b"here", 1)


@pytest.mark.usefixtures("curt")
def test_one_that_hangs_on_a_connection_that_was_kept_is_not_asked_the_same_again() -> None:
    asked: list[str] = []
    over = threading.Event()

    def answer(path: str) -> tuple[int, bytes]:
        if path == "/path":
            asked.append(path)
        if path == "/healthz" or len(asked) > 1:
            over.wait(60)
        return 200, b"here"

    with (
        pages(answer) as hanging,
        pages(lambda _: (200, b"there")) as good,
        closing(Transport(Servers([hanging, good]), retry_seconds=60)) as transport,
    ):
        assert [transport.get("/path", bytes) for _ in range(2)] == [b"here", b"there"]
        assert len(asked) == 2
        over.set()


@pytest.mark.usefixtures("curt")
def test_one_that_stops_in_the_middle_of_an_answer_gives_way_too_and_what_came_is_kept() -> None:
    over = threading.Event()

    def stop(body: memoryview) -> Iterator[bytes]:
        yield from (bytes(body[n : n + 1]) for n in range(len(body)))

    cut = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"
    with server(cut, hold=over) as hanging, closing(Transport(Servers([hanging]), retry_seconds=60)) as transport:
        assert transport.get_some("/", stop) == [b"a", b"b", b"c"]
        over.set()


@pytest.mark.usefixtures("curt")
def test_one_whose_answer_comes_in_drops_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.transport.transport, "_PATIENCE_SECONDS", 2.0)
    drops = [b"drop"] * 20

    def drip() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 80\r\n\r\n")
            for drop in drops:
                connection.sendall(drop)
                time.sleep(0.2)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=drip)
        thread.start()
        assert get(f"http://127.0.0.1:{listening.getsockname()[1]}") == (b"".join(drops), 0)
        thread.join(60)


def test_a_server_that_is_slow_but_lives_is_waited_for_and_one_rank_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with alive(slowly) as slow, pages(lambda _: (200, b"here")) as other:
        assert get(slow, other) == (b"slow", 0)
        assert [without_process(record.getMessage()) for record in caplog.records] == [
            f"penstock: {slow} is alive, but has sent nothing for 0 seconds: it may have too much to do, or its disks may hang"
        ]
        caplog.clear()
        monkeypatch.setenv("RANK", "1")
        assert get(slow, retry_seconds=0.5) == (b"slow", 0)
        assert not caplog.records


def test_what_comes_over_a_new_connection_alone_is_asked_for_there(caplog: pytest.LogCaptureFixture) -> None:
    """As where a proxy has forgotten the old one, and keeps it open."""
    asked: list[None] = []
    over = threading.Event()

    def answer() -> bytes:
        asked.append(None)
        if len(asked) == 1:
            over.wait(60)
        return b"here"

    with alive(answer) as url:
        assert get(url) == (b"here", 1)
        assert len(asked) == 3
        over.set()
    assert "and it gives the same over a new connection: this one is lost" in caplog.text


@pytest.mark.parametrize("begins_late", [False, True])
def test_an_answer_that_has_begun_may_take_its_time_though_a_new_one_would_begin_at_once(begins_late: bool) -> None:
    """Also one that begins a moment after the new one."""
    asked: list[bytes] = []

    def ask(connection: socket.socket) -> None:
        asked.append(connection.recv(1 << 16).split()[1])

    def answer(connection: socket.socket, first: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n" + first)

    def run() -> None:
        with listening.accept()[0] as slow:
            ask(slow)
            if not begins_late:
                answer(slow, b"some")
            for _ in range(2):
                with listening.accept()[0] as aside:
                    ask(aside)
                    answer(aside, b"whatever")
            if begins_late:
                answer(slow, b"some")
                time.sleep(0.2)
            slow.sendall(b"more")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=run)
        thread.start()
        assert get(f"http://127.0.0.1:{listening.getsockname()[1]}") == (b"somemore", 0)
        thread.join(60)
    assert asked == [b"/path", b"/healthz", b"/path" if begins_late else b"/healthz"]


def test_one_that_lives_but_never_answers_gives_way_while_another_is_untried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.transport.transport, "_HURRY_SECONDS", 0.5)
    over = threading.Event()
    with alive(lambda: bytes(over.wait(60))) as stuck, pages(lambda _: (200, b"here")) as good:
        assert get(stuck, good) == (b"here", 1)
        over.set()


def test_when_all_are_slow_the_second_round_is_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.transport.transport, "_HURRY_SECONDS", 0.5)
    monkeypatch.setattr(penstock.transport.transport, "_SILENCE_SECONDS", 3.0)
    monkeypatch.setattr(Connection, "would_answer", lambda *_: False)  # what is asked aside is not to count
    asked: list[float] = []

    def slower_and_slower() -> bytes:
        asked.append(time.monotonic())
        time.sleep(4.0 if len(asked) < 3 else 1.0)
        return b"slow"

    with alive(slower_and_slower) as first, alive(slower_and_slower) as second:
        assert get(first, second) == (b"slow", 2)


@pytest.mark.usefixtures("curt")
def test_a_hang_is_no_longer_than_retry_seconds_allow_and_says_what_it_was() -> None:
    with server() as hanging, pytest.raises(ServerUnavailable, match="silent for . seconds, and it does not answer /healthz"):
        get(hanging, retry_seconds=0.5)


@pytest.mark.parametrize("page", [response(b"", "404 Not Found"), response(b"", "401 Unauthorized")])
def test_a_proxy_that_lets_only_batches_through_counts_as_alive(page: bytes) -> None:
    status = int(page.split()[1])

    def answer(path: str) -> tuple[int, bytes]:
        return (status, b"") if path == "/healthz" else (200, slowly())

    with pages(answer) as url:
        assert get(url) == (b"slow", 0)


@pytest.mark.usefixtures("patient")
def test_one_with_nobody_behind_it_does_not() -> None:
    over = threading.Event()

    def answer(path: str) -> tuple[int, bytes]:
        return (502, b"") if path == "/healthz" else (200, bytes(over.wait(60)))

    with pages(answer) as url, pages(lambda _: (200, b"here")) as good:
        assert get(url, good) == (b"here", 1)
        over.set()


def test_closing_ends_the_watch_also_while_it_asks() -> None:
    before = threading.active_count()
    with server() as hanging:
        transport = Transport(Servers([hanging]), retry_seconds=600)

        def run() -> None:
            with pytest.raises(ServerUnavailable, match="interrupted"):
                transport.get("/", bytes)

        thread = threading.Thread(target=run)
        thread.start()
        time.sleep(0.6)
        transport.interrupt()
        thread.join(20)
        transport.close()
    assert threading.active_count() <= before
