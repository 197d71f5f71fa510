"""Memory for bodies goes from one connection to the next, unless a thread may still write to it."""

import errno
import gc
import logging
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from weakref import ref

import httpx
import pytest

import answering
from answering import pages, response
from penstock import PenstockError, ServerUnavailable, SpecError
from penstock.cli.connection import greet
from penstock.cli.doctor import check_latency
from penstock.transport.connection import Connection
from penstock.transport.probe import client_aside
from penstock.transport.responses import TransientError, UnexpectedServer
from penstock.transport.servers import Servers
from penstock.transport.transport import Transport

BODY = bytes(range(256)) * 100


def fetch(connection: Connection, server: str) -> memoryview:
    return connection.fetch(server, "/path?step=1", silence_seconds=60.0)


def test_what_one_epoch_received_into_the_next_one_does_too() -> None:
    with pages(lambda _: (200, BODY)) as server:
        with closing(Connection()) as first:
            body = fetch(first, server)
            assert body == BODY
            where = body.obj
        with closing(Connection()) as second, closing(Connection()) as beside:
            assert fetch(second, server).obj is not where  # the body is still looked at
            del body
            assert fetch(second, server).obj is where
            assert fetch(beside, server).obj is not where


def test_one_that_is_closed_does_not_wait_for_the_garbage_collector() -> None:
    gc.disable()
    try:
        with pages(lambda _: (200, BODY)) as server:
            connection = Connection()
            with closing(connection):
                assert fetch(connection, server) == BODY
        kept = ref(connection)
        del connection
        assert kept() is None
    finally:
        gc.enable()


def test_memory_is_not_given_away_while_a_thread_fetches() -> None:
    asked, answered = threading.Event(), threading.Event()

    def answer(_: str) -> tuple[int, bytes]:
        asked.set()
        answered.wait(60)
        return 200, BODY

    def wait_for_it() -> None:
        with suppress(TransientError):
            fetch(left, server)

    with pages(answer) as server:
        left = Connection()
        memory = left._buffers
        thread = threading.Thread(target=wait_for_it)
        thread.start()
        assert asked.wait(60)
        left.close()
        with closing(Connection()) as following:
            assert following._buffers is not memory
        answered.set()
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have some of these options, or other names for them")
@pytest.mark.usefixtures("no_proxies")
@pytest.mark.parametrize("has_proxy", [False, True])
def test_the_kernel_finds_out_soon_that_a_connection_is_lost(monkeypatch: pytest.MonkeyPatch, has_proxy: bool) -> None:
    with pages(lambda _: (200, BODY)) as server:
        if has_proxy:
            monkeypatch.setenv("http_proxy", server)
        with closing(Connection()) as connection:
            assert fetch(connection, server) == BODY
            [made] = connection._sockets._open
            assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle, pause, count, unconfirmed = (
                made.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
            )
    assert idle + count * pause == 14
    assert unconfirmed == 14_000


@pytest.mark.usefixtures("no_proxies")
@pytest.mark.parametrize("reason", [errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ECONNRESET])
def test_a_connection_that_was_lost_before_it_is_used_again_is_made_anew(monkeypatch: pytest.MonkeyPatch, reason: int) -> None:
    """As the kernel tells it of one that nobody has answered its probes on."""
    send, lost = socket.socket.sendall, set[socket.socket]()

    def sendall(made: socket.socket, request: bytes) -> None:
        if made in lost:
            raise OSError(reason, os.strerror(reason))
        send(made, request)

    monkeypatch.setattr(socket.socket, "sendall", sendall)
    with pages(lambda _: (200, BODY)) as server, closing(Connection()) as connection:
        assert fetch(connection, server) == BODY
        lost.update(connection._sockets._open)
        assert fetch(connection, server) == BODY


def test_each_request_has_a_patience_of_its_own() -> None:
    answers, over = iter([False, True]), threading.Event()

    def answer(_: str) -> tuple[int, bytes]:
        if next(answers):
            over.wait(20)
        return 200, BODY

    with pages(answer) as server, closing(Connection()) as connection:
        assert fetch(connection, server) == BODY
        with pytest.raises(TransientError, match="timed out"):
            connection.fetch(server, "/path?step=1", silence_seconds=0.2)
        over.set()


