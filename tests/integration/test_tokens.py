"""Tokens: who gets in, what each may see, and that a forbidden dataset answers as one that does not exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import Mount
from starlette.testclient import TestClient

from penstock.wire.report import HEADER, Report
from penstock_server.api.admission import InFlight
from penstock_server.app import create_app
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import open_catalog
from penstock_server.security.tokens import Scope, Tokens, create_token, revoke_token
from support.corpora import write_numbered
from support.processes import until
from support.servers import ROOT, Serve, penstock

BATCH = "/v1/datasets/{}/epochs/0/ranks/0/batches/0"
SMALL = {"batch_size": 4, "seq_len": 8}
OPEN = ("/healthz", "/readyz")
# A value for each parameter of a path: the routes are then asked for something that exists.
PATH = {"dataset": "team-a.wiki", "epoch": "0", "rank": "0", "step": "0", "row": "0", "name:path": "page.js"}


class Callers:
    """A token of each kind, all in one file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.reader = self.create("reader", "team-a.*", "read")
        self.foreign = self.create("foreign", "team-b.*", "read")
        self.metrics = self.create("metrics", "team-a.*", "metrics")
        self.team_admin = self.create("team-admin", "team-a.*", "admin")
        self.admin = self.create("admin", "*", "admin")
        self.expired = self.create("expired", "*", "admin", datetime.now(UTC) - timedelta(seconds=1))

    def create(self, name: str, datasets: str, scope: Scope, expires: datetime | None = None) -> str:
        return create_token(self.file, name, (datasets,), scope, expires)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name in ("team-a/wiki", "team-a/code", "team-b/secret"):
        write_numbered(tmp_path / "data" / name, 64)
    for name, mix in {"team-a/mixed": "team-a.wiki:1,team-a.code:1", "team-a/wide": "team-a.wiki:1,team-b.secret:1"}.items():
        (tmp_path / "data" / name).mkdir()
        (tmp_path / "data" / name / "penstock.toml").write_text(f'mix = "{mix}"')
    (tmp_path / "data" / "team-b" / "text").mkdir()
    (tmp_path / "data" / "team-b" / "text" / "a.txt").write_text("not a shard")
    return tmp_path / "data"


@pytest.fixture
def callers(tmp_path: Path) -> Callers:
    return Callers(tmp_path / "tokens.json")


@pytest.fixture
def app(data: Path, tmp_path: Path, callers: Callers) -> FastAPI:
    tokens = Tokens(callers.file)
    tokens.load()
    return create_app(open_catalog(data, None, BlockStore(tmp_path / "cache")), InFlight(1 << 30), tokens=tokens)


@pytest.fixture
def client(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app, follow_redirects=False) as client:
        yield client


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def urls(app: FastAPI) -> Iterator[tuple[str, str]]:
    """A method and a path for each route of the application, whoever added it."""
    for route in app.routes:
        if isinstance(route, Mount):
            yield "GET", f"{route.path}/swagger-ui.css"
            continue
        path = re.sub(r"\{([^}]+)\}", lambda found: PATH[found[1]], str(getattr(route, "path")))  # noqa: B009
        yield from ((method, path) for method in getattr(route, "methods"))  # noqa: B009


def test_every_route_asks_for_a_token(app: FastAPI, client: TestClient, callers: Callers) -> None:
    listed = [*urls(app), ("GET", "/no/such/path"), ("OPTIONS", "/v1/datasets"), ("DELETE", "/v1/datasets"), ("GET", "/login")]
    assert len(listed) > 25
    assert {"/", "/docs", "/metrics", "/openapi.json", "/docs/assets/swagger-ui.css"} <= {path for _, path in listed}
    for method, path in listed:
        is_open = path in OPEN and method in ("GET", "HEAD")
        for headers in ({}, bearer(callers.expired), bearer("pst_wrong"), {"Authorization": "Digest x"}, bearer("")):
            answer = client.request(method, path, headers=headers)
            assert answer.status_code == 200 if is_open else answer.status_code in (401, 429), (method, path, headers)
            assert is_open or "team-" not in answer.text.replace(f'"instance":"{path}"', "")


