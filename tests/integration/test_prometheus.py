"""Prometheus with the files of docker/prometheus and docker/grafana: it scrapes a real server while a run trains."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock import RemoteDataset
from support.corpora import write_numbered, write_text, write_tokenizer
from support.processes import until
from support.servers import ROOT, Serve, Server

CONFIG, ALERTS = ROOT / "docker/prometheus/prometheus.yml", ROOT / "docker/prometheus/alerts.yml"
DASHBOARD = json.loads((ROOT / "docker/grafana/dashboards/penstock.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]

pytestmark = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")), reason="prometheus and promtool are not installed"
)


def promtool(*arguments: str | Path, given: bytes = b"") -> None:
    """Fails if it reports an error or a warning."""
    done = subprocess.run(["promtool", *arguments], input=given, capture_output=True, check=False)
    report = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, report
    assert arguments[:2] != ("check", "metrics") or report == ""


@pytest.fixture(scope="module")
def server(shared: Path, serve: Serve) -> Server:
    write_numbered(shared / "numbers", 4000)
    write_tokenizer(shared / "tokenizer.json")
    write_text(shared / "text", [f"the quick brown fox {number} " * 20 for number in range(2000)])
    return serve(shared, "--tokenizer", str(shared / "tokenizer.json"), "--processes", "2")


@contextmanager
def training(server: Server) -> Iterator[None]:
    """A run that repeats epochs of two datasets until the end."""
    stopped = threading.Event()

    def run(dataset: str) -> None:
        data = RemoteDataset(server.url, dataset, batch_size=4, seq_len=32, rank=0, world_size=1, packing="concat", job="run")
        while not stopped.is_set():
            for _ in data:
                if stopped.wait(0.01):
                    return

    threads = [threading.Thread(target=run, args=(dataset,)) for dataset in ("numbers", "text")]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


class Prometheus:
    """A Prometheus that scrapes a server every second, with the rules of this repository."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, **query: str) -> Any:
        response = httpx.get(f"{self._url}/api/v1/{path}", params=query, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()["data"]

    def query(self, expression: str) -> list[float]:
        """The values of an expression now, without those of divisions by 0."""
        values = [float(sample["value"][1]) for sample in self.get("query", query=expression)["result"]]
        return [value for value in values if value == value]


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    config = CONFIG.read_text()
    (folder / "token").write_text("of a server without tokens")
    replaced = {
        "server:8000": server.url.removeprefix("http://"),
        "15s": "1s",
        "/run/penstock/token": f"{folder}/token",
    }
    for shipped, here in replaced.items():
        assert shipped in config
        config = config.replace(shipped, here)
    (folder / "prometheus.yml").write_text(config)
    shutil.copy(ALERTS, folder)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--web.listen-address={address}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--storage.tsdb.path={folder}/data"], stderr=log)

    def is_ready() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        try:
            return httpx.get(f"http://{address}/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    try:
        until(is_ready)
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait()


def test_promtool_accepts_the_metrics_and_the_configuration(server: Server, tmp_path: Path) -> None:
    with training(server):
        until(lambda: "penstock_rank_wait_seconds_total{" in server.get("/metrics").text)
        promtool("check", "metrics", given=server.get("/metrics").content)
    (tmp_path / "token").touch()
    (tmp_path / "prometheus.yml").write_text(CONFIG.read_text().replace("/run/penstock/token", f"{tmp_path}/token"))
    shutil.copy(ALERTS, tmp_path)
    promtool("check", "config", tmp_path / "prometheus.yml")


@pytest.mark.slow
def test_panels_and_alerts_get_data_from_a_real_run(server: Server, prometheus: Prometheus) -> None:
    expressions = [target["expr"].replace("$__rate_interval", "15s") for panel in PANELS for target in panel["targets"]]
    [group] = prometheus.get("rules")["groups"]
    metrics = {name for rule in group["rules"] for name in re.findall(r"\bpenstock_\w+|\bup\b", rule["query"])}
    assert len(expressions) > 20
    assert len(metrics) > 8
    with training(server):
        for expression in [*expressions, *metrics]:
            until(partial(prometheus.query, expression))
    [group] = prometheus.get("rules")["groups"]
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    server.stop()
    until(lambda: [alert["labels"]["alertname"] for alert in prometheus.get("alerts")["alerts"]] == ["PenstockServerGone"])


def test_panels_have_a_place_and_a_data_source() -> None:
    provisioned = (ROOT / "docker/grafana/provisioning/datasources/prometheus.yml").read_text()
    assert {panel["datasource"]["uid"] for panel in PANELS} == set(re.findall(r"uid: (\S+)", provisioned))
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    cells = [
        (at["x"] + x, at["y"] + y)
        for at in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(at["w"])
        for y in range(at["h"])
    ]
    assert len(cells) == len({*cells})
    assert {x for x, _ in cells} == {*range(24)}


CACHE = {"penstock_cache_bytes": "95x30", "penstock_cache_budget_bytes": "100x30", "penstock_cache_evictions_total": "0+60x30"}
COLD, WARM = ({"penstock_cache_misses_total": "0+60x30", "penstock_cache_hits_total": f"0+{hits}x30"} for hits in (90, 900))
COUNTING = {"penstock_index_counting": "1x30", "penstock_index_counted_blocks": "0 1 2x30"}
OTHER = {"penstock_index_counted_blocks of b": "0+1x30"}  # a second server that counts while the first one waits for it


@pytest.mark.parametrize(
    ("alert", "series", "quiet_minute", "firing_minute"),
    [
        ("PenstockServerGone", {"up": "1x5 0x20"}, 6, 8),
        ("PenstockServerGone", {}, 0, 2),
        ("PenstockRankStarves", {"penstock_rank_wait_fraction_max": "0.1 0.3x20"}, 5, 7),
        ("PenstockRankStarves", {"penstock_rank_wait_fraction_max": "0.3 0.1x2 0.3 0.1x20"}, 20, None),
        ("PenstockCacheThrashes", CACHE | COLD, 9, 25),
        ("PenstockCacheThrashes", CACHE | WARM, 25, None),
        ("PenstockCorruptBlocks", {"penstock_cache_corrupt_blocks_total": "0x3 1x20"}, 2, 5),
        ("PenstockIndexStuck", COUNTING, 11, 13),
        ("PenstockIndexStuck", COUNTING | OTHER, 25, None),
    ],
)
def test_alert_fires(alert: str, series: dict[str, str], quiet_minute: int, firing_minute: int | None, tmp_path: Path) -> None:
    def firing(minute: int, count: int) -> dict[str, Any]:
        expected = [{"labels": "{}", "value": count}] if count else []
        query = f"count(ALERTS{{alertname='{alert}', alertstate='firing'}})"
        return {"expr": query, "eval_time": f"{minute}m", "exp_samples": expected}

    expected = [firing(quiet_minute, 0)] + ([firing(firing_minute, 1)] if firing_minute else [])
    inputs = []
    for name, values in series.items():
        metric, _, instance = name.partition(" of ")
        inputs.append({"series": f"{metric}{{job='penstock', instance='{instance}', dataset='d'}}", "values": values})
    test = {"interval": "1m", "input_series": inputs, "promql_expr_test": expected}
    rules = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "test.yml").write_text(json.dumps(rules))
    promtool("test", "rules", tmp_path / "test.yml")
