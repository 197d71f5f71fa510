"""The transport with several servers: who is asked, when it waits, and what all of them must agree on."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing

import pytest

import penstock.transport.servers
import penstock.transport.transport
from answering import pages, problem, response, server
from logged import without_process
from penstock import DataError, PenstockError, ServerUnavailable, SnapshotGone
from penstock.transport.connection import Connection
from penstock.transport.servers import Servers
from penstock.transport.transport import Transport

AWAY = "http://127.0.0.1:9"

Answer = Callable[[str], tuple[int, bytes]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.transport.transport, "_FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(penstock.transport.transport, "_MAX_DELAY_SECONDS", 0.05)


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on nothing may wait."""

    def wait(*_: float) -> float:
        raise AssertionError("it waited")

    monkeypatch.setattr(penstock.transport.transport, "uniform", wait)


def named(name: bytes) -> Answer:
    return lambda _: (200, name)


def get(*servers: str, retry_seconds: float = 20.0, rank: int = 0) -> tuple[bytes, int]:
    with closing(Transport(Servers(servers, rank), retry_seconds=retry_seconds)) as transport:
        return transport.get("/path", bytes), transport.num_retries


def test_ranks_begin_at_servers_of_their_own() -> None:
    with pages(named(b"a")) as a, pages(named(b"b")) as b, pages(named(b"c")) as c:
        assert [get(a, b, c, rank=rank) for rank in range(5)] == [(b"a", 0), (b"b", 0), (b"c", 0), (b"a", 0), (b"b", 0)]


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize(
    "fault",
    [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", b"garbage\r\n\r\n", response(b"no", "500 Oops"),
     response(b"", "503 Busy", "Retry-After: 3600"), response(b"", "429 Slow down", "Retry-After: 3600"),
     response(b"<html>", "404 Not Found"), problem("snapshot-gone", 409), problem("shard-unreadable", 500),
     problem("unknown-dataset", 404), problem("index-not-ready", 503)],
    ids=["hangs up", "cut short", "garbage", "500", "503", "429", "stranger", "other snapshot", "bad disk", "other data",
         "counting"],
)  # fmt: skip
def test_another_server_is_asked_at_once(fault: bytes) -> None:
    with server(fault) as bad, pages(named(b"here")) as good:
        assert get(AWAY, bad, good) == (b"here", 1 + (b"index-not-ready" not in fault))


def test_it_waits_only_when_all_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def wait(_: float, high: float) -> float:
        waits.append(high)
        return 0.001

    monkeypatch.setattr(penstock.transport.transport, "uniform", wait)
    with server(*[b""] * 5, response(b"here")) as flaky:
        assert get(AWAY, flaky) == (b"here", 11)
    assert waits == [0.01, 0.02, 0.04, 0.05, 0.05]


def test_a_server_that_answers_is_asked_again_and_the_one_that_failed_is_not() -> None:
    with (
        pages(named(b"good")) as good,
        server(b"", response(b"bad")) as bad,
        closing(Transport(Servers([bad, good]), retry_seconds=9)) as transport,
    ):
        assert [transport.get("/", bytes) for _ in range(5)] == [b"good"] * 5
        assert transport.num_retries == 1


def test_retry_after_holds_for_the_server_that_said_so_and_for_the_next_request_too() -> None:
    with (
        server(response(b"", "503 Busy", "Retry-After: 1"), response(b"asked too soon")) as busy,
        server(b"", response(b"here")) as flaky,
        closing(Transport(Servers([busy, flaky]), retry_seconds=9)) as transport,
    ):
        assert transport.get_some("/", iter) == []
        assert transport.get("/", bytes) == b"here"


def test_run_comes_home_when_the_home_server_answers_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(penstock.transport.servers, "_AWAY_SECONDS", 0.0)
    answers = [(500, b"")]
    with pages(lambda _: answers[-1]) as home, pages(named(b"away")) as away:
        servers, given = Servers([home, away]), []
        for turn in range(4):
            with closing(Transport(servers, retry_seconds=9)) as transport:
                given.append((transport.get("/", bytes), transport.num_retries))
            if turn == 1:
                answers.append((200, b"home"))
    assert given == [(b"away", 1), (b"away", 1), (b"home", 0), (b"home", 0)]
    assert caplog.text.count(f"{home} answers again: back to it") == 1


