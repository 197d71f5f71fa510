"""Clients that leave while the server works for them: they leave nothing behind, and there the work is given up."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from torch.utils.data import DataLoader

from penstock import RemoteDataset
from penstock.client import Client
from penstock.iteration import BatchIterator
from support.corpora import write_numbered, write_shards, write_tokenizer
from support.processes import held, nothing_left, until
from support.servers import Serve, Server


@pytest.fixture(scope="module")
def server(serve: Serve, shared: Path) -> Server:
    write_numbered(shared / "numbers", 3000)
    return serve(shared)


@pytest.fixture(params=["answers", "hangs"])
def change(request: pytest.FixtureRequest, server: Server) -> Iterator[Callable[[], None]]:
    """Has the server hang from then on, or not."""
    yield lambda: os.kill(server.pid, signal.SIGSTOP if request.param == "hangs" else signal.SIGCONT)
    os.kill(server.pid, signal.SIGCONT)


@pytest.fixture(autouse=True)
def _alone() -> None:
    """What another test asked a server that hangs is over. The threads of a server in this process stay."""

    def is_of_client(thread: threading.Thread) -> bool:
        return thread.daemon and thread.name.startswith("penstock-") and thread.name != "penstock-read-ahead"

    until(lambda: not any(map(is_of_client, threading.enumerate())))


def dataset(server: Server, **settings: Any) -> RemoteDataset:
    return RemoteDataset(server.url, "numbers", batch_size=1, seq_len=8, prefetch_bytes=1, **settings)


@pytest.mark.filterwarnings("ignore:a loop goes on")  # two of one dataset do
def test_abandoned_loop_leaves_no_thread_and_no_socket(server: Server, change: Callable[[], None], tmp_path: Path) -> None:
    def train(batches: Iterator[Any], dropped: Iterator[Any]) -> None:
        for _ in batches:
            next(dropped)
            assert held()["penstock-fetch"] == 3
            change()
            raise ValueError("the loss is nan")

    with nothing_left():
        data = dataset(server, ledger=tmp_path / "run.ledger")
        assert held()["penstock-fetch"] == 0
        for _ in data:
            with pytest.raises(ValueError, match="loss is nan"):
                train(iter(data), iter(dataset(server)))
            break
    gc.collect()
    assert not any(type(alive) is BatchIterator for alive in gc.get_objects())


def test_abandoned_loader_workers_leave_no_process_and_no_thread(server: Server) -> None:
    with nothing_left():
        for batches in (iter(DataLoader(dataset(server), batch_size=None, num_workers=2)),):
            next(batches)
            workers = [worker.pid for worker in batches._workers]  # type: ignore[attr-defined]
        del batches
        for thread in threading.enumerate():
            if thread.name == "QueueFeederThread":  # torch's, one for each worker, which it does not wait for
                thread.join(30)
    assert len(workers) == 2
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


def test_iterator_can_be_collected_in_its_fetch_thread(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.batches = iter(RemoteDataset(server.url, "numbers", ledger=tmp_path / "run.ledger"))
            self.itself = self

    num_fetches, dropped, collected = 0, threading.Event(), threading.Event()
    frames = Client.frames

    def collect_and_fetch(*args: Any) -> Any:
        nonlocal num_fetches
        num_fetches += 1
        if num_fetches == 2:
            assert dropped.wait(30)
            gc.collect()
            collected.set()
        return frames(*args)

    monkeypatch.setattr(Client, "frames", collect_and_fetch)
    gc.collect()
    gc.disable()
    try:
        with nothing_left():
            trainer = Trainer()
            next(trainer.batches)
            del trainer
            dropped.set()
            assert collected.wait(30)
            for thread in threading.enumerate():
                if thread.name == "penstock-fetch":  # nobody waits for it, but it ends
                    thread.join(30)
    finally:
        gc.enable()


def test_loop_leaves_no_thread_when_one_cannot_be_started(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "penstock-fetch":
            raise RuntimeError("can't start new thread")
        start(thread)

    with nothing_left():
        data = dataset(server, ledger=tmp_path / "run.ledger")
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="start new thread"):
                next(iter(data))
        assert next(iter(data))["input_ids"].shape == (1, 8)


@pytest.mark.parametrize("path", ["batches/0", "batches"])
def test_server_makes_no_blocks_for_a_client_that_left(serve: Serve, tmp_path: Path, path: str) -> None:
    texts = [[f"{n} " + "the quick brown fox jumps " * 60 for n in range(100)] for _ in range(200)]
    write_shards(tmp_path / "data" / "long", "text", texts, type_=pa.string(), row_group_size=100)
    write_tokenizer(tmp_path / "tokenizer.json")
    cache = tmp_path / "cache"
    server = serve(tmp_path / "data", "--tokenizer", str(tmp_path / "tokenizer.json"), cache_dir=cache)
    url = f"{server.url}/v1/datasets/long/epochs/0/ranks/0/{path}"
    with pytest.raises(httpx.ReadTimeout):
        httpx.get(url, params={"batch_size": 256, "seq_len": 8, "shuffle": "global"}, timeout=0.3)
    stored, changed_at = -1, time.monotonic()
    while time.monotonic() < changed_at + 2:
        if stored != (stored := len(list(cache.glob("*.block")))):
            changed_at = time.monotonic()
        time.sleep(0.1)
    assert stored < 130  # of some 144 that the first batch needs
    assert len(server.frames("/v1/datasets/long/epochs/0/ranks/0/batches/0", batch_size=2, seq_len=8, shuffle="global")) == 1
    assert "Traceback" not in server.stop()


@contextmanager
def who_want_much_text(server: Server) -> Iterator[None]:
    """Six clients, whose pages take seconds each, of which two are made at a time."""
    url = (
        "/v1/datasets/numbers/epochs/0/ranks/0/batches/0?format=json&packing=concat&seq_len=64&drop_last=false&batch_size=16384"
    )
    with ExitStack() as stack:
        for seed in range(6):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", httpx.URL(server.url).port)))
            client.sendall(f"GET {url}&seed={seed} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        time.sleep(0.5)
        yield


def test_server_makes_no_text_for_clients_that_left(serve: Serve, tmp_path: Path) -> None:
    write_numbered(tmp_path / "numbers", 3000)
    server = serve(tmp_path)
    server.json_when_ready("/v1/datasets/numbers/spec", packing="concat", seq_len=64)
    with who_want_much_text(server):
        pass
    began_at = time.monotonic()
    server.json("/v1/datasets/numbers/epochs/0/ranks/0/batches/0", batch_size=1, seq_len=8, format="json")
    assert time.monotonic() - began_at < 3  # one page takes longer
    assert not server.stop()


def test_stopping_server_abandons_text_without_a_log_line(serve: Serve, tmp_path: Path) -> None:
    write_numbered(tmp_path / "numbers", 3000)
    server = serve(tmp_path)
    server.json_when_ready("/v1/datasets/numbers/spec", packing="concat", seq_len=64)
    with who_want_much_text(server):
        began_at = time.monotonic()
        assert not server.stop(signal.SIGINT)
        assert time.monotonic() - began_at < 6
