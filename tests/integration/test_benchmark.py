"""The benchmarks, run for moments on a tiny corpus: that they measure, not what."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import peers
from contest import Contest
from corpus import BATCH_SIZE, Corpus
from generate import write_corpus
from processes import ProcessFailed
from ratios.training_step import Size, compare
from results import Loader
from scale.model import Job
from scale.ranks import measure
from support.processes import Fork
from support.servers import ROOT, Serve, Server


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    made = Corpus(tmp_path_factory.mktemp("corpus"), 1024)
    write_corpus(made)
    return made


def forked(command: Sequence[str], *, timeout_seconds: float, environment: Mapping[str, str]) -> str:
    """As processes.run, without the seconds in which each process imports torch."""
    _, script, *arguments = command
    with closing(Fork(*arguments, script=Path(script), environment={**os.environ, **environment})) as process:
        status, out, errors = process.communicate(timeout_seconds)
    if status:
        raise ProcessFailed(errors)
    return out


@pytest.mark.slow
def test_benchmark_measures_loaders_without_installs(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("contest.run", forked)
    monkeypatch.setattr("contest.load", lambda name: replace(peers.load(name), workers=(2 if name == "numpy_memmap" else 0,)))
    told: list[str] = []
    contest = Contest(corpus=corpus, names=peers.QUICK, num_rounds=1, seconds=0.1, warm_up_seconds=0.0, tell=told.append)
    loaders = {loader.key: loader for loader in contest.run()}
    assert [loader.failures for loader in loaders.values()] == [[]] * len(peers.QUICK)
    assert all(loader.tokens_per_second and loader.trainer_cpu for loader in loaders.values())
    assert {key for key, loader in loaders.items() if loader.server_cpu} == {peers.OURS}
    assert "checking Penstock, 0 workers" in told


def test_benchmark_reports_a_loader_that_is_not_installed(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("contest._HERE", tmp_path)  # where there are no environments
    contest = Contest(corpus=corpus, names=("grain_map",), num_rounds=1, seconds=0.1, warm_up_seconds=0.0, tell=lambda _: None)
    [loader] = contest.run()
    assert isinstance(loader, Loader)
    assert loader.samples == []
    assert loader.failures == ["not installed: there is no .venv in benchmarks; `make bench` makes it"]


@pytest.fixture(scope="module")
def server(corpus: Corpus, serve: Serve) -> Server:
    return serve(corpus.parquet)


def test_benchmark_measures_a_training_step(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratios.training_step.SEQ_LEN", 64)
    size = Size(dim=64, num_layers=1, batch_size=1, num_steps=1, num_profiled=1, num_repeats=1)
    measured = compare(server.url, torch.device("cuda" if torch.cuda.is_available() else "cpu"), size)
    assert measured.theirs
    assert measured.ours > 0
    assert re.fullmatch(r"[+-]\d+\.\d\d%; calls that wait for the GPU in 1 steps: (\d+) and \1", measured.note)


def test_benchmark_load_gives_each_rank_batches(corpus: Corpus, server: Server) -> None:
    command = ["python", str(ROOT / "benchmarks" / "load.py"), server.url, "20", "--world-size", "20", "--seconds", "0.5"]
    told = json.loads(forked(command, timeout_seconds=120, environment={}))
    assert told["num_errors"] == 0
    assert told["num_batches"] >= 20
    assert told["fewest_batches"] >= 1
    assert corpus.num_samples >= 20 * BATCH_SIZE


def test_light_ranks_take_what_the_simulation_says_of_real_servers(corpus: Corpus, serve: Serve) -> None:
    servers = [serve(corpus.parquet) for _ in range(2)]
    job = Job(num_ranks=6, batch_size=4, seq_len=1024, step_seconds=0.02, token_bytes=2, prefetch_bytes=1 << 17)
    addresses = [server.url for server in servers]
    run = measure(addresses, "tokens", job, warm_seconds=0.5, seconds=1.0, range_steps=None, server_pids=[])
    assert 5 < run.num_steps <= 1.1 / job.step_seconds
    assert abs(run.served_bytes - run.num_steps * job.num_ranks * job.step_bytes) <= job.num_ranks * 2 * job.prefetch_bytes
    assert 0 <= run.wait_fraction <= 1
    for server in servers:
        assert re.search(r"^penstock_batches_total\S* [1-9]", server.get("/metrics").text, re.MULTILINE)
