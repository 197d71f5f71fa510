"""What a training loop is told beside its batches: how many, how long it waited, and what they were."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest

from corpora import write_numbered
from penstock import RemoteDataset, wire
from penstock.stats import Stats
from serving import Server

NUM_ROWS, BATCH_SIZE = 120, 4


@pytest.fixture(scope="module")
def server(serve: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    data_dir = tmp_path_factory.mktemp("data")
    write_numbered(data_dir / "numbers", NUM_ROWS)
    return serve(data_dir)


def dataset(server: Server, **settings: Any) -> RemoteDataset:
    return RemoteDataset(server.url, "numbers", **({"batch_size": BATCH_SIZE, "seq_len": 8, "seed": 3} | settings))


class Recording:
    def __init__(self) -> None:
        self.entries: list[tuple[wire.Address, str]] = []

    def record(self, address: wire.Address, digest: str) -> None:
        self.entries.append((address, digest))


def test_the_statistics_count_what_the_loop_was_given(server: Server) -> None:
    data = dataset(server)
    assert (data.stats(), data.stats().wait_share) == (Stats(), 0.0)
    num_tokens = 0
    for number, batch in enumerate(data, start=1):
        num_tokens += int(batch["attention_mask"].sum())
        time.sleep(0.001)
        stats = data.stats()
        assert (stats.num_batches, stats.num_tokens) == (number, num_tokens)
        if number == 20:
            break
    for batch in data:
        num_tokens += int(batch["attention_mask"].sum())
    stats = data.stats()
    assert (stats.num_batches, stats.num_tokens, stats.num_retries) == (20 + NUM_ROWS // BATCH_SIZE, num_tokens, 0)
    assert stats.wait_seconds > 0
    assert stats.busy_seconds > 0.019
    assert stats.wait_share == stats.wait_seconds / (stats.wait_seconds + stats.busy_seconds)
    assert stats.buffered_bytes == 0


def test_what_is_fetched_ahead_is_counted_in_bytes_until_the_loop_ends(server: Server) -> None:
    data = dataset(server)
    most = 0
    for _ in data:
        time.sleep(0.01)
        most = max(most, data.stats().buffered_bytes)
    assert most > 0
    assert most % (3 * 8 * BATCH_SIZE * 8) == 0  # ids, mask and labels
    assert data.stats().buffered_bytes == 0


def test_two_loops_at_once_are_counted_together(server: Server) -> None:
    data = dataset(server)
    for _ in zip(data, data, strict=True):
        pass
    assert data.stats().num_batches == 2 * NUM_ROWS // BATCH_SIZE
    assert data.stats().buffered_bytes == 0


def test_a_copy_may_be_made_in_mid_loop(server: Server) -> None:
    data = dataset(server)
    for _ in data:
        again = copy.deepcopy(data)
        break
    assert again.stats().num_batches == 1
    assert len(list(again)) == NUM_ROWS // BATCH_SIZE


def test_a_recorder_is_told_of_each_batch_that_was_handed_over_and_of_no_other(server: Server) -> None:
    data, recording = dataset(server), Recording()
    data._recorder = recording
    for number, _ in enumerate(data, start=1):
        assert len(recording.entries) == number
        if number == 7:
            break
    frames = server.frames("/v1/datasets/numbers/epochs/0/ranks/0/batches", stop=7, **data.spec.to_query())
    assert recording.entries == [(frame.address, frame.digest) for frame in frames]
