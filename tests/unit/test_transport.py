"""The transport against real sockets that misbehave: which server is asked, when it waits, and what it raises."""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from weakref import ref

import pytest

import penstock.servers
import penstock.transport
from penstock import DataError, PenstockError, ServerUnavailable, SnapshotGone, VersionMismatch, WireError
from penstock.http import HttpClient
from penstock.responses import IndexNotReady
from penstock.servers import Servers
from penstock.transport import RetryLog, Transport
from support.processes import without_process
from support.servers import pages, problem, rank_that_prefers, response, server

AWAY = "http://127.0.0.1:9"
DRAINING = "Penstock-Draining: true"
CUT = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"

Answer = Callable[[str], tuple[int, bytes]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.transport, "_FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(penstock.transport, "_MAX_DELAY_SECONDS", 0.05)


@pytest.fixture
def never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(*_: object) -> None:
        raise AssertionError("it waited")

    monkeypatch.setattr(HttpClient, "wait", wait)


def named(name: bytes) -> Answer:
    return lambda _: (200, name)


def opened(*servers: str, retry_seconds: float = 20.0, first_contact: bool = False) -> closing[Transport]:
    """Tries the servers in this order."""
    ordered = Servers(servers, rank_that_prefers(*servers))
    return closing(Transport(ordered, retry_seconds=retry_seconds, first_contact=first_contact))


def get(*servers: str, retry_seconds: float = 20.0) -> tuple[bytes, int]:
    with opened(*servers, retry_seconds=retry_seconds) as transport:
        return transport.get("/path", bytes), transport.num_retries


@pytest.mark.parametrize(
    "fault",
    [b"", CUT + b"short", b"garbage\r\n\r\n", response(b"no", "500 Oops"), response(b"busy", "503 Busy"),
     response(b"slow down", "429 Too Many"), problem("internal-error", 500)],
    ids=["hangs up", "cut short", "garbage", "500", "503", "429", "internal error"],
)  # fmt: skip
def test_get_retries_a_transient_fault(fault: bytes) -> None:
    with server(fault, fault, response(b"here")) as url:
        assert get(url) == (b"here", 2)


def test_get_retries_a_body_that_does_not_decode() -> None:
    def decode(body: memoryview) -> bytes:
        if bytes(body) == b"damaged":
            raise WireError("damaged")
        return bytes(body)

    with server(response(b"damaged"), response(b"sound")) as url, opened(url) as transport:
        assert transport.get("/", decode) == b"sound"
        assert transport.num_corrupted == 1


@pytest.mark.parametrize("last", [response(b"here"), problem("bad-row", 500)], ids=["answer", "refusal"])
def test_failures_leave_nothing_to_the_garbage_collector(last: bytes) -> None:
    gc.disable()
    try:
        with server(CUT + b"short", last) as url:
            transport = Transport(Servers([url]), retry_seconds=20.0)
            with closing(transport), suppress(DataError):
                transport.get("/path", bytes)
            assert transport.num_retries == 1
        kept = ref(transport)
        del transport
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("jitter", [0.0, 0.2])
def test_retry_after_is_honoured_with_jitter(monkeypatch: pytest.MonkeyPatch, jitter: float) -> None:
    monkeypatch.setattr(penstock.transport, "uniform", lambda *_: jitter)
    with server(response(b"", "503 Busy", "Retry-After: 1"), response(b"here")) as url:
        began = time.monotonic()
        assert get(url) == (b"here", 1)
        assert time.monotonic() - began >= 1 + jitter


def test_error_after_retry_seconds_names_them_the_server_and_the_reason() -> None:
    with pytest.raises(ServerUnavailable, match=r"retry_seconds=0.2 from http://127.0.0.1:9; .*Connection refused"):
        get(AWAY, retry_seconds=0.2)


def test_refusal_of_the_only_server_is_raised_at_once() -> None:
    with server(problem("bad-row", 500)) as url, pytest.raises(DataError, match=r"^this is bad-row \(request \w+\)$") as raised:
        get(url)
    assert raised.value.__cause__ is None


def test_unexpected_server_is_a_refusal_at_first_contact() -> None:
    with (
        server(response(b"<html>", "404 Not Found")) as url,
        opened(url, first_contact=True) as transport,
        pytest.raises(PenstockError, match="answered 404: .* Is there a penstock server at this address"),
    ):
        transport.get("/", bytes)


@pytest.mark.parametrize("status", ["404 Not Found", "302 Found", "204 Nothing", "200 OK"])
def test_running_loop_waits_for_a_load_balancer_whose_servers_are_down(status: str) -> None:
    def decode(body: memoryview) -> bytes:
        if bytes(body) != b"here":
            raise WireError("this is not a batch")
        return bytes(body)

    page = response(b"" if status.startswith("204") else b"<html>", status)
    with server(page, page, response(b"here")) as url, opened(url) as transport:
        assert transport.get("/", decode) == b"here"
        assert (transport.num_retries, transport.num_corrupted) == (2, 2 if status.startswith("200") else 0)


@pytest.mark.parametrize("state", ["reading", "waiting"])
def test_interrupt_ends_a_get_at_once(state: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1] if state == 'reading' else 9}"
        failures: list[BaseException] = []

        def run() -> None:
            try:
                transport.get("/", bytes)
            except PenstockError as error:
                failures.append(error)

        with opened(url, retry_seconds=600) as transport:
            thread = threading.Thread(target=run)
            thread.start()
            time.sleep(0.3)
            transport.interrupt()
            thread.join(20)
            assert isinstance(failures[0], ServerUnavailable)
            if state == "reading":
                assert transport.num_retries == 0  # the server is not at fault


