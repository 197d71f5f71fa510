"""Answers as they come, in whatever pieces, over a connection whose silence is noticed; http.client reads the same of them."""

import io
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPResponse
from itertools import pairwise
from random import Random

import pytest

from penstock.transport import channel
from penstock.transport.channel import Channel, HttpError

BODY = bytes(range(256)) * 400


@pytest.fixture(params=["linux", "elsewhere"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel waits for all of a body on Linux, and Python for every piece elsewhere."""
    monkeypatch.setattr(sys, "platform", request.param)


pytestmark = pytest.mark.usefixtures("system")


@contextmanager
def answered(*pieces: bytes, keep_open: bool = False, pause_seconds: float = 0.0) -> Iterator[Channel]:
    """A channel to a server that sends these pieces, one after the other, and then closes."""
    near, far = socket.socketpair()
    is_over = threading.Event()

    def send() -> None:
        with far, suppress(ConnectionError):  # who has read enough hangs up
            for piece in pieces:
                far.sendall(piece)
                time.sleep(pause_seconds)
            is_over.wait(60 if keep_open else 0)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        with closing(Channel(near)) as made:
            yield made
    finally:
        is_over.set()
        thread.join()


def body_of(made: Channel, length: int | None) -> bytes:
    if length is None:
        return b"".join(made.chunks())
    memory = memoryview(bytearray(length))
    count = 0
    while count < length:
        came = made.readinto(memory[count:])
        assert came
        count += came
    return bytes(memory)


def cut(content: bytes, random: Random) -> list[bytes]:
    """The content in a few pieces, some of them of one byte."""
    borders = sorted({0, len(content), *(random.randrange(len(content)) for _ in range(random.randrange(12)))})
    return [content[a:b] for a, b in pairwise(borders)]


def chunked(body: bytes, random: Random) -> bytes:
    pieces = cut(body, random)
    lines = [b"%x%b\r\n%b\r\n" % (len(piece), random.choice([b"", b";name=value", b" ;a"]), piece) for piece in pieces]
    return b"".join(lines) + b"0\r\n" + random.choice([b"", b"X-Late: 1\r\n"]) + b"\r\n"


def random_answer(random: Random) -> tuple[bytes, bytes]:
    """A sound answer, and its body."""
    body = BODY[: random.randrange(1, len(BODY))]
    is_chunked = random.random() < 0.4
    headers = [
        b"Date: Tue, 24 Nov 2026 03:24:34 GMT",
        b"x-empty:",
        b"X-Twice: 1",
        b"X-Twice:2",
        b"X-Colon: a: b",
        b"ETag: \xe9",
    ]
    chosen = random.sample(headers, random.randrange(len(headers)))
    chosen.append(b"Transfer-Encoding: chunked" if is_chunked else b"content-LENGTH: %d" % len(body))
    if random.random() < 0.5:
        chosen.append(random.choice([b"Connection: close", b"Connection: keep-alive", b"connection: Keep-Alive, Upgrade"]))
    random.shuffle(chosen)
    before = random.choice([b"", b"", b"HTTP/1.1 100 Continue\r\n\r\n"])  # http.client knows no other of these
    first = random.choice([b"HTTP/1.1 200 OK", b"HTTP/1.1 503 Service Unavailable", b"HTTP/1.0 404 Not Found", b"HTTP/1.1 200"])
    content = chunked(body, random) if is_chunked else body
    return before + b"\r\n".join([first, *chosen, b"", b""]) + content, body


class Canned:
    """What http.client takes for a socket."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def makefile(self, _: str) -> io.BytesIO:
        return io.BytesIO(self._content)


@pytest.mark.parametrize("seed", range(8))
def test_answers_are_read_as_http_client_reads_them_in_whatever_pieces_they_come(seed: int) -> None:
    random = Random(seed)
    for _ in range(25):
        content, _ = random_answer(random)
        expected = HTTPResponse(Canned(content))  # type: ignore[arg-type]
        expected.begin()
        with answered(*cut(content, random)) as made:
            head = made.head()
            body = body_of(made, head.length)
        assert (head.status, head.is_last) == (expected.status, bool(expected.will_close))
        assert head.headers == {name.lower(): ", ".join(expected.headers.get_all(name, [])) for name in expected.headers}
        assert head.length == (None if expected.chunked else expected.length)
        assert body == expected.read()


@pytest.mark.skipif(not hasattr(socket, "MSG_WAITALL"), reason="the kernel waits for a body on Linux")
def test_a_body_comes_in_one_piece_where_the_kernel_waits_for_it() -> None:
    memory, body = memoryview(bytearray(len(BODY))), cut(BODY, Random(1))
    with answered(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY), *body, pause_seconds=0.02) as made:
        made.head()
        counts = list[int]()
        while sum(counts) < len(memory):
            counts.append(made.readinto(memory[sum(counts) :]))
    assert memory == BODY
    assert len(counts) <= 2 if sys.platform == "linux" else len(counts) > 2


def test_one_answer_ends_where_the_next_begins() -> None:
    random = Random(1)
    answers = [random_answer(random) for _ in range(20)]
    with answered(*cut(b"".join(content for content, _ in answers), random)) as made:
        for _, body in answers:
            assert body_of(made, made.head().length) == body
        with pytest.raises(ConnectionError, match="without an answer"):
            made.head()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "no HTTP"),
        (b"220 mail.example.org ESMTP\r\n\r\n", "no HTTP"),
        (b"HTTP/2 200\r\n\r\n", "no HTTP"),
        (b"HTTP/1.1 0200 OK\r\n\r\n", "no HTTP"),
        (b"HTTP/1.1 2x0 OK\r\n\r\n", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 12_000, "more than 65,536 bytes of lines without an end"),
        (b"HTTP/1.1 200 OK\r\nContent-Length 5\r\n\r\n", "headers of the answer are garbled"),
        (b"HTTP/1.1 200 OK\r\nA: b\rTransfer-Encoding: x\r\nContent-Length: 0\r\n\r\n", "headers of the answer are garbled"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: a\x1b[2J\r\n\r\n", "headers of the answer are garbled"),
        (b"HTTP/1.1 200 OK\r\nConte\x00t: 1\r\nContent-Length: 0\r\n\r\n", "headers of the answer are garbled"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", "does not tell its length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", "does not tell its length"),
        (b"HTTP/1.0 503 Away\r\nConnection: close\r\n\r\n", "of status 503, does not tell its length"),
        (b"HTTP/1.1 200 OK\n\n", "does not tell its length"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n", "packed with gzip"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_answer_is_told_at_once(content: bytes, reason: str) -> None:
    with answered(content, keep_open=True) as made, pytest.raises(HttpError, match=reason):
        made.head()


@pytest.mark.parametrize(
    "content",
    [b"5\r\nhello", b"5\r\nhelloX\r\n0\r\n\r\n", b"5\r\nhello\r\n", b"0\r\n", b"x\r\n", b"-1\r\n", b"\r\n\r\n", b"5" * 5000],
)  # fmt: skip
def test_chunks_that_are_cut_or_garbled_are_told(content: bytes) -> None:
    with answered(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n" + content) as made:
        assert made.head().length is None
        with pytest.raises(HttpError, match=r"garbled|ended|without an end"):
            body_of(made, None)


def test_a_head_that_is_cut_is_told_from_a_connection_that_was_closed() -> None:
    with answered(b"HTTP/1.1 200 OK\r\nContent-Le") as made, pytest.raises(HttpError, match="in mid-answer"):
        made.head()
    with answered() as made, pytest.raises(ConnectionError, match="without an answer"):
        made.head()


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (b"HTTP/1.1 200 OK\nA: b\nContent-Length: 2\n\nok", {"a": "b", "content-length": "2"}),  # with half of a line's end
        (b"HTTP/1.1 200 OK\r\nA: b\r\n \tc: d\r\nContent-Length: 2\r\n\r\nok", {"a": "b c: d", "content-length": "2"}),
        (b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
         b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", {"content-length": "2"}),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0000000000000000000002\nok\n0\n\n",
         {"transfer-encoding": "chunked"}),
    ],
)  # fmt: skip
def test_odd_answers_that_are_sound_are_taken(content: bytes, headers: dict[str, str]) -> None:
    with answered(content) as made:
        head = made.head()
        assert head.headers == headers
        assert body_of(made, head.length) == b"ok"


def test_what_nobody_asked_for_does_not_pass_for_the_next_answer() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    with answered(answer + answer, keep_open=True) as made:
        made.send(b"GET / HTTP/1.1\r\n\r\n")
        assert body_of(made, made.head().length) == b"ok"
        with pytest.raises(ConnectionError, match="more came than was asked for"):
            made.send(b"GET /next HTTP/1.1\r\n\r\n")


@pytest.mark.parametrize("status", ["101 Switching Protocols", "204 No Content", "304 Not Modified"])
def test_some_answers_have_no_body(status: str) -> None:
    with answered(f"HTTP/1.1 {status}\r\n\r\n".encode()) as made:
        assert made.head().length == 0


def test_a_body_that_ends_early_is_known_by_its_end() -> None:
    memory = memoryview(bytearray(1000))
    with answered(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", BODY[:700]) as made:
        assert made.head().length == 1000
        count = 0
        while came := made.readinto(memory[count:]):
            count += came
    assert memory[:count] == BODY[:700]


@pytest.mark.parametrize("read", [Channel.head, lambda made: made.readinto(memoryview(bytearray(10)))])
def test_a_silence_ends(read: Callable[[Channel], object]) -> None:
    with answered(keep_open=True) as made:
        made.silence_seconds = 0.1
        with pytest.raises(TimeoutError, match="timed out"):
            read(made)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer sends signals here")
def test_a_silence_ends_under_signals_too() -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        with answered(keep_open=True) as made:
            made.silence_seconds = 0.5
            with pytest.raises(TimeoutError, match="timed out"):
                made.head()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_server_that_sends_little_at_a_time_is_heard_of() -> None:
    near, far = socket.socketpair()
    memory = memoryview(bytearray(1 << 20))
    with closing(Channel(near)) as made, far:
        far.sendall(b"ab")
        assert made.readinto(memory) == 2  # and does not wait until the server has been silent for too long
        assert bytes(memory[:2]) == b"ab"


def test_a_request_that_nobody_reads_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_SEND_SECONDS", 1)
    near, far = socket.socketpair()
    with closing(Channel(near)) as made, far, pytest.raises(TimeoutError, match="timed out"):
        made.send(bytes(100 << 20))
