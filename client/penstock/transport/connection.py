"""The connection: one GET, one body. Whoever receives in another way replaces what is in here, and nothing else."""

from __future__ import annotations

import socket
import threading
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

import httpx

from penstock import __version__
from penstock.errors import WireError
from penstock.threads import Flag
from penstock.transport.buffers import Buffers
from penstock.transport.channel import HttpError
from penstock.transport.probe import by_proxy, http_client, proxy_of, tls_refusal
from penstock.transport.receive import Body, Origin, Receiver, Request
from penstock.transport.responses import TransientError, UnexpectedServer, doubt, failure_of
from penstock.wire import content_digest

_spare: deque[Buffers] = deque(maxlen=1)  # what the last connection of this process received into, for the next one
_WAIT_SECONDS = 2  # before a server that reads or tokenizes what was asked for says how far it is
_HEADERS = {
    "Accept": "*/*",
    "Accept-Encoding": "identity",  # token ids do not shrink enough to pay for the CPU of a compressed transfer
    "Connection": "keep-alive",
    "Prefer": f"wait={_WAIT_SECONDS}",
    "User-Agent": f"penstock/{__version__}",
}
_CONNECT_SECONDS = 4.0  # less than a loop that is left waits for its thread
# The kernel finds out by these, within some 14 seconds of silence, that nobody is at the other end any more, also while the
# server is at work. Not every system has them all; the second is macOS's name for the first. The last, in milliseconds, is for
# how long a request may go without a receipt.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPALIVE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 14_000}


class Connection:
    """GETs of one process, one at a time; connections are kept open between them.

    Bodies are received into what `allocate(nbytes)` gives, by default memory that is used again once nobody looks at it; those
    that come through a proxy or in chunks into memory of their own.

    `interrupt` may be called from other threads.
    """

    def __init__(self, allocate: Callable[[int], memoryview] | None = None) -> None:
        self.interrupted = Flag()  # from then on nothing can be fetched
        self._sockets = _Sockets()
        self._allocate, self._buffers = allocate, Buffers() if allocate else _take_spare()
        self._is_fetching = False
        self._receiver = Receiver(self._remember)
        self._client: httpx.Client | None = None  # for servers behind a proxy: it is httpx's to find and to speak to
        self._proxy_of = lru_cache(maxsize=8)(proxy_of)  # which reads the whole environment

    def fetch(self, server: str, target: str, *, silence_seconds: float, then: str | None = None) -> memoryview:
        """The body of a 200; the server may take as long as it likes, if only something comes every `silence_seconds`.

        `target` is path and query; `then` that which is likely to be fetched next of the same server: it is sent ahead.

        Raises TransientError: there is none, or only a part of it.  Raises WireError: it is not the body that was sent.
        Raises the PenstockError that fits the refusal.
        """
        named = server + target.partition("?")[0]
        receiving = Body(self._allocate or self._buffers.allocate)
        try:
            self._is_fetching = True
            status, headers, body = self._exchange(server, target, then, silence_seconds, receiving)
        except (httpx.RequestError, OSError, HttpError) as error:
            reason = str(error) or type(error).__name__
            if refusal := tls_refusal(server, reason):
                raise UnexpectedServer(refusal) from error
            if isinstance(error, httpx.ProxyError) and reason.startswith("407"):
                raise UnexpectedServer(f"{reason.rstrip('.')}. {doubt(server, 407, '')}") from error
            received = receiving.received if receiving.status == 200 else memoryview(b"")
            is_silence = not receiving.status and not isinstance(error, (HttpError, httpx.ProxyError))
            raise TransientError(reason + by_proxy(server), received=received, is_silence=is_silence) from error
        finally:
            self._is_fetching = False
        declared = headers.get("content-digest", "")
        if declared.startswith("sha-256=:") and declared != content_digest(body):
            raise WireError(f"the answer of {named} was damaged on the way: its digest is not the one that was sent with it")
        if status == 200:
            return body
        raise failure_of(named, status, headers, bytes(body), by_proxy(server))

    def interrupt(self) -> None:
        """Makes whatever runs in other threads fail now; nothing can be fetched afterwards."""
        self.interrupted.set()
        self._sockets.shut_down()

    def close(self) -> None:
        """Closes what is open. A thread that should have ended, and still fetches, fails."""
        # The order matters: what it has taken is not given away.
        buffers, self._buffers = self._buffers, Buffers()
        if not self._is_fetching and not self._allocate:
            buffers.trim()
            _spare.append(buffers)
        self._receiver.close()
        if self._client:
            self._client.close()

    def _exchange(
        self, server: str, target: str, then: str | None, silence_seconds: float, receiving: Body
    ) -> tuple[int, Mapping[str, str], memoryview]:
        connect_seconds = min(_CONNECT_SECONDS, silence_seconds)
        if self._proxy_of(server):
            self._client = self._client or http_client(_HEADERS)
            timeout, extensions = httpx.Timeout(silence_seconds, connect=connect_seconds), {"trace": _trace(self._remember)}
            with self._client.stream("GET", _url(server + target), timeout=timeout, extensions=extensions) as response:
                receiving.collect(response.status_code, response.iter_bytes())
            return response.status_code, response.headers, receiving.received
        ahead = then and _encoded(server, then)
        request = Request(_origin(server), _encoded(server, target), ahead, connect_seconds, silence_seconds)
        status, headers = self._receiver.get(request, receiving)
        return status, headers, receiving.received

    def _remember(self, made: socket.socket) -> None:
        self._sockets.add(made)
        if self.interrupted.is_set():  # while this connection was made
            self._sockets.shut_down()


