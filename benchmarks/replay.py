"""A static server: replays, from memory, another server's responses to the same URLs. It shows the limit of a client.

    python benchmarks/replay.py http://127.0.0.1:8000

It fetches a missing response from the server at that address. `GET /misses` returns the number of such responses.
"""

from __future__ import annotations

import asyncio
import sys
import urllib.error
import urllib.request

_END = b"\r\n\r\n"


class Answers:
    """Whole HTTP responses by path and query."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._known: dict[bytes, bytes] = {}

    def of(self, target: bytes) -> bytes:
        if target == b"/misses":
            return _response(200, "text/plain", str(len(self._known)).encode())
        if target not in self._known:
            self._known[target] = self._fetch(target.decode())
        return self._known[target]

    def _fetch(self, target: str) -> bytes:
        try:
            with urllib.request.urlopen(self._upstream + target) as answer:
                return _response(answer.status, answer.headers["Content-Type"], answer.read())
        except urllib.error.HTTPError as refused:
            return _response(refused.code, refused.headers["Content-Type"], refused.read())


class Connection(asyncio.Protocol):
    """Serve one request after the other; requests have no body."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while _END in self._received:
            request, self._received = self._received.split(_END, 1)
            self._transport.write(self._answers.of(request.split(b" ", 2)[1]))


def _response(status: int, media_type: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status} -\r\nContent-Type: {media_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def serve(upstream: str) -> None:
    answers = Answers(upstream)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(answers), "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