def test_a_server_may_be_one_of_several_behind_an_address() -> None:
    with pages(lambda path: (200, path.encode())) as server, closing(Connection()) as connection:
        for behind in ("", "/first", "/second%20"):
            body = connection.fetch(server + behind, "/path?step=1", then="/next?step=2", silence_seconds=60.0)
            assert bytes(body).decode() == f"{behind}/path"
            body = connection.fetch(server + behind, "/next?step=2", silence_seconds=60.0)
            assert bytes(body).decode() == f"{behind}/next"


@pytest.mark.usefixtures("no_proxies")
@pytest.mark.parametrize(
    ("variables", "is_read_in_place"),
    [({"no_proxy": "localhost,127.0.0.1"}, True), ({"https_proxy": "http://127.0.0.1:9"}, True),
     ({"http_proxy": "http://127.0.0.1:9", "no_proxy": "127.0.0.1"}, True), ({"http_proxy": "SERVER"}, False)],
)  # fmt: skip
def test_a_host_that_needs_no_proxy_takes_no_copy(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_read_in_place: bool
) -> None:
    with pages(lambda _: (200, BODY)) as server:
        for name, value in variables.items():
            monkeypatch.setenv(name, value.replace("SERVER", server))
        with closing(Connection()) as connection:
            body = fetch(connection, server)
            assert body == BODY
            assert isinstance(body.obj, bytearray) == is_read_in_place


@pytest.mark.usefixtures("no_proxies")
def test_what_came_through_a_proxy_before_it_broke_off_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer() -> None:
        with proxy.accept()[0] as client:
            client.recv(1 << 16)
            client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc")

    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        thread = threading.Thread(target=answer)
        thread.start()
        with closing(Connection()) as connection, pytest.raises(TransientError) as cut:
            connection.fetch("http://elsewhere.invalid", "/", silence_seconds=20.0)
        assert bytes(cut.value.received) == b"abc"
        thread.join(60)


