"""SIGKILL of the real server at random moments of an epoch: nothing is lost, nothing repeated, nothing changed."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from random import Random

import pytest

import penstock.transport
from penstock import RemoteDataset
from support.corpora import write_numbered
from support.recorded import contents
from support.servers import Server

NUM_ROWS = 8_000
SEED = 11


class Killer:
    """Kills a server so many times, each time a random while after it has come back, and starts it again."""

    def __init__(self, server: Server, num_kills: int) -> None:
        self._server, self._num_kills, self._chance = server, num_kills, Random(SEED)
        self.num_done = 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._num_kills = 0
        self._thread.join()

    @property
    def is_done(self) -> bool:
        """Whether the server lives to the end from now on."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self.num_done < self._num_kills:
            time.sleep(self._chance.uniform(0, 0.2))
            self._server.kill()
            self._server.start()
            self.num_done += 1


@pytest.mark.parametrize("num_kills", [12, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_servers_lose_and_repeat_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_kills: int) -> None:
    """The loop leaves some batches for after each kill, and little is fetched ahead of it."""
    monkeypatch.setattr(penstock.transport, "_MAX_DELAY_SECONDS", 0.2)
    write_numbered(tmp_path / "data" / "numbers", NUM_ROWS, row_group_size=500)
    with Server(tmp_path / "data", tmp_path / "cache") as server:
        expected = [*map(contents, dataset(server))]
        data = dataset(server)
        seen = []
        with Killer(server, num_kills) as killer:
            for number, batch in enumerate(data):
                seen.append(contents(batch))
                while not killer.is_done and number * (num_kills + 1) > (killer.num_done + 1) * len(expected):
                    time.sleep(0.001)
            assert killer.num_done == num_kills
    assert seen == expected
    assert data.stats().num_batches == NUM_ROWS // 8
    assert data.stats().num_retries >= num_kills // 2


def dataset(server: Server) -> RemoteDataset:
    return RemoteDataset(server.url, "numbers", batch_size=8, seq_len=8, seed=SEED, prefetch_bytes=1 << 14)
