"""Connections to hosts by name: lookups run in threads that can be abandoned, and their results are cached.

A lookup cannot be cancelled, and Python's connect timeout begins only after it. An abandoned thread continues: if a
resolver's first server is silent, a lookup takes longer than one attempt may.
"""

from __future__ import annotations

import socket
import time
from copy import copy
from threading import Thread

from penstock.threads import own_thread

_KNOWN_SECONDS = 30.0  # cache lifetime: without it each connection of an epoch would wait for a lookup
_OLD_SECONDS = 1.0  # of a lookup, before the expired addresses are used again
_MAX_SECONDS = 30.0  # of a lookup, before another one starts in parallel
_Address = tuple[str, int]


def connect(host: str, port: int, seconds: float) -> socket.socket:
    """Connect to one of a host's addresses. The lookup and each address have a timeout of `seconds`.

    Raises:
        OSError: the host has no address, or no address accepts the connection.
        UnicodeError: the host name is invalid.
    """
    name = _names.setdefault((host, port), _Name(host, port))
    first: OSError | None = None
    for address in name.addresses(seconds):
        try:
            made = socket.create_connection(address, seconds)
        except TimeoutError:
            first = first or TimeoutError(f"no connection within {seconds:g} seconds")
        except OSError as error:
            first = first or error
        else:
            name.answers(address)
            return made
    name.forget()
    try:
        raise first or OSError(f"{host} has no address")
    finally:
        first = None  # its traceback refers to this frame: break the cycle


class _Name:
    """Addresses of one host and port; the last that answered comes first."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._thread: Thread | None = None  # of the running lookup
        self._begun_at = 0.0
        self._addresses: tuple[_Address, ...] = ()
        self._failure: Exception | None = None
        self._known_until = 0.0

    def addresses(self, seconds: float) -> tuple[_Address, ...]:
        """Return cached or looked-up addresses; if the lookup is slow or fails, the expired ones.

        Raises TimeoutError: no address is cached, and the lookup takes longer than `seconds`. Raises what getaddrinfo raises.
        """
        if time.monotonic() < self._known_until:
            return self._addresses
        if thread := self._looking_up():
            thread.join(min(seconds, _OLD_SECONDS) if self._addresses else seconds)
        if self._addresses:
            return self._addresses
        if thread and thread.is_alive():
            raise TimeoutError(f"no address of {self._host} within {seconds:g} seconds")
        if self._failure:
            raise copy(self._failure)  # a raised exception refers to its frames; the stored one must not
        return self._addresses

    def answers(self, address: _Address) -> None:
        """Record that this address accepts connections."""
        self._addresses = (address, *(other for other in self._addresses if other != address))

    def forget(self) -> None:
        """Forget all addresses: none accepts connections, and the host may have new ones."""
        self._addresses, self._known_until = (), 0.0

    def _looking_up(self) -> Thread | None:
        """Return the lookup's thread: an abandoned one unless it hangs, or a new one. None: the lookup is done."""
        thread, self._thread = self._thread, None
        if not (thread and thread.is_alive() and time.monotonic() < self._begun_at + _MAX_SECONDS):
            thread = own_thread("name", self._look_up)
            self._begun_at = time.monotonic()
            try:
                thread.start()
            except RuntimeError:  # no more threads can start: look up here, even if it takes longer
                self._look_up()
                return None
        self._thread = thread
        return thread

    def _look_up(self) -> None:
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            self._failure = error
        else:
            self._addresses, self._failure = tuple((_host_of(*place), self._port) for *_, place in found), None
            self._known_until = time.monotonic() + _KNOWN_SECONDS


def _host_of(host: str, _port: int, _flow: int = 0, scope: int = 0) -> str:
    """Format a socket's address as text. A link-local address includes its scope."""
    return f"{host}%{scope}" if scope else host


_names = dict[tuple[str, int], _Name]()  # shared by all connections of this process
