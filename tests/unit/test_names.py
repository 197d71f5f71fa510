"""Names and their addresses: looked up once for several connections, and by no attempt for nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.transport import names
from penstock.transport.names import connect

LookUp = Callable[..., list[Any]]
# Hosts have the addresses 127.0.0.11 and so on here: no other test takes a port of these.


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_names", {})


@contextmanager
def listening(*hosts: str, port: int = 0) -> Iterator[int]:
    with socket.create_server((hosts[0], port)) as listener:
        bound = listener.getsockname()[1]
        if len(hosts) == 1:
            yield bound
        else:
            with listening(*hosts[1:], port=bound):
                yield bound


def found(*hosts: str) -> list[Any]:
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 80)) for host in hosts]


def looked_up(monkeypatch: pytest.MonkeyPatch, answers: LookUp) -> list[str]:
    """The names that are asked for, of which none is an address."""
    asked, resolve = list[str](), socket.getaddrinfo

    def look_up(host: str, *place: Any, **hints: Any) -> list[Any]:
        if host.startswith("127."):
            return resolve(host, *place, **hints)
        asked.append(host)
        return answers(host)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return asked


def place_of(host: str, port: int) -> str:
    with connect(host, port, 5.0) as made:
        return str(made.getpeername()[0])


def test_a_name_is_looked_up_once_for_the_connections_of_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = looked_up(monkeypatch, lambda _: found("127.0.0.11"))
    with listening("127.0.0.11") as port:
        for _ in range(3):
            assert place_of("data-0", port) == "127.0.0.11"
        assert asked == ["data-0"]
        monkeypatch.setattr(names, "_KNOWN_SECONDS", 0.0)
        names._names.clear()
        for _ in range(3):
            place_of("data-0", port)
        assert asked == ["data-0"] * 4


def test_what_a_look_up_finds_that_took_too_long_is_there_for_the_next_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()

    def slow(_: str) -> list[Any]:
        assert may_end.wait(60)
        return found("127.0.0.11")

    asked = looked_up(monkeypatch, slow)
    with listening("127.0.0.11") as port:
        for _ in range(3):
            with pytest.raises(TimeoutError, match=r"no address of data-0 within 0\.01 seconds"):
                connect("data-0", port, 0.01)
        may_end.set()
        assert place_of("data-0", port) == "127.0.0.11"
    assert asked == ["data-0"]


def test_beside_a_look_up_that_hangs_another_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, are_hanging = threading.Event(), [True]

    def answer(_: str) -> list[Any]:
        if are_hanging.pop():
            may_end.wait(60)
        return found("127.0.0.11")

    asked = looked_up(monkeypatch, answer)
    with listening("127.0.0.11") as port:
        with pytest.raises(TimeoutError):
            connect("data-0", port, 0.01)
        are_hanging.append(False)
        monkeypatch.setattr(names, "_MAX_SECONDS", 0.0)
        assert place_of("data-0", port) == "127.0.0.11"
    may_end.set()
    assert asked == ["data-0"] * 2


def test_while_a_name_is_looked_up_again_the_addresses_that_answer_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(names, "_KNOWN_SECONDS", 0.0)
    monkeypatch.setattr(names, "_OLD_SECONDS", 0.01)
    looked_up(monkeypatch, lambda _: found("127.0.0.11"))
    with listening("127.0.0.11") as port:
        place_of("data-0", port)
        looked_up(monkeypatch, lambda _: found("127.0.0.12") if may_end.wait(60) else [])
        assert place_of("data-0", port) == "127.0.0.11"
    with pytest.raises(ConnectionRefusedError):
        connect("data-0", port, 5.0)
    with pytest.raises(TimeoutError):  # as none of them answers
        connect("data-0", port, 0.01)
    may_end.set()
    with listening("127.0.0.12", port=port):
        assert place_of("data-0", port) == "127.0.0.12"


def test_an_address_of_one_link_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def create(address: tuple[str, int], _: float) -> socket.socket:
        tried.append(address)
        raise ConnectionRefusedError

    place = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", (host, 80, 0, scope)) for host, scope in (("fe80::1", 3), ("::1", 0))]
    looked_up(monkeypatch, lambda _: place)
    monkeypatch.setattr(socket, "create_connection", create)
    with pytest.raises(ConnectionRefusedError):
        connect("data-0", 8000, 5.0)
    assert tried == [("fe80::1%3", 8000), ("::1", 8000)]


def test_the_address_that_answered_last_is_tried_first_until_none_does(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = looked_up(monkeypatch, lambda _: found("127.0.0.11", "127.0.0.12", "127.0.0.13"))
    with listening("127.0.0.13", "127.0.0.12") as port:
        assert place_of("data-0", port) == "127.0.0.12"
        with listening("127.0.0.11", port=port):
            assert place_of("data-0", port) == "127.0.0.12"
    with listening("127.0.0.13", port=port):
        assert place_of("data-0", port) == "127.0.0.13"
    assert asked == ["data-0"]
    with pytest.raises(ConnectionRefusedError):
        connect("data-0", port, 5.0)
    with listening("127.0.0.11", port=port):
        assert place_of("data-0", port) == "127.0.0.11"
    assert asked == ["data-0"] * 2


def test_a_name_that_was_not_found_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(_: str) -> list[Any]:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    with listening("127.0.0.11") as port:
        looked_up(monkeypatch, away)
        for _ in range(2):
            with pytest.raises(socket.gaierror, match="Temporary failure"):
                connect("data-0", port, 5.0)
        monkeypatch.setattr(names, "_KNOWN_SECONDS", 0.0)
        for answer in (lambda _: found("127.0.0.11"), away):  # the second time, what was known before is good enough
            looked_up(monkeypatch, answer)
            assert place_of("data-0", port) == "127.0.0.11"


def test_where_no_thread_can_be_started_a_name_is_looked_up_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    looked_up(monkeypatch, lambda _: found("127.0.0.11"))
    monkeypatch.setattr(threading.Thread, "start", start)
    with listening("127.0.0.11") as port:
        assert place_of("data-0", port) == "127.0.0.11"
