"""The budget of bytes in flight."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
from starlette.testclient import TestClient

from penstock_server.api import batches
from penstock_server.api.admission import InFlight
from penstock_server.app import create_app
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import open_catalog
from penstock_server.machine import memory_bytes
from penstock_server.problems import BadRow, Busy
from penstock_server.settings import Settings
from support.corpora import write_numbered


def test_response_beyond_the_budget_is_refused_until_bytes_are_released() -> None:
    in_flight = InFlight(100)
    first, second = in_flight.admit(2, 30), in_flight.admit(1, 40)
    first.take()
    second.take()
    with pytest.raises(Busy, match="2 responses in flight take 100 bytes, this one needs 1, .* --inflight-bytes"):
        in_flight.admit(1, 1)
    first.release()
    in_flight.admit(3, 20).take()
    assert in_flight.reserved_bytes == 100


def test_single_response_may_exceed_the_budget() -> None:
    in_flight = InFlight(100)
    large = in_flight.admit(1, 1000)
    large.take()
    with pytest.raises(Busy):
        in_flight.admit(1, 0)
    large.release()
    in_flight.admit(1, 1000).take()


def test_reservations_made_together_do_not_both_take_the_last_room() -> None:
    in_flight = InFlight(100)
    first, second = in_flight.admit(1, 60), in_flight.admit(1, 60)
    first.take()
    with pytest.raises(Busy):
        second.take()
    second.release()  # which took nothing
    assert (in_flight.num_responses, in_flight.reserved_bytes) == (1, 60)


def test_measured_chunks_count_beyond_the_budget_and_are_released_once() -> None:
    in_flight = InFlight(100)
    reservation = in_flight.admit(2, 40)
    for _ in range(2):
        reservation.take()
    reservation.measured(30)
    assert in_flight.reserved_bytes == 60
    reservation.measured(20)
    assert in_flight.reserved_bytes == 60
    reservation.measured(300)
    assert in_flight.reserved_bytes == 600
    for _ in range(2):
        reservation.release()
    assert (in_flight.num_responses, in_flight.reserved_bytes) == (0, 0)


def test_failed_request_and_head_request_release_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_numbered(tmp_path / "data" / "numbers", 40)
    catalog, in_flight = open_catalog(tmp_path / "data", None, BlockStore(tmp_path / "cache")), InFlight(1 << 30)
    client = TestClient(create_app(catalog, in_flight))
    url = "/v1/datasets/numbers/epochs/0/ranks/0/batches?batch_size=2&seq_len=4"

    def in_flight_after(method: str, status: int) -> tuple[int, int]:
        assert client.request(method, url).status_code == status
        return in_flight.num_responses, in_flight.reserved_bytes

    for _ in range(2):  # the first time its blocks are waited for, and then they are there
        with monkeypatch.context() as patch:
            patch.setattr(batches, "body_of", Mock(side_effect=BadRow("no")))
            assert in_flight_after("GET", 500) == (0, 0)
        assert in_flight_after("HEAD", 200) == (0, 0)
        assert in_flight_after("GET", 200) == (0, 0)


def test_budget_is_configured_or_a_quarter_of_the_memory() -> None:
    assert Settings.read({"data_dir": "d", "inflight_bytes": "2GB"}, {}).most_inflight_bytes == 2 * 10**9
    assert Settings.read({"data_dir": "d", "inflight_bytes": "0"}, {}).most_inflight_bytes == 0
    assert Settings.read({"data_dir": "d", "inflight_bytes": "2GB", "processes": "4"}, {}).most_inflight_bytes == 5 * 10**8
    assert Settings.read({"data_dir": "d"}, {}).most_inflight_bytes == memory_bytes() // 4
