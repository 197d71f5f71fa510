"""Receiving: a GET whose body is read from the socket straight into memory that the caller gives.

httpx copies a body four times on its way through Python. For bodies of megabytes that is most of what a trainer's CPU does for
its data; here the kernel writes them where they are to stay.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import httpx

from penstock.errors import SpecError

_READ_BYTES = 1 << 18  # at a time at least; of what breaks off in between, that much may be lost
_READ_SHARE = 4  # and of a large body a quarter of what has come: fewer reads take less of the trainer's CPU
_MOST_READ_BYTES = 1 << 20  # at a time at most: a server whose bytes come slowly would pass for one that is silent
_LARGEST_BODY = 2 << 30  # twice the largest batch; what says it is larger is no answer to what was asked
_LARGEST_REFUSAL = 16 << 20  # of what is no batch; a server's own are a sentence, and other programs' a page
_PAUSE_SECONDS = 60.0  # without asking ahead, where that has failed


class Origin(NamedTuple):
    """A server, and the headers that every request to it has."""

    scheme: str
    host: str
    port: int
    headers: tuple[tuple[str, str], ...]


class Request(NamedTuple):
    """A GET of one `target`, path and query as they are sent; `then` is the target that is likely to be asked for next.

    The server may be silent for `silence_seconds` at a time, and must take a connection within `connect_seconds`.
    """

    origin: Origin
    target: str
    then: str | None
    connect_seconds: float
    silence_seconds: float


class Body:
    """The body of one response: `allocate(nbytes)` gives memory for it, where the response tells its length.

    What has come so far is `received`; `on_bytes()` is called whenever something came.
    """

    def __init__(self, allocate: Callable[[int], memoryview], on_bytes: Callable[[], None]) -> None:
        self._allocate, self._on_bytes = allocate, on_bytes
        self._memory, self._num_bytes = memoryview(b""), 0
        self.status = 0  # that it came with, or is still coming

    @property
    def received(self) -> memoryview:
        """What has come so far; the whole body, once the response is there."""
        return self._memory[: self._num_bytes]

    def read(self, response: http.client.HTTPResponse) -> None:
        """Reads to the end. Raises IncompleteRead: the connection closed before it."""
        self.status = response.status
        if response.length is None:  # chunked, so nobody knows how much comes
            self._collect(response)
            return
        self._memory = self._allocate(response.length)
        while self._num_bytes < len(self._memory):
            most = min(max(_READ_BYTES, self._num_bytes // _READ_SHARE), _MOST_READ_BYTES)
            came = response.readinto(self._memory[self._num_bytes : self._num_bytes + most])
            if not came:
                raise http.client.IncompleteRead(b"", len(self._memory) - self._num_bytes)
            self._num_bytes += came
            self._on_bytes()

    def _collect(self, response: http.client.HTTPResponse) -> None:
        parts: list[bytes] = []
        num_bytes = 0
        try:
            while part := response.read1(_READ_BYTES):
                parts.append(part)
                num_bytes += len(part)
                _check_size(response, num_bytes)
                self._on_bytes()
        finally:
            self._memory = memoryview(b"".join(parts))
            self._num_bytes = len(self._memory)


class Receiver:
    """HTTP/1.1 over connections that are kept open between requests; for one thread at a time.

    What a request says is likely to be asked for next is asked ahead over a second connection, so that the server makes the one
    answer while the other is received. If something else is requested next, that answer is given up. `on_connect` is given
    each new socket.
    """

    def __init__(self, on_connect: Callable[[socket.socket], None]) -> None:
        self._on_connect = on_connect
        # Of each server: the one whose turn it is, and perhaps the one that is asked ahead.
        self._connections: dict[Origin, deque[http.client.HTTPConnection]] = {}
        self._asked: tuple[Origin, str] | None = None  # ahead: of whom, and its target
        self._paused_until = 0.0  # nothing is asked ahead before
        self._tls: ssl.SSLContext | None = None

    def get(self, request: Request, body: Body) -> tuple[int, httpx.Headers]:
        """One exchange: the status and the headers, once all is in `body`.

        Raises OSError, HTTPException: the server is away, or what came is no answer or not all of it.
        Raises SpecError: see tls_context.
        """
        try:
            response = self._answer(request)
            with response:  # one that ends its connection keeps the socket for itself
                _check(response)
                if response.status == http.client.OK and not response.will_close:
                    self._ask_ahead(request)
                body.read(response)
        except BaseException as error:
            self._drop(request.origin)  # what it would still send belongs to no request
            if type(error) is http.client.BadStatusLine:  # what is no HTTP stands in it, and is nothing for a log
                raise http.client.HTTPException("what came is no HTTP") from error
            raise
        if response.will_close:
            self._drop(request.origin)
        # As bytes: httpx takes text for ASCII, and a damaged header may be of any characters.
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.getheaders()]
        return response.status, httpx.Headers(headers)

    def close(self) -> None:
        """Closes the connections. If a thread that did not end in time still uses them, it fails, and not this."""
        # No more are made. And whoever is told of them mostly has this, too: both would wait for the garbage collector.
        self._on_connect = socket.socket.close
        for origin in tuple(self._connections):
            self._drop(origin)

    def _answer(self, request: Request) -> http.client.HTTPResponse:
        """The answer, as far as its headers.

        A kept connection that the server has closed meanwhile is made anew. A refusal of what was asked ahead is not heard: it
        was said while another answer was being read, perhaps because of that one.
        """
        is_asked = self._turn(request)
        is_kept = request.origin in self._connections
        if is_asked:  # while it is still being made, the server can make the next beside it
            self._ask_ahead(request)
        try:
            response = self._ask(request, is_asked)
            if not is_asked or response.status == http.client.OK:
                return response
            self._pause()
        except ConnectionError:
            if not is_kept:
                raise
        self._drop(request.origin)
        return self._ask(request, False)

    def _turn(self, request: Request) -> bool:
        """Whether this was asked ahead: then that connection comes first. What else was asked ahead is given up."""
        asked, self._asked = self._asked, None
        is_asked = asked == (request.origin, request.target)
        if is_asked:
            self._connections[request.origin].rotate()
        elif asked:
            self._drop(asked[0])
        return is_asked

    def _ask(self, request: Request, is_asked: bool) -> http.client.HTTPResponse:
        connections = self._connections.get(request.origin) or deque((self._connect(request),))
        self._connections[request.origin] = connections
        connections[0].sock.settimeout(request.silence_seconds)
        if not is_asked:
            _send(connections[0], request.origin, request.target)
        return connections[0].getresponse()

    def _ask_ahead(self, request: Request) -> None:
        if request.then is None or self._asked or time.monotonic() < self._paused_until:
            return
        connections = self._connections[request.origin]
        if len(connections) == 1:
            try:
                connections.append(self._connect(request))
            except OSError:
                self._pause()  # to find out may have taken seconds, while an answer waits to be read
                return
        try:
            _send(connections[1], request.origin, request.then)
            self._asked = (request.origin, request.then)
        except OSError:  # a kept one, that the server has closed meanwhile
            connections.pop().close()

    def _pause(self) -> None:
        self._paused_until = time.monotonic() + _PAUSE_SECONDS

    def _connect(self, request: Request) -> http.client.HTTPConnection:
        (scheme, host, port, _), seconds = request.origin, request.connect_seconds
        made = http.client.HTTPConnection(host, port, timeout=seconds)
        if scheme == "https":
            self._tls = self._tls or tls_context()
            made = http.client.HTTPSConnection(host, port, timeout=seconds, context=self._tls)
        try:
            made.connect()
        except TimeoutError as error:
            raise TimeoutError(f"no connection within {seconds:g} seconds") from error
        self._on_connect(made.sock)
        return made

    def _drop(self, origin: Origin) -> None:
        self._asked = None
        for connection in tuple(self._connections.pop(origin, ())):
            connection.close()


def tls_context() -> ssl.SSLContext:
    """Which certificates are trusted. Raises SpecError: those that the environment names cannot be read."""
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        names = [name for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if name in os.environ]
        named = ", ".join(f"{name}={os.environ[name]}" for name in names)
        raise SpecError(
            f"the certificates to trust cannot be read: {error}. Correct or unset {named}.", ("servers",)
        ) from error


def _send(connection: http.client.HTTPConnection, origin: Origin, target: str) -> None:
    connection.putrequest("GET", target, skip_host=True, skip_accept_encoding=True)
    for name, value in origin.headers:
        connection.putheader(name, value)
    connection.endheaders()


def _check(response: http.client.HTTPResponse) -> None:
    """Whether the headers came whole. http.client takes those that end in mid-line for all there are.

    Raises HTTPException: they did not, or the body is packed, or larger than any.
    """
    _check_size(response, response.length or 0)
    if response.length is None and not response.chunked:
        raise http.client.HTTPException("the answer does not tell its length, or its headers were cut")
    if (packed := response.getheader("Content-Encoding", "identity")) != "identity":
        raise http.client.HTTPException(f"the answer is packed with {packed}, which was not asked for")


def _check_size(response: http.client.HTTPResponse, num_bytes: int) -> None:
    most, what = (_LARGEST_BODY, "batch") if response.status == http.client.OK else (_LARGEST_REFUSAL, "refusal")
    if num_bytes > most:
        raise http.client.HTTPException(f"the answer is of {num_bytes:,} bytes or more, larger than any {what}")
