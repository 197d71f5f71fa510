"""GETs over real sockets: memory of bodies, kept connections, requests sent ahead, proxies and certificates."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from penstock import PenstockError, SpecError
from penstock.cli.connection import greet
from penstock.http import Buffers, HttpClient
from penstock.responses import TransientError, UnexpectedServer
from support import servers as answering
from support.servers import pages, response

CONTENT = bytes(range(256)) * 5000


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


class Listener(ThreadingHTTPServer):
    """Counts connections and records the requested kinds. Clients may hang up on it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.num_connections, self.asked = 0, list[str]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), OSError):
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
        is_first = self.server.asked.count(kind) == 1
        if kind == "hangs-up" and is_first:
            self.close_connection = True
            return
        self.send_response(503 if kind in ("busy-at-first", "preparing") and is_first else 404 if kind == "missing" else 200)
        if kind == "preparing":
            self.send_header("Retry-After", "0")
        if "chunked" in kind:
            self.send_header("Transfer-Encoding", "chunked")
        elif kind != "until-closed":
            self.send_header("Content-Length", str(len(CONTENT)))
        if kind == "draining":
            self.send_header("Penstock-Draining", "true")
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
        else:
            self.wfile.write(CONTENT[:300_000] if kind == "cut" else CONTENT)
        self.close_connection = kind in ("cut", "cut-chunked", "forgets", "closing", "until-closed")


@pytest.fixture
def server() -> Iterator[Listener]:
    listener = Listener()
    thread = threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield listener
    listener.shutdown()
    listener.server_close()
    thread.join()


@pytest.fixture
def client() -> Iterator[HttpClient]:
    with closing(HttpClient(5.0)) as client:
        yield client


def test_body_is_in_the_allocated_memory(server: Listener) -> None:
    memory = bytearray(len(CONTENT))
    with closing(HttpClient(5.0, lambda nbytes: memoryview(memory)[:nbytes])) as client:
        body = client.get(server.url, "/sized")
    assert body.obj is memory
    assert memory == CONTENT


def test_body_of_unknown_length_arrives_whole(server: Listener, client: HttpClient) -> None:
    assert client.get(server.url, "/chunked") == CONTENT


def test_response_without_a_length_is_refused(server: Listener, client: HttpClient) -> None:
    with pytest.raises(TransientError, match="length"):
        client.get(server.url, "/until-closed")


def test_response_larger_than_any_batch_is_refused_before_it_takes_memory(client: HttpClient) -> None:
    huge = b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\nthe first bytes"
    with answering.server(huge) as url, pytest.raises(TransientError, match="no batch has that many"):
        client.get(url, "/")


def test_connection_is_kept_and_replaced_when_the_server_has_closed_it(server: Listener, client: HttpClient) -> None:
    for kind in ("sized", "chunked", "sized"):
        assert client.get(server.url, f"/{kind}") == CONTENT
    assert server.num_connections == 1
    client.get(server.url, "/forgets")  # the server closes without notice
    assert client.get(server.url, "/sized") == CONTENT
    assert server.num_connections == 2


def test_rest_of_a_body_is_no_part_of_the_next_response(server: Listener) -> None:
    memory: Iterator[MemoryError | memoryview] = iter([MemoryError(), memoryview(bytearray(len(CONTENT)))])

    def allocate(_: int) -> memoryview:
        given = next(memory)
        if isinstance(given, memoryview):
            return given
        raise given

    with closing(HttpClient(5.0, allocate)) as client:
        with pytest.raises(MemoryError):
            client.get(server.url, "/sized")
        assert client.get(server.url, "/sized") == CONTENT


@pytest.mark.parametrize("kind", ["cut", "cut-chunked"])
def test_received_part_of_a_truncated_body_is_kept(server: Listener, client: HttpClient, kind: str) -> None:
    with pytest.raises(TransientError) as raised:
        client.get(server.url, f"/{kind}")
    assert 100_000 <= len(raised.value.received) < len(CONTENT)
    assert CONTENT.startswith(raised.value.received)
    assert client.get(server.url, "/sized") == CONTENT


