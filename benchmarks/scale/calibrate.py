"""Measures the costs of the server's work: core seconds for each request, batch, sample, byte, block and token.

One server process has one core, and light ranks have another. Ranges of several shapes differ in their numbers of batches,
samples and bytes; least squares give the cost of each. `penstock prepare` gives the costs of blocks.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median

import numpy as np

import data
from corpus import SEQ_LEN
from penstock_server.blocks.cache import SUFFIX, CacheFolder, Maps
from penstock_server.blocks.shared import SharedStore
from penstock_server.monitoring.metrics import Metrics
from processes import Server, adopt_orphans, run, serving
from ratios import Scale
from scale.model import Costs, Job
from scale.ranks import Run
from servers import prepare, serve_command

_SCRIPT = Path(__file__).parents[1] / "scaling.py"
_RANKS = 16
# (batch size, tokens of a sample, steps of a range): each cost is most of at least one of them.
_SHAPES = ((1, 64, 1), (1, 64, 64), (64, 64, 64), (4, 1024, 16), (32, 1024, 1), (32, 1024, 16), (64, 1024, 64))
DATASET = "tokens"
TOKEN_BYTES = 2


def calibrate(scale: Scale, tell: Callable[[str], None]) -> Costs:
    """Return the medians of `scale.num_repeats` measurements of all costs."""
    adopt_orphans()  # the processes that tokenize outlive the command by a moment, and their CPU time counts
    tell("writing the corpus, and preparing it")
    data.warm_cache(scale)
    tell("serving ranges")
    server, client, turnaround = _serving_costs(scale)
    tell("copying and decoding blocks")
    stored, decoded = _block_costs(scale)
    tell("tokenizing")
    return Costs(
        request=server[0],
        batch=server[1],
        sample=server[2],
        byte=server[3],
        client_request=client[0],
        client_byte=client[1],
        turnaround=turnaround,
        stored_byte=stored,
        decoded_byte=decoded,
        token=_token_cost(scale),
    )


def light_ranks(
    servers: Sequence[Server],
    job: Job,
    *,
    cores: str = "",
    seconds: float = 2.0,
    warm_seconds: float = 1.0,
    range_steps: int | None = None,
) -> Run:
    """Run the ranks of `job` in another process, on some cores."""
    addresses, pids = (",".join(str(value) for value in values) for values in zip(*_places(servers), strict=True))
    command = [*_on(cores), sys.executable, str(_SCRIPT), "ranks", addresses, DATASET, json.dumps(asdict(job))]
    command += ["--seconds", str(seconds), "--warm-seconds", str(warm_seconds), "--server-pids", pids]
    command += ["--range-steps", str(range_steps)] if range_steps else []
    return Run(**json.loads(run(command, timeout_seconds=120)))


@contextmanager
def server_on(cores: str, scale: Scale) -> Iterator[Server]:
    """Run a server with one process and a full cache on some cores, such as "0"; on all if that is empty."""
    with serving([*_on(cores), *serve_command(data.corpus(scale).parquet, data.warm_cache(scale))]) as server:
        yield server


def _on(cores: str) -> list[str]:
    return ["taskset", "-c", cores] if cores else []


def _places(servers: Sequence[Server]) -> Iterator[tuple[str, int]]:
    return ((server.address, server.pid) for server in servers)


def _serving_costs(scale: Scale) -> tuple[list[float], list[float], float]:
    """Return the server's costs of a request, batch, sample and byte; the client's of a request and byte; the turnaround."""
    with server_on("0", scale) as server:
        runs = [[_run(server, _RANKS, *shape) for shape in _SHAPES] for _ in range(scale.num_repeats)]
        alone = [_run(server, 1, *_SHAPES[0]) for _ in range(scale.num_repeats)]
    rows = [(1, n, n * batch, n * batch * seq_len * TOKEN_BYTES) for batch, seq_len, n in _SHAPES]
    by_shape = list(zip(*runs, strict=True))
    servers = [median(each.server_seconds / each.num_requests for each in runs) for runs in by_shape]
    clients = [median(each.client_seconds / each.num_requests for each in runs) for runs in by_shape]
    turnaround = median((run.seconds - run.server_seconds - run.client_seconds) / run.num_requests for run in alone)
    return fit(rows, servers), fit([(row[0], row[3]) for row in rows], clients), max(0.0, turnaround)


def _run(server: Server, num_ranks: int, batch_size: int, seq_len: int, steps: int) -> Run:
    step_bytes = batch_size * seq_len * TOKEN_BYTES
    job = Job(
        num_ranks=num_ranks,
        batch_size=batch_size,
        seq_len=seq_len,
        step_seconds=0.0,
        token_bytes=TOKEN_BYTES,
        prefetch_bytes=4 * steps * step_bytes,
    )
    return light_ranks([server], job, cores="1", seconds=1.5, range_steps=steps)


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the cost >= 0 of each column, so that their sums are near to `seconds`; relative errors count."""
    matrix = np.array(rows, np.float64) / np.array(seconds)[:, None]
    used = list(range(matrix.shape[1]))
    while True:
        costs = np.linalg.lstsq(matrix[:, used], np.ones(len(rows)), rcond=None)[0]
        if (costs >= 0).all():
            found = dict(zip(used, costs.tolist(), strict=True))
            return [found.get(column, 0.0) for column in range(matrix.shape[1])]
        used.pop(int(np.argmin(costs)))


def _block_costs(scale: Scale) -> tuple[float, float]:
    """Return the costs of a byte of a block from a shared folder, and from Parquet."""
    parquet = data.corpus(scale).parquet
    copied, decoded = list[float](), list[float]()
    for _ in range(scale.num_repeats):
        with tempfile.TemporaryDirectory(dir=scale.work) as folder:
            caches, store = [Path(folder) / name for name in ("one", "two")], Path(folder) / "store"
            command = (parquet, caches[0], "--store", str(store))
            decoded.append(_cpu(*command) - _cpu(*command))  # the second one finds the blocks
            copied.append(_copied_byte(store, caches[1]))
    return median(copied), median(decoded) / (2 * SEQ_LEN * scale.num_samples)


def _copied_byte(store: Path, cache: Path) -> float:
    """Return the CPU seconds for each byte of the blocks of a store, which a server copies into its cache."""
    cache.mkdir()
    with closing(SharedStore(store, Metrics())) as shared:
        maps = Maps(CacheFolder(cache), shared)
        sizes = {name.removesuffix(SUFFIX): nbytes for name, nbytes, _ in shared.objects() if name.endswith(SUFFIX)}
        before = time.process_time()
        for key in sizes:
            assert maps.read(key)
        return (time.process_time() - before) / sum(sizes.values())


def _token_cost(scale: Scale) -> float:
    """Return the cost of a token of text."""
    folder, cache = data.documents(scale), scale.work / "calibration"
    found = list[float]()
    for _ in range(scale.num_repeats):
        shutil.rmtree(cache, ignore_errors=True)
        found.append(_cpu(folder, cache) - _cpu(folder, cache))
    with serving(serve_command(folder, cache)) as server:
        response = urllib.request.urlopen(f"{server.address}/v1/datasets/documents")
        tokens = json.loads(response.read())["tokens"]
    return max(0.0, median(found)) / float(tokens)


def _cpu(parquet: Path, cache: Path, *flags: str) -> float:
    """Return the CPU seconds of `penstock prepare`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    prepare(parquet, cache, *flags)
    with suppress(ChildProcessError):
        while os.waitpid(-1, 0):
            pass
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
