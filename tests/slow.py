"""Readers that take a kilobyte a second, on real sockets with buffers as small as the kernel makes them."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlencode, urlsplit

_AT_A_TIME = 1024


class SlowReaders:
    """So many connections that ask for one URL; `heads` are the status lines and headers that came so far."""

    def __init__(self, number: int, url: str, path: str, query: dict[str, str | int], pause_seconds: float) -> None:
        self._pause_seconds = pause_seconds
        address = urlsplit(url)
        assert address.hostname
        self._sockets = [_connect(address.hostname, address.port or 80) for _ in range(number)]
        self._received = [bytearray() for _ in range(number)]
        for own in self._sockets:
            own.sendall(f"GET {path}?{urlencode(query)} HTTP/1.1\r\nHost: server\r\n\r\n".encode())
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def heads(self) -> list[str]:
        return [bytes(came).partition(b"\r\n\r\n")[0].decode() for came in list(self._received) if b"\r\n\r\n" in came]

    @property
    def num_received(self) -> list[int]:
        return [len(came) for came in self._received]

    @property
    def num_connected(self) -> int:
        return sum(own.fileno() >= 0 for own in self._sockets)

    def wait_for_heads(self) -> list[str]:
        """The heads, once each connection has its own."""
        deadline = time.monotonic() + 60
        while len(self.heads) < len(self._sockets):
            assert time.monotonic() < deadline, self.heads
            time.sleep(0.05)
        return self.heads

    def stop_reading(self) -> None:
        """Takes nothing any more, and stays connected."""
        self._over.set()
        self._thread.join()

    def leave(self) -> None:
        """Hangs up, in the midst of the body."""
        self.stop_reading()
        for own in self._sockets:
            own.close()

    def _run(self) -> None:
        while not self._over.is_set():
            with selectors.DefaultSelector() as ready:
                for number, own in enumerate(self._sockets):
                    if own.fileno() >= 0:
                        ready.register(own, selectors.EVENT_READ, number)
                for key, _ in ready.select(0.1):
                    self._read(key.data)
            self._over.wait(self._pause_seconds if len(self.heads) == len(self._sockets) else 0.05)

    def _read(self, number: int) -> None:
        came = b""
        with suppress(OSError):
            came = self._sockets[number].recv(_AT_A_TIME)
        self._received[number] += came
        if not came:
            self._sockets[number].close()


@contextmanager
def slow_readers(
    number: int, url: str, path: str, query: dict[str, str | int], *, pause_seconds: float = 1.0
) -> Iterator[SlowReaders]:
    """Readers that are there until they leave, or the block ends."""
    readers = SlowReaders(number, url, path, query, pause_seconds)
    try:
        yield readers
    finally:
        readers.leave()


def _connect(host: str, port: int) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)  # before it connects, or it has no effect on the window
    made.connect((host, port))
    return made
