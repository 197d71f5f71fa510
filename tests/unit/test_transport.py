"""The transport against real sockets that misbehave."""

from __future__ import annotations

import gc
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from weakref import ref

import pytest

import penstock.transport.transport
from answering import problem, response, server
from penstock import (
    DataError,
    OutOfRange,
    PenstockError,
    ServerUnavailable,
    SnapshotGone,
    SpecError,
    UnknownDataset,
    VersionMismatch,
    WireError,
)
from penstock.transport.responses import NotReady, TransientError, UnexpectedServer, failure_of
from penstock.transport.retry_log import RetryLog
from penstock.transport.servers import Servers
from penstock.transport.transport import Transport


def get(*servers: str, retry_seconds: float = 20.0) -> tuple[bytes, int]:
    with closing(Transport(Servers(servers), retry_seconds=retry_seconds)) as transport:
        return transport.get("/path", bytes), transport.num_retries


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.transport.transport, "_FIRST_DELAY_SECONDS", 0.01)


@pytest.mark.parametrize(
    "fault",
    [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort", b"garbage\r\n\r\n", response(b"no", "500 Oops"),
     response(b"busy", "503 Busy"), response(b"slow down", "429 Too Many"), problem("internal-error", 500)],
    ids=["hangs up", "cut short", "garbage", "500", "503", "429", "internal error"],
)  # fmt: skip
def test_a_fault_on_the_way_is_tried_again(fault: bytes) -> None:
    with server(fault, fault, response(b"here")) as url:
        assert get(url) == (b"here", 2)


@pytest.mark.parametrize("last", [response(b"here"), problem("bad-row", 500)], ids=["an answer", "a refusal"])
def test_a_fault_and_a_refusal_leave_nothing_to_the_garbage_collector(last: bytes) -> None:
    gc.disable()
    try:
        with server(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort", last) as url:
            transport = Transport(Servers([url]), retry_seconds=20.0)
            with closing(transport), suppress(DataError):
                transport.get("/path", bytes)
            assert transport.num_retries == 1
        kept = ref(transport)
        del transport
        assert kept() is None
    finally:
        gc.enable()


def test_a_body_that_does_not_decode_is_fetched_again() -> None:
    def decode(body: memoryview) -> bytes:
        if bytes(body) == b"damaged":
            raise WireError("damaged")
        return bytes(body)

    with (
        server(response(b"damaged"), response(b"sound")) as url,
        closing(Transport(Servers([url]), retry_seconds=9)) as transport,
    ):
        assert transport.get("/", decode) == b"sound"


def test_a_server_that_is_away_gives_way_to_the_next() -> None:
    with server(response(b"here"), response(b"here")) as url:
        assert get("http://127.0.0.1:9", url)[0] == b"here"


def test_retry_after_is_honoured() -> None:
    with server(response(b"", "503 Busy", "Retry-After: 1"), response(b"here")) as url:
        began = time.monotonic()
        assert get(url) == (b"here", 1)
        assert time.monotonic() - began >= 1  # a lower bound: the wait was asked for


def test_ranks_that_a_server_sent_away_at_once_do_not_come_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.transport.transport, "uniform", lambda *_: 0.2)
    with server(response(b"", "503 Busy", "Retry-After: 1"), response(b"here")) as url:
        began = time.monotonic()
        assert get(url) == (b"here", 1)
        assert time.monotonic() - began >= 1.2  # a lower bound, as above


def test_when_time_is_up_one_error_says_for_how_long_whom_and_why() -> None:
    with pytest.raises(ServerUnavailable, match=r"retry_seconds=0.2 from http://127.0.0.1:9; .*Connection refused"):
        get("http://127.0.0.1:9", retry_seconds=0.2)
    fault = b'{"type": "urn:penstock:problem:internal-error", "detail": "a fault."}'
    with server(response(fault, "500 No")) as url, pytest.raises(ServerUnavailable, match=r": a fault\. A run resumes"):
        get(url, retry_seconds=0)