def test_fork_leaves_the_connection_to_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    with pages(named(b"here")) as url, opened(url) as transport:
        assert transport.get("/", bytes) == b"here"
        child = os.fork()
        if child == 0:
            monkeypatch.setattr(HttpClient, "interrupt", lambda _: os._exit(1))
            transport.interrupt()
            transport.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert transport.get("/", bytes) == b"here"
        assert transport.num_retries == 0


def test_retry_seconds_do_not_run_while_a_server_is_busy() -> None:
    busy = problem("busy", 503, "Retry-After: 1")
    with server(busy, busy, response(b"here")) as url:
        assert get(url, retry_seconds=0.2) == (b"here", 2)


def test_retry_seconds_do_not_run_while_a_server_counts() -> None:
    with server(*[problem("index-not-ready", 503, "Retry-After: 1")] * 2, response(b"here")) as cold:
        assert get(cold, AWAY, retry_seconds=0.3)[0] == b"here"


@pytest.mark.parametrize("slug", ["busy", "index-not-ready"])
def test_transport_retries_a_server_that_answers_in_the_last_round(monkeypatch: pytest.MonkeyPatch, slug: str) -> None:
    monkeypatch.setattr(penstock.transport, "uniform", lambda _, high: 60 * high)
    with server(b"", problem(slug, 503), response(b"here")) as url:
        assert get(url, retry_seconds=0.2)[0] == b"here"


def test_last_attempt_ignores_a_longer_retry_after() -> None:
    with server(response(b"", "503 Away", "Retry-After: 3600"), response(b"here")) as url:
        assert get(url, retry_seconds=0.2) == (b"here", 1)


def test_retry_after_of_get_some_does_not_end_a_get_without_retry_seconds() -> None:
    with server(problem("busy", 503, "Retry-After: 1"), response(b"here")) as url, opened(url, retry_seconds=0) as transport:
        assert transport.get_some("/", bytes) == []
        assert transport.get("/", bytes) == b"here"


