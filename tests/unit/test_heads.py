"""Heads of requests, and trailers, that do not end: a real server cuts them off, and goes on with the others."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from corpora import write_numbered
from in_thread import serving
from penstock_server.api.admission import InFlight

PIECE = 32_800  # four of them are more than the server takes
BEGINS = {
    "url": (b"GET /", b"x" * PIECE),
    "header": (b"GET / HTTP/1.1\r\nx: ", b"x" * PIECE),
    "headers": (b"GET / HTTP/1.1\r\n", b"a:b\r\n" * (PIECE // 5)),
    "trailer": (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nx: ", b"x" * PIECE),
    "trailers": (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"a:b\r\n" * (PIECE // 5)),
}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    write_numbered(folder / "data" / "numbers", 96)
    with serving(folder / "data", folder / "cache", InFlight(1 << 30), stop_seconds=0.5) as found:
        yield found


def answer_to(address: str, begin: bytes, piece: bytes) -> bytes:
    """What the server answers until it hangs up. Raises TimeoutError: it does not."""
    with socket.create_connection((urlsplit(address).hostname, urlsplit(address).port), timeout=30) as connection:
        connection.sendall(begin)
        answer = bytearray()
        if b"\r\n\r\n" in begin:  # a whole head; what comes in one piece with it is not counted
            answer += connection.recv(1 << 16)
        for _ in range(4):
            connection.sendall(piece)
        with suppress(ConnectionError):
            while got := connection.recv(1 << 16):
                answer += got
        return bytes(answer)


@pytest.mark.parametrize("name", BEGINS)
def test_what_does_not_end_is_cut_off(address: str, name: str) -> None:
    answer = answer_to(address, *BEGINS[name])
    if name in ("url", "header", "headers"):
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.endswith(b"The head of this request has more than 131,072 bytes.")
    assert urlopen(f"{address}/readyz").status == 200


def test_as_many_requests_as_anybody_sends_and_bodies_of_any_size_are_taken(address: str) -> None:
    host, port = urlsplit(address).hostname, urlsplit(address).port
    with socket.create_connection((host, port), timeout=30) as connection, connection.makefile("rb") as answers:
        for _ in range(3):
            connection.sendall(b"GET /readyz HTTP/1.1\r\nx: " + b"x" * 60_000 + b"\r\n\r\n")
            assert answers.readline() == b"HTTP/1.1 200 OK\r\n"
            while (line := answers.readline()) != b"\r\n":
                if line.lower().startswith(b"content-length: "):
                    length = int(line.split()[1])
            answers.read(length)
        head = b"POST /v1/datasets/numbers/refresh HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head + b"".join(b"8000\r\n" + b"x" * 0x8000 + b"\r\n" for _ in range(20)) + b"0\r\n\r\n")
        assert answers.readline() == b"HTTP/1.1 200 OK\r\n"
