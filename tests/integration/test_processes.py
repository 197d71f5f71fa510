"""`penstock serve --processes`: several processes on one port are one server, whatever becomes of each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from penstock import RemoteDataset
from penstock.spec import Packing
from support.corpora import write_numbered
from support.processes import Fork, until
from support.recorded import contents
from support.servers import Serve, Server, serving_below

NUM_ROWS = 480
BATCHES = "/v1/datasets/numbers/epochs/0/ranks/0/batches"
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def data(shared: Path) -> Path:
    write_numbered(shared / "numbers", NUM_ROWS)
    return shared


def dataset(server: Server, rank: int = 0, world_size: int = 1) -> RemoteDataset:
    return RemoteDataset(
        server.url, "numbers", batch_size=5, seq_len=8, rank=rank, world_size=world_size, prefetch_bytes=1 << 12
    )


def latest(server: Server) -> str:
    """The latest snapshot, asked for on a connection of its own."""
    snapshot: str = httpx.get(f"{server.url}/v1/datasets/numbers/spec", timeout=60).json()["snapshot"]
    return snapshot


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Meanwhile another process must answer."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def children(server: Server, number: int) -> list[int]:
    """Of so many, once they are there."""
    until(lambda: len(server.children()) == number)
    return server.children()


@linux
def test_killed_worker_is_replaced_and_the_epoch_unchanged(serve: Serve, data: Path) -> None:
    with serve(data, "--processes", "2") as server:
        assert server.greeting.count("numbers: ") == 1
        before = children(server, 2)
        expected = [*map(contents, dataset(server))]
        run, seen = dataset(server), list[bytes]()
        for number, batch in enumerate(run):
            seen.append(contents(batch))
            if number == 20:
                os.kill(before[0], signal.SIGKILL)
            if number == 60:  # so that none is left until another has begun
                until(lambda: before[0] not in server.children())
                os.kill(before[1], signal.SIGKILL)
        assert seen == expected
        until(lambda: len(server.children()) == 2 and not set(before) & set(server.children()))
        log = server.stop()
        killed = "was ended by SIGKILL (the kernel sends it when memory runs out); another starts in"
        assert f"server process {before[0]} {killed}" in log
        assert f"server process {before[1]} {killed}" in log


def wait_until_each_serves(server: Server, pids: list[int]) -> None:
    """Request something while all other processes are stopped."""
    for pid in pids:
        with ExitStack() as stack:
            for other in set(pids) - {pid}:
                stack.enter_context(stopped(other))
            httpx.get(f"{server.url}/healthz", timeout=60).raise_for_status()


@linux
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_supervisor(serve: Serve, data: Path, how: signal.Signals) -> None:
    with serve(data, "--processes", "2") as server:
        pids = children(server, 2)
        wait_until_each_serves(server, pids)  # one that is still being started tells that it cannot be
        assert server.stop(how) == ""
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
        if how == signal.SIGKILL:
            server.start()  # on the same port
            assert len(server.frames(BATCHES)) == NUM_ROWS // 8


@contextmanager
def started(data: Path, cache: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server of two processes, in the process group of the tests."""
    command = f"exec {sys.executable} -m penstock serve {data} --cache-dir {cache} --port 0 --processes 2 --drain-seconds 0"
    with subprocess.Popen(["sh", "-c", command]) as process:
        try:
            until(lambda: len(serving_below(process.pid)) == 2)
            yield process
        finally:
            process.terminate()


@linux
def test_stopped_worker_ends_with_the_supervisor(data: Path, tmp_path: Path) -> None:
    with started(data, tmp_path) as process:
        pids = serving_below(process.pid)
        until(lambda: all(len(list(Path(f"/proc/{pid}/task").iterdir())) > 1 for pid in pids))  # one watches the parent
        os.kill(pids[1], signal.SIGSTOP)
        process.kill()
        try:
            until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
        finally:
            with suppress(ProcessLookupError):
                os.kill(pids[1], signal.SIGKILL)


@linux
def test_new_data_is_the_latest_on_every_worker(serve: Serve, tmp_path: Path) -> None:
    write_numbered(tmp_path / "numbers", NUM_ROWS)
    with serve(tmp_path, "--processes", "2", "--poll-seconds", "0") as server:
        one, other = children(server, 2)
        with stopped(one):
            before = latest(server)  # the other answers, so it has begun
        with stopped(other):
            write_numbered(tmp_path / "numbers" / "_more", 10, num_shards=1)
            (tmp_path / "numbers" / "_more" / "part-000.parquet").rename(tmp_path / "numbers" / "part-900.parquet")
            after = httpx.post(f"{server.url}/v1/datasets/numbers/refresh", timeout=60).json()["snapshot"]
        with stopped(one):
            assert latest(server) == after != before
        with stopped(other):
            (tmp_path / "numbers" / "part-900.parquet").unlink()
            assert httpx.post(f"{server.url}/v1/datasets/numbers/refresh", timeout=60).json()["snapshot"] == before
        with stopped(one):
            assert latest(server) == before


@linux
def test_tokens_come_once_from_different_workers(serve: Serve, data: Path) -> None:
    packings: list[Packing] = ["rows", "concat"]
    with serve(data, "--processes", "2") as server:
        one, other = children(server, 2)
        for packing in packings:
            tokens = Counter[int]()
            for rank in range(4):
                with stopped((one, other)[rank % 2]):
                    for batch in RemoteDataset(
                        server.url, "numbers", batch_size=5, seq_len=8, rank=rank, world_size=4, packing=packing
                    ):
                        tokens.update(batch["input_ids"][batch["attention_mask"] > 0].tolist())
            del tokens[1]  # which fills rows; the others are their numbers
            assert set(tokens.values()) == {1}
            assert len(tokens) == NUM_ROWS - 1 if packing == "rows" else len(tokens) > 0.9 * NUM_ROWS


def test_error_at_start_is_printed_once(tmp_path: Path, data: Path) -> None:
    with pytest.raises(
        AssertionError, match=r"the server did not start:\npenstock serve: \S+ holds no file that ends in .parquet"
    ):
        Server(tmp_path, tmp_path / "cache", "--processes", "3")


@linux
def test_first_worker_killed_before_it_serves_is_reported(tmp_path: Path, data: Path) -> None:
    with closing(Fork("serve", data, "--cache-dir", tmp_path / "cache", "--port", "0", "--processes", "2")) as process:
        until(lambda: serving_below(process.pid))
        os.kill(serving_below(process.pid)[0], signal.SIGKILL)
        status, _, errors = process.communicate(timeout=20)
    assert status == 1
    assert "the first process was ended by SIGKILL (the kernel sends it when memory runs out) before it could serve" in errors
