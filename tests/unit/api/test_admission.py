"""The budget of bytes in flight."""

from __future__ import annotations

import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from starlette.testclient import TestClient

from penstock_server.api import batches
from penstock_server.api.admission import DistinctLimit, InFlight, Reservation, current_caller
from penstock_server.app import create_app
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import open_catalog
from penstock_server.machine import memory_bytes
from penstock_server.problems import BadRow, Busy, LimitExceeded
from penstock_server.settings import Settings
from support.corpora import write_numbered


def test_response_beyond_the_budget_is_refused_until_bytes_are_released() -> None:
    in_flight = InFlight(100)
    first, second = in_flight.admit(2, 30), in_flight.admit(1, 40)
    first.take()
    second.take()
    with pytest.raises(Busy, match="of 100 bytes for responses in flight is used up, and this one needs 1.*--inflight-bytes"):
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


def response(in_flight: InFlight, caller: str, nbytes: int, waits_seconds: float | None = None) -> tuple[Reservation, Mock]:
    """A response that has taken its bytes, and what closes it; it waits for its client since then, if at all."""
    current_caller.set(caller)
    reservation = in_flight.admit(1, nbytes)
    reservation.take()
    reservation.abort = Mock()
    if waits_seconds is not None:
        reservation.waits_since = time.monotonic() - waits_seconds
    return reservation, reservation.abort


def test_caller_within_its_share_gets_the_room_of_the_one_above_it_that_waits_longest() -> None:
    in_flight = InFlight(100)
    closed = [response(in_flight, "crowd", 20, seconds)[1] for seconds in (2.0, 4.0, 0.1, 3.0, None)]
    response(in_flight, "one", 30)
    assert [close.called for close in closed] == [False, True, False, True, False]
    assert in_flight.reserved_bytes == 90
    with pytest.raises(Busy):
        response(in_flight, "one", 30)  # it would be above its share
    with pytest.raises(Busy):
        response(in_flight, "crowd", 20)
    assert sum(close.called for close in closed) == 2


def test_no_response_is_closed_if_that_makes_too_little_room() -> None:
    in_flight = InFlight(100)
    _, close = response(in_flight, "crowd", 20, 4.0)
    response(in_flight, "crowd", 80)
    with pytest.raises(Busy):
        response(in_flight, "one", 40)
    close.assert_not_called()


@pytest.mark.parametrize(("waits_seconds", "is_closed"), [(4.0, False), (6.0, True)])
@pytest.mark.parametrize("caller", ["crowd", "stranger"])
def test_stalled_response_gives_way_to_its_own_caller_and_to_one_that_holds_no_more(
    caller: str, waits_seconds: float, is_closed: bool
) -> None:
    in_flight = InFlight(100)
    _, close = response(in_flight, "crowd", 50, waits_seconds)
    response(in_flight, "other", 50)
    current_caller.set(caller)
    if is_closed:
        in_flight.admit(1, 50).take()
    else:
        with pytest.raises(Busy):
            in_flight.admit(1, 50)
    assert close.called == is_closed


def test_closed_response_takes_and_releases_no_more_bytes() -> None:
    in_flight = InFlight(100)
    closed, _ = response(in_flight, "crowd", 100, 1.0)
    response(in_flight, "one", 50)
    closed.measured(500)
    closed.release()
    assert (in_flight.num_responses, in_flight.reserved_bytes) == (1, 50)


def test_number_of_different_values_of_a_caller_is_bounded_for_a_while() -> None:
    limit = DistinctLimit(2, 60, "specs")
    for value in (1, 2, 1):
        limit.check("one", value)
    with pytest.raises(LimitExceeded, match="has used 2 different specs, the limit for 60 seconds. Retry in 60 seconds"):
        limit.check("one", 3)
    limit.check("other", 3)
    passed = DistinctLimit(1, 0, "specs")
    passed.check("one", 1)
    passed.check("one", 2)