def test_home_server_is_asked_again_no_sooner_than_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.transport.servers, "uniform", lambda *_: 1.0)
    now, asked, lives = 0.0, Counter[str](), threading.Event()

    def home(path: str) -> tuple[int, bytes]:
        asked[path] += 1
        return 200 if lives.is_set() else 500, b"home"

    with pages(home) as first, pages(named(b"away")) as second:

        def some() -> bytes:
            return b"".join(transport.get_some("/", lambda body: [bytes(body)])) or transport.get("/", bytes)

        with closing(Transport(Servers([first, second]), retry_seconds=9)) as transport:
            transport._servers._clock = lambda: now
            assert some() == b"away"
            assert asked["/"] == 1
            now = 29.0
            assert (some(), asked["/"]) == (b"away", 1)
            now = 31.0
            assert [some(), some()] == [b"away", b"away"]
            assert asked["/"] == 2  # it is away for twice as long from here on
            lives.set()
            now = 90.0
            assert (some(), asked["/"]) == (b"away", 2)
            now = 92.0
            assert some() == b"home"


def test_server_that_hangs_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.transport.transport, "_READ_SECONDS", 0.3)
    over = threading.Event()
    with pages(lambda _: (200, bytes(over.wait(60)))) as hanging, pages(named(b"here")) as good:
        assert get(hanging, good) == (b"here", 1)
        over.set()


def test_server_that_hangs_within_a_response_gives_way_and_what_came_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.transport.transport, "_READ_SECONDS", 0.3)
    over = threading.Event()

    def singly(body: memoryview) -> list[bytes]:
        return [bytes(body[n : n + 1]) for n in range(len(body))]

    cut = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"
    with server(cut, hold=over) as hanging, closing(Transport(Servers([hanging]), retry_seconds=60)) as transport:
        assert transport.get_some("/", singly) == [b"a", b"b", b"c"]
        over.set()


def test_response_that_comes_in_drops_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.transport.transport, "_READ_SECONDS", 1.0)
    drops = [b"drop"] * 20

    def drip() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 80\r\n\r\n")
            for drop in drops:
                connection.sendall(drop)
                time.sleep(0.1)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=drip)
        thread.start()
        assert get(f"http://127.0.0.1:{listening.getsockname()[1]}") == (b"".join(drops), 0)
        thread.join(60)


def test_a_refusal_is_taken_back_by_who_counts_now() -> None:
    gone = problem("snapshot-gone", 409)
    with (
        server(gone, problem("index-not-ready", 503), response(b"here")) as restarted,
        server(b"", *[gone] * 9) as other,
    ):
        assert get(restarted, other)[0] == b"here"


def test_what_all_refuse_is_final_and_says_what_each_said() -> None:
    with (
        server(problem("snapshot-gone", 409)) as newer,
        server(problem("unknown-dataset", 404)) as stranger,
        pytest.raises(SnapshotGone, match=f"all 2 servers refuse.\n{newer}: this is snapshot-gone\n{stranger}: this is unk"),
    ):
        get(newer, stranger)


def test_what_one_refuses_another_that_comes_back_may_have() -> None:
    refusal = problem("snapshot-gone", 409)
    with server(*[refusal] * 9) as newer, server(b"", b"", response(b"here")) as restarting:
        assert get(newer, restarting) == (b"here", 5)


def test_a_refusal_and_a_silence_are_one_error_that_names_both() -> None:
    with (
        pages(lambda _: (409, b'{"type": "urn:penstock:problem:snapshot-gone", "detail": "other data"}')) as newer,
        pytest.raises(ServerUnavailable, match=f"{newer}: other data; {AWAY}: .*Connection refused"),
    ):
        get(newer, AWAY, retry_seconds=0.2)


def test_one_server_that_refuses_is_believed_at_once() -> None:
    with server(problem("bad-row", 500)) as url, pytest.raises(DataError, match="^this is bad-row$"):
        get(url)