def test_a_failure_names_the_proxy_that_it_may_be_of(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("all_proxy", "http://127.0.0.1:9")
    through = r"refused \(through ALL_PROXY; NO_PROXY=localhost goes past it\)$"
    with closing(Connection()) as connection, pytest.raises(TransientError, match=through):
        fetch(connection, "http://localhost:10")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with closing(Connection()) as connection, pytest.raises(TransientError, match=through.replace("ALL", "HTTP")):
        fetch(connection, "http://localhost:10")
    monkeypatch.setenv("no_proxy", "localhost")
    with closing(Connection()) as connection, pytest.raises(TransientError, match="refused$"):
        fetch(connection, "http://localhost:10")


def test_the_name_and_the_password_of_an_address_are_sent() -> None:
    asked: list[bytes] = []

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            asked.append(connection.recv(1 << 16))
            connection.sendall(response(BODY))

    with socket.create_server(("127.0.0.1", 0)) as listener, closing(Connection()) as connection:
        thread = threading.Thread(target=answer)
        thread.start()
        assert fetch(connection, f"http://me:se%20cret@127.0.0.1:{listener.getsockname()[1]}") == BODY
        thread.join(60)
    [line] = [line for line in asked[0].split(b"\r\n") if line.lower().startswith(b"authorization:")]
    assert line.split()[1:] == [b"Basic", b64encode(b"me:se cret")]


@pytest.mark.usefixtures("no_proxies")
@pytest.mark.parametrize("through_proxy", [False, True])
def test_password_of_an_address_is_sent_and_never_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, through_proxy: bool
) -> None:
    """httpx logs the URL of each request."""
    caplog.set_level(logging.DEBUG)
    sent = list[str | None]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            sent.append(self.headers["Authorization"])
            self.wfile.write(response(b'{"wire": 2}'))

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener, closing(Connection()) as connection:
        threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True).start()
        if through_proxy:
            monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{listener.server_port}")
        address = f"http://me:secret@127.0.0.1:{listener.server_port}"
        fetch(connection, address)
        greet(address)
        list(check_latency(address))
        listener.shutdown()
    assert len(sent) > 2
    assert set(sent) == {f"Basic {b64encode(b'me:secret').decode()}"}
    assert "/healthz" in caplog.text
    assert "secret" not in caplog.text


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.usefixtures("no_proxies")
@pytest.mark.parametrize(
    ("name", "value"), [("NO_PROXY", "localhost,fd00::/8"), ("SSL_CERT_FILE", "/nowhere/certificates.pem")]
)
def test_what_plain_http_does_not_need_of_the_environment_may_be_wrong(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pages(lambda _: (200, BODY)) as server, closing(Connection()) as connection:
        assert fetch(connection, server) == BODY


@pytest.mark.usefixtures("no_proxies")
@pytest.mark.usefixtures("no_proxies")
@pytest.mark.parametrize(
    ("no_proxy", "is_past"),
    [
        ("127.0.0.1", True),
        ("x, 127.0.0.0/8", True),
        ("127.0.0.1/8", True),
        ("10.0.0.0/8,127.0.0.0/x", False),
        ("*", True),
        ("127.0.0.1:{port}", True),
        ("127.0.0.1:1", False),
    ],
)
def test_addresses_in_a_network_that_no_proxy_names_are_asked_without(
    monkeypatch: pytest.MonkeyPatch, no_proxy: str, is_past: bool
) -> None:
    with pages(lambda _: (200, b"by the proxy")) as proxy, pages(lambda _: (200, b"by itself")) as server:
        monkeypatch.setenv("http_proxy", proxy)
        monkeypatch.setenv("no_proxy", no_proxy.format(port=server.rpartition(":")[2]))
        with closing(Connection()) as connection:
            assert bytes(fetch(connection, server)) == (b"by itself" if is_past else b"by the proxy")


@pytest.mark.usefixtures("no_proxies")
@pytest.mark.parametrize(
    "address", ["gopher://me:secret@proxy:70", "http://me:secret@proxy:port", "socks5://me:secret@proxy:70"]
)
def test_a_proxy_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setitem(sys.modules, "socksio", None)  # as where httpx has no SOCKS
    monkeypatch.setenv("ALL_PROXY", address)
    monkeypatch.setenv("NO_PROXY", "localhost")
    with pages(lambda _: (200, BODY)) as server, closing(Connection()) as connection:
        told_of = r"names proxies \(ALL_PROXY\), and .*[^.]\. Correct or unset these"
        with pytest.raises(SpecError, match=told_of) as told:
            fetch(connection, "http://elsewhere.invalid")
        assert fetch(connection, server.replace("127.0.0.1", "localhost")) == BODY  # which needs none
    assert "secret" not in str(told.value)


@pytest.mark.usefixtures("no_proxies")
def test_who_is_no_server_is_told_from_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = response(b"x", "200 OK", "Content-Encoding: gzip")
    for answer, is_silence in ((packed, False), (b"SSH-2.0-x\r\n\r\n", False), (b"", True)):
        with answering.server(answer) as url, closing(Connection()) as connection, pytest.raises(TransientError) as told:
            fetch(connection, url)
        assert told.value.is_silence == is_silence
    with answering.server(response(b"", "407 Proxy Authentication Required")) as proxy, closing(Connection()) as connection:
        monkeypatch.setenv("https_proxy", proxy)
        with pytest.raises(UnexpectedServer, match="^407 .*The proxy asks for a name and a password: give them in"):
            fetch(connection, "https://elsewhere.invalid")


@pytest.mark.usefixtures("no_proxies")
def test_certificates_that_are_not_there_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/certificates.pem")
    unset = r"Correct or unset SSL_CERT_FILE=/nowhere/certificates\.pem"
    with closing(Connection()) as connection, pytest.raises(SpecError, match=unset):
        fetch(connection, "https://localhost:9")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    with closing(Connection()) as connection, pytest.raises(SpecError, match=r"Correct or unset these, or SSL_CERT_FILE\.$"):
        fetch(connection, "https://localhost:9")


@pytest.fixture
def untrusted(tmp_path: Path) -> Iterator[str]:
    """A server with TLS whose certificate no authority issued."""
    if not shutil.which("openssl"):
        pytest.skip("no openssl to make a certificate")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost", "-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as listener:
        listener.daemon_threads = True
        listener.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients hang up
        listener.socket = context.wrap_socket(listener.socket, server_side=True)
        threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True).start()
        yield f"https://localhost:{listener.server_port}"
        listener.shutdown()


