"""nginx with docker/nginx/penstock.conf before real servers: the second job is served from its cache."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock import AccessDenied, RemoteDataset
from penstock_server.security.tokens import create_token
from support.corpora import write_numbered
from support.processes import until
from support.recorded import contents
from support.servers import ROOT, Serve, Server

CONFIG = ROOT / "docker/nginx/penstock.conf"
NUM_STEPS = 128
BATCHES = "/v1/datasets/numbers/epochs/0/ranks/0/batches"
# 28 batches of 16 KiB a range: more than the slow link passes at once.
SPEC: dict[str, Any] = {"batch_size": 8, "seq_len": 1024, "prefetch_bytes": 2 << 20}
MAIN = """
daemon off;
pid {folder}/pid;
error_log stderr warn;
{user}
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/penstock.conf;
    server {{
        listen 127.0.0.1:{slow};
        location / {{
            proxy_pass http://127.0.0.1:{fast};
            proxy_http_version 1.1;
            proxy_set_header Host $http_host;
            proxy_buffering off;
            limit_rate 320k;
        }}
    }}
}}
"""

pytestmark = pytest.mark.skipif(not shutil.which("nginx"), reason="nginx is not installed")


class Nginx:
    """`url` is the cache's, `slow_url` the same behind a slow link."""

    def __init__(self, fast: int, slow: int) -> None:
        self.url, self.slow_url = f"http://127.0.0.1:{fast}", f"http://127.0.0.1:{slow}"


Start = Callable[[Server], Nginx]


@contextmanager
def nginx(folder: Path, *servers: Server) -> Iterator[Nginx]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        fast, slow = one.getsockname()[1], other.getsockname()[1]
    names = ("penstock-0.penstock:8000", "penstock-1.penstock:8000")
    replaced = dict(zip(names, (server.url.removeprefix("http://") for server in servers), strict=True)) | {
        "/var/cache/nginx/penstock": f"{folder}/cache",
        "listen 8000": f"listen 127.0.0.1:{fast}",
    }
    config = CONFIG.read_text()
    for shipped, here in replaced.items():
        assert config.count(shipped) == 1
        config = config.replace(shipped, here)
    (folder / "penstock.conf").write_text(config)
    main = folder / "nginx.conf"
    main.write_text(MAIN.format(folder=folder, user="user root;" if os.geteuid() == 0 else "", fast=fast, slow=slow))
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(["nginx", "-p", folder, "-e", "stderr", "-c", main], stderr=log)
    started = Nginx(fast, slow)

    def is_ready() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        try:
            return httpx.get(f"{started.slow_url}/healthz").status_code == 200
        except httpx.TransportError:
            return False

    try:
        until(is_ready)
        yield started
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def data_dir(shared: Path) -> Path:
    write_numbered(shared / "numbers", 8 * NUM_STEPS)
    return shared


def num_made(*servers: Server) -> float:
    """Batches that the servers have made."""
    name = 'penstock_batches_total{dataset="numbers"} '
    return sum(float(server.get("/metrics").text.partition(name)[2].partition("\n")[0] or 0) for server in servers)


def test_second_job_is_served_from_the_cache(serve: Serve, data_dir: Path, tmp_path: Path) -> None:
    one, other = serve(data_dir), serve(data_dir)
    expected = [contents(batch) for batch in RemoteDataset(one.url, "numbers", **SPEC)]
    assert len(expected) == NUM_STEPS
    with nginx(tmp_path, one, other) as cache:

        def run(url: str, first: int = 0, **other: Any) -> float:
            """Run a job from a step on. Return the number of batches that the servers have made for it."""
            before = num_made(*servers)
            data = RemoteDataset(url, "numbers", **SPEC | other)
            data.seek(8 * first)
            given = [contents(batch) for batch in data]
            assert other or given == expected[first:]
            assert data.stats().num_retries == 0
            return num_made(*servers) - before

        servers = (one, other)
        assert run(cache.slow_url) == NUM_STEPS
        assert run(cache.url) == 0
        assert run(cache.slow_url) == 0
        assert 0 < run(cache.url, 41) <= 2 * 28  # until it requests whole ranges
        assert run(cache.url, 41) == 0
        assert run(cache.url, seed=1) == NUM_STEPS


def test_only_batches_of_a_named_snapshot_are_stored(serve: Serve, data_dir: Path, tmp_path: Path) -> None:
    server = serve(data_dir)
    with nginx(tmp_path, server, server) as cache, httpx.Client(base_url=cache.url) as client:

        def get(path: str, **query: str | int) -> httpx.Response:
            return client.get(path, params=query, headers={"X-Request-ID": f"request-{next(numbers)}"})

        numbers = iter(range(1, 100))
        snapshot = get("/v1/datasets/numbers/spec").json()["snapshot"]
        for path in (f"{BATCHES}/0", "/v1/datasets/numbers", "/v1/jobs", "/readyz", f"{BATCHES}/1000000"):
            assert [get(path).headers["X-Cache"] for _ in range(2)] == ["MISS", "MISS"]
        made, stored, other = (get(f"{BATCHES}/0", snapshot=snapshot, seed=seed) for seed in (0, 0, 1))
        assert [answer.headers["X-Cache"] for answer in (made, stored, other)] == ["MISS", "HIT", "MISS"]
        assert made.content == stored.content == server.get(f"{BATCHES}/0").content != other.content
        assert "Server-Timing" in made.headers
        assert "Server-Timing" not in stored.headers
        ids = [int(answer.headers["X-Request-ID"].removeprefix("request-")) for answer in (made, stored, other)]
        assert ids == [ids[0], ids[0] + 1, ids[0] + 2]


def test_nothing_is_stored_that_needs_a_token(serve: Serve, data_dir: Path, tmp_path: Path) -> None:
    token = create_token(tmp_path / "tokens.json", "trainer", ("*",), "read", None)
    server = serve(data_dir, "--tokens", str(tmp_path / "tokens.json"))
    with nginx(tmp_path, server, server) as cache:
        for _ in range(2):
            data = RemoteDataset(cache.url, "numbers", token=token, **SPEC)
            assert len([*data]) == NUM_STEPS
        with pytest.raises(AccessDenied, match="needs a token"):
            RemoteDataset(cache.url, "numbers", snapshot=data.snapshot, **SPEC)
        url = f"{cache.url}{BATCHES}?start=0&stop=1&stride=1&snapshot={data.snapshot}"
        answers = [httpx.get(url, headers=headers) for headers in ({"Authorization": f"Bearer {token}"}, {})]
        assert [answer.status_code for answer in answers] == [200, 401]
        assert answers[0].headers["Cache-Control"].startswith("private")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_job_goes_on_when_a_server_behind_the_cache_stops(serve: Serve, data_dir: Path, tmp_path: Path) -> None:
    with serve(data_dir, "--drain-seconds", "1") as one, serve(data_dir) as other, nginx(tmp_path, one, other) as cache:
        data = RemoteDataset(cache.url, "numbers", **SPEC | {"prefetch_bytes": 1})
        batches = iter(data)
        given = [contents(next(batches)) for _ in range(10)]
        one.stop()
        given += map(contents, batches)
        assert given == [contents(batch) for batch in RemoteDataset(other.url, "numbers", **SPEC)]
        assert data.stats().num_retries == 0