class _Sockets:
    """Open sockets. Any thread may add one, or shut them all down."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal may interrupt whoever shuts them down, and its handler do the same
        self._open: list[socket.socket] = []

    def add(self, made: socket.socket) -> None:
        _keep_alive(made)
        with self._lock:
            self._open = [*(known for known in self._open if known.fileno() >= 0), made]

    def shut_down(self) -> None:
        """Wakes whoever reads from one of them or writes to it."""
        with self._lock:
            for known in self._open:
                # Closing it would not wake a thread that is blocked in it; shutting it down does. An SSL socket's own method
                # would take the encryption away from under that thread.
                with suppress(OSError):
                    socket.socket.shutdown(known, socket.SHUT_RDWR)


def _trace(remember: Callable[[socket.socket], None]) -> Callable[[str, Mapping[str, Any]], None]:
    """What httpx tells of a connection that is being made, for the extension `trace`."""

    def trace(event: str, info: Mapping[str, Any]) -> None:
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            remember(info["return_value"].get_extra_info("socket"))

    return trace


def _keep_alive(made: socket.socket) -> None:
    with suppress(OSError):  # of one that is closed already: to read from it tells that
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if option := getattr(socket, name, None):
                made.setsockopt(socket.IPPROTO_TCP, option, value)


def _take_spare() -> Buffers:
    with suppress(IndexError):
        return _spare.pop()
    return Buffers()


@lru_cache(maxsize=8)
def _origin(server: str) -> Origin:
    url = httpx.URL(server)
    headers = {"Host": url.netloc.decode(), **_HEADERS}
    if url.userinfo:
        headers["Authorization"] = f"Basic {b64encode(f'{url.username}:{url.password}'.encode()).decode()}"
    port = url.port or (443 if url.scheme == "https" else 80)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return Origin(url.scheme, url.host, port, lines.encode())


_url = lru_cache(maxsize=8)(httpx.URL)  # those of an epoch differ in their queries, and it takes long to check one


def _encoded(server: str, target: str) -> str:
    """Path and query as they are sent; the address of a server may have a path, too."""
    path, mark, query = target.partition("?")
    return _url(server + path).raw_path.decode() + mark + query
