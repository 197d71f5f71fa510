"""`penstock serve` with TLS: runs, commands, and certificates that are replaced under load."""

from __future__ import annotations

import re
import socket
import ssl
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from penstock import PenstockError, RemoteDataset
from support.certificates import HOST, Authority
from support.corpora import write_numbered
from support.processes import until
from support.servers import Serve, Server, penstock

NUM_ROWS = 1024


@pytest.fixture(scope="module")
def data_dir(shared: Path) -> Path:
    write_numbered(shared / "numbers", NUM_ROWS)
    return shared


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_CA", "PENSTOCK_CERT", "SSL_CERT_FILE", "SSL_CERT_DIR", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


def serial(server: Server, authority: Authority) -> object:
    """The number of the certificate that a new connection gets."""
    context = ssl.create_default_context(cafile=authority.file)
    with context.wrap_socket(connected(server), server_hostname=HOST) as connection:
        return (connection.getpeercert() or {})["serialNumber"]


def connected(server: Server) -> socket.socket:
    return socket.create_connection((HOST, urlsplit(server.url).port or 0))


def replace(path: Path, certificate: Path) -> None:
    """Rename a file into the place of another, as tools that renew certificates do."""
    certificate.rename(path)


def test_run_over_tls_gets_the_batches_of_a_run_without_it(data_dir: Path, serve: Serve, authority: Authority) -> None:
    plain, encrypted = serve(data_dir), serve(data_dir, "--tls-cert", str(authority.issue()))
    assert set(re.findall(r"https?://", encrypted.greeting)) == {"https://"}
    expected = [batch["input_ids"] for batch in RemoteDataset(plain.url, "numbers", batch_size=64, seq_len=8)]
    data = RemoteDataset(encrypted.url, "numbers", batch_size=64, seq_len=8, ca=authority.file)
    batches = [batch["input_ids"] for batch in data]
    assert len(batches) == len(expected) == NUM_ROWS // 64
    assert all(map(torch.equal, batches, expected))


def test_commands_trust_what_they_are_told_to(data_dir: Path, serve: Serve, authority: Authority) -> None:
    server = serve(data_dir, "--tls-cert", str(authority.issue()))
    for command in ("peek", "doctor"):
        assert penstock(command, f"{server.url}/numbers", "--ca", authority.file).returncode == 0
        assert penstock(command, f"{server.url}/numbers", PENSTOCK_CA=str(authority.file)).returncode == 0
        refused = penstock(command, f"{server.url}/numbers")
        assert refused.returncode != 0
        said = " ".join((refused.stdout + refused.stderr).split())
        assert "is not trusted: unable to get local issuer certificate" in said
    arguments = ("bench", f"{server.url}/numbers", "--seconds", "0.1", "--ca", authority.file)
    assert penstock(*arguments).returncode == penstock(*arguments, "--no-tensors").returncode == 0
    with pytest.raises(PenstockError, match="is not trusted"):
        RemoteDataset(server.url, "numbers")


def test_doctor_warns_of_a_certificate_that_ends_within_two_weeks(data_dir: Path, serve: Serve, authority: Authority) -> None:
    def shown(days: float) -> str:
        server = serve(data_dir, "--tls-cert", str(authority.issue(days=days)))
        done = penstock("doctor", f"{server.url}/numbers", "--ca", authority.file)
        assert done.returncode == 0
        return " ".join(done.stdout.split())

    assert re.search(r"warn tls the certificate of the server ends in 13 days, at 20\S+ \S+ UTC -> renew it", shown(13.9))
    assert re.search(r"ok tls the certificate of the server ends in 14 days, at 20\S+ \S+ UTC ok latency", shown(14.5))


@pytest.mark.parametrize("processes", ["1", "2"])
def test_run_goes_on_while_certificates_are_replaced(
    data_dir: Path, serve: Serve, authority: Authority, processes: str
) -> None:
    cert = authority.issue()
    server = serve(data_dir, "--tls-cert", str(cert), "--processes", processes)
    data = RemoteDataset(
        server.url, "numbers", batch_size=1, seq_len=8, ca=authority.file, epochs="endless", prefetch_bytes=1 << 14
    )
    batches = iter(data)

    def uses_some() -> bool:
        return len([*islice(batches, 50)]) == 50

    numbers = [serial(server, authority)]
    for _ in range(3):
        replace(cert, authority.issue())
        until(lambda: uses_some() and serial(server, authority) not in numbers)
        numbers.append(serial(server, authority))
    good = cert.read_bytes()
    cert.write_text(good.decode().partition("-----BEGIN CERTIFICATE")[0])  # a key alone
    until(lambda: uses_some() and "What was loaded before stays in use" in server.log())
    assert serial(server, authority) in numbers
    batches.close()  # type: ignore[attr-defined]
    assert data.stats().num_retries == 0


def test_unusable_certificate_ends_the_server_at_its_start(data_dir: Path, authority: Authority, tmp_path: Path) -> None:
    cert, other = authority.issue(), authority.issue()
    for processes in ("1", "2"):
        arguments = ("--tls-cert", cert, "--tls-key", other, "--processes", processes, "--port", "0")
        done = penstock("serve", data_dir, "--cache-dir", tmp_path, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"--tls-cert: {cert} and {other} cannot be used: " in done.stderr
