"""Malformed requests over raw sockets: the server answers 4xx or closes, serves the next request and logs no traceback."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_server.security.tokens import create_token
from support.corpora import write_numbered
from support.servers import Serve, Server

LIST, REFRESH, LOGIN = (
    b"GET /v1/datasets HTTP/1.1\r\n",
    b"POST /v1/datasets/numbers/refresh HTTP/1.1\r\n",
    b"POST /login HTTP/1.1\r\n",
)
END = b"\r\nConnection: close\r\n\r\n"
REFUSED = {
    "header of 1 MB": LIST + b"X: " + b"a" * (1 << 20) + END,
    "header without an end": LIST + b"X: " + b"a" * (4 << 20),
    "10,000 headers": LIST + b"".join(b"X-%d: y\r\n" % number for number in range(10_000)) + END,
    "path of 1 MB": b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1" + END,
    "query of 1 MB": b"GET /v1/datasets/numbers/spec?mix=" + b"a" * (1 << 20) + b" HTTP/1.1" + END,
    "method of 100 kB": b"A" * 100_000 + b" / HTTP/1.1" + END,
    "unknown method": b"BREW /v1/datasets HTTP/1.1" + END,
    "NUL in a value": LIST + b"X: a\0b" + END,
    "NUL in a cookie": LIST + b"Cookie: penstock_token=a\0b" + END,
    "CR in a value": LIST + b"X: a\rInjected: b" + END,
    "LF in a value": LIST + b"X: a\nInjected: b" + END,
    "folded value": LIST + b"X: a\r\n b" + END,
    "bytes that are no ASCII": b"GET /v1/datasets/\xff\xfe HTTP/1.1" + END,
    "negative length": LIST + b"Content-Length: -1" + END,
    "length that is no number": REFRESH + b"Content-Length: 0x10" + END,
    "length of 20 digits": REFRESH + b"Content-Length: 99999999999999999999" + END,
    "two lengths": REFRESH + b"Content-Length: 3\r\nContent-Length: 4" + END + b"abcd",
    "length and chunks": REFRESH + b"Content-Length: 3\r\nTransfer-Encoding: chunked" + END + b"0\r\n\r\n",
    "chunk size that is no number": REFRESH + b"Transfer-Encoding: chunked" + END + b"zz\r\nabc\r\n",
    "body of 32 MB": LOGIN + b"Content-Length: 33554432" + END + b"a" * (32 << 20),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "CONNECT": b"CONNECT elsewhere:443 HTTP/1.1" + END,
    "incomplete request": LIST + b"X: a",
    "incomplete login": LOGIN + b"Content-Length: 100\r\n\r\ntoken=abc",
}
# They reach the application with a token, and name nothing that exists.
UNKNOWN = {
    "invalid percent-encoding": b"/v1/datasets/%zz%c3%28%",
    "NUL": b"/v1/datasets/%00",
    "CR and LF": b"/v1/datasets/a%0d%0aInjected:%20b",
    "long name": b"/v1/datasets/" + b"a" * 60_000,
    "NUL in a file": b"/docs/assets/a%00b",
    "long name of a file": b"/docs/assets/" + b"a" * 5_000,
    "no UTF-8 in a file": b"/docs/assets/%ff%fe",
    "folder above": b"/docs/assets/../../setup.py",
    "encoded folder above": b"/docs/assets/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
    "folder above the page": b"/page/..%2f..%2fapp.py",
    "other host": b"//elsewhere/v1/datasets",
    "slash at the end": b"/v1/datasets/",
}


class Target:
    """A server with tokens; requests for it are bytes."""

    def __init__(self, server: Server, token: str) -> None:
        self.server, self.authorization = server, f"Authorization: Bearer {token}\r\n".encode()
        self._address = ("127.0.0.1", urlsplit(server.url).port or 0)

    def send(self, content: bytes) -> bytes:
        """The answer to bytes; after a silence of the server, nothing more is sent. b"": it closes or resets the connection."""
        answer = bytearray()
        with socket.create_connection(self._address, timeout=30) as own, suppress(ConnectionError):
            with suppress(ConnectionError):  # it may answer and close before it has read all
                own.sendall(content)
            if not select.select([own], [], [], 1.0)[0]:
                own.shutdown(socket.SHUT_WR)
            while received := own.recv(65536):
                answer += received
        return bytes(answer)

    def check(self) -> None:
        """The next request is served."""
        assert self.send(LIST + self.authorization + END[2:]).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.fixture(scope="module")
def target(serve: Serve, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    write_numbered(shared / "numbers", 96)
    file = tmp_path_factory.mktemp("tokens") / "tokens.json"
    token = create_token(file, "admin", ("*",), "admin", None)
    target = Target(serve(shared, "--tokens", str(file)), token)
    yield target
    assert "Traceback" not in target.server.stop()


def assert_refused(answer: bytes) -> None:
    assert not answer or answer.startswith(b"HTTP/1.1 4"), answer[:200]
    assert b"\nInjected:" not in answer


@pytest.mark.parametrize("name", REFUSED)
def test_malformed_request_is_refused(target: Target, name: str) -> None:
    assert_refused(target.send(REFUSED[name]))
    target.check()


@pytest.mark.parametrize("name", UNKNOWN)
def test_odd_path_is_a_404(target: Target, name: str) -> None:
    answer = target.send(b"GET " + UNKNOWN[name] + b" HTTP/1.1\r\n" + target.authorization + END[2:])
    assert answer.startswith(b"HTTP/1.1 404 Not Found\r\n")
    assert b"\nInjected:" not in answer
    target.check()


def test_garbage_after_a_request_is_refused(target: Target) -> None:
    answer = target.send(LIST + target.authorization + b"\r\n\x00\x01garbage\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 OK") <= 1
    assert answer.count(b"HTTP/1.1 400 Bad Request") == 1
    target.check()


def test_request_id_cannot_add_a_header(target: Target) -> None:
    answer = target.send(LIST + target.authorization + b"X-Request-ID: a%0d%0aInjected: b" + END)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Injected" not in answer


def test_connection_reset_in_a_login_is_not_a_fault(target: Target) -> None:
    with socket.create_connection(("127.0.0.1", urlsplit(target.server.url).port or 0)) as own:
        own.sendall(LOGIN + b"Content-Length: 100\r\n\r\ntoken=abc")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    target.check()


PIECES = [
    LIST,
    REFRESH,
    b"\r\n",
    b"\n",
    b"\r",
    b": ",
    b" ",
    b"\0",
    b"\xff",
    b"%",
    b"X",
    b"Content-Length: 3",
    b"HTTP/1.1",
    b"abc",
]
PIECES += [
    b"Transfer-Encoding: chunked",
    b"3\r\nabc\r\n",
    b"0\r\n\r\n",
    b"Host: a",
    b"Cookie: penstock_token=",
    b"Range: bytes=0-",
]


@given(
    st.lists(st.sampled_from(PIECES) | st.binary(max_size=9), max_size=30)
    .map(b"".join)
    .map(lambda content: content + END + END)
)
def test_any_bytes_are_refused_without_a_token(target: Target, content: bytes) -> None:
    assert_refused(target.send(content))
    target.check()