@pytest.mark.parametrize(
    ("slug", "status", "kind"),
    [
        ("bad-parameter", 422, SpecError),
        ("unknown-dataset", 404, UnknownDataset),
        ("step-out-of-range", 404, OutOfRange),
        ("rank-out-of-range", 404, OutOfRange),
        ("snapshot-gone", 409, SnapshotGone),
        ("shard-unreadable", 500, DataError),
        ("bad-row", 500, DataError),
        ("dataset-invalid", 500, DataError),
        ("index-failed", 500, DataError),
    ],
)
def test_a_refusal_is_raised_at_once_with_the_servers_words(slug: str, status: int, kind: type[PenstockError]) -> None:
    with server(problem(slug, status)) as url, pytest.raises(kind, match=f"this is {slug}") as caught:
        get(url)
    assert caught.value.__cause__ is None  # and not itself, which whoever follows the causes would do for ever


def test_a_stranger_on_the_port_is_named_when_a_run_begins() -> None:
    with (
        server(response(b"<html>", "404 Not Found")) as url,
        closing(Transport(Servers([url]), retry_seconds=600, first_contact=True)) as transport,
        pytest.raises(PenstockError, match="answered 404: .* Is there a penstock server at this address"),
    ):
        transport.get("/", bytes)


@pytest.mark.parametrize("status", ["404 Not Found", "302 Found", "204 Nothing", "200 OK"])
def test_a_run_that_is_under_way_rides_out_a_load_balancer_whose_servers_are_away(status: str) -> None:
    def decode(body: memoryview) -> bytes:
        if bytes(body) != b"here":
            raise WireError("this is not a batch")
        return bytes(body)

    page = response(b"" if status.startswith("204") else b"<html>", status)
    with server(page, page, response(b"here")) as url, closing(Transport(Servers([url]), retry_seconds=20)) as transport:
        assert transport.get("/", decode) == b"here"
        assert (transport.num_retries, transport.num_corrupted) == (2, 2 if status.startswith("200") else 0)


def test_an_outage_is_two_lines_in_the_log_and_not_a_flood(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="penstock")
    with server(*[b""] * 6, response(b"here")) as url:
        get(url)
    lines = [record.message for record in caplog.records if record.name == "penstock"]
    assert len(lines) == 2
    assert "trying again for up to 20 seconds" in lines[0]
    assert "answers after 6 failed attempts" in lines[1]


@pytest.mark.parametrize("state", ["reading", "waiting"])
def test_an_interrupt_ends_a_get_at_once(state: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1] if state == 'reading' else 9}"
        transport = Transport(Servers([url]), retry_seconds=600)
        caught: list[BaseException] = []

        def run() -> None:
            try:
                transport.get("/", bytes)
            except PenstockError as error:
                caught.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        time.sleep(0.3)
        transport.interrupt()
        thread.join(20)
        assert not thread.is_alive()
        assert isinstance(caught[0], ServerUnavailable)
        if state == "reading":
            assert transport.num_retries == 0  # it is no fault of the server's, and nobody is told of one
        transport.close()


@pytest.mark.parametrize("header", ["1", "{date}"])
def test_a_server_that_asks_to_be_left_alone_gives_way_to_the_next_at_once(header: str) -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    asked = header.replace("1", "3600").format(date=date)
    with server(response(b"", "503 Busy", f"Retry-After: {asked}")) as busy, server(response(b"here")) as idle:
        assert get(busy, idle, retry_seconds=60) == (b"here", 1)