def test_get_some_returns_the_items_before_a_fault() -> None:
    def decode(body: memoryview) -> Iterator[int]:
        for item in body:
            if item == ord("x"):
                raise WireError("damaged")
            yield item - ord("0")

    answers = [b"", CUT + b"123", CUT + b"12x4", response(b"12x4"), response(b"1234"), problem("bad-row", 500)]
    with server(*answers) as url, opened(url) as transport:
        assert [transport.get_some("/", decode) for _ in answers] == [[], [1, 2, 3], [1, 2], [1, 2], [1, 2, 3, 4], []]
        assert (transport.num_retries, transport.num_corrupted, transport.num_bytes) == (4, 1, 3 + 4 + 4 + 4)


def test_get_some_ignores_a_truncated_response_of_another_version() -> None:
    def decode(body: memoryview) -> Iterator[int]:
        raise VersionMismatch(f"{len(body)} bytes of another version")

    with server(CUT + b"123") as url, opened(url) as transport:
        assert transport.get_some("/", decode) == []


def preparing(done: int, *headers: str) -> bytes:
    progress = {"detail": f"The server is tokenizing: {done} of 3 row groups.", "done": done, "total": 3}
    body = json.dumps({"type": "urn:penstock:problem:blocks-not-ready"} | progress).encode()
    return response(body, "503 Service Unavailable", "Retry-After: 0", *headers)


def test_transport_retries_the_server_that_prepares_blocks(caplog: pytest.LogCaptureFixture) -> None:
    with (
        server(preparing(0), preparing(1), response(b"here"), preparing(2), response(b"more")) as url,
        server() as other,
        opened(url, other, retry_seconds=0) as transport,
    ):
        assert transport.get("/", bytes) == b"here"
        assert bytes(transport.get_some("/", bytes)) == b"more"
        assert transport.num_retries == 0
    assert "The server is tokenizing: 0 of 3 row groups." in caplog.text


def test_server_without_progress_gives_way_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.transport, "_STUCK_SECONDS", 0.0)
    with server(preparing(1), preparing(1)) as url, server(response(b"here")) as other:
        assert get(url, other) == (b"here", 1)


# Several servers


@pytest.mark.usefixtures("never_waits")
@pytest.mark.parametrize(
    "fault",
    [b"", CUT + b"short", b"garbage\r\n\r\n", response(b"no", "500 Oops"), response(b"", "503 Busy", "Retry-After: 3600"),
     response(b"<html>", "404 Not Found"), problem("snapshot-gone", 409), problem("shard-unreadable", 500),
     problem("index-not-ready", 503)],
    ids=["hangs up", "cut short", "garbage", "500", "503", "stranger", "other snapshot", "bad disk", "counting"],
)  # fmt: skip
def test_next_server_is_asked_immediately(fault: bytes) -> None:
    with server(fault) as bad, pages(named(b"here")) as good:
        assert get(AWAY, bad, good) == (b"here", 1 + (b"index-not-ready" not in fault))


def test_waits_double_after_all_servers_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    monkeypatch.setattr(penstock.transport, "uniform", lambda _, high: high)
    monkeypatch.setattr(HttpClient, "wait", lambda _, seconds: waits.append(seconds))
    with server(*[b""] * 5, response(b"here")) as flaky:
        assert get(AWAY, flaky) == (b"here", 11)
    assert waits == [0.01, 0.02, 0.04, 0.05, 0.05]


def test_transport_asks_the_server_that_answered_next() -> None:
    with pages(named(b"good")) as good, server(b"", response(b"bad")) as bad, opened(bad, good) as transport:
        assert [transport.get("/", bytes) for _ in range(5)] == [b"good"] * 5
        assert transport.num_retries == 1


def test_busy_server_is_left_alone_while_another_answers() -> None:
    with (
        server(problem("busy", 503, "Retry-After: 3600")) as busy,
        server(response(b"one"), response(b"more")) as free,
        opened(busy, free) as transport,
    ):
        assert transport.get_some("/", bytes) == []
        assert transport.get("/", bytes) == b"one"
        assert bytes(transport.get_some("/", bytes)) == b"more"
        assert transport.num_retries == 1


