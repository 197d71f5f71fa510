"""HTTP receiver: reads the body of a GET from the socket straight into the caller's memory.

httpx copies a body four times on its way through Python. For bodies of megabytes, these copies are most of a trainer's CPU
time for data. Here the kernel writes a body directly to its final memory.
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

_READ_BYTES = 1 << 20  # per read: small enough that the next reader finds the bytes in the CPU cache
_OK = 200
_MAX_BODY = 2 << 30  # twice the largest batch; a larger body does not answer this request
_MAX_REFUSAL = 16 << 20  # for any other status; the server sends a sentence, other programs a page
_PAUSE_SECONDS = 60.0  # without requests ahead, after one has failed


class Origin(NamedTuple):
    """A server, and the header lines of every request to it."""

    scheme: str
    host: str
    port: int
    headers: bytes


class Request(NamedTuple):
    """A GET of one `target` (encoded path and query); `then` is the likely next target.

    The server may be silent for `silence_seconds` at a time, and must accept a connection within `connect_seconds`.
    """

    origin: Origin
    target: str
    then: str | None
    connect_seconds: float
    silence_seconds: float


class Body:
    """Body of one response. `allocate(nbytes)` returns its memory if the response declares a length."""

    def __init__(self, allocate: Callable[[int], memoryview]) -> None:
        self._allocate = allocate
        self._memory, self._num_bytes = memoryview(b""), 0
        self.status = 0  # of the response; 0 before its head has arrived

    @property
    def received(self) -> memoryview:
        """The bytes received so far; the whole body once the response is complete."""
        return self._memory[: self._num_bytes]

    def read(self, head: Head, channel: Channel) -> None:
        """Read to the end. Raises HttpError: the connection closed before it."""
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
        """Read it in pieces. Raises HttpError: the body is too large.  Raises what `pieces` raises."""
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
    """HTTP/1.1 client that keeps connections open between requests; for one thread at a time.

    It sends a request's likely next target ahead, over a second connection: the server prepares that response while the client
    receives this one. If the next request is for another target, it drops that response. It calls `on_connect` with each new
    socket.
    """

    def __init__(self, on_connect: Callable[[socket.socket], None]) -> None:
        self._on_connect = on_connect
        # Per server: the connection for the next request, and perhaps one with a request sent ahead.
        self._channels: dict[Origin, deque[Channel]] = {}
        # The request sent ahead: server and target.
        self._asked: tuple[Origin, str] | None = None
        self._paused_until = 0.0  # monotonic time; no request is sent ahead before
        self._tls: ssl.SSLContext | None = None

    def get(self, request: Request, body: Body) -> tuple[int, Mapping[str, str]]:
        """Return the status and the headers (lowercase names), once the response is complete in `body`.

        Raises:
            OSError, HttpError: the server is unavailable, or the response is invalid or incomplete.
            SpecError: see tls_context.
        """
        try:
            channel, head = self._answer(request)
            _check(head)
            if head.status == _OK:
                self._ask_ahead(request)
            body.read(head, channel)
        except BaseException:
            self._drop(request.origin)  # the rest of its response would pass for the next one
            raise
        if head.is_last:
            self._end(request.origin, channel)
        return head.status, head.headers

    def close(self) -> None:
        """Close the connections. A thread that still uses them fails; this method does not."""
        # The callback's owner mostly owns this object: the cycle would keep both until the garbage collector runs.
        self._on_connect = socket.socket.close
        for origin in tuple(self._channels):
            self._drop(origin)

    def _answer(self, request: Request) -> tuple[Channel, Head]:
        """Return the head of the response, and its connection.

        It reconnects if the server has closed a kept connection. It repeats a request sent ahead that the server refused: the
        refusal may be due to the response that the client was reading then. `Retry-After: 0` is no refusal: the server still
        prepares the response, and the caller repeats the request on the same connection.
        """
        is_asked = self._turn(request)
        is_kept = request.origin in self._channels
        if is_asked:  # the server can prepare the next response in parallel
            self._ask_ahead(request)
        try:
            channel, head = self._ask(request, is_asked)
            if not is_asked or head.status == _OK or head.headers.get("retry-after") == "0":
                return channel, head
            self._pause()
        except ConnectionError:
            if not is_kept:
                raise
        self._drop(request.origin)
        return self._ask(request, False)

    def _turn(self, request: Request) -> bool:
        """Whether this request was sent ahead. Puts its connection first; drops a request sent ahead that is not wanted."""
        asked, self._asked = self._asked, None
        is_asked = asked == (request.origin, request.target)
        if is_asked:
            self._channels[request.origin].rotate()
        elif asked == (request.origin, request.then):  # this request is repeated
            self._asked = asked
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
                self._pause()  # the attempt may have taken seconds, while a response waits
                return
        try:
            channels[1].send(_get(request.origin, request.then))
            self._asked = (request.origin, request.then)
        except OSError:  # the server has closed this kept connection
            channels.pop().close()

    def _pause(self) -> None:
        self._paused_until = time.monotonic() + _PAUSE_SECONDS

    def _connect(self, request: Request) -> Channel:
        (scheme, host, port, _), seconds = request.origin, request.connect_seconds
        if scheme == "https" and not self._tls:
            self._tls = tls_context()
        made = connect(host, port, seconds)
        with suppress(OSError):  # if it is closed already, the next read raises
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls and scheme == "https":
            try:
                made = self._tls.wrap_socket(made, server_hostname=host)
            except TimeoutError as error:
                raise TimeoutError(f"no TLS connection within {seconds:g} seconds") from error
        self._on_connect(made)
        return Channel(made)

    def _end(self, origin: Origin, channel: Channel) -> None:
        """Close a connection after its last response. Keep the other one and its request sent ahead."""
        channel.close()
        others = deque(other for other in self._channels.pop(origin, ()) if other is not channel)
        if others:
            self._channels[origin] = others

    def _drop(self, origin: Origin) -> None:
        self._asked = None
        for channel in tuple(self._channels.pop(origin, ())):
            channel.close()


def tls_context() -> ssl.SSLContext:
    """Return the trusted certificates. Raises SpecError: those that the environment names cannot be read."""
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
    """Raises HttpError: the body is compressed or too large."""
    _check_size(head.status, head.length or 0)
    if (packed := head.headers.get("content-encoding", "identity")) != "identity":
        raise HttpError(f"the answer is packed with {packed[:40]}, which was not asked for")


def _check_size(status: int, num_bytes: int) -> None:
    most, what = (_MAX_BODY, "batch") if status == _OK else (_MAX_REFUSAL, "refusal")
    if num_bytes > most:
        raise HttpError(f"the answer is of {num_bytes:,} bytes or more, larger than any {what}")
