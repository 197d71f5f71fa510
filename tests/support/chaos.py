"""A TCP proxy that does to connections what networks and dying servers do; connection n of a seed always fails in one way."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Literal
from urllib.parse import urlsplit

Kind = Literal["delay", "cut", "truncate", "flip", "error", "garbage", "hang", "throttle"]
KINDS: tuple[Kind, ...] = ("delay", "cut", "truncate", "flip", "error", "garbage", "hang")

_DELAY_SECONDS = 0.05
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets the connection
_ANSWERS: dict[Kind, bytes] = {
    "error": b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\nOops",
    "throttle": b"HTTP/1.1 503 Slow Down\r\nContent-Length: 40\r\n\r\n<Error><Code>SlowDown</Code></Error>\r\n\r\n",
}
_AT_ONCE: tuple[Kind, ...] = ("error", "garbage", "throttle")


@dataclass(frozen=True, slots=True)
class Strike:
    """What happens to a connection once so many further bytes of answers have passed.

    delay     it pauses, and goes on
    cut       it is reset
    truncate  it is closed, as if all had been sent
    flip      a bit of the next byte is flipped, and it goes on
    error     the first request is answered with a 500, and `after_bytes` does not matter
    throttle  the same, with the 503 of an object store that asks for fewer requests
    garbage   the same, with bytes that are no HTTP
    hang      nothing comes any more, and it stays open
    """

    kind: Kind
    after_bytes: int
    bit: int
    garbage: bytes

    @classmethod
    def draw(cls, chance: Random, kinds: Sequence[Kind], longest: int) -> Strike:
        """A few bytes, within a header, are as likely as many."""
        after_bytes = int(longest ** chance.random())
        return cls(chance.choice(kinds), after_bytes, chance.randrange(8), chance.randbytes(chance.randrange(1, 300)))


class ChaosProxy:
    """Passes connections on to a server until something strikes them; `num_faults` counts what has struck.

    Without kinds of faults it only passes on, and can be stopped. What asks for /healthz passes unharmed and uncounted: when
    that is depends on the clock.
    """

    def __init__(self, server: str, seed: int, kinds: Sequence[Kind] = KINDS, *, longest: int = 100_000) -> None:
        address = urlsplit(server)
        self._server = (str(address.hostname), int(address.port or 80))
        self._seed, self._kinds, self._longest = seed, kinds, longest
        self._num_connections = 0
        self.num_faults: Counter[Kind] = Counter()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._port = 0
        self.start()

    def start(self) -> None:
        """Listens, at the same port as before."""
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._threads: list[threading.Thread] = []
        self._spawn(self._accept, self._listener)

    def stop(self) -> None:
        """Refuses connections, and closes those that are there."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        while self._threads:
            self._threads.pop().join()

    def __enter__(self) -> ChaosProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _spawn(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                self._spawn(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client, socket.create_connection(self._server) as server:
            with self._lock:
                self._open |= {client, server}
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                self._pass_on(client, server)
            finally:
                with self._lock:
                    self._open -= {client, server}

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        request = client.recv(65536)
        strikes: Iterator[Strike] = iter(())
        if self._kinds and not request.startswith(b"GET /healthz "):
            strikes = self._strikes(self._num_connections)
            self._num_connections += 1
        strike = next(strikes, None)
        if strike and strike.kind in _AT_ONCE:
            self.num_faults[strike.kind] += 1
            client.sendall(_ANSWERS.get(strike.kind, strike.garbage))
            return
        server.sendall(request)
        upstream = threading.Thread(target=_copy, args=(client, server), daemon=True)
        upstream.start()
        if self._answer(client, server, strike, strikes) == "hang":
            upstream.join()  # until the client has enough of it
        # Shut down for reading alone, so that a reset is the first that the client hears.
        for end, how in ((client, socket.SHUT_RD), (server, socket.SHUT_RDWR)):
            with suppress(OSError):
                end.shutdown(how)
        upstream.join()

    def _strikes(self, number: int) -> Iterator[Strike]:
        chance = Random(f"{self._seed}, {number}")
        while True:
            yield Strike.draw(chance, self._kinds, self._longest)

    def _answer(
        self, client: socket.socket, server: socket.socket, strike: Strike | None, strikes: Iterator[Strike]
    ) -> Kind | None:
        """Passes answers on until the server closes the connection, or a strike ends it: of what kind."""
        passed = 0  # since the last strike
        while answer := bytearray(server.recv(65536)):
            while strike and strike.after_bytes < passed + len(answer):
                self.num_faults[strike.kind] += 1
                place = strike.after_bytes - passed
                client.sendall(answer[:place])
                del answer[:place]
                if strike.kind == "cut":
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                if strike.kind in ("cut", "truncate", "hang"):
                    return strike.kind
                if strike.kind == "delay":
                    time.sleep(_DELAY_SECONDS)
                if strike.kind == "flip":
                    answer[0] ^= 1 << strike.bit
                client.sendall(answer[:1])
                del answer[:1]
                passed, strike = 0, next(later for later in strikes if later.kind not in _AT_ONCE)
            client.sendall(answer)
            passed += len(answer)
        return None


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while request := source.recv(65536):
            target.sendall(request)
        target.shutdown(socket.SHUT_RDWR)  # whoever asked has left