def test_request_ahead_is_sent_once_over_a_second_connection(server: Listener, client: HttpClient) -> None:
    kinds = ["sized", "chunked", "sized?b", "chunked?b", "sized?c", "sized?d"]
    for kind, then in pairwise(kinds):
        assert client.get(server.url, f"/{kind}", then=f"/{then}") == CONTENT
    assert server.num_connections == 2
    assert client.get(server.url, f"/{kinds[-1]}") == CONTENT
    assert sorted(server.asked) == sorted(kind.split("?")[0] for kind in kinds)


def test_request_ahead_works_when_each_response_ends_its_connection(server: Listener, client: HttpClient) -> None:
    for kind, then in pairwise(["closing", "closing?b", "sized", "closing?c", "sized"]):
        assert client.get(server.url, f"/{kind}", then=f"/{then}") == CONTENT


def test_request_ahead_is_dropped_when_another_target_is_wanted(server: Listener, client: HttpClient) -> None:
    client.get(server.url, "/sized", then="/chunked")
    assert client.get(server.url, "/sized?b", then="/sized?c") == CONTENT
    assert client.get(server.url, "/sized?c") == CONTENT


@pytest.mark.parametrize("kind", ["hangs-up", "busy-at-first"])
def test_request_ahead_is_repeated_when_it_fails(server: Listener, client: HttpClient, kind: str) -> None:
    client.get(server.url, "/sized", then=f"/{kind}")
    assert client.get(server.url, f"/{kind}") == CONTENT
    assert server.asked.count(kind) == 2


def test_request_ahead_is_not_sent_after_a_refusal(server: Listener, client: HttpClient) -> None:
    client.get(server.url, "/sized", then="/busy-at-first")
    client.get(server.url, "/busy-at-first", then="/chunked")
    client.get(server.url, "/sized")
    assert "chunked" not in server.asked


def test_request_ahead_is_not_sent_to_a_server_that_will_stop(server: Listener, client: HttpClient) -> None:
    client.get(server.url, "/draining", then="/chunked")
    assert client.is_draining
    client.get(server.url, "/sized")
    assert not client.is_draining
    assert "chunked" not in server.asked


def test_response_says_when_the_server_prepares_ahead(server: Listener, client: HttpClient) -> None:
    client.get(server.url, "/sized", then="/preparing")
    with pytest.raises(TransientError):
        client.get(server.url, "/preparing", then="/chunked")
    assert client.get(server.url, "/preparing", then="/chunked") == CONTENT
    assert client.get(server.url, "/chunked") == CONTENT
    assert [server.asked.count(kind) for kind in ("preparing", "chunked")] == [2, 1]


def test_silence_ends_after_its_timeout() -> None:
    over = threading.Event()
    with pages(lambda _: (200, bytes(over.wait(20)))) as url, closing(HttpClient(0.2)) as client:
        with pytest.raises(TransientError, match="timed out"):
            client.get(url, "/")
        over.set()


def test_address_may_have_a_path(client: HttpClient) -> None:
    with pages(lambda path: (200, path.encode())) as url:
        for path in ("", "/first", "/second%20"):
            assert bytes(client.get(url + path, "/a?step=1", then="/b?step=2")).decode() == f"{path}/a"
            assert bytes(client.get(url + path, "/b?step=2")).decode() == f"{path}/b"


def test_buffer_is_reused_only_when_no_view_of_it_is_left() -> None:
    buffers = Buffers()
    first = buffers.allocate(1000)
    view = np.frombuffer(first[:10], np.uint8)
    buffer = first.obj
    del first
    assert buffers.allocate(500).obj is not buffer
    del view
    assert buffers.allocate(900).obj is buffer
    assert [len(buffers.allocate(nbytes)) for nbytes in (400, 2000, 0)] == [400, 2000, 0]


