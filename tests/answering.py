"""Servers of a few lines, on real sockets, that answer with bytes laid out beforehand."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def response(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join([*head, "", ""]).encode() + body


def problem(slug: str, status: int, *headers: str) -> bytes:
    body = {"type": f"urn:penstock:problem:{slug}", "status": status, "detail": f"this is {slug}"}
    return response(json.dumps(body).encode(), f"{status} No", *headers)


@contextmanager
def server(*answers: bytes, hold: threading.Event | None = None) -> Iterator[str]:
    """Answers each connection with the next bytes, whatever is asked, then closes it, or, given an event, once that is set.

    b"" hangs up at once; behind the last answer it hangs.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            for answer in answers:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)
                    if hold:
                        hold.wait(60)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def pages(answer: Callable[[str], tuple[int, bytes]], seconds_per_byte: float = 0.0) -> Iterator[str]:
    """Answers each GET with the status and the body that `answer` gives for its path, and keeps connections open."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # or the body would wait 40 ms for the client to acknowledge the headers

        def do_GET(self) -> None:
            status, body = answer(self.path.partition("?")[0])
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(OSError):  # whoever asked has left
                for part in [body[at : at + 1] for at in range(len(body))] if seconds_per_byte else [body]:
                    self.wfile.write(part)
                    time.sleep(seconds_per_byte)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        listener.daemon_threads = True
        threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{listener.server_port}"
        listener.shutdown()
