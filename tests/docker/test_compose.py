"""`docker compose up` for real: images are built, the server becomes healthy, a trainer container trains and exits 0."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.corpora import write_text, write_tokenizer
from support.processes import until
from support.servers import REASON, ROOT, compose_command

SECONDS = int(os.environ.get("PENSTOCK_TEST_REPLICAS_SECONDS", "60"))
REPLICAS = ["replica-1", "replica-2", "replica-3"]

pytestmark = [pytest.mark.docker, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


def docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True).stdout.strip()


class Compose:
    """The project under a name and on a port of its own, over one data folder."""

    def __init__(self, data: Path, tokenizer: str = "", sample: str = "", **environment: str) -> None:
        port, replica_port, nginx_port, ray_port, prometheus_port, grafana_port = (_free_port() for _ in range(6))
        self.url, self.replica_url, self.ray_url, self.prometheus_url, self.grafana_url = (
            f"http://127.0.0.1:{port}" for port in (port, replica_port, ray_port, prometheus_port, grafana_port)
        )
        self._environment = {
            "COMPOSE_PROJECT_NAME": f"penstock-test-{port}", "PENSTOCK_PORT": str(port), "PENSTOCK_DATA": str(data),
            "PENSTOCK_TOKENIZER": tokenizer, "PENSTOCK_CACHE_BYTES": "300MB",
            "PENSTOCK_SAMPLE": sample, "PENSTOCK_REPLICA_PORT": str(replica_port), "PENSTOCK_NGINX_PORT": str(nginx_port),
            "PENSTOCK_RAY_PORT": str(ray_port), "PENSTOCK_SECONDS": str(SECONDS),
            "PENSTOCK_PROMETHEUS_PORT": str(prometheus_port), "PENSTOCK_GRAFANA_PORT": str(grafana_port),
        } | environment  # fmt: skip
        if subprocess.run(["docker", "buildx", "version"], capture_output=True, check=False).returncode != 0:
            self._environment["DOCKER_BUILDKIT"] = "0"  # an older engine builds by itself

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*(compose_command() or []), *arguments], cwd=ROOT, env=os.environ | self._environment, capture_output=True,
            text=True, check=False, timeout=1500,
        )  # fmt: skip

    def __call__(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def container(self, service: str) -> str:
        return self("ps", "--all", "--quiet", service).strip()

    def inspect(self, service: str, template: str) -> str:
        return docker("inspect", "-f", template, self.container(service))

    def get(self, path: str, url: str = "") -> httpx.Response:
        address = f"{url or self.url}{path}"
        token = self("exec", "-T", "server", "cat", "/var/lib/penstock/token").strip()
        assert httpx.get(address).status_code == 401
        return httpx.get(address, headers={"Authorization": f"Bearer {token}"}, timeout=60)  # what is cold takes seconds

    def json(self, path: str, url: str = "") -> Any:
        return self.get(path, url).json()

    def wait_until(self, template: str, expected: str, service: str = "server") -> None:
        deadline = time.monotonic() + 180
        while self.inspect(service, template) != expected:
            assert time.monotonic() < deadline, self("logs", service)
            time.sleep(0.5)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """An empty folder that the container's user may enter."""
    tmp_path.chmod(0o755)
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def write_data(folder: Path) -> None:
    write_text(folder / "mine", ["the quick brown fox jumps over the lazy dog"] * 64)
    write_tokenizer(folder / "tokenizer.json")


@contextmanager
def composed(data: Path, tokenizer: str = "", sample: str = "", **environment: str) -> Iterator[Compose]:
    compose = Compose(data, tokenizer, sample, **environment)
    try:
        yield compose
    finally:
        profiles = [word for name in ("demo", "monitoring", "s3", "replicas", "ray") for word in ("--profile", name)]
        compose(*profiles, "down", "--volumes")