def test_scopes_and_globs_of_every_route(app: FastAPI, client: TestClient, callers: Callers) -> None:
    def status(method: str, path: str, token: str) -> int:
        return client.request(method, path, headers=bearer(token), params=SMALL if "/batches" in path else {}).status_code

    for method, path in urls(app):
        is_of_dataset, is_metrics, is_refresh = "team-a.wiki" in path, path == "/metrics", path.endswith("/refresh")
        is_fine = 405 if method == "HEAD" and path == "/docs/oauth2-redirect" else 200
        assert status(method, path, callers.admin) == is_fine, (method, path)
        assert status(method, path, callers.team_admin) == is_fine, (method, path)
        assert status(method, path, callers.reader) == (403 if is_metrics or is_refresh else is_fine), (method, path)
        expected = 403 if is_metrics or is_refresh else 404 if is_of_dataset else is_fine
        assert status(method, path, callers.foreign) == expected, (method, path)
        assert status(method, path, callers.metrics) == (is_fine if is_metrics or path in OPEN else 403), (method, path)


def test_probes_tell_strangers_their_status_alone(client: TestClient, callers: Callers) -> None:
    assert [client.get(path).json() for path in OPEN] == [{"status": "ok"}, {"status": "ready"}]
    assert client.get("/healthz", headers=bearer(callers.reader)).json()["wire"]
    ready = client.get("/readyz", headers=bearer(callers.reader)).json()
    assert ready == {"status": "ready", "datasets": 2, "refused": 0}


def test_token_comes_as_bearer_basic_or_cookie(client: TestClient, callers: Callers) -> None:
    for headers, auth in [
        (bearer(callers.reader), None),
        ({"Authorization": f"bearer  {callers.reader}"}, None),
        ({}, ("anything", callers.reader)),
        ({"Cookie": f"other=1; penstock_token={callers.reader}"}, None),
    ]:
        assert client.get("/v1/datasets", headers=headers, auth=auth).status_code == 200
    refused = client.get("/v1/datasets", headers={"Cookie": f"penstock_token={callers.reader}", "Authorization": "Bearer no"})
    assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, 'Bearer realm="penstock"')
    assert client.get("/v1/datasets", params={"token": callers.reader}).status_code == 401


def test_lists_show_what_the_token_may_see(client: TestClient, callers: Callers) -> None:
    def names(token: str) -> tuple[list[str], list[str]]:
        shown = client.get("/v1/datasets", headers=bearer(token)).json()
        return [dataset["name"] for dataset in shown["datasets"]], [mixture["name"] for mixture in shown["mixtures"]]

    assert names(callers.reader) == (["team-a.code", "team-a.wiki"], ["team-a.mixed"])
    assert names(callers.foreign) == (["team-b.secret"], [])
    assert names(callers.admin) == (["team-a.code", "team-a.wiki", "team-b.secret"], ["team-a.mixed", "team-a.wide"])


def test_forbidden_dataset_answers_as_one_that_does_not_exist(app: FastAPI, client: TestClient, callers: Callers) -> None:
    hidden = ("team-b.secret", "team-b.text", "team-a.wide")
    for method, path in urls(app):
        if "team-a.wiki" not in path:
            continue
        token = callers.team_admin if path.endswith("/refresh") else callers.reader
        for name in hidden:
            unknown = "team-a.none" if name.startswith("team-a") else "team-b.none"
            if path.endswith("/refresh") and name == "team-a.wide":
                continue  # an admin of its name may look for new data in its folder, which has none
            answers = [
                client.request(method, path.replace("team-a.wiki", asked), headers=bearer(token), params={"snapshot": "x"})
                for asked in (name, unknown)
            ]
            texts = [
                re.sub(r'"request_id":"[^"]+"| Did you mean [^?]+\?', "", answer.text.replace(asked, "NAME"))
                for answer, asked in zip(answers, (name, unknown), strict=True)
            ]
            if answers[0].status_code == 422:  # `snapshot` is not a parameter of this path
                continue
            assert [answer.status_code for answer in answers] == [404, 404], (method, path, name)
            assert texts[0] == texts[1]


