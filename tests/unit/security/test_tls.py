"""TLS of a real server in a thread: certificates that are replaced, client certificates, and headers of proxies."""

from __future__ import annotations

import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI, Request

from penstock.access import Access
from penstock.http import HttpClient
from penstock.responses import TransientError
from penstock_server.api.admission import InFlight
from penstock_server.app import create_app
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import open_catalog
from penstock_server.security.tls import Certificates, subject_of
from penstock_server.serving import server as serving
from penstock_server.settings import Settings, SettingsError
from support.certificates import HOST, Authority
from support.corpora import write_numbered
from support.servers import serving_app


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def app(tmp_path: Path) -> Iterator[FastAPI]:
    """A server's app that also tells who asks."""
    write_numbered(tmp_path / "data" / "numbers", 9)
    with closing(BlockStore(tmp_path / "cache")) as store:
        app = create_app(open_catalog(tmp_path / "data", None, store), InFlight(1 << 30))

        @app.get("/caller")
        async def caller(request: Request) -> dict[str, Any]:
            assert request.client
            return {"host": request.client.host, "certificate": request.scope["state"].get("certificate")}

        yield app


@contextmanager
def serving_tls(app: FastAPI, certificates: Certificates) -> Iterator[str]:
    certificates.load()
    with serving_app(app, tls=certificates.context) as url:
        yield url


def certificates_of(cert: Path, key: Path | None = None, client_ca: Path | None = None) -> Certificates:
    return Certificates(Settings(data_dir=(cert,), cache_dir=cert, tls_cert=cert, tls_key=key, tls_client_ca=client_ca))


def caller(url: str, ca: Path, cert: Path | None = None) -> Any:
    with httpx.Client(verify=Access(ca=ca, cert=cert).tls_context()) as client:
        return client.get(f"{url}/caller").json()