@pytest.mark.usefixtures("no_proxies")
def test_untrusted_certificate_is_refused_without_retries_when_a_run_begins(untrusted: str) -> None:
    told = r"^the certificate of https://localhost:\d+ is not trusted: self.signed certificate\. .* set SSL_CERT_FILE to"
    with closing(Transport(Servers([untrusted]), retry_seconds=600, first_contact=True)) as transport:
        with pytest.raises(PenstockError, match=told) as refused:
            transport.get("/", bytes)
        assert transport.num_retries == 0
    with pytest.raises(PenstockError, match=told) as diagnosed:
        greet(untrusted)
    for error in (refused, diagnosed):
        assert not isinstance(error.value, ServerUnavailable)
        assert "Start" not in str(error.value)


@pytest.mark.usefixtures("no_proxies")
@pytest.mark.parametrize("status", [403, 502, 503, 504])
def test_answer_of_a_proxy_names_the_proxy_and_how_to_bypass_it(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    told = r"\(through HTTP_PROXY; NO_PROXY=elsewhere\.invalid goes past it\)"
    with pages(lambda _: (status, b"<html>no</html>")) as proxy, closing(Connection()) as connection:
        monkeypatch.setenv("http_proxy", proxy)
        with pytest.raises(TransientError, match=rf"{status}.* {told}"):
            fetch(connection, "http://elsewhere.invalid")
        with pytest.raises(PenstockError, match=rf"{status} {told}"):
            greet("http://elsewhere.invalid")


@pytest.mark.usefixtures("no_proxies")
def test_answer_of_a_server_behind_a_proxy_does_not_name_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering.server(answering.problem("busy", 503)) as proxy, closing(Connection()) as connection:
        monkeypatch.setenv("http_proxy", proxy)
        with pytest.raises(TransientError, match="^this is busy$"):
            fetch(connection, "http://elsewhere.invalid")


@pytest.mark.usefixtures("no_proxies")
def test_certificates_are_checked_however_https_is_spelled(monkeypatch: pytest.MonkeyPatch) -> None:
    verified = []

    def transport(verify: object) -> httpx.BaseTransport:
        verified.append(verify)
        return httpx.MockTransport(lambda _: httpx.Response(200))

    monkeypatch.setattr(httpx, "HTTPTransport", transport)
    for server in ("http://host", "HTTP://host", "https://host", "HTTPS://host"):
        client_aside(server).close()
    assert [bool(context) for context in verified] == [False, False, True, True]


@pytest.mark.usefixtures("no_proxies")
def test_a_resolver_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def look_up(*_: object, **__: object) -> None:
        over.wait(20)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    with closing(Connection()) as connection, monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", look_up)
        with pytest.raises(TransientError, match=r"no address of server\.invalid within 0\.2 seconds"):
            connection.fetch("http://server.invalid", "/", silence_seconds=0.2)
        over.set()
        with pytest.raises(TransientError, match="Temporary failure in name resolution"):
            fetch(connection, "http://server.invalid")


@pytest.mark.usefixtures("no_proxies")
@pytest.mark.parametrize(
    ("server", "place"),
    [("http://[fd00::abcd]", ("fd00::abcd", 80)), ("https://[2001:db8::5]", ("2001:db8::5", 443)),
     ("http://[::1]:8000", ("::1", 8000)), ("http://host", ("host", 80))],
)  # fmt: skip
def test_an_address_without_a_port_has_that_of_its_scheme(
    monkeypatch: pytest.MonkeyPatch, server: str, place: tuple[str, int]
) -> None:
    asked = []

    def look_up(host: str, port: int, **_: object) -> list[object]:
        return [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", (host, port, 0, 0))]

    def connect(address: tuple[str, int], *_: object) -> socket.socket:
        asked.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "create_connection", connect)
    with closing(Connection()) as connection, pytest.raises(TransientError):
        fetch(connection, server)
    assert asked == [place]
