"""A container with 512 MB serves a dataset many times as large: tokens counted, blocks evicted and decoded again."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import wire
from support.servers import REASON, ROOT

pytestmark = [pytest.mark.docker, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

GIGABYTES = int(os.environ.get("PENSTOCK_TEST_GIGABYTES", "1"))
NUM_STEPS = 8 if GIGABYTES == 1 else 20  # of each spec that are asked for, all over the epoch
LIMIT, MAX_ANONYMOUS = "512m", 300 << 20
SHARD_TOKENS, ROW_TOKENS = 1 << 25, 1024


def docker(*arguments: str) -> str:
    return subprocess.run(
        ["docker", *arguments], check=True, capture_output=True, text=True, timeout=1500, cwd=ROOT
    ).stdout.strip()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One shard of 128 MiB of token ids under many names: to the server each is a shard of its own."""
    folder = tmp_path_factory.mktemp("data") / "large"
    folder.mkdir()
    ids = np.random.default_rng(0).integers(0, 50_000, SHARD_TOKENS, dtype=np.int32)
    offsets = np.arange(0, SHARD_TOKENS + 1, ROW_TOKENS, dtype=np.int32)
    table = pa.table({"tokens": pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))})
    first = folder / "part-000.parquet"
    pq.write_table(table, first, row_group_size=8192, compression="none", use_dictionary=False)
    for number in range(1, -(-GIGABYTES * 10**9 // first.stat().st_size)):
        os.link(first, folder / f"part-{number:03}.parquet")
    folder.parent.chmod(0o755)
    return folder.parent


class Limited:
    """A server in a container that may use no more than LIMIT, cache of files in memory included."""

    def __init__(self, data: Path) -> None:
        docker("build", "--file", "docker/Dockerfile", "--target", "server", "--tag", "penstock-server", ".")
        self.name = docker(
            "run", "--detach", "--memory", LIMIT, "--memory-swap", LIMIT, "--publish", "127.0.0.1::8000",
            "--volume", f"{data}:/data:ro", "--env", "PENSTOCK_CACHE_BYTES=400MB", "--env", "PENSTOCK_INSECURE=yes",
            "penstock-server",
        )  # fmt: skip
        self.url = f"http://{docker('port', self.name, '8000').splitlines()[0]}"
        self.peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        [pid] = docker("inspect", "--format", "{{.State.Pid}}", self.name).splitlines()
        while not self._over.wait(0.05):
            try:
                [kib] = re.findall(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
            except (OSError, ValueError):
                return  # it died, which the requests tell
            self.peak = max(self.peak, int(kib) * 1024)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        docker("rm", "--force", "--volumes", self.name)

    def get(self, path: str, **query: str | int) -> httpx.Response:
        deadline = time.monotonic() + 1200
        while True:
            try:
                response = httpx.get(f"{self.url}/v1/datasets/large{path}", params=query, timeout=120)
                if response.status_code != 503:
                    assert response.status_code == 200, response.text
                    return response
            except httpx.TransportError:
                state = docker("inspect", "--format", "{{.State.Status}} {{.State.OOMKilled}}", self.name)
                assert state.startswith("running"), state
            assert time.monotonic() < deadline
            time.sleep(0.2)


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[Limited]:
    limited = Limited(data)
    yield limited
    limited.close()


def test_large_dataset_is_served_within_the_memory_limit(server: Limited) -> None:
    assert server.get("").json()["size_bytes"] >= GIGABYTES * 10**9
    specs: list[dict[str, str | int]] = [
        {"shuffle": "window"},
        {"packing": "concat"},
        {"packing": "best_fit"},
        {"packing": "rows", "overflow": "split", "seq_len": 512},
        {"packing": "rows", "length_bucket_size": 64},
    ]
    for spec in specs:
        num_steps = server.get("/spec", batch_size=32, **spec).json()["num_steps"]
        for step in range(0, num_steps, max(1, num_steps // NUM_STEPS)):
            [frame] = wire.decode(server.get(f"/epochs/0/ranks/0/batches/{step}", batch_size=32, **spec).content)
            assert frame.step == step
    print(f"peak of anonymous memory: {server.peak / 2**20:.0f} MiB of a limit of {LIMIT}")
    assert server.peak < MAX_ANONYMOUS
