"""Names: connections to hosts whose addresses are looked up in threads that can be left behind, and then known for a while.

Nothing ends a look-up but the resolver, and Python's own time limit begins when the addresses are there. A thread that is left
behind goes on: where a resolver's first server is silent, a look-up takes longer than an attempt may.
"""

from __future__ import annotations

import socket
import time
from copy import copy
from threading import Thread

from penstock.threads import own_thread

_KNOWN_SECONDS = 30.0  # of several connections an epoch, each would wait for the name again
_OLD_SECONDS = 1.0  # of a look-up, before those that were known are taken once more
_MAX_SECONDS = 30.0  # of one look-up, before another is begun beside it
_Address = tuple[str, int]


def connect(host: str, port: int, seconds: float) -> socket.socket:
    """A connection to one of a host's addresses, each of which has so many seconds to take it; so has the look-up of the name.

    Raises OSError: there is no address, or none takes it. Raises UnicodeError: that is no name.
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
        first = None  # in its traceback is this call


class _Name:
    """The addresses of one host and port; the one that answered last before the others."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._thread: Thread | None = None  # that looks it up
        self._begun_at = 0.0
        self._addresses: tuple[_Address, ...] = ()
        self._failure: Exception | None = None
        self._known_until = 0.0

    def addresses(self, seconds: float) -> tuple[_Address, ...]:
        """As they are known, or as they are looked up; where that takes long or fails, those that were known before.

        Raises TimeoutError: there are none, and it takes longer. Raises what getaddrinfo does.
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
            raise copy(self._failure)  # what is raised refers to those whom it ends
        return self._addresses

    def answers(self, address: _Address) -> None:
        """This address takes connections."""
        self._addresses = (address, *(other for other in self._addresses if other != address))

    def forget(self) -> None:
        """None of them does: by now the host may have others."""
        self._addresses, self._known_until = (), 0.0

    def _looking_up(self) -> Thread | None:
        """The thread that does: one that somebody has left behind, unless it hangs, or another. None: it is done already."""
        thread, self._thread = self._thread, None
        if not (thread and thread.is_alive() and time.monotonic() < self._begun_at + _MAX_SECONDS):
            thread = own_thread("name", self._look_up)
            self._begun_at = time.monotonic()
            try:
                thread.start()
            except RuntimeError:  # no more can be started now: then it may take longer
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
    """A socket's address as text. One that is valid on one of the machine's links alone names that."""
    return f"{host}%{scope}" if scope else host


_names = dict[tuple[str, int], _Name]()  # of this process, for all of its connections
