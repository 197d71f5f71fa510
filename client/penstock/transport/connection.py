"""Connection: one GET, one body. Another way to receive replaces only this module."""

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

_spare: deque[Buffers] = deque(maxlen=1)  # receive buffers of this process's last connection, for the next one
_WAIT_SECONDS = 2  # until a server that still reads or tokenizes the data reports its progress
_HEADERS = {
    "Accept": "*/*",
    "Accept-Encoding": "identity",  # token ids do not shrink enough to pay for the CPU of a compressed transfer
    "Connection": "keep-alive",
    "Prefer": f"wait={_WAIT_SECONDS}",
    "User-Agent": f"penstock/{__version__}",
}
# Shorter than an abandoned loop waits for its thread.
_CONNECT_SECONDS = 4.0
# With these options the kernel detects a dead peer within about 14 seconds of silence, also while the server prepares a
# response. Not every system has them all; TCP_KEEPALIVE is macOS's name for TCP_KEEPIDLE. TCP_USER_TIMEOUT (milliseconds)
# limits how long sent data may stay unacknowledged.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPALIVE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 14_000}


class Connection:
    """GETs of one process, one at a time, over connections that stay open between them.

    Bodies go into the memory that `allocate(nbytes)` returns. The default reuses memory once nothing refers to it. Bodies that
    come through a proxy or in chunks always get new memory.

    Other threads may call `interrupt`.
    """

    def __init__(self, allocate: Callable[[int], memoryview] | None = None) -> None:
        self.interrupted = Flag()  # from then on nothing can be fetched
        self._sockets = _Sockets()
        self._allocate, self._buffers = allocate, Buffers() if allocate else _take_spare()
        self._is_fetching = False
        self._receiver = Receiver(self._remember)
        self._client: httpx.Client | None = None  # for servers reached through a proxy
        self._proxy_of = lru_cache(maxsize=8)(proxy_of)  # uncached, it would read the environment for each request

    def fetch(self, server: str, target: str, *, silence_seconds: float, then: str | None = None) -> memoryview:
        """Return the body of a 200. There is no total timeout: the server must send a byte every `silence_seconds`.

        `target` is path and query; `then` is the likely next target at the same server: its request is sent ahead.

        Raises:
            TransientError: no body arrived, or only a part of it.
            WireError: the body's digest differs from the one sent with it.
            PenstockError: the subclass that fits the refusal.
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
        """Make running fetches in other threads fail now; later fetches fail, too."""
        self.interrupted.set()
        self._sockets.shut_down()

    def close(self) -> None:
        """Close all connections. A thread that should have ended, but still fetches, fails."""
        # Swap the buffers first: a fetch that still runs must not write into buffers that go to the next connection.
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
        self._lock = threading.RLock()  # reentrant: a signal handler may interrupt shut_down and call it again
        self._open: list[socket.socket] = []

    def add(self, made: socket.socket) -> None:
        _keep_alive(made)
        with self._lock:
            self._open = [*(known for known in self._open if known.fileno() >= 0), made]

    def shut_down(self) -> None:
        """Wake all threads that read from the sockets or write to them."""
        with self._lock:
            for known in self._open:
                # close() would not wake a thread that is blocked in the socket; shutdown() does. SSLSocket.shutdown would
                # remove the encryption while that thread still uses it.
                with suppress(OSError):
                    socket.socket.shutdown(known, socket.SHUT_RDWR)


def _trace(remember: Callable[[socket.socket], None]) -> Callable[[str, Mapping[str, Any]], None]:
    """Return a `trace` extension for httpx that passes each new socket to `remember`."""

    def trace(event: str, info: Mapping[str, Any]) -> None:
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            remember(info["return_value"].get_extra_info("socket"))

    return trace


def _keep_alive(made: socket.socket) -> None:
    with suppress(OSError):  # if it is closed already, the next read raises
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


_url = lru_cache(maxsize=8)(httpx.URL)  # slow to parse, and within an epoch only the queries differ


def _encoded(server: str, target: str) -> str:
    """Return the encoded path and query; the address of a server may have a path, too."""
    path, mark, query = target.partition("?")
    return _url(server + path).raw_path.decode() + mark + query