@pytest.mark.parametrize(
    ("variables", "is_direct"),
    [
        ({"http_proxy": "PROXY"}, False),
        ({"all_proxy": "PROXY"}, False),
        ({"https_proxy": "PROXY"}, True),
        ({"http_proxy": "PROXY", "no_proxy": "x, 127.0.0.0/8"}, True),
        ({"http_proxy": "PROXY", "no_proxy": "127.0.0.1:PORT"}, True),
        ({"http_proxy": "PROXY", "no_proxy": "10.0.0.0/8,127.0.0.1:1,fd00::/8"}, False),
    ],
)
def test_proxy_of_the_environment_is_used(
    monkeypatch: pytest.MonkeyPatch, client: HttpClient, variables: dict[str, str], is_direct: bool
) -> None:
    with pages(lambda _: (200, b"direct")) as url, pages(lambda _: (200, b"by proxy")) as proxy:
        for name, value in variables.items():
            monkeypatch.setenv(name, value.replace("PROXY", proxy).replace("PORT", url.rpartition(":")[2]))
        assert bytes(client.get(url, "/")) == (b"direct" if is_direct else b"by proxy")


def _answered_once(answer: bytes, heard: list[bytes]) -> tuple[str, threading.Thread]:
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with listener, listener.accept()[0] as connection:
            heard.append(connection.recv(1 << 16))
            connection.sendall(answer)

    thread = threading.Thread(target=run)
    thread.start()
    return f"127.0.0.1:{listener.getsockname()[1]}", thread


def test_proxy_gets_the_whole_url_and_its_password(monkeypatch: pytest.MonkeyPatch, client: HttpClient) -> None:
    heard = list[bytes]()
    place, thread = _answered_once(response(CONTENT), heard)
    monkeypatch.setenv("http_proxy", f"http://me:se%20cret@{place}")
    assert client.get("http://elsewhere.invalid/base", "/path?step=1") == CONTENT
    thread.join()
    lines = heard[0].split(b"\r\n")
    assert lines[0] == b"GET http://elsewhere.invalid/base/path?step=1 HTTP/1.1"
    assert b"Host: elsewhere.invalid" in lines
    assert b"Proxy-Authorization: Basic " + b64encode(b"me:se cret") in lines


def test_fragment_is_the_ip_of_connections_and_no_part_of_a_request(client: HttpClient) -> None:
    heard = list[bytes]()
    place, thread = _answered_once(response(b"", "404 No"), heard)
    port = place.rpartition(":")[2]
    with pytest.raises(UnexpectedServer, match=rf"^http://name.invalid:{port}/base/path answered 404"):
        client.get(f"http://name.invalid:{port}/base#127.0.0.1", "/path?step=1")
    thread.join()
    lines = heard[0].split(b"\r\n")
    assert lines[0] == b"GET /base/path?step=1 HTTP/1.1"
    assert f"Host: name.invalid:{port}".encode() in lines


def test_https_goes_through_a_tunnel_of_the_proxy(monkeypatch: pytest.MonkeyPatch, client: HttpClient) -> None:
    heard = list[bytes]()
    place, thread = _answered_once(response(b"", "407 Proxy Authentication Required"), heard)
    monkeypatch.setenv("https_proxy", f"http://{place}")
    with pytest.raises(TransientError, match=r"407.*through HTTPS_PROXY"):
        client.get("https://elsewhere.invalid", "/path")
    thread.join()
    assert heard[0].startswith(b"CONNECT elsewhere.invalid:443 HTTP/1.")


