"""Runs and commands on a server that needs tokens: who gets in, what is replaced in mid-run, and where no token may be."""

from __future__ import annotations

import io
import pickle
import shutil
import subprocess
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch.utils.data import DataLoader

from penstock import AccessDenied, RemoteDataset, UnknownDataset
from penstock_server.security.tokens import create_token, revoke_token
from support.certificates import Authority
from support.corpora import write_numbered
from support.processes import until
from support.servers import Serve, Server, penstock

SPEC: dict[str, Any] = {"batch_size": 8, "seq_len": 8}
NUM_STEPS = 64


@pytest.fixture(scope="module")
def data_dir(shared: Path) -> Path:
    write_numbered(shared / "numbers", 8 * NUM_STEPS)
    return shared


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOKEN", "TOKEN_FILE", "TOKENS", "CA", "CERT"):
        monkeypatch.delenv(f"PENSTOCK_{name}", raising=False)


def create(tokens: Path, name: str = "trainer", dataset: str = "*") -> str:
    return create_token(tokens, name, (dataset,), "read", None)


def guarded(serve: Serve, data_dir: Path, tokens: Path, *flags: str) -> Server:
    return serve(data_dir, "--tokens", str(tokens), *flags)


def test_run_with_a_token_is_let_in(data_dir: Path, serve: Serve, tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token, other = create(tokens), create(tokens, "other", "letters")
    url = guarded(serve, data_dir, tokens).url
    assert len([*RemoteDataset(url, "numbers", token=token, **SPEC)]) == NUM_STEPS
    assert len([*RemoteDataset(url.replace("//", f"//any:{token}@"), "numbers", **SPEC)]) == NUM_STEPS
    monkeypatch.setenv("PENSTOCK_TOKEN", token)
    assert len([*RemoteDataset(url, "numbers", **SPEC)]) == NUM_STEPS
    with pytest.raises(UnknownDataset):
        RemoteDataset(url, "numbers", token=other)
    with pytest.raises(AccessDenied, match="The token is wrong, expired or revoked.*came from token="):
        RemoteDataset(url, "numbers", token=f"{token}x")
    monkeypatch.delenv("PENSTOCK_TOKEN")
    with pytest.raises(AccessDenied, match="needs a token.*No token was sent"):
        RemoteDataset(url, "numbers")


def test_nothing_that_a_run_writes_has_its_token(
    data_dir: Path, serve: Serve, tokens: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = create(tokens)
    server = guarded(serve, data_dir, tokens)
    ledger, checkpoint = tmp_path / "run.ledger", io.BytesIO()
    data = RemoteDataset(server.url.replace("//", f"//any:{token}@"), "numbers", ledger=ledger, **SPEC)
    given = RemoteDataset(server.url, "numbers", token=token, **SPEC)
    batches = iter(data)
    next(batches)
    revoke_token(tokens, "trainer")
    until(lambda: _status(server, token) == 401)
    with pytest.raises(AccessDenied) as raised:
        RemoteDataset(server.url, "numbers", token=token)
    torch.save([data, given], checkpoint)
    for written in (
        *(f"{one!r} {one.state_dict()} {vars(one)} {one.stats()}" for one in (data, given)),
        pickle.dumps([data, given]).decode("latin-1"),
        checkpoint.getvalue().decode("latin-1"),
        ledger.read_text(),
        str(raised.value),
        caplog.text,
        server.log(),
    ):
        assert written is not None
        assert token not in written


@pytest.mark.slow
def test_spawned_loader_worker_gets_the_token(data_dir: Path, serve: Serve, tokens: Path) -> None:
    token = create(tokens)
    data = RemoteDataset(guarded(serve, data_dir, tokens).url, "numbers", token=token, **SPEC)
    loader = DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert len([*loader]) == NUM_STEPS


def test_run_goes_on_while_its_token_is_replaced(
    data_dir: Path, serve: Serve, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    monkeypatch.setenv("PENSTOCK_TOKEN_FILE", str(file))
    file.write_text(create(tokens, "0"))
    server = guarded(serve, data_dir, tokens)
    data = RemoteDataset(server.url, "numbers", epochs="endless", prefetch_bytes=1 << 12, **SPEC)
    batches = iter(data)

    def uses_some() -> bool:
        return len([*islice(batches, 50)]) == 50

    for number in range(1, 4):
        old = file.read_text()
        file.write_text(create(tokens, f"{number}"))
        revoke_token(tokens, f"{number - 1}")
        while _status(server, old) != 401:
            assert uses_some()
        assert uses_some()
    assert data.stats().num_retries == 0
    revoke_token(tokens, "3")  # before the new one is there: the loop waits
    until(lambda: _status(server, file.read_text()) == 401)
    late = threading.Timer(1.0, lambda: file.write_text(create(tokens, "4")))
    late.start()
    assert uses_some()
    assert uses_some()
    late.join()
    assert data.stats().num_retries > 0
    batches.close()  # type: ignore[attr-defined]


def _status(server: Server, token: str) -> int:
    return httpx.get(f"{server.url}/v1/datasets", headers={"Authorization": f"Bearer {token}"}).status_code


def test_commands_take_the_token_from_a_file_or_the_environment(
    data_dir: Path, serve: Serve, tokens: Path, tmp_path: Path
) -> None:
    token, file, ledger = create(tokens), tmp_path / "token", tmp_path / "run.ledger"
    file.write_text(token)
    url = guarded(serve, data_dir, tokens).url
    assert len([*RemoteDataset(url, "numbers", token=token, ledger=ledger, **SPEC)]) == NUM_STEPS
    for command in (
        ("peek", f"{url}/numbers"),
        ("doctor", url),
        ("bench", f"{url}/numbers", "--seconds", "0.1"),
        ("audit", str(ledger), "--server", url),
    ):
        for done in (
            penstock(*command, "--token-file", file, PENSTOCK_TOKEN="wr0ng"),
            penstock(*command, PENSTOCK_TOKEN=token),
            penstock(*command, PENSTOCK_TOKEN_FILE=str(file)),
        ):
            assert done.returncode == 0, done.stderr + done.stdout
        refused = penstock(*command, PENSTOCK_TOKEN="wr0ng")
        said = " ".join((refused.stdout + refused.stderr).split())
        assert refused.returncode != 0
        assert "does not know this caller. The token came from PENSTOCK_TOKEN: replace it there." in said
        assert "wr0ng" not in said


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_curl_line_of_peek_is_let_in_and_hides_the_token(
    data_dir: Path, serve: Serve, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, clients = Authority(tmp_path / "servers"), Authority(tmp_path / "clients")
    token, file, cert = create(tokens), tmp_path / "a token", clients.issue(subject="trainer")
    file.write_text(token)
    create_token(tokens, "by-certificate", ("*",), "read", None, certificate=_subject(cert))
    plain = f"{guarded(serve, data_dir, tokens).url}/numbers"
    flags = ("--tls-cert", str(authority.issue()), "--tls-client-ca", str(clients.file))
    encrypted = f"{guarded(serve, data_dir, tokens, *flags).url}/numbers"
    for variable, *arguments in (
        (token, plain),
        ("", plain, "--token-file", file),
        ("", encrypted, "--token-file", file, "--ca", authority.file),
        ("", encrypted, "--cert", cert, "--ca", authority.file),
        ("", encrypted, "--cert", f"{cert},{cert}", "--ca", authority.file),
    ):
        monkeypatch.setenv("PENSTOCK_TOKEN", variable)
        line = penstock("peek", *arguments).stdout.splitlines()[-1]
        assert token not in line
        fetched = subprocess.run(["bash", "-c", f"{line} --fail -sS"], capture_output=True, text=True, check=True)
        assert fetched.stdout.startswith("{")


def test_client_certificate_takes_the_place_of_a_token(data_dir: Path, serve: Serve, tokens: Path, tmp_path: Path) -> None:
    authority, clients = Authority(tmp_path / "servers"), Authority(tmp_path / "clients")
    trainer, other = clients.issue(subject="trainer-a"), clients.issue(subject="trainer-b")
    create_token(tokens, "trainer", ("numbers",), "read", None, certificate=_subject(trainer))
    flags = ("--tls-cert", str(authority.issue()), "--tls-client-ca", str(clients.file))
    url = guarded(serve, data_dir, tokens, *flags).url
    assert len([*RemoteDataset(url, "numbers", ca=authority.file, cert=trainer, **SPEC)]) == NUM_STEPS
    assert penstock("peek", f"{url}/numbers", "--ca", authority.file, "--cert", trainer).returncode == 0
    for cert, reason in ((other, "no entry for the client certificate CN=trainer-b,"), (None, "needs a token")):
        with pytest.raises(AccessDenied, match=reason):
            RemoteDataset(url, "numbers", ca=authority.file, cert=cert)


def _subject(cert: Path) -> str:
    command = ["openssl", "x509", "-in", str(cert), "-noout", "-subject", "-nameopt", "RFC2253,-esc_msb"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return printed.removeprefix("subject=").rstrip("\n")