def test_mix_cannot_name_a_forbidden_dataset(client: TestClient, callers: Callers) -> None:
    for path in (BATCH.format("team-a.wiki"), "/v1/datasets/team-a.wiki/spec", f"{BATCH.format('team-a.wiki')}/provenance"):
        answers = [
            client.get(path, headers=bearer(callers.reader), params={**SMALL, "mix": f"team-a.wiki:1,{other}:1"})
            for other in ("team-b.secret", "team-b.none")
        ]
        assert [answer.status_code for answer in answers] == [404, 404]
        texts = [re.sub(r'"request_id":"[^"]+"', "", answer.text) for answer in answers]
        assert texts[0].replace("team-b.secret", "team-b.none") == texts[1]
        allowed = client.get(path, headers=bearer(callers.reader), params={**SMALL, "mix": "team-a.wiki:1,team-a.code:1"})
        assert allowed.status_code == 200


def test_jobs_and_metrics_are_those_of_visible_datasets(client: TestClient, callers: Callers) -> None:
    for name, dataset, mix in [
        ("ours", "team-a.wiki", ""),
        ("theirs", "team-b.secret", ""),
        ("both", "team-a.wiki", "team-a.wiki:1,team-b.secret:1"),
        ("declared", "team-a.wide", ""),
    ]:
        report = Report(job=name, step=1, num_batches=1, wait_seconds={"network": 1.0}).to_header()
        headers = {**bearer(callers.admin), HEADER: report}
        query = SMALL | ({"mix": mix} if mix else {})
        assert client.get(BATCH.format(dataset), headers=headers, params=query).status_code == 200

    def jobs(token: str) -> set[str]:
        shown = client.get("/v1/jobs", headers=bearer(token)).json()
        assert shown["verdict"]["text"].count(" ranks ") == (len(shown["jobs"]) > 1)
        return {job["job"] for job in shown["jobs"]}

    assert jobs(callers.admin) == {"ours", "theirs", "both", "declared"}
    assert jobs(callers.reader) == {"ours"}
    assert jobs(callers.foreign) == {"theirs"}
    assert client.get("/v1/jobs", headers=bearer(callers.reader)).json()["caller"] == "reader"
    metrics = client.get("/metrics", headers=bearer(callers.metrics)).text
    assert 'penstock_tokens_total{dataset="team-a.wiki"}' in metrics
    assert "penstock_requests_total" in metrics
    assert "team-b" not in metrics
    assert "team-a.wide" not in metrics
    assert 'dataset="team-b.secret"' in client.get("/metrics", headers=bearer(callers.admin)).text


def test_numbers_of_all_datasets_need_a_token_for_all(client: TestClient, callers: Callers) -> None:
    assert client.get(BATCH.format("team-b.secret"), headers=bearer(callers.foreign), params=SMALL).status_code == 200

    def shown(token: str) -> tuple[set[str], dict[str, int]]:
        server = client.get("/v1/jobs?history=true", headers=bearer(token)).json()["server"]
        history = server.pop("history")
        lengths = {name: len(values) for name, values in history.items() if isinstance(values, list)}
        return {name for name, value in server.items() if value is None}, lengths

    missing, lengths = shown(callers.admin)
    assert missing <= {"cache_hit_fraction"}  # without a request for a block
    assert {*lengths.values()} == {120}
    rates = {f"{name}_per_second" for name in ("tokens", "bytes", "batches", "refusals")}
    sources = {"source_requests_throttled", "source_requests_failed"}
    expected = rates | sources | {"in_flight_bytes", "cache_used_bytes", "cache_hit_fraction"}
    assert shown(callers.reader) == shown(callers.team_admin) == (expected, dict.fromkeys(lengths, 0))


def test_wrong_tokens_slow_their_address_down_alone(app: FastAPI, callers: Callers, caplog: pytest.LogCaptureFixture) -> None:
    guesser = TestClient(app, client=("192.0.2.1", 1))
    other = TestClient(app, client=("192.0.2.2", 1))
    statuses = [guesser.get("/v1/datasets", headers=bearer(f"pst_{guess}")).status_code for guess in range(22)]
    assert statuses == [401] * 20 + [429] * 2
    refused = guesser.get("/v1/datasets", headers={**bearer("pst_x"), "X-Forwarded-For": "192.0.2.9"})
    assert refused.status_code == 429
    assert 0 < int(refused.headers["Retry-After"]) <= 60
    assert guesser.get("/v1/datasets", headers=bearer(callers.reader)).status_code == 200
    assert other.get("/v1/datasets", headers=bearer("pst_x")).status_code == 401
    assert caplog.messages.count("192.0.2.1 sent more than 20 wrong tokens in a minute") == 1
    assert "pst_" not in caplog.text


