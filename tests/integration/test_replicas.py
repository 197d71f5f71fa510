"""Ranks on replicas that come and go: a range of names, and a name with several IPs."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import penstock.servers
from penstock import RemoteDataset
from penstock.access import Access
from penstock.http import HttpClient
from penstock.responses import UnexpectedServer
from support.certificates import Authority
from support.corpora import write_numbered
from support.ledgers import report_on
from support.ranks import Rank, go_on
from support.servers import Serve, Server

NUM_RANKS = 8
EPOCHS = 60

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has 127.0.0.2 without more ado")


class Names:
    """IPs by name, as DNS would have them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ips: dict[str, list[str]] = {}
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._look_up)

    def _look_up(self, host: Any, *arguments: Any, **settings: Any) -> list[Any]:
        if not str(host).endswith(".test"):
            return self._real(host, *arguments, **settings)
        if not self.ips.get(host):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [found for ip in self.ips[host] for found in self._real(ip, *arguments, **settings)]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


class Replicas:
    """Servers on 127.0.0.1, 127.0.0.2, ... with one port, and their names."""

    def __init__(self, data: Path, folder: Path, names: Names, stack: ExitStack) -> None:
        self._data, self._folder, self._names, self._stack = data, folder, names, stack
        self.running: dict[int, Server] = {}
        self.port = 0

    def start(self, number: int) -> None:
        cache, ip = self._folder / f"cache-{number}", f"127.0.0.{number + 1}"
        server = Server(self._data, cache, "--host", ip, "--drain-seconds", "2.5", "--insecure", port=self.port)
        self.running[number] = self._stack.enter_context(server)
        self.port = urlsplit(server.url).port or 0
        self._list()

    def remove(self, number: int) -> None:
        """Stop one as Kubernetes does: no DNS name has it any more, and it serves on for a while."""
        server = self.running.pop(number)
        self._list()
        server.stop()

    def kill(self, number: int) -> None:
        self.running[number].stop(signal.SIGKILL)

    def _list(self) -> None:
        self._names.ips = {f"data-{number}.test": [f"127.0.0.{number + 1}"] for number in self.running}
        self._names.ips["data.test"] = [ip for [ip] in self._names.ips.values()]

    def num_batches(self) -> dict[int, float]:
        """Batches that each has made."""
        name = 'penstock_batches_total{dataset="numbers"} '
        texts = {number: server.get("/metrics").text for number, server in self.running.items()}
        return {number: float(text.partition(name)[2].partition("\n")[0] or 0) for number, text in texts.items()}


@pytest.fixture
def replicas(shared: Path, tmp_path: Path, names: Names) -> Iterator[Replicas]:
    data = shared / "replicas"
    write_numbered(data / "numbers", 480)
    with ExitStack() as stack:
        yield Replicas(data, tmp_path, names, stack)


def all_serve(replicas: Replicas, ranks: list[Rank]) -> bool:
    """Whether each replica gets requests while the ranks go on, and about its share of them."""
    before = replicas.num_batches()
    for _ in range(4):
        go_on(ranks)
    made = [now - before[number] for number, now in replicas.num_batches().items()]
    return min(made) > 0.4 * sum(made) / len(made)


@pytest.mark.slow
@pytest.mark.parametrize("servers", ["data.test:{port}", "data-{{0..2}}.test:{port}"], ids=["name", "range"])
def test_ranks_follow_replicas_that_come_and_go(
    replicas: Replicas, servers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(penstock.servers, "_LOOK_SECONDS", 0.5)
    replicas.start(0)
    ledger = tmp_path / "run.ledger"
    ranks = [
        Rank(
            RemoteDataset(
                servers.format(port=replicas.port), "numbers", batch_size=5, seq_len=8, rank=rank, world_size=NUM_RANKS,
                epochs=EPOCHS, prefetch_bytes=1 << 10, ledger=ledger,
            ),
            step_seconds=0.05,
        )
        for rank in range(NUM_RANKS)
    ]  # fmt: skip

    def num_retries() -> int:
        return sum(rank.data.stats().num_retries for rank in ranks)

    go_on(ranks)
    failed = num_retries()  # in a range, the ranks of names that DNS does not have yet
    for number in (1, 2):
        replicas.start(number)
    while not all_serve(replicas, ranks):
        pass
    replicas.remove(0)
    go_on(ranks)
    assert num_retries() == failed
    replicas.kill(1)
    go_on(ranks)
    assert num_retries() > failed
    replicas.running[1].start()
    while not all_serve(replicas, ranks):
        pass
    for rank in ranks:
        rank.step_seconds = 0.0
    for rank in ranks:
        rank.join()
    assert report_on(ledger).is_proven
    assert all(len(rank.seen) == EPOCHS * 480 // (5 * NUM_RANKS) for rank in ranks)


def test_certificate_of_a_replica_has_the_name(shared: Path, tmp_path: Path, serve: Serve, names: Names) -> None:
    write_numbered(shared / "numbers", 480)
    authority = Authority(tmp_path)
    server = serve(shared, "--tls-cert", str(authority.issue("data.test")), "--insecure")
    port = urlsplit(server.url).port
    names.ips = {"data.test": ["127.0.0.1", "127.0.0.2"]}  # only one answers
    data = RemoteDataset(f"https://data.test:{port}", "numbers", batch_size=8, seq_len=8, ca=authority.file)
    assert len(list(data)) == 60
    http = HttpClient(5.0, access=Access(ca=authority.file))
    with pytest.raises(UnexpectedServer, match="is not trusted: Hostname mismatch"):
        http.get(f"https://other.test:{port}#127.0.0.1", "/healthz")
    http.close()
