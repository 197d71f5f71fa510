"""Which server is asked next: arithmetic and a clock."""

from __future__ import annotations

from collections import Counter

import pytest

import penstock.transport.servers
from penstock.transport.servers import Servers

NAMES = ["a", "b", "c"]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def asks_home(servers: Servers) -> bool:
    return servers.turn()[0] == servers.home


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(penstock.transport.servers, "uniform", lambda low, high: (low + high) / 2)
    return Clock()


@pytest.mark.parametrize("num_servers", [1, 2, 3, 5])
def test_ranks_are_spread_evenly_also_when_a_server_is_lost(num_servers: int) -> None:
    names = [str(n) for n in range(num_servers)]
    orders = [Servers(names, rank).addresses for rank in range(num_servers * max(num_servers - 1, 1) * 4)]
    assert all(sorted(order) == names for order in orders)
    assert [order[0] for order in orders[:num_servers]] == names
    for lost in names:
        for place in range(min(num_servers, 2)):
            homeless = Counter(order[place] for order in orders if place == 0 or order[0] == lost)
            assert len(set(homeless.values())) == 1
            assert len(homeless) == num_servers - place


def test_a_turn_asks_each_server_once_and_begins_with_the_one_that_answered(clock: Clock) -> None:
    servers = Servers(NAMES, 1, clock)
    assert servers.turn() == ["b", "c", "a"]
    assert servers.failed("b") == "c"
    servers.answered("c")
    assert servers.turn() == ["c", "b", "a"]
    assert [servers.failed("c"), servers.failed("a"), servers.failed("b")] == ["a", "b", "c"]


def test_a_server_that_asked_to_be_left_alone_is_left_out_of_turns_for_so_long(clock: Clock) -> None:
    servers = Servers(NAMES, 0, clock)
    servers.failed("a", 5.0)
    assert servers.turn() == ["b", "c"]
    assert servers.seconds_until_ready() == 0
    servers.leave_alone("b", 2.0)
    servers.leave_alone("c", 3.0)
    assert servers.turn() == []
    assert servers.seconds_until_ready() == 2
    assert servers.turn(also_busy=True) == ["b", "a", "c"]
    clock.now += 3
    assert servers.turn() == ["b", "c"]


def test_it_is_time_to_go_home_some_while_after_another_server_answered(clock: Clock) -> None:
    servers = Servers(NAMES, 0, clock)
    servers.failed("a")
    clock.now += 1000
    assert not asks_home(servers)
    servers.answered("b")
    clock.now += 29
    assert not asks_home(servers)
    clock.now += 1
    assert asks_home(servers)
    assert servers.turn() == ["a", "b", "c"]
    assert servers.answered("a")
    assert not servers.answered("a")


def test_the_way_home_is_asked_for_less_and_less_often_while_home_fails(clock: Clock) -> None:
    servers = Servers(NAMES, 0, clock)
    waits = []
    for _ in range(6):
        servers.failed("a")
        servers.answered("b")
        began = clock.now
        while not asks_home(servers):
            clock.now += 1
        waits.append(clock.now - began)
    assert waits == [30, 60, 120, 240, 300, 300]
    servers.answered("a")
    servers.failed("a")
    servers.answered("c")
    clock.now += 30
    assert asks_home(servers)


def test_the_way_home_is_not_put_off_where_another_server_fails_and_the_one_that_answers_is_asked_next(clock: Clock) -> None:
    servers = Servers(NAMES, 0, clock)
    servers.failed("a")
    servers.answered("b")
    clock.now += 29
    servers.failed("b")
    servers.answered("c")
    servers.answered("b")
    assert servers.turn() == ["b", "a", "c"]
    clock.now += 1
    assert asks_home(servers)


def test_who_has_answered_is_not_left_alone_any_longer(clock: Clock) -> None:
    servers = Servers(["a"], 0, clock)
    servers.failed("a", after_seconds=3600)
    assert servers.turn() == []
    servers.answered("a")
    assert (servers.turn(), servers.seconds_until_ready()) == (["a"], 0)


def test_home_is_left_where_it_failed_another_and_stays_where_it_did_not(clock: Clock) -> None:
    asked = Servers(NAMES, 0, clock)
    for failing in "ab":
        asked.failed(failing)
    asked.answered("c")
    ranks = [Servers(NAMES, rank, clock) for rank in range(6)]
    for servers in ranks:
        servers.learn_from(asked)
    assert [servers.current for servers in ranks] == ["c"] * 6
    ranks[0].answered("c")
    clock.now += 30
    assert asks_home(ranks[0])
    asked.answered("a")
    another = Servers(NAMES, 0, clock)
    another.learn_from(asked)
    another.learn_from(another)
    assert another.current == "a"


def test_home_that_failed_once_more_is_left_alone_from_then_on(clock: Clock) -> None:
    servers = Servers(NAMES, 0, clock)
    servers.failed("a")
    servers.answered("b")
    clock.now += 29
    for name in "bca":
        servers.failed(name)
    servers.answered("b")
    clock.now += 59
    assert not asks_home(servers)
    clock.now += 1
    assert asks_home(servers)


def test_ranks_that_lost_their_home_together_do_not_come_back_together() -> None:
    clock = Clock()
    lost = [Servers(NAMES, 0, clock) for _ in range(100)]
    for servers in lost:
        servers.failed("a")
        servers.answered("b")
    clock.now += 15
    assert not any(asks_home(servers) for servers in lost)
    clock.now += 15
    assert 10 < sum(asks_home(servers) for servers in lost) < 90
    clock.now += 15.1
    assert all(asks_home(servers) for servers in lost)
