from pathlib import Path

import pytest

from penstock_server.inflight import InFlight
from penstock_server.memory import memory_bytes
from penstock_server.problems import Busy
from penstock_server.settings import Settings


def test_what_is_beyond_the_budget_is_refused_until_something_is_given_back() -> None:
    in_flight = InFlight(100)
    first, second = in_flight.hold(2, 30), in_flight.hold(1, 40)
    first.take()
    second.take()
    with pytest.raises(
        Busy, match="2 responses that are being read hold 100 bytes, this one would hold 1, .* --inflight-bytes"
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


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/", {"memory.max": "5000000\n"}, 5_000_000),
        ("0::/a/b", {"a/memory.max": "6000000\n", "a/b/memory.max": "max\n"}, 6_000_000),
        ("5:cpu:/x\n4:memory:/docker/12", {"memory/memory.limit_in_bytes": "7000000\n"}, 7_000_000),
        ("0::/", {"memory.max": "max\n"}, None),
        (None, {}, None),
    ],
    ids=["container", "group above", "version 1", "no limit", "no groups"],
)
def test_the_memory_of_a_container_counts_not_that_of_its_machine(
    tmp_path: Path, groups: str | None, files: dict[str, str], limit: int | None
) -> None:
    contents = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    if groups is not None:
        contents["proc/self/cgroup"] = groups + "\n"
    for name, text in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    machine = memory_bytes(tmp_path / "none")
    assert machine > 10_000_000
    assert memory_bytes(tmp_path) == (limit or machine)


def test_the_budget_is_what_was_set_or_a_quarter_of_the_memory() -> None:
    assert Settings.read({"data_dir": "d", "inflight_bytes": "2GB"}, {}).most_inflight_bytes == 2 * 10**9
    assert Settings.read({"data_dir": "d", "inflight_bytes": "0"}, {}).most_inflight_bytes == 0
    assert Settings.read({"data_dir": "d", "inflight_bytes": "2GB", "processes": "4"}, {}).most_inflight_bytes == 5 * 10**8
    assert Settings.read({"data_dir": "d"}, {}).most_inflight_bytes == memory_bytes() // 4
