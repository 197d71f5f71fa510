"""Replicas of one rank: addresses, the order of preference, and what happens when replicas come and go."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Collection
from itertools import combinations, pairwise
from operator import ne
from statistics import mean
from typing import Any

import pytest

import penstock.servers
from penstock import SpecError
from penstock.access import Access
from penstock.servers import Servers, by_preference, parse_servers, replicas_of

NUM_RANKS = 64
NAME = "http://data:8000"


def names(number: int, prefix: str = "http://data") -> list[str]:
    return [f"{prefix}-{n}:8000" for n in range(number)]


# Addresses


@pytest.mark.parametrize(
    "given",
    [
        "", " ", "ftp://a:1", "http://", "::1", "a:port", "a:65536", "a:0", "http://a..b:80", "a" * 64, [],
        "a:1?x=1", "a:1/b#c", "http:/a:1", "http://[abc]:80", "http://http://a:1", "a b:1", "a:1 /b",
        "a-{0..}:1", "a-{3..0}:1", "a-{0..99999}:1", "a-{0..1}-{0..1}:1", ["a:1", "a-{1..0}:1"], "a:{65535..65536}",
    ],
)  # fmt: skip
def test_invalid_address_is_refused(given: Any) -> None:
    with pytest.raises(SpecError, match="servers must be addresses such as"):
        parse_servers(given, Access())


@pytest.mark.parametrize("address", ["http://secret@host:8000", "me:se cret@host", ["a:1", " me:secr/et@host:0"]])
def test_address_with_an_unencoded_password_is_refused_without_printing_it(address: str | list[str]) -> None:
    with pytest.raises(SpecError, match="the name or the token in an address is invalid") as raised:
        parse_servers(address, Access())
    assert "cret" not in str(raised.value)


def test_invalid_address_is_refused_without_its_password() -> None:
    with pytest.raises(SpecError, match="not 'http://a..b:80'"):
        parse_servers("http://me:secret@a..b:80", Access())


@pytest.mark.parametrize(
    ("given", "addresses"),
    [
        ("data-{0..2}.data:8000", ["http://data-0.data:8000", "http://data-1.data:8000", "http://data-2.data:8000"]),
        ("https://data-{08..10}/train", ["https://data-08/train", "https://data-09/train", "https://data-10/train"]),
        (["a-{9..10}:1/", "a-10:1", "b:{8000..8001}"], ["http://a-9:1", "http://a-10:1", "http://b:8000", "http://b:8001"]),
        ("10.0.0.{7..8}:80", ["http://10.0.0.7:80", "http://10.0.0.8:80"]),
    ],
)
def test_range_in_braces_stands_for_several_addresses(given: str | list[str], addresses: list[str]) -> None:
    assert list(parse_servers(given, Access())) == addresses


def test_each_server_of_a_range_has_the_token_of_the_address() -> None:
    access = Access()
    assert parse_servers("https://me:one@data-{0..1}", access) == ("https://data-0", "https://data-1")
    headers = access.headers("https://data-0")
    assert headers == access.headers("https://data-1") == access.headers("https://data-1#10.0.0.7")
    assert headers["Authorization"].startswith("Basic ")
    assert access.headers("https://data-2") == {}


# Order of preference


def largest_share(choices: Collection[str], num_replicas: int) -> float:
    """The ranks of the busiest replica, in even shares."""
    return max(Counter(choices).values()) * num_replicas / len(choices)


@pytest.mark.parametrize("num_ranks", [1, 8, 64, 200])
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 5])
def test_no_replica_has_more_than_its_share_of_ranks(num_ranks: int, num_replicas: int) -> None:
    orders = [by_preference(names(num_replicas), rank, num_ranks) for rank in range(num_ranks)]
    assert all(sorted(order) == names(num_replicas) for order in orders)
    assert max(Counter(order[0] for order in orders).values()) == -(-num_ranks // num_replicas)


@pytest.mark.parametrize("num_replicas", [2, 3, 4, 5])
def test_ranks_of_lost_replicas_spread_evenly_over_the_others(num_replicas: int) -> None:
    replicas = names(num_replicas)
    orders = [by_preference(replicas, rank, NUM_RANKS) for rank in range(NUM_RANKS)]
    for lost in replicas:
        moved = Counter(order[1] for order in orders if order[0] == lost)
        assert max(moved.values()) - min(moved.values()) <= 1
    for num_left in range(1, num_replicas + 1):
        shares = [
            largest_share([next(replica for replica in order if replica in left) for order in orders], num_left)
            for left in combinations(replicas, num_left)
        ]
        assert max(shares) < 1.2
        assert mean(shares) < 1.1


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
def test_added_replica_moves_few_ranks_but_its_own(num_replicas: int) -> None:
    moved = []
    for cluster in range(20):
        replicas = names(num_replicas + 1, f"http://cluster-{cluster}")
        for rank in range(NUM_RANKS):
            before = by_preference(replicas[:-1], rank, NUM_RANKS)[0]
            moved.append(by_preference(replicas, rank, NUM_RANKS)[0] != before)
    assert mean(moved) < 1.4 / (num_replicas + 1)  # rank modulo n: n / (n + 1)


def test_order_of_addresses_does_not_matter() -> None:
    assert by_preference(names(5), 7, NUM_RANKS) == by_preference(reversed(names(5)), 7, NUM_RANKS)


# Health


class Network:
    """Replicas, and the clock of a simulation. `listed` are those that DNS has, `ready` those that answer."""

    def __init__(self, *replicas: str) -> None:
        self.listed, self.ready = {*replicas}, {*replicas}
        self.now = 100.0

    def clock(self) -> float:
        return self.now


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    network = Network()
    monkeypatch.setattr(penstock.servers, "replicas_of", lambda _: tuple(network.listed))
    monkeypatch.setattr(penstock.servers, "is_ready", lambda address, _: address in network.ready)
    monkeypatch.setattr(penstock.servers, "_GLANCE_SECONDS", 60.0)
    return network


class Ranks:
    """Ranks that each make a request a second, and what became of their requests."""

    def __init__(self, network: Network, addresses: list[str]) -> None:
        self.network = network
        self.servers = [Servers(addresses, rank, NUM_RANKS, clock=network.clock) for rank in range(NUM_RANKS)]
        self.at = [""] * NUM_RANKS
        self.num_failed = 0

    def go_on(self, seconds: int) -> None:
        for _ in range(seconds):
            self.network.now += 1
            for rank, servers in enumerate(self.servers):
                self.at[rank] = self._request(servers)

    def _request(self, servers: Servers) -> str:
        for address in servers.to_try():
            if address in self.network.ready:
                servers.answered(address)
                return address
            servers.failed(address)
            self.num_failed += 1
        raise AssertionError("no replica answers")

    def leave(self, replica: str) -> None:
        """The replica says that it will stop."""
        self.network.ready.discard(replica)
        for servers in self.servers:
            if servers.current == replica:
                servers.leave(replica)

    @property
    def share(self) -> float:
        assert {*self.at} <= self.network.ready
        return largest_share(self.at, len(self.network.ready))


def replica(number: int) -> str:
    return f"{NAME}#10.0.0.{number}"


def test_ranks_use_added_replicas_within_a_minute_and_leave_removed_ones_at_once(network: Network) -> None:
    network.listed |= {replica(1)}
    network.ready |= network.listed
    ranks = Ranks(network, [NAME])
    ranks.go_on(1)
    for number in (2, 3, 4, 5):
        network.listed.add(replica(number))
        network.ready.add(replica(number))
        before = [*ranks.at]
        ranks.go_on(60)
        assert ranks.share <= 1 + number / NUM_RANKS
        assert mean(map(ne, ranks.at, before)) < 1.5 / number
    for number in (3, 1, 5):
        network.listed.discard(replica(number))
        ranks.leave(replica(number))
        ranks.go_on(1)
        assert replica(number) not in ranks.at
        ranks.go_on(60)
        assert ranks.share <= 1 + len(network.listed) / NUM_RANKS
    assert ranks.num_failed == 0


def test_ranks_spread_over_the_replicas_that_answer(network: Network) -> None:
    replicas = names(5)
    network.ready |= {replicas[0]}
    ranks = Ranks(network, replicas)
    ranks.go_on(1)
    for ready in ((0, 1), (0, 1, 2, 3, 4), (1, 3, 4), (1,), (0, 1, 2, 4)):
        network.ready = {replicas[number] for number in ready}
        ranks.go_on(1)
        failed = ranks.num_failed
        ranks.go_on(60)
        assert ranks.share < 1.2
        assert ranks.num_failed == failed  # a replica that is down costs a rank one attempt


def test_ranks_return_to_a_replica_at_different_times(network: Network) -> None:
    replicas = names(2)
    network.ready |= {*replicas}
    ranks = Ranks(network, replicas)
    network.ready.discard(replicas[0])
    ranks.go_on(1)
    network.ready.add(replicas[0])
    ranks.go_on(9)
    assert ranks.at.count(replicas[0]) == 0
    returned = []
    for _ in range(21):
        ranks.go_on(1)
        returned.append(ranks.at.count(replicas[0]))
    assert returned[-1] == NUM_RANKS // 2
    assert max(now - before for before, now in pairwise(returned)) < 10


def test_new_ips_are_found_after_all_replicas_failed(network: Network) -> None:
    network.listed |= {replica(1), replica(2)}
    network.ready |= network.listed
    servers = Servers([NAME], clock=network.clock)
    servers.answered(servers.to_try()[0])
    network.listed, network.ready = {replica(3), replica(4)}, {replica(3), replica(4)}
    for address in servers.to_try():
        servers.failed(address)
    network.now += 1
    assert {*servers.to_try()} == network.listed


def test_replicas_stay_while_dns_fails(network: Network) -> None:
    network.listed |= {replica(1), replica(2)}
    servers = Servers([NAME], clock=network.clock)
    assert {*servers.to_try()} == {replica(1), replica(2)}
    network.listed.clear()
    network.now += 60
    assert {*servers.to_try()} == {replica(1), replica(2)}


def test_request_does_not_wait_for_a_replica_that_drops_packets(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    looking, arrived = threading.Event(), threading.Event()

    def is_ready(*_: object) -> bool:
        looking.set()
        return arrived.wait(60)

    monkeypatch.setattr(penstock.servers, "is_ready", is_ready)
    monkeypatch.setattr(penstock.servers, "_GLANCE_SECONDS", 0.01)
    servers = Servers(names(2), clock=network.clock)
    preferred = servers.current
    other = servers.failed(preferred)
    network.now += 60
    began = time.monotonic()
    assert servers.to_try() == [other, preferred]
    assert looking.wait(60)
    assert servers.to_try() == [other, preferred]
    assert time.monotonic() - began < 30
    arrived.set()
    while servers.to_try() != [preferred, other]:
        assert time.monotonic() - began < 60
        time.sleep(0.01)


def asked(network: Network) -> tuple[Servers, str, str, str]:
    """Servers that all answer, and their order."""
    servers = Servers(names(3), clock=network.clock)
    first, second, third = servers.to_try()
    return servers, first, second, third


def test_replicas_that_failed_come_last(network: Network) -> None:
    servers, first, second, third = asked(network)
    assert servers.failed(first) == second
    network.now += 1
    assert servers.to_try() == [second, third, first]
    assert servers.failed(second) == third
    network.now += 1
    assert servers.failed(third) == first
    servers.answered(third)
    assert servers.to_try() == [third, first, second]


def test_replicas_are_left_out_until_their_retry_after_has_passed(network: Network) -> None:
    servers, first, second, third = asked(network)
    servers.failed(first, 5.0)
    assert servers.to_try() == [second, third]
    assert servers.seconds_until_ready() == 0
    servers.leave_alone(second, 2.0)
    servers.leave_alone(third, 3.0)
    assert servers.to_try() == []
    assert servers.seconds_until_ready() == 2
    assert servers.to_try(also_busy=True) == [second, third, first]
    network.now += 3
    assert servers.to_try() == [second, third]
    servers.answered(first)
    assert servers.to_try() == [first, second, third]


def test_replicas_that_will_stop_come_last_until_they_are_ready_again(network: Network) -> None:
    servers, first, second, third = asked(network)
    assert servers.leave(first) == second
    network.now += 1
    assert servers.leave(second) == third
    network.now += 1
    assert servers.leave(third) == first  # all will stop: the one that said so first serves on
    assert servers.leave(first) == first
    network.now += 1
    assert servers.failed(first) == second  # it has stopped
    network.now += 60
    assert servers.to_try() == [second, third, first]
    network.ready.add(first)
    network.now += 60
    assert servers.to_try() == [first, second, third]
    assert servers.answered(first) is False  # no other has answered since


def test_replica_that_is_ready_but_fails_is_left_alone_for_longer_each_time(network: Network) -> None:
    network.ready |= {*names(3)}
    servers, first, *_ = asked(network)
    failed_at = list[float]()
    for _ in range(3600):
        network.now += 1
        for address in servers.to_try():
            if address != first:
                servers.answered(address)
                break
            servers.failed(address)
            failed_at.append(network.now)
    pauses = [after - before for before, after in pairwise(failed_at)]
    assert 10 <= pauses[0] <= 32
    assert all(300 <= pause <= 332 for pause in pauses[5:])
    assert len(failed_at) < 20


def test_replica_that_still_counts_comes_after_one_that_has_counted(network: Network) -> None:
    servers, first, second, third = asked(network)
    servers.leave_alone(first, 1.0)
    servers.answered(second)
    network.now += 2
    assert servers.to_try() == [second, third, first]
    network.ready.add(first)
    network.now += 30
    assert servers.to_try()[0] == first


def test_return_to_a_preferred_replica_is_reported_once(network: Network) -> None:
    servers, first, second, _ = asked(network)
    servers.answered(first)
    servers.failed(first)
    assert not servers.answered(second)
    network.ready.add(first)
    network.now += 60
    assert servers.to_try()[0] == first
    assert servers.answered(first)
    assert not servers.answered(first)


def test_only_replica_is_not_looked_at(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(*_: object) -> bool:
        raise AssertionError("it looked")

    monkeypatch.setattr(penstock.servers, "is_ready", look)
    monkeypatch.setattr(penstock.servers, "replicas_of", look)
    servers = Servers(["http://10.0.0.7:8000"], clock=network.clock)
    servers.failed("http://10.0.0.7:8000")
    network.now += 60
    assert servers.to_try() == ["http://10.0.0.7:8000"]


# DNS


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What the resolver has, by name."""
    found: dict[str, list[str]] = {}

    def getaddrinfo(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        if host not in found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        families = [(socket.AF_INET6 if ":" in ip else socket.AF_INET, ip) for ip in found[host]]
        return [(family, socket.SOCK_STREAM, 6, "", (ip, port)) for family, ip in families]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return found


@pytest.mark.parametrize(
    ("ips", "expected"),
    [
        (["10.0.0.7"], [NAME]),
        (["::1", "127.0.0.1"], [NAME]),
        (["10.0.0.7", "10.0.0.7"], [NAME]),
        (["10.0.0.8", "10.0.0.7"], [replica(7), replica(8)]),
        (["10.0.0.8", "10.0.0.7", "fd00::8", "fd00::7"], [replica(7), replica(8)]),
        (["10.0.0.7", "fd00::8", "fd00::7"], [NAME]),
        (["fd00::8", "fd00::7"], [f"{NAME}#fd00::7", f"{NAME}#fd00::8"]),
    ],
)
def test_each_ip_of_a_name_is_a_replica(records: dict[str, list[str]], ips: list[str], expected: list[str]) -> None:
    assert replicas_of(NAME) == ()
    records["data"] = ips
    assert sorted(replicas_of(NAME)) == expected