@pytest.fixture
def project(data: Path, request: pytest.FixtureRequest) -> Iterator[Compose]:
    if getattr(request, "param", "") == "own data":
        write_data(data)
        tokenizer, sample = "/data/tokenizer.json", ""
    else:
        tokenizer, sample = "", "yes"
    with composed(data, tokenizer, sample) as compose:
        yield compose


@pytest.mark.parametrize(("project", "expected"), [("sample", ["questions", "stories"]), ("own data", ["mine"])],
                         indirect=["project"])  # fmt: skip
def test_compose_serves_the_data_folder_or_the_sample(project: Compose, expected: list[str]) -> None:
    project("up", "--detach", "--build", "server")
    project.wait_until("{{.State.Health.Status}}", "healthy")
    datasets = project.json("/v1/datasets")["datasets"]
    assert [dataset["name"] for dataset in datasets] == expected
    assert project.json(f"/v1/datasets/{expected[-1]}")["cache"]["budget_bytes"] == 300_000_000
    batch = project.json(f"/v1/datasets/{expected[-1]}/epochs/0/ranks/0/batches/0?format=json")
    assert batch["samples"][0]["text"]
    assert f" at {project.url.replace('127.0.0.1', 'localhost')}\n" in project("logs", "--no-color", "server")
    assert project("exec", "-T", "server", "id", "-u").strip() == "10001"
    writes = "touch /data/x /usr/x 2>/dev/null && echo wrote || echo refused"
    assert project("exec", "-T", "server", "sh", "-c", writes).strip() == "refused"
    handed_out = "cd /var/lib/penstock; stat -c %U:%a trainer/token metrics/token"
    assert project("exec", "-T", "server", "sh", "-c", handed_out).split() == ["penstock:600", "penstock:644"]
    can_be_had = "libmimalloc" in project("exec", "-T", "server", "find", "/usr/lib")
    assert ("libmimalloc" in project("exec", "-T", "server", "cat", "/proc/1/maps")) == can_be_had


def test_compose_demo_trains_in_a_second_container(project: Compose) -> None:
    project("--profile", "demo", "up", "--build", "--abort-on-container-exit", "--exit-code-from", "trainer")
    assert "60/60" in project("--profile", "demo", "logs", "trainer")


def test_compose_monitoring_scrapes_the_server_and_has_a_dashboard(project: Compose) -> None:
    pulled = project.run("--profile", "monitoring", "pull", "prometheus", "grafana")
    if pulled.returncode != 0:
        pytest.skip(
            "the images of Prometheus and Grafana cannot be pulled; tests/integration/test_prometheus.py checks the files"
        )
    project("--profile", "monitoring", "up", "--detach", "--build")

    def answers(url: str) -> bool:
        with suppress(httpx.TransportError, KeyError, ValueError):
            result = httpx.get(url, params={"query": "up"}, timeout=60).json()["data"]["result"]
            return [sample["value"][1] for sample in result] == ["1"]
        return False

    until(lambda: answers(f"{project.prometheus_url}/api/v1/query"), 180)
    until(lambda: answers(f"{project.grafana_url}/api/datasources/proxy/uid/penstock-prometheus/api/v1/query"), 180)
    page = httpx.get(f"{project.grafana_url}/api/dashboards/uid/penstock", timeout=60).json()
    assert page["dashboard"]["title"] == "Penstock"


def test_compose_serves_from_an_object_store_and_shares_its_work_there(project: Compose) -> None:
    project("--profile", "s3", "up", "--detach", "--build")
    project.wait_until("{{.State.Health.Status}}", "healthy", "replica-1")
    batch = "/v1/datasets/stories/epochs/0/ranks/0/batches/0?packing=concat&format=json"
    urls = project.replica_url, project.url
    until(lambda: all(project.get(batch, url).status_code == 200 for url in urls), 180)  # they count tokens
    far, near = (project.json(batch, url)["samples"] for url in urls)
    assert far == near
    metrics = project.get("/metrics", project.replica_url).text
    read, written = (
        float(re.findall(rf"^penstock_{name} (\S+)", metrics, re.MULTILINE)[0])
        for name in ("source_bytes_total", 'store_requests_total{outcome="written"}')
    )
    assert min(read, written) > 0
    assert project("exec", "-T", "objects", "id", "-u").strip() == "10001"
    usage = project("exec", "-T", "replica-1", "penstock", "store", "usage", "--store", "s3://penstock/store")
    assert not usage.startswith("0 objects"), usage