@pytest.mark.parametrize("status", [403, 502])
def test_failure_of_a_proxy_names_its_variable(monkeypatch: pytest.MonkeyPatch, client: HttpClient, status: int) -> None:
    hint = r"\(through HTTP_PROXY; NO_PROXY=elsewhere\.invalid goes past it\)"
    with pages(lambda _: (status, b"<html>no</html>")) as proxy:
        monkeypatch.setenv("http_proxy", proxy)
        with pytest.raises(TransientError, match=rf"{status}.* {hint}"):
            client.get("http://elsewhere.invalid", "/")
        with pytest.raises(PenstockError, match=rf"{status} {hint}"):
            greet("http://elsewhere.invalid")


def test_response_through_a_proxy_does_not_name_the_proxy(monkeypatch: pytest.MonkeyPatch, client: HttpClient) -> None:
    with answering.server(answering.problem("busy", 503)) as proxy:
        monkeypatch.setenv("http_proxy", proxy)
        with pytest.raises(TransientError, match="^this is busy$"):
            client.get("http://elsewhere.invalid", "/")


@pytest.mark.parametrize("address", ["socks5://me:secret@proxy:70", "http://me:secret@proxy:port"])
def test_unusable_proxy_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch, client: HttpClient, address: str
) -> None:
    monkeypatch.setenv("ALL_PROXY", address)
    with pytest.raises(SpecError, match="ALL_PROXY") as raised:
        client.get("http://elsewhere.invalid", "/")
    assert "secret" not in str(raised.value)


def test_unreadable_certificates_matter_only_to_https(monkeypatch: pytest.MonkeyPatch, client: HttpClient) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/certificates.pem")
    with pages(lambda _: (200, CONTENT)) as url:
        assert client.get(url, "/") == CONTENT
    with pytest.raises(SpecError, match="SSL_CERT_FILE"):
        client.get("https://localhost:9", "/")


@pytest.fixture
def certificate(server: Listener, tmp_path: Path) -> Path:
    """A certificate that no authority issued. The server speaks TLS with it."""
    if not shutil.which("openssl"):
        pytest.skip("no openssl to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    return certificate


def test_certificate_of_https_is_checked(server: Listener, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"https://localhost:{server.server_port}"
    with closing(HttpClient(5.0)) as client, pytest.raises(UnexpectedServer, match="not trusted.*SSL_CERT_FILE"):
        client.get(url, "/sized")
    with pytest.raises(PenstockError, match="not trusted.*SSL_CERT_FILE"):
        greet(url)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with closing(HttpClient(5.0)) as client:
        assert client.get(url, "/sized", then="/chunked") == CONTENT
        assert client.get(url, "/chunked") == CONTENT


@pytest.mark.parametrize("act", [HttpClient.interrupt, HttpClient.close])
def test_interrupt_and_close_end_a_read_in_another_thread(act: Callable[[HttpClient], None]) -> None:
    asked, over = threading.Event(), threading.Event()
    failures = list[Exception]()

    def answer(_: str) -> tuple[int, bytes]:
        asked.set()
        over.wait(20)
        return 200, b""

    def get() -> None:
        try:
            client.get(url, "/")
        except TransientError as error:
            failures.append(error)

    with pages(answer) as url, closing(HttpClient(60.0)) as client:
        thread = threading.Thread(target=get)
        thread.start()
        assert asked.wait(20)
        act(client)
        thread.join(20)
        over.set()
        assert len(failures) == 1


def test_connection_of_an_interrupted_client_fails(server: Listener, client: HttpClient) -> None:
    client.interrupt()
    with pytest.raises(TransientError):
        client.get(server.url, "/sized")


def test_https_address_has_port_443_by_default(monkeypatch: pytest.MonkeyPatch, client: HttpClient) -> None:
    places = []

    def connect(place: tuple[str, int], *_: object) -> socket.socket:
        places.append(place)
        raise ConnectionRefusedError(os.strerror(111))

    monkeypatch.setattr(socket, "create_connection", connect)
    for url in ("http://host", "https://[2001:db8::5]", "http://[::1]:8000"):
        with pytest.raises(TransientError):
            client.get(url, "/")
    assert places == [("host", 80), ("2001:db8::5", 443), ("::1", 8000)]
