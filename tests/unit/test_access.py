"""Tokens and certificates of the client: where they come from, where they go, and what follows a refusal."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import socket
import ssl
import subprocess
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing, contextmanager
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from penstock import AccessDenied, PenstockError, SpecError
from penstock.access import Access
from penstock.client import Client
from penstock.http import HttpClient
from penstock.responses import UnexpectedServer
from penstock.servers import Servers
from penstock.transport import Transport
from support.certificates import HOST, Authority
from support.processes import put_result
from support.servers import pages, response
from support.servers import server as answering

SECRET = "pst_4tAbwq"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOKEN", "TOKEN_FILE", "CA", "CERT"):
        monkeypatch.delenv(f"PENSTOCK_{name}", raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ssl_cert_file", "ssl_cert_dir"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(*_: object) -> None:
        raise AssertionError("it waited")

    monkeypatch.setattr(HttpClient, "wait", wait)


class Guard:
    """Server that answers to one token, and with a problem to any other; `heard` are the headers that it got."""

    def __init__(self, token: str, context: ssl.SSLContext | None = None) -> None:
        self.token, self.heard = token, list[str]()
        self.refusal = "unauthorized", 401
        guard = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                given = self.headers.get("Authorization", "")
                guard.heard.append(given)
                slug, status = ("", 200) if given == f"Bearer {guard.token}" else guard.refusal
                body = json.dumps({"type": f"urn:penstock:problem:{slug}", "detail": "no."} if slug else {}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None: ...

        self._listener = ThreadingHTTPServer((HOST, 0), Handler)
        self._listener.daemon_threads = True
        if context:
            self._listener.socket = context.wrap_socket(self._listener.socket, server_side=True)
        self.url = f"{'https' if context else 'http'}://{HOST}:{self._listener.server_port}"
        threading.Thread(target=self._listener.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown()
        self._listener.server_close()


@pytest.fixture
def guard() -> Iterator[Guard]:
    with closing(Guard(SECRET)) as guard:
        yield guard


def opened(url: str, access: Access | None = None, *, first_contact: bool = False) -> closing[Transport]:
    return closing(Transport(Servers([url]), retry_seconds=20.0, first_contact=first_contact, access=access))


def get(url: str, access: Access | None = None) -> bytes:
    with closing(HttpClient(5.0, access=access)) as client:
        return bytes(client.get(url, "/"))


def test_token_is_the_first_of_argument_address_variable_and_file(
    guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sent(servers: str, token: str | None = None) -> str:
        with closing(Client(servers, "docs", rank=0, retry_seconds=5, access=Access(token)).connect()) as transport:
            transport.get_some("/", bytes)
        return guard.heard[-1]

    with_login = guard.url.replace("//", "//me:in%2Faddress@")
    file = tmp_path / "token"
    file.write_text(" in-file\n")
    assert sent(guard.url) == ""
    monkeypatch.setenv("PENSTOCK_TOKEN_FILE", str(file))
    assert sent(guard.url) == "Bearer in-file"
    monkeypatch.setenv("PENSTOCK_TOKEN", "in-variable")
    assert sent(guard.url) == "Bearer in-variable"
    assert sent(with_login) == "Basic " + b64encode(b"me:in/address").decode()
    assert sent(with_login, "argument") == "Bearer argument"


def test_each_server_gets_the_token_of_its_own_address(guard: Guard) -> None:
    with closing(Guard("")) as other:
        servers = [guard.url.replace("//", "//me:one@"), other.url.replace("//", "//me:two@")]
        with closing(Client(servers, "docs", rank=0, retry_seconds=5).connect()) as transport, pytest.raises(AccessDenied):
            transport.get("/", bytes)
        assert ({*guard.heard}, {*other.heard}) == (
            {"Basic " + b64encode(b"me:one").decode()},
            {"Basic " + b64encode(b"me:two").decode()},
        )


def test_requests_sent_ahead_have_the_token(guard: Guard) -> None:
    with closing(HttpClient(5.0, access=Access(SECRET))) as client:
        client.get(guard.url, "/1", then="/2")
        client.get(guard.url, "/2")
    assert guard.heard == [f"Bearer {SECRET}"] * 2


@pytest.mark.parametrize("token", ["", " ", "two\nlines", "zwei wörter", "\x00", 7])
def test_token_that_no_header_can_have_is_refused_without_printing_it(token: Any) -> None:
    with pytest.raises(SpecError, match="token=") as raised:
        Access(token)
    assert not str(token).strip() or str(token) not in str(raised.value)


@pytest.mark.parametrize("content", [None, b"", b"secret\nsecond", b"\xff"])
def test_unreadable_token_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> None:
    monkeypatch.setenv("PENSTOCK_TOKEN_FILE", str(tmp_path / "token"))
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    with pages(lambda _: (200, b"")) as url, pytest.raises(SpecError, match=f"{tmp_path}/token.*PENSTOCK_TOKEN_FILE") as raised:
        get(url)
    assert "secret" not in str(raised.value)


@pytest.mark.usefixtures("never_waits")
@pytest.mark.parametrize("refusal", [("unauthorized", 401), ("forbidden", 403), ("too-many-attempts", 429)])
def test_refused_token_ends_a_run_at_its_start(guard: Guard, refusal: tuple[str, int]) -> None:
    guard.refusal = refusal
    for first_contact in (True, False):
        with opened(guard.url, Access("wr0ng"), first_contact=first_contact) as transport:
            with pytest.raises(AccessDenied, match=r"no\. The token came from token=: replace it there") as raised:
                transport.get("/", bytes)
            assert "wr0ng" not in str(raised.value)
        message = r"No token was sent.*token=, PENSTOCK_TOKEN or PENSTOCK_TOKEN_FILE"
        with opened(guard.url, first_contact=first_contact) as transport, pytest.raises(AccessDenied, match=message):
            transport.get("/", bytes)


@pytest.mark.usefixtures("never_waits")
@pytest.mark.parametrize("refusal", [("unauthorized", 401), ("too-many-attempts", 429)])
def test_replaced_token_file_is_read_when_the_server_refuses(
    guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: tuple[str, int]
) -> None:
    guard.refusal = refusal
    file = tmp_path / "token"
    monkeypatch.setenv("PENSTOCK_TOKEN_FILE", str(file))
    file.write_text(guard.token)
    for first_contact in (True, False):
        with opened(guard.url, first_contact=first_contact) as transport:
            for token in ("next", "last"):
                transport.get("/", bytes)
                guard.token = token
                file.write_text(token)
            assert bytes(transport.get("/", bytes)) == b"{}"
            assert transport.num_retries == 0


def test_run_waits_for_a_token_that_replaces_an_accepted_one(
    guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    monkeypatch.setenv("PENSTOCK_TOKEN_FILE", str(file))
    file.write_text(guard.token)
    wait = HttpClient.wait

    def replace_and_wait(client: HttpClient, seconds: float) -> None:
        if file.exists():
            file.unlink()  # it is being replaced: the last token is sent again
        else:
            file.write_text("next")
        wait(client, seconds)

    with opened(guard.url) as transport:
        transport.get("/", bytes)
        guard.token = "next"
        monkeypatch.setattr(HttpClient, "wait", replace_and_wait)
        assert transport.get("/", bytes) == b"{}"
        assert transport.num_retries == 2


def test_redirect_does_not_take_the_token_along(guard: Guard) -> None:
    redirect = response(b"", "302 Found", f"Location: {guard.url}/")
    with answering(redirect) as url, pytest.raises(UnexpectedServer, match="302 and leads to"):
        get(url, Access(SECRET))
    assert guard.heard == []


def test_proxy_gets_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = list[str]()
    with closing(Guard("")) as proxy:
        proxy.heard = heard
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("https_proxy", proxy.url)
        with pytest.raises(SpecError, match=r"unencrypted through HTTP_PROXY.*NO_PROXY=elsewhere\.invalid"):
            get("http://elsewhere.invalid", Access(SECRET))
        assert heard == []


def test_tunnel_of_a_proxy_is_opened_without_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = SimpleQueue[bytes]()

    with _recording(response(b"", "407 No"), heard) as proxy:
        monkeypatch.setenv("https_proxy", proxy)
        with pytest.raises(Exception, match="407"):
            get("https://elsewhere.invalid", Access(SECRET))
    request = heard.get(timeout=20)
    assert request.startswith(b"CONNECT elsewhere.invalid:443")
    assert b"Authorization" not in request


@contextmanager
def _recording(answer: bytes, heard: SimpleQueue[bytes]) -> Iterator[str]:
    with socket.create_server((HOST, 0)) as listener:

        def run() -> None:
            with listener.accept()[0] as connection:
                heard.put(connection.recv(1 << 16))
                connection.sendall(answer)

        thread = threading.Thread(target=run)
        thread.start()
        yield f"http://{HOST}:{listener.getsockname()[1]}"
        thread.join()


def test_pickle_has_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client("http://me:Pa55@host:1", "docs", rank=0, retry_seconds=1, access=Access(SECRET))
    content = pickle.dumps(client)
    for secret in (SECRET, "Pa55"):
        assert secret.encode() not in content
        assert secret not in repr(client) + repr(vars(client))
    loaded = pickle.loads(pickle.dumps(Access(SECRET)))
    assert loaded.headers("http://host:1") == {}
    monkeypatch.setenv("PENSTOCK_TOKEN", "of-the-environment")
    assert loaded.headers("http://host:1") == {"Authorization": "Bearer of-the-environment"}


def test_copy_has_the_token() -> None:
    assert deepcopy({"data": Access(SECRET)})["data"].headers("http://host") == {"Authorization": f"Bearer {SECRET}"}


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_process_of_multiprocessing_gets_the_token(method: str) -> None:
    context = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    process = context.Process(target=put_result, args=(answers, Access(SECRET).headers, "http://host"))  # type: ignore[attr-defined]
    process.start()
    assert answers.get() == {"Authorization": f"Bearer {SECRET}"}
    process.join()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


def server_context(certificate: Path, client_authority: Path | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    if client_authority:
        context.load_verify_locations(client_authority)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def test_authority_is_that_of_the_argument_or_the_variable(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Guard(SECRET, server_context(authority.issue()))) as guard:
        assert get(guard.url, Access(SECRET, ca=authority.file)) == b"{}"
        for name in ("PENSTOCK_CA", "SSL_CERT_FILE"):
            with monkeypatch.context() as patch:
                patch.setenv(name, str(authority.file))
                assert get(guard.url, Access(SECRET)) == b"{}"


@pytest.mark.usefixtures("never_waits")
@pytest.mark.parametrize(
    ("names", "days", "is_known", "message"),
    [
        ((), 1, False, "not trusted: unable to get local issuer certificate. If a private authority.*ca=.*SSL_CERT_FILE"),
        ((), -0.5, True, "not trusted: certificate has expired. Renew it on the server"),
        (("10.0.0.1",), 1, True, "not trusted: IP address mismatch.*Use a name that the certificate has"),
        (("other.invalid",), 1, True, "not trusted: .*mismatch.*Use a name that the certificate has"),
    ],
)  # fmt: skip
def test_wrong_certificate_ends_a_run_at_its_start(
    authority: Authority, names: tuple[str, ...], days: float, is_known: bool, message: str
) -> None:
    with closing(Guard(SECRET, server_context(authority.issue(*names, days=days)))) as guard:
        access = Access(SECRET, ca=authority.file if is_known else None)
        with opened(guard.url, access, first_contact=True) as transport, pytest.raises(PenstockError, match=message):
            transport.get("/", bytes)
        assert guard.heard == []


def test_run_waits_while_a_certificate_is_replaced(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    context = server_context(authority.issue(days=-0.5))
    with closing(Guard(SECRET, context)) as guard, opened(guard.url, Access(SECRET, ca=authority.file)) as transport:
        monkeypatch.setattr(HttpClient, "wait", lambda *_: context.load_cert_chain(authority.issue()))
        assert transport.get("/", bytes) == b"{}"
        assert transport.num_retries == 1


def test_run_takes_replaced_files_after_a_failure(authority: Authority, tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_bytes(Authority(tmp_path / "old").file.read_bytes())
    guard = Guard(SECRET, server_context(authority.issue()))
    with closing(guard), opened(guard.url, Access(SECRET, ca=ca)) as transport:
        assert transport.get_some("/", bytes) == []
        ca.write_text("")  # half of a replacement
        assert transport.get_some("/", bytes) == []
        ca.write_bytes(authority.file.read_bytes())
        assert transport.get("/", bytes) == b"{}"


def test_client_certificate_is_shown(authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = authority.issue(subject="trainer")
    foreign = Authority(tmp_path / "foreign").issue(subject="trainer")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    key.write_text(both.read_text().partition("-----BEGIN CERTIFICATE")[0])
    certificate.write_text(both.read_text().removeprefix(key.read_text()))
    with closing(Guard(SECRET, server_context(authority.issue(), authority.file))) as guard:
        for cert in (both, str(both), (certificate, key)):
            assert get(guard.url, Access(SECRET, ca=authority.file, cert=cert)) == b"{}"
        monkeypatch.setenv("PENSTOCK_CERT", f"{certificate},{key}")
        assert get(guard.url, Access(SECRET, ca=authority.file)) == b"{}"
        monkeypatch.delenv("PENSTOCK_CERT")
        for wrong in (None, foreign):
            with pytest.raises(UnexpectedServer, match="refuses the certificate of this client.*Correct cert="):
                get(guard.url, Access(SECRET, ca=authority.file, cert=wrong))


def test_unusable_certificate_files_are_refused(authority: Authority, tmp_path: Path) -> None:
    both = authority.issue(subject="trainer")
    encrypted = tmp_path / "encrypted.pem"
    subprocess.run(["openssl", "pkey", "-in", both, "-aes256", "-passout", "pass:x", "-out", encrypted], check=True)
    for cert in (tmp_path / "missing.pem", authority.file, (both, authority.issue()), (both, encrypted)):
        with pytest.raises(SpecError, match="client certificate cannot be read.*PENSTOCK_CERT"):
            get("https://127.0.0.1:9", Access(ca=authority.file, cert=cert))
    for ca in (tmp_path / "missing.pem", encrypted):
        with pytest.raises(SpecError, match="certificates to trust cannot be read.*PENSTOCK_CA"):
            get("https://127.0.0.1:9", Access(ca=ca))