@pytest.mark.usefixtures("inline")
def test_what_is_counted_on_one_server_may_be_ready_on_another() -> None:
    with (
        server(problem("index-not-ready", 503)) as cold,
        server(response(b"here"), response(b"more")) as warm,
        closing(Transport(Servers([cold, warm]), retry_seconds=9)) as transport,
    ):
        assert [transport.get("/", bytes) for _ in range(2)] == [b"here", b"more"]
        assert transport.num_retries == 0


def test_however_long_a_server_counts_time_is_not_up() -> None:
    with server(*[problem("index-not-ready", 503, "Retry-After: 1")] * 2, response(b"here")) as cold:
        assert get(cold, AWAY, retry_seconds=0.3)[0] == b"here"


def test_each_stage_of_an_outage_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with (
        server(*[b""] * 6, response(b"here"), response(b"more")) as flaky,
        closing(Transport(Servers([AWAY, flaky]), retry_seconds=20)) as transport,
    ):
        assert transport.get("/", bytes) == b"here"
        assert transport.get("/", bytes) == b"more"
    lines = [without_process(record.message) for record in caplog.records if record.name == "penstock"]
    assert [line.replace(flaky, "FLAKY").replace(AWAY, "AWAY") for line in lines] == [
        "penstock: AWAY: [Errno 111] Connection refused; failing over to FLAKY",
        "penstock: no server has answered (AWAY: [Errno 111] Connection refused; FLAKY: the server closed the connection "
        "without an answer); trying again for up to 20 seconds",
        "penstock: FLAKY answers after 13 failed attempts",
    ]


def test_a_line_that_damages_every_other_answer_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with server(*[b"", response(b"here")] * 50) as flaky, closing(Transport(Servers([flaky]), retry_seconds=20)) as transport:
        for _ in range(50):
            assert transport.get("/", bytes) == b"here"
        assert transport.num_retries == 50
    assert len([record for record in caplog.records if record.name == "penstock"]) <= 4


def test_an_interrupt_wakes_a_read_on_whichever_connection_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Home's connection is kept while another server is asked, and used again afterwards."""
    monkeypatch.setattr(penstock.transport.servers, "_AWAY_SECONDS", 0.0)
    asked = Counter[str]()
    reading, over = threading.Event(), threading.Event()

    def home(path: str) -> tuple[int, bytes]:
        asked[path] += 1
        if asked["/"] == 3:
            reading.set()
            over.wait(60)
        return (500 if path == "/" and asked["/"] == 2 else 200), b"home"

    with pages(home) as first, pages(named(b"away")) as second:
        transport = Transport(Servers([first, second]), retry_seconds=600)
        assert [transport.get("/", bytes) for _ in range(2)] == [b"home", b"away"]
        caught: list[BaseException] = []

        def run() -> None:
            try:
                transport.get("/", bytes)
            except PenstockError as error:
                caught.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        assert reading.wait(20)
        transport.interrupt()
        thread.join(20)
        over.set()
        assert isinstance(caught[0], ServerUnavailable)
        transport.close()


def test_a_fork_that_closes_its_copy_leaves_the_connection_to_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    with pages(named(b"here")) as url, closing(Transport(Servers([url]), retry_seconds=9)) as transport:
        assert transport.get("/", bytes) == b"here"
        child = os.fork()
        if child == 0:
            monkeypatch.setattr(Connection, "interrupt", lambda _: os._exit(1))
            transport.interrupt()
            transport.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert transport.get("/", bytes) == b"here"
        assert transport.num_retries == 0


def test_passwords_of_addresses_are_in_no_log_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    away = AWAY.replace("http://", "http://me:se@cret@")
    with (
        pytest.raises(ServerUnavailable) as told,
        closing(Transport(Servers([away, f"{away}9"]), retry_seconds=0.1)) as transport,
    ):
        transport.get("/", bytes)
    with (
        server(response(b"", "404 No")) as other,
        closing(Transport(Servers([other.replace("//", "//me:secret@")]), retry_seconds=9, first_contact=True)) as transport,
        pytest.raises(PenstockError, match="answered 404") as refused,
    ):
        transport.get("/v1/datasets", bytes)
    assert "cret" not in caplog.text + str(told.value) + str(refused.value)
    assert AWAY in caplog.text
