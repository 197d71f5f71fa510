"""What /v1/jobs and /metrics say of running loops: real servers, real loops."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock import RemoteDataset
from penstock.wire.report import HEADER, Report
from support.corpora import write_numbered, write_text, write_tokenizer
from support.processes import until
from support.servers import Serve, Server, penstock


class Loop:
    """A training loop in a thread, which works `step_seconds` with each batch until it is stopped."""

    def __init__(self, data: RemoteDataset, step_seconds: float) -> None:
        self.data, self._step_seconds = data, step_seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        for _ in self.data:
            if self._stopped.wait(self._step_seconds):
                return

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


@contextmanager
def loops(*datasets: RemoteDataset, step_seconds: float) -> Iterator[list[Loop]]:
    running = [Loop(data, step_seconds) for data in datasets]
    try:
        yield running
    finally:
        for loop in running:
            loop.stop()


def values(server: Server, name: str) -> dict[tuple[str, ...], float]:
    """The samples of a metric by the values of their labels."""
    families = text_string_to_metric_families(server.get("/metrics").text)
    return {tuple(s.labels.values()): s.value for family in families for s in family.samples if s.name == name}


def ranks_of(server: Server, job: str) -> dict[int, Any]:
    return {rank["rank"]: rank for each in server.json("/v1/jobs")["jobs"] if each["job"] == job for rank in each["ranks"]}


def test_job_lists_its_ranks_where_they_are_and_what_they_waited_for(tmp_path: Path, serve: Serve) -> None:
    write_numbered(tmp_path / "numbers", 4000)
    server = serve(tmp_path)
    assert server.json("/v1/jobs")["verdict"] == {"state": "idle", "text": "No run is active."}
    data = [RemoteDataset(server.url, "numbers", batch_size=2, seq_len=8, rank=r, world_size=2, job="a run") for r in range(2)]
    for each in data:
        for _ in each:
            pass
        for number, _ in enumerate(each):  # the second epoch's first request reports the end of the first
            if number == 3:
                break
    [job] = server.json("/v1/jobs", history="true")["jobs"]
    assert (job["job"], job["dataset"], job["world_size"], job["num_steps"]) == ("a run", "numbers", 2, 1000)
    assert job["spec"] == data[0].spec.to_dict()
    assert job["state"] == "running"
    assert [rank["rank"] for rank in job["ranks"]] == [0, 1]
    for rank, each in zip(job["ranks"], data, strict=True):
        stats = each.stats()
        assert rank["total_wait_seconds"] == pytest.approx(stats.wait_seconds, abs=0.2)
        assert rank["total_wait_seconds"] == pytest.approx(sum(rank["total_wait_stages"].values()))
        assert rank["total_compute_seconds"] == pytest.approx(stats.compute_seconds, abs=0.2)
        assert {"make", "client"} <= {*rank["total_wait_stages"]}
        assert len(rank["history"]) == 120
        assert rank["total_wait_seconds"] > 0.9 * each.stats().wait_seconds
    assert values(server, "penstock_samples_total") == {("numbers",): 2 * values(server, "penstock_batches_total")["numbers",]}


def test_rank_that_does_not_exist_is_in_no_job(tmp_path: Path, serve: Serve) -> None:
    write_numbered(tmp_path / "numbers", 40)
    server = serve(tmp_path)
    report = Report(job="a run", compute_seconds=1.0, wait_seconds={"read": 1.0}).to_header()
    for rank in (1, 2):
        url = f"{server.url}/v1/datasets/numbers/epochs/0/ranks/{rank}/batches/0?batch_size=2&seq_len=8&world_size=2"
        httpx.get(url, headers={HEADER: report})
    assert {*ranks_of(server, "a run")} == {1}


class Throttle:
    """A proxy in front of a server that passes on `bytes_per_second` of its responses on each connection."""

    def __init__(self, server: str, bytes_per_second: int) -> None:
        address = urlsplit(server)
        self._target = (str(address.hostname), int(address.port or 80))
        self._bytes_per_second = bytes_per_second
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                threading.Thread(target=self._pass_on, args=(client, server, 1 << 30), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(server, client, self._bytes_per_second), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, bytes_per_second: int) -> None:
        with suppress(OSError):
            while piece := source.recv(4096):
                sink.sendall(piece)
                time.sleep(len(piece) / bytes_per_second)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def __enter__(self) -> Throttle:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()


@pytest.mark.slow
def test_throttled_rank_and_cold_dataset_are_named(tmp_path: Path, serve: Serve) -> None:
    world_size, slow = 63, 17
    write_numbered(tmp_path / "numbers", 200_000, row_group_size=2000)
    write_tokenizer(tmp_path / "tokenizer.json")
    write_text(tmp_path / "text", [f"the quick brown fox {n} " * 200 for n in range(3000)])
    tokenizer, cache = ("--tokenizer", str(tmp_path / "tokenizer.json")), tmp_path / "cache"
    assert penstock("prepare", tmp_path, "--dataset", "numbers", *tokenizer, "--cache-dir", cache).returncode == 0
    server = serve(tmp_path, "--processes", "2", *tokenizer, cache_dir=cache)

    with Throttle(server.url, 10_000) as throttle, ExitStack() as running:
        fed = [
            RemoteDataset(
                throttle.url if rank == slow else server.url,
                "numbers",
                batch_size=4,
                seq_len=512,
                rank=rank,
                world_size=world_size,
                job="fed",
                prefetch_bytes=1 << 18,
            )
            for rank in range(world_size)
        ]
        cold = RemoteDataset(server.url, "text", batch_size=128, seq_len=512, rank=0, world_size=1, job="cold")
        running.enter_context(loops(*fed, step_seconds=0.5))

        def jobs() -> dict[str, Any]:
            return {job["job"]: job for job in server.json("/v1/jobs")["jobs"]}

        def dominant(rank: dict[str, Any]) -> str | None:
            waits = rank["wait_seconds"]
            return max(waits, key=lambda stage: waits[stage], default=None)

        # All ranks start together, and wait then.
        until(lambda: [straggler["rank"] for straggler in jobs()["fed"]["stragglers"]] == [slow], 180)
        assert dominant(jobs()["fed"]["ranks"][slow]) == "receive"
        running.enter_context(loops(cold, step_seconds=0.0))
        until(lambda: "cold" in jobs() and dominant(jobs()["cold"]["ranks"][0]) == "tokenize")
        assert len(jobs()["fed"]["ranks"]) == world_size
        verdict = server.json("/v1/jobs")["verdict"]
        assert verdict["state"] == "waiting"
        assert "of cold waits" in verdict["text"] or f"ank {slow} of fed waits" in verdict["text"]

        until(lambda: values(server, "penstock_active_ranks") == {("numbers",): world_size, ("text",): 1.0})

        def longest_wait() -> str | None:
            waits = values(server, "penstock_rank_wait_seconds_total")
            stages = {stage: seconds for (dataset, stage), seconds in waits.items() if dataset == "text"}
            return max(stages, key=lambda stage: stages[stage], default=None)

        until(lambda: longest_wait() == "tokenize")  # its first request reports no wait yet

        def agree(rank: dict[str, Any], data: RemoteDataset) -> bool:
            waited: float = rank["total_wait_seconds"]
            return abs(waited / data.stats().wait_seconds - 1) < 0.05

        # A report comes with each range: the sums of the server are those of the last report.
        until(lambda: agree(jobs()["fed"]["ranks"][slow], fed[slow]))
        until(lambda: agree(jobs()["cold"]["ranks"][0], cold))
