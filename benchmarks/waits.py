"""Measures how soon a server names a throttled rank and a cold stage, and how exact its attributed waits are.

    python benchmarks/waits.py WORK_DIR

Two server processes serve 63 ranks of one job over cached token ids. The link of rank 17 gets slow. When its loop has waited
for a second, another job begins on text that is not cached. The script prints the seconds until /v1/jobs names both, and the
difference between the waits that the server attributes and those that the loops measured.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock import RemoteDataset
from penstock.errors import PenstockError

_RANKS, _SLOW = 63, 17
_STEP_SECONDS = 1.0
_PORT = 8391
_URL = f"http://127.0.0.1:{_PORT}"


class Link(threading.Thread):
    """A proxy in front of the server, which passes on `bytes_per_second` of its responses on each connection."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes_per_second = 1e9
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.start()

    def run(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.socket()
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)  # else it would hold whole ranges
            server.connect(("127.0.0.1", _PORT))
            threading.Thread(target=self._pass_on, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pass_on, args=(server, client, True), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_slow: bool) -> None:
        with suppress(OSError):
            while piece := source.recv(4096):
                sink.sendall(piece)
                if is_slow:
                    time.sleep(len(piece) / self.bytes_per_second)
            sink.shutdown(socket.SHUT_WR)


def write_data(folder: Path) -> None:
    """Write 8,000 rows of 2,048 token ids, and 40 MB of text with a tokenizer."""
    for name in ("ids", "text"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 50_000, (8000, 2048), np.int32)
    pq.write_table(pa.table({"input_ids": list(rows)}), folder / "ids/part-0.parquet", row_group_size=400)
    subprocess.run(
        [sys.executable, "-m", "penstock", "sample", folder / "sample", "--rows", "1000"], check=True, capture_output=True
    )
    words = np.array([f"word{n}" for n in range(5000)])
    texts = [" ".join(words[rng.integers(0, 5000, 1500)]) for _ in range(4000)]
    pq.write_table(pa.table({"text": texts}), folder / "text/part-0.parquet", row_group_size=200)


def consume(data: RemoteDataset, step_seconds: float) -> None:
    """Train on a dataset in a thread, forever."""

    def run() -> None:
        with suppress(PenstockError):  # the script ends
            for _ in data:
                time.sleep(step_seconds)

    threading.Thread(target=run, daemon=True).start()


def seconds_until(condition: Callable[[], object]) -> float:
    """Return the seconds until a condition holds, at most 60."""
    began_at = time.monotonic()
    while not condition() and time.monotonic() < began_at + 60:
        time.sleep(0.1)
    return time.monotonic() - began_at


def jobs() -> dict[str, Any]:
    """Return the server's jobs by name."""
    return {job["job"]: job for job in httpx.get(f"{_URL}/v1/jobs").json()["jobs"]}


def is_waiting_for(stage: str, rank: dict[str, Any]) -> bool:
    """Return whether a rank waits, and for this stage most."""
    waits = rank["wait_seconds"]
    return (rank["wait_fraction"] or 0) > 0.05 and max(waits, key=lambda name: waits[name]) == stage


def main() -> None:
    folder = Path(sys.argv[1])
    if not (folder / "text/part-0.parquet").exists():
        write_data(folder)
    serve: list[str | Path] = [sys.executable, "-m", "penstock", "serve", folder, "--processes", "2", "--port", str(_PORT)]
    serve += ["--cache-dir", folder / f"cache-{time.time():.0f}", "--tokenizer", folder / "sample/tokenizer.json"]
    server = subprocess.Popen(serve, stdout=subprocess.DEVNULL)
    try:
        link = Link()
        seconds_until(_is_ready)
        ranks = [
            RemoteDataset(
                link.url if rank == _SLOW else _URL,
                "ids",
                batch_size=16,
                seq_len=2048,
                rank=rank,
                world_size=_RANKS,
                epochs="endless",
                prefetch_bytes=2 << 20,
                job="fed",
            )
            for rank in range(_RANKS)
        ]
        for data in ranks:
            consume(data, _STEP_SECONDS)
            time.sleep(_STEP_SECONDS / _RANKS)
        time.sleep(20)
        print("before:", httpx.get(f"{_URL}/v1/jobs").json()["verdict"]["text"])
        link.bytes_per_second = 30_000
        slow, waited = ranks[_SLOW], ranks[_SLOW].stats().wait_seconds
        seconds_until(lambda: slow.stats().wait_seconds > waited + 1.0)  # more than the hiccups of a busy machine
        slow_seconds = seconds_until(lambda: is_waiting_for("receive", jobs()["fed"]["ranks"][_SLOW]))
        cold = RemoteDataset(_URL, "text", batch_size=64, seq_len=1024, rank=0, world_size=1, job="cold")
        consume(cold, 0.0)
        cold_seconds = seconds_until(lambda: "cold" in jobs() and is_waiting_for("tokenize", jobs()["cold"]["ranks"][0]))
        print(f"throttled rank named after {slow_seconds:.1f} s, cold stage after {cold_seconds:.1f} s")
        print("verdict:", httpx.get(f"{_URL}/v1/jobs").json()["verdict"]["text"])
        print("stragglers:", [straggler["text"] for straggler in jobs()["fed"]["stragglers"]])
        metrics = httpx.get(f"{_URL}/metrics").text
        print(
            *re.findall(r'^penstock_rank_wait_(?:fraction_max|seconds_total)\{dataset="text".*$', metrics, re.MULTILINE),
            sep="\n",
        )
        time.sleep(20)
        known = {(name, rank["rank"]): rank["total_wait_seconds"] for name, job in jobs().items() for rank in job["ranks"]}
        loops = {("cold", 0): cold, **{("fed", rank): data for rank, data in enumerate(ranks)}}
        for name, keys in (("cold", [("cold", 0)]), ("throttled", [("fed", _SLOW)]), ("all ranks", list(loops))):
            attributed, measured = (sum(known[key] for key in keys), sum(loops[key].stats().wait_seconds for key in keys))
            print(f"{name}: {attributed:.2f} s attributed, {measured:.2f} s measured, {attributed / measured - 1:+.1%}")
    finally:
        server.terminate()
        server.wait()


def _is_ready() -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{_URL}/readyz").is_success
    return False


if __name__ == "__main__":
    main()