def test_shared_caches_keep_batches_of_open_servers_alone(
    app: FastAPI, client: TestClient, callers: Callers, data: Path, tmp_path: Path
) -> None:
    resolved = client.get("/v1/datasets/team-a.wiki/spec", headers=bearer(callers.reader), params=SMALL).json()["spec"]
    query = SMALL | {"snapshot": resolved["snapshot"]}
    guarded = client.get(BATCH.format("team-a.wiki"), headers=bearer(callers.reader), params=query)
    with TestClient(create_app(open_catalog(data, None, BlockStore(tmp_path / "other")), InFlight(1 << 30))) as everyone:
        public = everyone.get(BATCH.format("team-a.wiki"), params=query)
    assert guarded.headers["Cache-Control"] == "private, max-age=31536000, immutable"
    assert public.headers["Cache-Control"] == "public, max-age=31536000, immutable"
    assert guarded.content == public.content


def test_page_has_a_login_and_a_logout(client: TestClient, callers: Callers) -> None:
    as_browser = {"Accept": "text/html,*/*"}
    asked = client.get("/", headers=as_browser)
    assert (asked.status_code, 'name="token"' in asked.text) == (401, True)
    assert client.get("/docs", headers=as_browser).status_code == 401
    wrong = client.post("/login", data={"token": "<b>guess</b>"})
    assert (wrong.status_code, "guess" in wrong.text, 'role="alert"' in wrong.text) == (401, False, True)
    right = client.post("/login", data={"token": callers.reader})
    assert (right.status_code, right.headers["Location"]) == (303, "./")
    assert "HttpOnly" in right.headers["Set-Cookie"]
    assert "SameSite=strict" in right.headers["Set-Cookie"]
    assert "Path" not in right.headers["Set-Cookie"]
    assert client.get("/", headers=as_browser).status_code == 200
    assert client.get("/v1/datasets").status_code == 200
    left = client.post("/logout")
    assert (left.status_code, left.headers["Location"]) == (303, "./")
    assert client.get("/", headers=as_browser).status_code == 401
    assert client.post("/login", content=b"token=" + b"x" * (1 << 20)).status_code == 401


def test_token_file_is_read_again_without_dropping_a_connection(data: Path, callers: Callers, serve: Serve) -> None:
    server = serve(data, "--tokens", str(callers.file))
    with httpx.Client(base_url=server.url) as kept:

        def status(token: str) -> int:
            return kept.get("/v1/datasets", headers=bearer(token)).status_code

        assert status(callers.reader) == 200
        first = kept.get("/healthz").extensions["network_stream"].get_extra_info("client_addr")
        second = callers.create("reader-2", "team-a.*", "read")
        until(lambda: status(second) == 200)
        assert status(callers.reader) == 200
        revoke_token(callers.file, "reader")
        until(lambda: status(callers.reader) in (401, 429))
        callers.file.write_text("{")
        until(lambda: "stays in use" in server.log())
        callers.file.unlink()
        assert status(second) == 200
        assert kept.get("/healthz").extensions["network_stream"].get_extra_info("client_addr") == first


@pytest.mark.parametrize(("flags", "status"), [((), 421), (("--insecure",), 200), (("--tokens",), 401)])
def test_server_without_tokens_has_no_other_name(
    data: Path, callers: Callers, serve: Serve, flags: tuple[str, ...], status: int
) -> None:
    server = serve(data, *flags, *([str(callers.file)] if "--tokens" in flags else []))
    assert httpx.get(f"{server.url}/v1/datasets", headers={"Host": "evil.example"}).status_code == status


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "localhost.example"])
def test_other_machines_are_let_in_with_tokens_or_insecure_alone(data: Path, tmp_path: Path, host: str) -> None:
    refused = penstock("serve", data, "--host", host, "--port", "0", "--cache-dir", tmp_path / "cache")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--tokens" in refused.stderr
    assert "--insecure" in refused.stderr