def shown(url: str, authority: Authority, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> bytes:
    """The certificate that a new connection gets."""
    context = ssl.create_default_context(cafile=authority.file)
    context.maximum_version = version
    opened = socket.create_connection((HOST, urlsplit(url).port or 0))
    with context.wrap_socket(opened, server_hostname="localhost") as connection:
        return connection.getpeercert(binary_form=True) or b""


def der(path: Path) -> bytes:
    """The certificate of a file that has its key, too."""
    pem = path.read_text()
    return ssl.PEM_cert_to_DER_cert(
        pem[pem.index("-----BEGIN CERTIFICATE") :].partition("-----END CERTIFICATE-----")[0] + "-----END CERTIFICATE-----"
    )


def test_new_connections_get_what_was_loaded_last(app: FastAPI, authority: Authority) -> None:
    cert = authority.issue()
    certificates = certificates_of(cert)
    with serving_tls(app, certificates) as url, closing(HttpClient(5.0, access=Access(ca=authority.file))) as client:
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            client.get(url, "/caller")
            before = der(cert)
            assert shown(url, authority, version) == before
            authority.issue(into=cert)
            certificates.load()
            assert shown(url, authority, version) == der(cert) != before
            client.get(url, "/caller")


def test_unusable_files_leave_the_certificate_in_use(app: FastAPI, authority: Authority, tmp_path: Path) -> None:
    cert, other = authority.issue(), authority.issue()
    key = tmp_path / "key.pem"
    key.write_bytes(cert.read_bytes())
    certificates, before = certificates_of(cert, key), der(cert)
    encrypted = subprocess.run(
        ["openssl", "pkey", "-in", other, "-aes256", "-passout", "pass:x"], check=True, capture_output=True
    ).stdout
    with serving_tls(app, certificates) as url:
        for content in (other.read_bytes(), b"", encrypted, None):  # the key of another; half of one; with a password; none
            key.unlink() if content is None else key.write_bytes(content)
            with pytest.raises(SettingsError, match=f"--tls-cert: {cert} and {key} cannot be used: .*Name PEM files"):
                certificates.load()
            assert shown(url, authority) == before
        cert.write_bytes(other.read_bytes())
        key.write_bytes(other.read_bytes())
        certificates.load()
        assert shown(url, authority) == der(other)


def test_unusable_client_authority_is_named(authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"--tls-client-ca: {tmp_path}/none.pem cannot be read"):
        certificates_of(authority.issue(), client_ca=tmp_path / "none.pem").load()


def test_client_certificate_names_the_caller(app: FastAPI, authority: Authority, tmp_path: Path) -> None:
    trainers = Authority(tmp_path / "trainers")
    client_ca = tmp_path / "client_ca.pem"
    client_ca.write_bytes(trainers.file.read_bytes())
    certificates = certificates_of(authority.issue(), client_ca=client_ca)
    trainer, foreign = trainers.issue(subject="trainer-a", team="team"), authority.issue(subject="trainer-a", team="team")
    with serving_tls(app, certificates) as url:
        assert caller(url, authority.file)["certificate"] is None  # a probe has none
        subject = caller(url, authority.file, trainer)["certificate"]
        assert (subject.partition(",")[0], subject.rpartition(",")[2]) == ("CN=trainer-a", "O=team")
        for refused in (foreign, trainers.issue(subject="trainer-a", days=-0.5)):
            client = HttpClient(5.0, access=Access(ca=authority.file, cert=refused))
            with (
                closing(client),
                pytest.raises(TransientError, match="Perhaps the server refuses the certificate of cert= or PENSTOCK"),
            ):
                client.get(url, "/caller")
        client_ca.write_bytes(authority.file.read_bytes())
        certificates.load()
        assert caller(url, authority.file, foreign)["certificate"].startswith("CN=trainer-a,")
        with pytest.raises(httpx.TransportError):
            caller(url, authority.file, trainer)


def test_client_certificates_need_tls_1_3(app: FastAPI, authority: Authority) -> None:
    """A session of TLS 1.2 would be resumed without a check of its certificate."""
    with serving_tls(app, certificates_of(authority.issue(), client_ca=authority.file)) as url:
        assert shown(url, authority)
        with pytest.raises(ssl.SSLError):
            shown(url, authority, ssl.TLSVersion.TLSv1_2)


def test_request_without_tls_is_told_of_https(app: FastAPI, authority: Authority) -> None:
    message = "If the server uses TLS, its address begins with https"
    refused = pytest.raises(TransientError, match=message)
    with serving_tls(app, certificates_of(authority.issue())) as url, closing(HttpClient(5.0)) as client, refused:
        client.get(url.replace("https", "http"), "/caller")


def test_connection_that_idled_too_long_is_replaced(
    app: FastAPI, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_KEEP_ALIVE_SECONDS", 0)
    certificates = certificates_of(authority.issue())
    with serving_tls(app, certificates) as url, closing(HttpClient(5.0, access=Access(ca=authority.file))) as client:
        for _ in range(20):
            client.get(url, "/caller", then="/caller")


def test_stalled_handshake_ends(app: FastAPI, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: after a minute. Meanwhile others are served."""
    monkeypatch.setattr(serving, "_HANDSHAKE_SECONDS", 1.0)
    with serving_tls(app, certificates_of(authority.issue())) as url:
        address = (HOST, urlsplit(url).port or 0)
        with socket.create_connection(address, timeout=30) as silent, socket.create_connection(address, timeout=30) as half:
            half.sendall(bytes.fromhex("160301"))  # the beginning of a handshake
            assert shown(url, authority)
            assert silent.recv(1) == half.recv(1) == b""


@pytest.mark.parametrize(("trusted", "host"), [("", HOST), ("10.0.0.0/8,127.0.0.1/32", "192.0.2.7"), ("10.0.0.0/8", HOST)])
def test_forwarded_address_is_believed_of_trusted_proxies_alone(app: FastAPI, trusted: str, host: str) -> None:
    with serving_app(app, trusted_proxy=trusted) as url:
        answer = httpx.get(f"{url}/caller", headers={"X-Forwarded-For": "192.0.2.7", "X-Forwarded-Proto": "https"})
        assert answer.json()["host"] == host


@pytest.mark.parametrize(
    ("names", "subject"),
    [
        (((("organizationName", "team"),), (("commonName", "trainer-a"),)), "CN=trainer-a,O=team"),
        (((("commonName", "a,O=team"),),), r"CN=a\,O=team"),
        (((("commonName", ' #"+;<>\\ '),),), r"CN=\ #\"\+\;\<\>\\\ "),
        (((("commonName", "a\nb"),),), r"CN=a\0Ab"),
        (((("commonName", "a"), ("userId", "7")), (("emailAddress", "a@b"),)), "emailAddress=a@b,CN=a+UID=7"),
        ((), ""),
    ],
)
def test_subject_is_written_as_rfc_4514_does(names: Any, subject: str) -> None:
    assert subject_of({"subject": names}) == subject


def test_subject_is_what_openssl_prints(app: FastAPI, authority: Authority) -> None:
    with serving_tls(app, certificates_of(authority.issue(), client_ca=authority.file)) as url:
        for name in ("trainer-a", "a,O=team", ' #"+;<>\\ ', "größe", "a\nb", "#1"):
            cert = authority.issue(subject=name, team="team")
            printed = subprocess.run(
                ["openssl", "x509", "-in", cert, "-noout", "-subject", "-nameopt", "RFC2253,-esc_msb"],
                check=True, capture_output=True, text=True,
            ).stdout  # fmt: skip
            assert f"subject={caller(url, authority.file, cert)['certificate']}\n" == printed