def test_get_waits_for_a_busy_server_though_another_refuses() -> None:
    gone = problem("snapshot-gone", 409)
    with server(problem("busy", 503, "Retry-After: 1"), response(b"here")) as busy, server(*[gone] * 100) as other:
        assert get(busy, other, retry_seconds=5)[0] == b"here"


def test_rank_returns_to_the_server_that_it_prefers_once_that_is_ready(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(penstock.servers, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(penstock.servers, "_GLANCE_SECONDS", 60.0)
    answers = [(500, b"")]
    with pages(lambda _: answers[-1]) as home, pages(named(b"away")) as away:
        servers, given = Servers([home, away], rank_that_prefers(home, away)), []
        for turn in range(4):
            with closing(Transport(servers, retry_seconds=9)) as transport:
                given.append((transport.get("/", bytes), transport.num_retries))
            if turn == 1:
                answers.append((200, b"home"))
    assert given == [(b"away", 1), (b"away", 0), (b"home", 0), (b"home", 0)]
    assert caplog.text.count(f"{home} is ready: going on with it") == 1


def test_transport_leaves_a_server_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.transport, "_READ_SECONDS", 0.3)
    over = threading.Event()
    with pages(lambda _: (200, bytes(over.wait(60)))) as hanging, pages(named(b"here")) as good:
        assert get(hanging, good) == (b"here", 1)
        over.set()


def test_slow_response_is_not_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.transport, "_READ_SECONDS", 1.0)
    with pages(lambda _: (200, b"drop" * 5), seconds_per_byte=0.1) as slow:
        assert get(slow) == (b"drop" * 5, 0)


@pytest.mark.usefixtures("never_waits")
def test_server_that_will_stop_is_left_without_a_failed_attempt(caplog: pytest.LogCaptureFixture) -> None:
    with server(response(b"last", "200 OK", DRAINING)) as old, pages(named(b"new")) as new, opened(old, new) as transport:
        given = [transport.get("/", bytes), bytes(transport.get_some("/", bytes)), transport.get("/", bytes)]
        assert (given, transport.num_retries) == ([b"last", b"new", b"new"], 0)
    lines = [without_process(record.message) for record in caplog.records if record.name == "penstock"]
    assert lines == [f"penstock: {old} will stop; going on with {new}"]


@pytest.mark.usefixtures("never_waits")
def test_server_that_will_stop_is_not_awaited_while_it_prepares() -> None:
    with server(preparing(0, DRAINING)) as old, pages(named(b"new")) as new, opened(old, new) as transport:
        assert (transport.get("/", bytes), transport.num_retries) == (b"new", 0)


@pytest.mark.usefixtures("never_waits")
def test_only_server_is_asked_until_it_stops(caplog: pytest.LogCaptureFixture) -> None:
    answers = [preparing(0, DRAINING), response(b"one", "200 OK", DRAINING), response(b"two", "200 OK", DRAINING)]
    with server(*answers, response(b"back")) as url, opened(url) as transport:
        given = [transport.get("/", bytes) for _ in range(3)]
        assert (given, transport.num_retries) == ([b"one", b"two", b"back"], 0)
    assert "will stop" not in caplog.text


@pytest.mark.usefixtures("never_waits")
def test_servers_that_all_will_stop_are_asked_until_they_do() -> None:
    last = [response(b"here", "200 OK", DRAINING)] * 9
    with server(*last) as one, server(*last) as other, opened(one, other) as transport:
        assert [transport.get("/", bytes) for _ in range(9)] == [b"here"] * 9
        assert transport.num_retries == 0


