import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from penstock.transport import receive
from penstock.transport.buffers import Buffers
from penstock.transport.channel import HttpError
from penstock.transport.receive import Body, Origin, Receiver, Request

CONTENT = bytes(range(256)) * 5000


class Listener(ThreadingHTTPServer):
    """Counts connections and notes what was asked for. Clients may hang up on it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.num_connections, self.asked, self.has_last = 0, list[str](), threading.Event()

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class Handler(BaseHTTPRequestHandler):
    """Answers /KIND."""

    protocol_version = "HTTP/1.1"
    server: Listener

    def setup(self) -> None:
        super().setup()
        self.server.num_connections += 1

    def log_message(self, format: str, *args: object) -> None: ...

    def do_GET(self) -> None:
        kind = self.path.split("?")[0].strip("/")
        self.server.asked.append(kind)
        if kind == "last":
            self.server.has_last.set()
        if kind == "behind-last":
            self.server.has_last.wait(60)
        if kind == "hangs-up" and self.server.asked.count(kind) == 1:
            self.close_connection = True
            return
        is_busy = kind in ("busy-at-first", "preparing") and self.server.asked.count(kind) == 1
        self.send_response(503 if is_busy else 404 if kind == "missing" else 200)
        self.send_header("X-Asked", self.headers["Host"] + self.path)
        if kind == "preparing":
            self.send_header("Retry-After", "0")
        if kind == "chunked" or kind == "cut-chunked":
            self.send_header("Transfer-Encoding", "chunked")
        elif kind != "until-closed":
            self.send_header("Content-Length", str(len(CONTENT)))
        else:
            self.send_header("Connection", "close")
        if kind == "closing":
            self.send_header("Connection", "close")
        self.end_headers()
        if "chunked" in kind:
            for start in range(0, len(CONTENT), 100_000):
                part = CONTENT[start : start + 100_000]
                self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
                if kind == "cut-chunked" and start:
                    break
            else:
                self.wfile.write(b"0\r\n\r\n")
        elif kind == "silent":
            self.wfile.write(CONTENT[:300_000])
            self.wfile.flush()
            threading.Event().wait(3)
        else:
            self.wfile.write(CONTENT[:300_000] if kind == "cut" else CONTENT)
        self.close_connection = kind in ("cut", "cut-chunked", "until-closed", "forgets", "silent")


@pytest.fixture
def server() -> Iterator[Listener]:
    made = Listener()
    thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def receiver(made: list[socket.socket] | None = None) -> closing[Receiver]:
    return closing(Receiver((made if made is not None else []).append))


def ask(receiver: Receiver, url: str, body: Body, then: str | None = None) -> tuple[int, Mapping[str, str]]:
    split = urlsplit(url)
    assert split.hostname
    assert split.port
    origin = Origin(split.scheme, split.hostname, split.port, f"Host: {split.netloc}\r\n".encode())
    return receiver.get(Request(origin, url.removeprefix(f"{split.scheme}://{split.netloc}"), then, 2.0, 0.5), body)


def body_in(memory: bytearray) -> Body:
    def allocate(nbytes: int) -> memoryview:
        memory[:] = bytes(nbytes)
        return memoryview(memory)

    return Body(allocate)


def url_of(server: Listener, kind: str) -> str:
    return f"http://127.0.0.1:{server.server_port}/{kind}"


def test_a_body_lies_in_the_memory_that_was_given_for_it(server: Listener) -> None:
    memory = bytearray()
    body = body_in(memory)
    with receiver() as client:
        status, headers = ask(client, url_of(server, "sized?a=1+2"), body)
    assert status == 200
    assert headers["x-asked"] == f"127.0.0.1:{server.server_port}/sized?a=1+2"
    assert memory == CONTENT
    assert body.received.obj is memory
    assert body.received == CONTENT


def test_a_body_that_comes_slowly_is_heard_of_however_much_has_come(server: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive, "_READ_BYTES", 20_000)
    memory = bytearray()
    with receiver() as client:
        ask(client, url_of(server, "sized"), body_in(memory))
    assert memory == CONTENT


@pytest.mark.parametrize("kind", ["chunked", "missing"])
def test_a_body_of_unknown_length_and_that_of_a_refusal_come_whole(server: Listener, kind: str) -> None:
    body = body_in(bytearray())
    with receiver() as client:
        status, _ = ask(client, url_of(server, kind), body)
    assert status == (404 if kind == "missing" else 200)
    assert body.received == CONTENT


def test_an_answer_without_a_length_is_none(server: Listener) -> None:
    with receiver() as client, pytest.raises(HttpError, match="does not tell its length"):
        ask(client, url_of(server, "until-closed"), body_in(bytearray()))


def test_one_connection_serves_many_requests_and_one_that_was_closed_is_made_anew(server: Listener) -> None:
    made: list[socket.socket] = []
    with receiver(made) as client:
        for kind in ("sized", "missing", "chunked", "sized"):
            ask(client, url_of(server, kind), body_in(bytearray()))
        assert server.num_connections == 1
        ask(client, url_of(server, "forgets"), body_in(bytearray()))  # and closes without a word
        body = body_in(bytearray())
        ask(client, url_of(server, "sized"), body)
        assert body.received == CONTENT
        assert server.num_connections == len(made) == 2
    assert all(known.fileno() < 0 for known in made)


def test_what_is_left_of_an_answer_that_nobody_read_is_no_part_of_the_next(server: Listener) -> None:
    def allocate(_: int) -> memoryview:
        raise MemoryError

    body = body_in(bytearray())
    with receiver() as client:
        with pytest.raises(MemoryError):
            ask(client, url_of(server, "sized"), Body(allocate))
        ask(client, url_of(server, "missing"), body)
    assert body.received == CONTENT


def test_an_answer_that_comes_twice_is_taken_once() -> None:
    def answer() -> None:
        with closing(listening):
            for _ in range(2):
                connection, _ = listening.accept()
                path = connection.recv(1 << 16).split()[1]
                connection.sendall(2 * (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(path), path)))
                connections.append(connection)

    connections = list[socket.socket]()
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    thread = threading.Thread(target=answer)
    thread.start()
    with receiver() as client:
        for path in ("/first", "/second"):
            body = body_in(bytearray())
            ask(client, url + path, body)
            assert bytes(body.received).decode() == path
    thread.join()
    for connection in connections:
        connection.close()


def get(client: Receiver, server: Listener, kind: str, then: str) -> bytes:
    """The body, where another is asked ahead."""
    body = body_in(bytearray())
    ask(client, url_of(server, kind), body, f"/{then}")
    return bytes(body.received)


def test_what_is_asked_ahead_is_asked_once_over_a_second_connection(server: Listener) -> None:
    made: list[socket.socket] = []
    kinds = ["sized", "chunked", "sized?b", "chunked?b", "sized?c", "sized?d"]
    with receiver(made) as client:
        for kind, then in pairwise(kinds):
            assert get(client, server, kind, then) == CONTENT
        assert server.num_connections == len(made) == 2
        asked = [kind.split("?")[0] for kind in kinds]
        # Two are under way at a time, in whatever order they come; the last perhaps has not come yet.
        assert sorted(server.asked) in (sorted(asked), sorted(asked[:-1]))
    assert all(known.fileno() < 0 for known in made)


def test_what_is_asked_ahead_comes_once_also_where_each_answer_ends_its_connection(server: Listener) -> None:
    made: list[socket.socket] = []
    kinds = ["closing", "closing?b", "sized", "closing?c", "sized?b", "sized?c"]
    with receiver(made) as client:
        for kind, then in pairwise([*kinds, "last"]):
            assert get(client, server, kind, then) == CONTENT
        assert server.has_last.wait(60)  # it was asked ahead
        assert sorted(server.asked) == sorted([kind.split("?")[0] for kind in kinds] + ["last"])
        assert server.num_connections == len(made) == 5
    assert all(known.fileno() < 0 for known in made)


def test_the_next_is_asked_for_while_what_was_asked_ahead_is_still_being_made(server: Listener) -> None:
    with receiver() as client:
        assert get(client, server, "sized", "behind-last") == CONTENT
        assert get(client, server, "behind-last", "last") == CONTENT
        assert get(client, server, "last", "sized") == CONTENT
        assert server.num_connections == 2


def test_what_was_asked_ahead_is_given_up_where_something_else_is_wanted(server: Listener) -> None:
    with receiver() as client:
        assert get(client, server, "sized", "silent") == CONTENT
        assert get(client, server, "sized?b", "sized?c") == CONTENT
        assert get(client, server, "sized?c", "sized?d") == CONTENT


def test_what_is_asked_ahead_and_not_answered_is_asked_again(server: Listener) -> None:
    with receiver() as client:
        assert get(client, server, "sized", "hangs-up") == CONTENT
        assert get(client, server, "hangs-up", "cut") == CONTENT
        assert server.asked.count("hangs-up") == 2
        with pytest.raises(HttpError):
            get(client, server, "cut", "sized")
        assert get(client, server, "sized", "sized") == CONTENT


def test_what_is_asked_ahead_and_refused_is_asked_again_and_then_no_more_is_asked_ahead(server: Listener) -> None:
    made: list[socket.socket] = []
    with receiver(made) as client:
        assert get(client, server, "sized", "busy-at-first") == CONTENT
        status, _ = ask(client, url_of(server, "busy-at-first"), body_in(bytearray()), "/chunked")
        assert status == 200
        assert server.asked.count("busy-at-first") == 2
        assert get(client, server, "sized", "sized") == CONTENT
        assert len(made) == 3  # one in place of the two that were closed


def test_request_sent_ahead_keeps_its_connection_when_the_server_still_prepares_the_response(server: Listener) -> None:
    with receiver() as client:
        assert get(client, server, "sized", "preparing") == CONTENT
        statuses = [ask(client, url_of(server, "preparing"), body_in(bytearray()), "/chunked")[0] for _ in range(2)]
        assert statuses == [503, 200]
        assert get(client, server, "chunked", "sized") == CONTENT
        assert [server.asked.count(kind) for kind in ("preparing", "chunked")] == [2, 1]
        assert server.num_connections == 2


def test_nothing_is_asked_ahead_behind_a_refusal(server: Listener) -> None:
    with receiver() as client:
        assert get(client, server, "missing", "sized") == CONTENT
        assert get(client, server, "chunked", "missing") == CONTENT
        assert server.asked[:2] == ["missing", "chunked"]


@pytest.mark.parametrize("kind", ["cut", "cut-chunked", "silent"])
def test_what_came_of_a_body_that_was_cut_is_kept(server: Listener, kind: str) -> None:
    body, after = body_in(bytearray()), body_in(bytearray())
    expected = TimeoutError if kind == "silent" else HttpError
    with receiver() as client:
        with pytest.raises(expected):
            ask(client, url_of(server, kind), body)
        assert 1 << 17 <= len(body.received) < len(CONTENT)
        assert CONTENT.startswith(body.received)
        ask(client, url_of(server, "sized"), after)  # nothing of the old answer is taken for the new
        assert after.received == CONTENT


@pytest.mark.parametrize("kind", ["sized", "chunked"])
def test_no_body_is_larger_than_any_batch(server: Listener, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(receive, "_MAX_BODY", len(CONTENT) - 1)
    with receiver() as client, pytest.raises(HttpError, match="1,280,000 bytes or more, larger than any batch"):
        get(client, server, kind, kind)


def test_no_refusal_is_as_large_as_a_batch(server: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive, "_MAX_REFUSAL", len(CONTENT) - 1)
    with receiver() as client:
        with pytest.raises(HttpError, match="1,280,000 bytes or more, larger than any refusal"):
            get(client, server, "missing", "missing")
        get(client, server, "sized", "sized")


def test_a_server_that_is_away_or_speaks_no_http_is_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        thread = threading.Thread(target=lambda: _answer(listening, b"who is there?\r\n\r\n"))
        thread.start()
        with receiver() as client, pytest.raises(HttpError):
            ask(client, f"http://127.0.0.1:{port}/", body_in(bytearray()))
        thread.join()
    with receiver() as client, pytest.raises(ConnectionRefusedError):
        ask(client, f"http://127.0.0.1:{port}/", body_in(bytearray()))


def _answer(listening: socket.socket, content: bytes) -> None:
    connection, _ = listening.accept()
    with connection:
        connection.recv(1 << 16)
        connection.sendall(content)


@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl to make a certificate")
def test_https_is_spoken_and_its_certificate_is_checked(
    server: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost", "-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    url = url_of(server, "sized").replace("http://127.0.0.1", "https://localhost")
    with receiver() as client, pytest.raises(ssl.SSLCertVerificationError):
        ask(client, url, body_in(bytearray()))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    body = body_in(bytearray())
    with receiver() as client:
        ask(client, url, body)
    assert body.received == CONTENT


def test_memory_is_used_again_once_nobody_looks_at_it_and_not_before() -> None:
    buffers = Buffers()
    first = buffers.allocate(1000)
    view = np.frombuffer(first[:10], np.uint8)
    where = first.obj
    del first
    second = buffers.allocate(500)
    assert second.obj is not where  # the array is still there
    del view
    assert buffers.allocate(900).obj is where
    assert len(buffers.allocate(400)) == 400
    assert len(buffers.allocate(2000)) == 2000  # none is large enough
    assert len(buffers.allocate(0)) == 0