@pytest.mark.parametrize("servers", ["http://replica-{1..3}:8000", "http://nginx:8000"])
def test_ranks_get_each_sample_once_while_replicas_are_killed(data: Path, servers: str) -> None:
    """One replica at a time or two at once, by SIGKILL or after a drain. -s prints what fraction of their time ranks waited."""
    chance, done = random.Random(1), Counter[str]()
    with composed(data, sample="yes", PENSTOCK_SERVERS=servers) as project:
        project("--profile", "replicas", "up", "--detach", "--build")
        containers = {name: project.container(name) for name in REPLICAS}
        ranks = project.container("ranks")
        while docker("inspect", "-f", "{{.State.Running}}", ranks) == "true":
            names, signal = chance.sample(REPLICAS, chance.choice([1, 2])), chance.choice(["KILL", "KILL", "TERM"])
            chosen = [containers[name] for name in names]
            docker("kill", "--signal", signal, *chosen)
            docker("wait", *chosen)
            time.sleep(chance.uniform(0, 5))
            docker("start", *chosen)
            for name in names:
                project.wait_until("{{.State.Health.Status}}", "healthy", name)
            time.sleep(chance.uniform(0, 5))
            done[f"{signal} of {len(names)}"] += 1
        report = docker("logs", ranks)
        assert docker("inspect", "-f", "{{.State.ExitCode}}", ranks) == "0", project("logs", "--no-color", "ranks")
        lines = [json.loads(line) for line in report.splitlines() if line.startswith("{")]
        print(dict(done), report, sep="\n")
        assert "PROVEN: each sample that was due" in report
        assert len(lines) == 4
        assert done.total() > 2


def test_compose_serves_what_a_cluster_of_ray_has_prepared(project: Compose) -> None:
    project("--profile", "ray", "up", "--detach", "--build")
    project.wait_until("{{.State.Health.Status}}", "healthy", "ray-server")
    batch = "/v1/datasets/stories/epochs/0/ranks/0/batches/0?packing=concat&format=json"
    far = project.get(batch, project.ray_url)
    assert far.status_code == 200, far.text  # it does not count
    until(lambda: project.get(batch, project.url).status_code == 200, 180)
    assert far.json()["samples"] == project.json(batch)["samples"]
    metrics = project.get("/metrics", project.ray_url).text
    assert re.search(r'^penstock_store_requests_total{outcome="hit"} [1-9]', metrics, re.MULTILINE)
    assert not re.search(r"^penstock_decode_seconds_count.* [1-9]", metrics, re.MULTILINE)


def test_compose_names_a_missing_data_folder(data: Path) -> None:
    data.rmdir()
    with composed(data) as project:
        done = project.run("up", "--detach", "--build", "server")
        assert done.returncode != 0
        assert str(data) in done.stderr
        assert not data.exists()


@pytest.mark.parametrize("fault", ["empty data folder", "missing tokenizer"])
def test_compose_names_a_wrong_setting(data: Path, fault: str) -> None:
    if fault == "missing tokenizer":
        write_data(data)
    with composed(data, "/data/tokenzier.json") as project:
        project("up", "--detach", "--build", "server")
        project.wait_until("{{.State.Status}} {{.State.ExitCode}}", "exited 2")
        reason = f"the data folder {data} is empty" if "empty" in fault else "the tokenizer /data/tokenzier.json cannot be read"
        assert reason in project("logs", "--no-color", "server")