def test_refusals_of_all_servers_are_final_and_named() -> None:
    with (
        server(problem("snapshot-gone", 409)) as newer,
        server(problem("unknown-dataset", 404)) as stranger,
        pytest.raises(SnapshotGone, match=rf"all 2 servers refuse.\n{newer}: this is snap.*\n{stranger}: this is unk"),
    ):
        get(newer, stranger)


def test_refusal_is_not_final_while_another_server_may_return() -> None:
    refusal = problem("snapshot-gone", 409)
    with server(*[refusal] * 9) as newer, server(b"", b"", response(b"here")) as restarting:
        assert get(newer, restarting) == (b"here", 5)
    with server(refusal, problem("index-not-ready", 503), response(b"here")) as counting, server(b"", *[refusal] * 9) as newer:
        assert get(counting, newer)[0] == b"here"


def test_error_names_a_refusal_and_a_silence() -> None:
    with (
        pages(lambda _: (409, b'{"type": "urn:penstock:problem:snapshot-gone", "detail": "other data"}')) as newer,
        pytest.raises(ServerUnavailable, match=rf"{newer}: other data \(request \w+\); {AWAY}: .*Connection refused\. Start"),
    ):
        get(newer, AWAY, retry_seconds=0.2)


def test_error_names_its_request_as_the_server_does() -> None:
    renamed = problem("bad-row", 500, "X-Request-ID: by-a-proxy")
    with server(renamed) as url, pytest.raises(DataError, match=r"^this is bad-row \(request by-a-proxy\)$"):
        get(url)


def test_log_and_error_name_the_request_of_each_attempt(caplog: pytest.LogCaptureFixture) -> None:
    ids: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            for answer in (b"", CUT + b"short", response(b"damaged"), problem("bad-row", 500)):
                with listener.accept()[0] as connection:
                    ids.extend(re.findall("X-Request-ID: (.*)\r\n", connection.recv(65536).decode()))
                    connection.sendall(answer)

        def decode(_: memoryview) -> None:
            raise WireError("damaged")

        thread = threading.Thread(target=run)
        thread.start()
        with opened(f"http://127.0.0.1:{listener.getsockname()[1]}") as transport, pytest.raises(DataError) as raised:
            transport.get("/", decode)
        thread.join()
    assert len(set(ids)) == 4
    assert str(raised.value) == f"this is bad-row (request {ids[3]})"
    assert f" (request {ids[0]}); trying again" in caplog.text


# Log


def test_outage_logs_one_line_per_stage(caplog: pytest.LogCaptureFixture) -> None:
    with server(*[b""] * 6, response(b"here"), response(b"more")) as flaky, opened(AWAY, flaky) as transport:
        assert transport.get("/", bytes) == b"here"
        assert transport.get("/", bytes) == b"more"
    first, second, third = (
        without_process(record.message).replace(flaky, "FLAKY").replace(AWAY, "AWAY")
        for record in caplog.records
        if record.name == "penstock"
    )
    assert first == "penstock: AWAY: [Errno 111] Connection refused; failing over to FLAKY"
    assert second.startswith("penstock: no server has answered (AWAY: [Errno 111] Connection refused; FLAKY: ")
    assert second.endswith("trying again for up to 20 seconds")
    assert third == "penstock: FLAKY answers after 13 failed attempts"


def test_alternating_failures_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with server(*[b"", response(b"here")] * 50) as flaky, opened(flaky) as transport:
        for _ in range(50):
            assert transport.get("/", bytes) == b"here"
        assert transport.num_retries == 50
    assert len([record for record in caplog.records if record.name == "penstock"]) <= 4


def test_progress_bar_is_drawn_and_cleared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    retry_log = RetryLog(600.0)
    retry_log.progress(IndexNotReady("about 40 s left", after_seconds=1.0, share=0.5))
    assert "[##########..........]" in (drawn := capsys.readouterr().err)
    assert "50% about 40 s left" in drawn
    retry_log.answered("http://a", is_preferred=False)
    assert capsys.readouterr().err == "\r\x1b[K"