@pytest.mark.parametrize("flag", ["--insecure", "--tokens"])
def test_other_machines_are_let_in(data: Path, callers: Callers, serve: Serve, flag: str) -> None:
    server = serve(data, "--host", "0.0.0.0", flag, *([str(callers.file)] if flag == "--tokens" else []))
    assert server.get("/v1/datasets").status_code == (401 if flag == "--tokens" else 200)


def test_command_makes_lists_and_revokes_tokens(tmp_path: Path) -> None:
    file = tmp_path / "new" / "tokens.json"

    def token(*arguments: str) -> subprocess.CompletedProcess[str]:
        return penstock("token", *arguments, PENSTOCK_TOKENS=str(file))

    made = token("create", "team-a", "--datasets", "team-a.*,public", "--expires", "90d")
    secret = made.stdout.strip()
    assert re.fullmatch(r"pst_[\w-]{43}", secret)
    assert secret not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert "already" in token("create", "team-a").stderr
    shown = token("list").stdout
    assert "team-a" in shown
    assert "team-a.*,public" in shown
    assert token("revoke", "team-b").returncode == 2
    assert token("revoke", "team-a").returncode == 0
    assert json.loads(file.read_text()) == {"tokens": []}
    assert token("create", "x", "--expires", "soon").returncode == 2
    assert token("create", "x", "--expires", "2001-01-01").returncode == 2
    assert token("create", "a b").returncode == 2
    assert "PENSTOCK_TOKENS" in penstock("token", "list").stderr


class FirstStart:
    """docker/serve.sh with a command `penstock` that runs these lines of a shell, or makes tokens."""

    def __init__(self, folder: Path) -> None:
        self.secrets, self._bin = folder / "secrets", folder / "bin"
        self._bin.mkdir()
        self.secrets.mkdir()

    def __call__(self, lines: str = "") -> subprocess.CompletedProcess[str]:
        command = self._bin / "penstock"
        run = f'exec "{sys.executable}" -c "import sys; from penstock.cli import main; sys.exit(main())" "$@"'
        command.write_text(f'#!/bin/sh\n{lines}\n[ "$1" = token ] && {run}\n')
        command.chmod(0o755)
        environment = os.environ | {
            "PATH": f"{self._bin}:{os.environ['PATH']}",
            "PENSTOCK_TOKENS": str(self.secrets / "tokens.json"),
        }
        return subprocess.run(
            ["sh", ROOT / "docker" / "serve.sh"], env=environment, capture_output=True, text=True, check=False, timeout=120
        )

    def identities(self) -> dict[str, tuple[str, str]]:
        """The name and the scope of the token in each file."""
        tokens = Tokens(self.secrets / "tokens.json")
        tokens.load()
        found = dict[str, tuple[str, str]]()
        for name in ("token", "trainer/token", "metrics/token"):
            identity = tokens.identify((self.secrets / name).read_text().strip())
            assert identity
            found[name] = identity.name, identity.scope
        return found


@pytest.fixture
def first_start(tmp_path: Path) -> FirstStart:
    return FirstStart(tmp_path)


def test_first_start_of_a_container_makes_tokens(first_start: FirstStart) -> None:
    expected = {
        "token": ("compose", "admin"),
        "trainer/token": ("trainer", "read"),
        "metrics/token": ("prometheus", "metrics"),
    }
    done = first_start()
    assert "pst_" not in done.stdout + done.stderr
    assert f"exec -T server cat {first_start.secrets}/token)" in done.stdout
    assert first_start.identities() == expected
    modes = {name: (first_start.secrets / name).stat().st_mode & 0o777 for name in (*expected, "tokens.json")}
    assert modes == {"token": 0o600, "trainer/token": 0o600, "metrics/token": 0o644, "tokens.json": 0o600}
    first = (first_start.secrets / "tokens.json").read_text()
    (first_start.secrets / "token").unlink()
    assert "penstock token create NAME makes one in this container" in first_start().stdout
    assert (first_start.secrets / "tokens.json").read_text() == first


def test_interrupted_first_start_begins_anew(first_start: FirstStart) -> None:
    failed = first_start('[ "$3" = prometheus ] && echo "the disk is full" >&2 && exit 2')
    assert (failed.returncode, failed.stderr) == (2, "the disk is full\n")
    assert not (first_start.secrets / "tokens.json").exists()
    first_start()
    assert len(first_start.identities()) == 3
