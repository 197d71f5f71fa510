import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from starlette.testclient import TestClient

from corpora import write_numbered
from penstock_server import respond
from penstock_server.admission import InFlight
from penstock_server.app import create_app
from penstock_server.batches.writer import frames
from penstock_server.blocks.cache import CacheFolder
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import open_catalog
from penstock_server.machine import memory_bytes
from penstock_server.problems import BadRow, Busy
from penstock_server.settings import Settings


def test_what_is_beyond_the_budget_is_refused_until_something_is_given_back() -> None:
    in_flight = InFlight(100)
    first, second = in_flight.hold(2, 30), in_flight.hold(1, 40)
    first.take()
    second.take()
    with pytest.raises(
        Busy,
        match="100 bytes are held by 2 responses not yet read, this one would hold 1, .* --inflight-bytes",
    ):
        in_flight.hold(1, 1)
    first.release()
    in_flight.hold(3, 20).take()
    assert in_flight.held_bytes == 100


def test_one_response_goes_however_large_it_is() -> None:
    in_flight = InFlight(100)
    large = in_flight.hold(1, 1000)
    large.take()
    with pytest.raises(Busy):
        in_flight.hold(1, 0)
    large.release()
    in_flight.hold(1, 1000).take()


def test_two_that_waited_for_blocks_at_a_time_do_not_both_take_the_last_room() -> None:
    in_flight = InFlight(100)
    first, second = in_flight.hold(1, 60), in_flight.hold(1, 60)
    first.take()
    with pytest.raises(Busy):
        second.take()
    second.release()  # which took nothing
    assert (in_flight.num_holds, in_flight.held_bytes) == (1, 60)


def test_what_a_chunk_takes_counts_once_it_is_known_beyond_the_budget_too_and_is_given_back_once() -> None:
    in_flight = InFlight(100)
    hold = in_flight.hold(2, 40)
    for _ in range(2):
        hold.take()
    hold.measured(30)
    assert in_flight.held_bytes == 60
    hold.measured(20)
    assert in_flight.held_bytes == 60
    hold.measured(300)
    assert in_flight.held_bytes == 600
    for _ in range(2):
        hold.release()
    assert (in_flight.num_holds, in_flight.held_bytes) == (0, 0)


def test_a_request_that_fails_or_wants_no_body_gives_back_what_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_numbered(tmp_path / "data" / "numbers", 40)
    catalog, in_flight = open_catalog(tmp_path / "data", None, BlockStore(CacheFolder(tmp_path / "cache"))), InFlight(1 << 30)
    client = TestClient(create_app(catalog, in_flight))
    url = "/v1/datasets/numbers/epochs/0/ranks/0/batches?batch_size=2&seq_len=4"

    def held_behind(method: str, status: int) -> tuple[int, int]:
        assert client.request(method, url).status_code == status
        return in_flight.num_holds, in_flight.held_bytes

    for _ in range(2):  # the first time its blocks are waited for, and then they are there
        with monkeypatch.context() as patch:
            patch.setattr(respond, "frames", Mock(side_effect=BadRow("no")))
            assert held_behind("GET", 500) == (0, 0)
        assert held_behind("HEAD", 200) == (0, 0)
        assert held_behind("GET", 200) == (0, 0)


@pytest.mark.parametrize("query", ["", "&length_bucket_size=4"])
def test_of_requests_that_may_wait_two_at_a_time_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, query: str) -> None:
    """They wait in as many threads as there are, and each would take memory beyond the budget."""
    write_numbered(tmp_path / "data" / "numbers", 40)
    catalog = open_catalog(tmp_path / "data", None, BlockStore(CacheFolder(tmp_path / "cache")))
    client, makers = TestClient(create_app(catalog, InFlight(1 << 30))), list[str]()

    def make(*chunk: Any) -> memoryview:
        makers.append(threading.current_thread().name)
        return frames(*chunk)

    monkeypatch.setattr(respond, "frames", make)
    for _ in range(2):  # the first time its blocks are waited for, and then they are there
        url = f"/v1/datasets/numbers/epochs/0/ranks/0/batches?batch_size=2&seq_len=4{query}"
        while (status := client.get(url).status_code) == 503:  # its rows are being counted
            pass
        assert status == 200
    assert [name.rpartition("_")[0] for name in makers] == ["penstock-batches"] * 2


def test_the_budget_is_what_was_set_or_a_quarter_of_the_memory() -> None:
    assert Settings.read({"data_dir": "d", "inflight_bytes": "2GB"}, {}).most_inflight_bytes == 2 * 10**9
    assert Settings.read({"data_dir": "d", "inflight_bytes": "0"}, {}).most_inflight_bytes == 0
    assert Settings.read({"data_dir": "d", "inflight_bytes": "2GB", "processes": "4"}, {}).most_inflight_bytes == 5 * 10**8
    assert Settings.read({"data_dir": "d"}, {}).most_inflight_bytes == memory_bytes() // 4
