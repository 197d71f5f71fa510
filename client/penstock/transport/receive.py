"""Receiving: a GET whose body is read from the socket straight into memory that the caller gives.

httpx copies a body four times on its way through Python. For bodies of megabytes that is most of what a trainer's CPU does for
its data; here the kernel writes them where they are to stay.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

import httpx

from penstock.errors import SpecError
from penstock.transport.channel import Channel, Head, HttpError
from penstock.transport.names import connect

_READ_BYTES = 1 << 20  # at a time: what is done with them finds them in the processor's cache
_OK = 200
_MAX_BODY = 2 << 30  # twice the largest batch; what says it is larger is no answer to what was asked
_MAX_REFUSAL = 16 << 20  # of what is no batch; a server's own are a sentence, and other programs' a page
_PAUSE_SECONDS = 60.0  # without asking ahead, where that has failed


class Origin(NamedTuple):
    """A server, and the lines of headers that every request to it has."""

    scheme: str
    host: str
    port: int
    headers: bytes


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

    What has come so far is `received`.
    """

    def __init__(self, allocate: Callable[[int], memoryview]) -> None:
        self._allocate = allocate
        self._memory, self._num_bytes = memoryview(b""), 0
        self.status = 0  # that it came with, or is still coming

    @property
    def received(self) -> memoryview:
        """What has come so far; the whole body, once the response is there."""
        return self._memory[: self._num_bytes]

    def read(self, head: Head, channel: Channel) -> None:
        """Reads to the end. Raises HttpError: the connection closed before it."""
        self.status = head.status
        if head.length is None:
            self.collect(head.status, channel.chunks())
            return
        self._memory = self._allocate(head.length)
        while self._num_bytes < head.length:
            came = channel.readinto(self._memory[self._num_bytes : self._num_bytes + _READ_BYTES])
            if not came:
                raise HttpError(f"the connection ended {head.length - self._num_bytes} bytes before the end of the answer")
            self._num_bytes += came

    def collect(self, status: int, pieces: Iterable[bytes]) -> None:
        """Takes it in pieces. Raises HttpError: it is larger than any.  Raises what `pieces` raises."""
        self.status = status
        parts: list[bytes] = []
        num_bytes = 0
        try:
            for part in pieces:
                parts.append(part)
                num_bytes += len(part)
                _check_size(status, num_bytes)
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
        self._channels: dict[Origin, deque[Channel]] = {}
        self._asked: tuple[Origin, str] | None = None  # ahead: of whom, and its target
        self._paused_until = 0.0  # nothing is asked ahead before
        self._tls: ssl.SSLContext | None = None

    def get(self, request: Request, body: Body) -> tuple[int, Mapping[str, str]]:
        """One exchange: the status and the headers, by names in small letters, once all is in `body`.

        Raises OSError, HttpError: the server is away, or what came is no answer or not all of it.
        Raises SpecError: see tls_context.
        """
        try:
            channel, head = self._answer(request)
            _check(head)
            if head.status == _OK:
                self._ask_ahead(request)
            body.read(head, channel)
        except BaseException:
            self._drop(request.origin)  # what it would still send belongs to no request
            raise
        if head.is_last:
            self._end(request.origin, channel)
        return head.status, head.headers

    def close(self) -> None:
        """Closes the connections. If a thread that did not end in time still uses them, it fails, and not this."""
        # No more are made. And whoever is told of them mostly has this, too: both would wait for the garbage collector.
        self._on_connect = socket.socket.close
        for origin in tuple(self._channels):
            self._drop(origin)

    def _answer(self, request: Request) -> tuple[Channel, Head]:
        """The answer, as far as its head, and the connection that it comes over.

        A kept connection that the server has closed meanwhile is made anew. A refusal of what was asked ahead is not heard: it
        was said while another answer was being read, perhaps because of that one.
        """
        is_asked = self._turn(request)
        is_kept = request.origin in self._channels
        if is_asked:  # while it is still being made, the server can make the next beside it
            self._ask_ahead(request)
        try:
            channel, head = self._ask(request, is_asked)
            if not is_asked or head.status == _OK:
                return channel, head
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
            self._channels[request.origin].rotate()
        elif asked:
            self._drop(asked[0])
        return is_asked

    def _ask(self, request: Request, is_asked: bool) -> tuple[Channel, Head]:
        channels = self._channels.get(request.origin) or deque((self._connect(request),))
        self._channels[request.origin] = channels
        channel = channels[0]
        channel.silence_seconds = request.silence_seconds
        if not is_asked:
            channel.send(_get(request.origin, request.target))
        return channel, channel.head()

    def _ask_ahead(self, request: Request) -> None:
        if request.then is None or self._asked or time.monotonic() < self._paused_until:
            return
        channels = self._channels[request.origin]
        if len(channels) == 1:
            try:
                channels.append(self._connect(request))
            except OSError:
                self._pause()  # to find out may have taken seconds, while an answer waits to be read
                return
        try:
            channels[1].send(_get(request.origin, request.then))
            self._asked = (request.origin, request.then)
        except OSError:  # a kept one, that the server has closed meanwhile
            channels.pop().close()

    def _pause(self) -> None:
        self._paused_until = time.monotonic() + _PAUSE_SECONDS

    def _connect(self, request: Request) -> Channel:
        (scheme, host, port, _), seconds = request.origin, request.connect_seconds
        if scheme == "https" and not self._tls:
            self._tls = tls_context()
        made = connect(host, port, seconds)
        with suppress(OSError):  # of one that is closed already: to read from it tells that
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls and scheme == "https":
            try:
                made = self._tls.wrap_socket(made, server_hostname=host)
            except TimeoutError as error:
                raise TimeoutError(f"no TLS connection within {seconds:g} seconds") from error
        self._on_connect(made)
        return Channel(made)

    def _end(self, origin: Origin, channel: Channel) -> None:
        """Closes a connection after its last answer. What was asked ahead over the other one comes all the same."""
        channel.close()
        others = deque(other for other in self._channels.pop(origin, ()) if other is not channel)
        if others:
            self._channels[origin] = others

    def _drop(self, origin: Origin) -> None:
        self._asked = None
        for channel in tuple(self._channels.pop(origin, ())):
            channel.close()


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


def _get(origin: Origin, target: str) -> bytes:
    return b"GET %b HTTP/1.1\r\n%b\r\n" % (target.encode("ascii"), origin.headers)


def _check(head: Head) -> None:
    """Raises HttpError: the body is packed, or larger than any."""
    _check_size(head.status, head.length or 0)
    if (packed := head.headers.get("content-encoding", "identity")) != "identity":
        raise HttpError(f"the answer is packed with {packed[:40]}, which was not asked for")


def _check_size(status: int, num_bytes: int) -> None:
    most, what = (_MAX_BODY, "batch") if status == _OK else (_MAX_REFUSAL, "refusal")
    if num_bytes > most:
        raise HttpError(f"the answer is of {num_bytes:,} bytes or more, larger than any {what}")