@pytest.mark.parametrize("asked", ["9" * 400, "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_no_server_is_left_alone_for_longer_than_an_hour(asked: str) -> None:
    failure = failure_of("http://host", 503, {"retry-after": asked}, b"")
    assert isinstance(failure, TransientError)
    assert failure.after_seconds == 3600


@pytest.mark.parametrize("other_clock", [timedelta(), timedelta(days=-400), timedelta(days=400)])
def test_a_date_is_by_the_clock_of_whoever_names_it(other_clock: timedelta) -> None:
    now = datetime.now(UTC) + other_clock
    headers = {
        "retry-after": format_datetime(now + timedelta(seconds=90), usegmt=True),
        "date": format_datetime(now, usegmt=True),
    }
    failure = failure_of("http://host", 503, headers, b"")
    assert isinstance(failure, TransientError)
    assert failure.after_seconds == 90


@pytest.mark.parametrize("date", ["", "today", "Thu, 01 Jan 99999 00:00:00 GMT"])
def test_a_date_is_by_the_clock_here_where_there_is_no_other(date: str) -> None:
    asked = format_datetime(datetime.now(UTC) + timedelta(minutes=30), usegmt=True)
    failure = failure_of("http://host", 503, {"retry-after": asked, "date": date}, b"")
    assert isinstance(failure, TransientError)
    assert 0 < failure.after_seconds <= 1800


@pytest.mark.parametrize(
    "asked", ["", "-1", "\u00b2", "soon", "Thu, 01 Jan 1970 00:00:00 GMT", "Thu, 01 Jan 99999 00:00:00 GMT"]
)
def test_what_asks_for_no_time_to_come_is_no_wait(asked: str) -> None:
    failure = failure_of("http://host", 503, {"retry-after": asked}, b"")
    assert isinstance(failure, TransientError)
    assert failure.after_seconds == 0


@pytest.mark.parametrize(
    ("told", "share"),
    [({"done": 3, "total": 4}, 0.75), ({"done": 5, "total": 4}, 1), ({"done": -1, "total": 4}, 0), ({"done": 0, "total": 0}, 0),
     ({"done": "some", "total": 4}, 0), ({}, 0)],
)  # fmt: skip
def test_how_far_a_server_is_lies_between_nothing_and_all(told: dict[str, object], share: float) -> None:
    body = json.dumps({"type": "urn:penstock:problem:index-not-ready"} | told).encode()
    failure = failure_of("http://host", 503, {"retry-after": "2"}, body)
    assert isinstance(failure, NotReady)
    assert (failure.share, failure.after_seconds) == (share, 2)


@pytest.mark.parametrize("body", [b"", b"[]", b"7", b'"busy"', b"[" * 100_000, b"\xff", b'{"detail": ""}'])
def test_a_status_tells_who_may_be_asked_again_whatever_the_body_is(body: bytes) -> None:
    kinds = {status: type(failure_of("http://host", status, {}, body)) for status in (302, 400, 404, 408, 425, 429, 500, 503)}
    assert [status for status, kind in kinds.items() if kind is UnexpectedServer] == [302, 400, 404]
    assert {kinds[status] for status in (408, 425, 429, 500, 503)} == {TransientError}
    assert str(failure_of("http://host", 503, {}, body)) == "HTTP status 503"


def test_a_busy_server_lives_so_retry_seconds_do_not_run() -> None:
    busy = problem("busy", 503, "Retry-After: 1")
    with server(busy, busy, response(b"here")) as url:
        assert get(url, retry_seconds=0.2) == (b"here", 2)


def test_a_run_waits_for_a_busy_server_though_another_refuses() -> None:
    gone = problem("snapshot-gone", 409)
    with server(problem("busy", 503, "Retry-After: 1"), response(b"here")) as busy, server(*[gone] * 100) as other:
        assert get(busy, other, retry_seconds=5)[0] == b"here"


@pytest.mark.parametrize("slug", ["busy", "index-not-ready"])
def test_a_server_that_lives_in_the_last_round_is_asked_again(monkeypatch: pytest.MonkeyPatch, slug: str) -> None:
    monkeypatch.setattr(penstock.transport.transport, "uniform", lambda _, high: 60 * high)
    with server(b"", problem(slug, 503), response(b"here")) as url:
        assert get(url, retry_seconds=0.2)[0] == b"here"


def test_when_time_is_up_a_server_is_asked_that_wanted_to_be_left_alone_for_longer() -> None:
    with server(response(b"", "503 Away", "Retry-After: 3600"), response(b"here")) as url:
        assert get(url, retry_seconds=0.2) == (b"here", 1)


def test_a_server_that_wanted_to_be_left_alone_is_asked_before_a_run_ends_even_without_any_patience() -> None:
    busy = problem("busy", 503, "Retry-After: 1")
    with server(busy, response(b"here")) as url, closing(Transport(Servers([url]), retry_seconds=0)) as transport:
        assert transport.get_some("/", bytes) == []
        assert transport.get("/", bytes) == b"here"


def test_of_a_busy_and_a_free_server_the_free_one_is_asked_for_the_rest_at_once() -> None:
    with (
        server(problem("busy", 503, "Retry-After: 3600")) as busy,
        server(response(b"one"), response(b"more")) as free,
        closing(Transport(Servers([busy, free]), retry_seconds=9)) as transport,
    ):
        assert transport.get_some("/", bytes) == []
        assert transport.get("/", bytes) == b"one"
        assert bytes(transport.get_some("/", bytes)) == b"more"
        assert transport.num_retries == 1


def test_one_attempt_brings_what_is_sound_before_a_fault() -> None:
    def decode(body: memoryview) -> Iterator[int]:
        for item in body:
            if item == ord("x"):
                raise WireError("damaged")
            yield item - ord("0")

    cut = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"
    answers = [b"", cut + b"123", cut + b"12x4", response(b"12x4"), response(b"1234"), problem("bad-row", 500)]
    with server(*answers) as url, closing(Transport(Servers([url]), retry_seconds=9)) as transport:
        assert [transport.get_some("/", decode) for _ in answers] == [[], [1, 2, 3], [1, 2], [1, 2], [1, 2, 3, 4], []]
        assert (transport.num_retries, transport.num_corrupted, transport.num_bytes) == (4, 1, 3 + 4 + 4 + 4)


def test_an_answer_of_another_version_that_breaks_off_ends_no_run() -> None:
    def decode(body: memoryview) -> Iterator[int]:
        raise VersionMismatch(f"{len(body)} bytes of another version")

    cut = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n123"
    with server(cut) as url, closing(Transport(Servers([url]), retry_seconds=9)) as transport:
        assert transport.get_some("/", decode) == []


def test_what_httpx_cannot_decode_is_tried_again() -> None:
    with server(response(b"no gzip", "200 OK", "Content-Encoding: gzip"), response(b"here")) as url:
        assert get(url) == (b"here", 1)


def test_the_bar_of_work_that_was_waited_for_goes_with_the_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    retry_log = RetryLog(600.0)
    retry_log.progress(NotReady("counting", after_seconds=1.0, share=0.5))
    assert "##########.........." in capsys.readouterr().err
    retry_log.answered("http://a")
    assert capsys.readouterr().err == "\r\x1b[K"


def test_the_bar_shows_the_time_left_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    detail = "about 40 s left until the tokens of stories are counted: 10 of 20 blocks are done (50%). This happens once."
    body = json.dumps({"type": "urn:penstock:problem:index-not-ready", "detail": detail, "done": 10, "total": 20}).encode()
    failure = failure_of("http://host", 503, {}, body)
    assert isinstance(failure, NotReady)
    RetryLog(600.0).progress(failure)
    assert "50% about 40 s left" in capsys.readouterr().err[:80]


def test_where_nobody_has_ever_answered_the_first_line_doubts_the_address(caplog: pytest.LogCaptureFixture) -> None:
    doubt = "Is it started (penstock serve DATA_DIR), and is this its address?"
    for first_contact, failure in (
        (True, TransientError("refused", is_silence=True)),
        (True, TransientError("busy")),
        (False, TransientError("refused")),
    ):
        RetryLog(600.0, first_contact=first_contact).failed("http://a", failure, "http://a")
    assert [doubt in line for line in caplog.messages] == [True, False, False]


def preparing(done: int) -> bytes:
    told = {"detail": f"The server is tokenizing: {done} of 3 row groups.", "done": done, "total": 3}
    body = json.dumps({"type": "urn:penstock:problem:blocks-not-ready"} | told).encode()
    return response(body, "503 Service Unavailable", "Retry-After: 0")


def test_a_server_that_tokenizes_what_is_asked_for_is_asked_again_itself_and_its_numbers_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        server(preparing(0), preparing(1), response(b"here"), preparing(2), response(b"more")) as url,
        server() as other,
        closing(Transport(Servers([url, other]), retry_seconds=0)) as transport,
    ):
        assert transport.get("/", bytes) == b"here"
        assert bytes(transport.get_some("/", bytes)) == b"more"
        assert transport.num_retries == 0
    assert "The server is tokenizing: 0 of 3 row groups." in caplog.text


def test_a_server_that_comes_no_further_gives_way_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.transport.transport, "_STUCK_SECONDS", 0.0)
    with server(preparing(1), preparing(1)) as url, server(response(b"here")) as other:
        assert get(url, other) == (b"here", 1)
