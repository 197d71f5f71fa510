"""Real servers: `penstock serve` as a process or in a thread, canned responses, slow readers; and the command line."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx
from fastapi import FastAPI
from rich.console import Console, RenderableType
from rich.padding import Padding

from penstock import wire
from penstock.servers import by_preference
from penstock_server.api.admission import InFlight
from penstock_server.app import create_app
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import open_catalog
from penstock_server.serving.listener import disconnect_stalled
from penstock_server.serving.server import Server as UvicornServer
from support.processes import Fork, until
from support.stores import SOURCE, Uploaded

_AT_A_TIME = 1024
SERVER_PACKAGES = ("penstock_server", "fastapi", "pyarrow", "starlette", "tokenizers", "uvicorn")
ROOT = Path(__file__).parents[2]


class Server:
    """Serves a folder until it is stopped or killed. `start` again takes the same port."""

    def __init__(self, data_dir: Path | str, cache_dir: Path, *flags: str, port: int = 0) -> None:
        self._uploaded = Uploaded(data_dir) if SOURCE == "s3" and isinstance(data_dir, Path) else None
        data = self._uploaded.url if self._uploaded else data_dir
        self._arguments: list[str | Path] = ["serve", data, "--cache-dir", cache_dir, "--drain-seconds", "0", *flags]
        self._port = port
        self._client = httpx.Client(timeout=60, verify=False)  # to read certificates would take longer than many a test
        self.start()

    def start(self) -> None:
        self._process = Fork(*self._arguments, "--port", str(self._port))
        self.greeting = ""
        while not self.greeting.endswith("Ctrl-C stops\n"):
            line = self._process.stdout.readline()
            if not line:
                errors = self._process.errors()
                self.__exit__()
                raise AssertionError(f"the server did not start:\n{self.greeting}{errors}")
            self.greeting += line
        self.pid = self._process.pid
        [(scheme, host, port)] = re.findall(r"at (https?)://([^:]+):(\d+)$", self.greeting, re.MULTILINE)[:1]
        self._port = int(port)
        self.url = f"{scheme}://{host if host.startswith('127.') else '127.0.0.1'}:{self._port}"

    def upload(self) -> None:
        """Have the object store, if the server reads from it, follow the data folder now."""
        if self._uploaded:
            self._uploaded.update()

    def kill(self) -> None:
        """SIGKILL: no chance to say goodbye."""
        self._process.close()

    def log(self) -> str:
        return self._process.errors()

    def children(self) -> list[int]:
        """The processes that serve, where `--processes` asked for several; Linux alone tells."""
        return serving_below(self.pid)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> str:
        """Asks the server to stop; what it wrote to its log."""
        self._process.send_signal(how)
        with closing(self._process):
            status, _, errors = self._process.communicate(timeout=20)
        assert how == signal.SIGKILL or status != -signal.SIGKILL, "the server did not stop"
        return errors

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self.kill()
        if self._uploaded:
            self._uploaded.close()

    def get(self, path: str, **query: str | int) -> httpx.Response:
        return self._client.get(f"{self.url}{path}", params=query or None)

    def json(self, path: str, **query: str | int) -> Any:
        response = self.get(path, **query)
        assert response.status_code == 200, response.text
        return response.json()

    def json_when_ready(self, path: str, **query: str | int) -> Any:
        """The answer once it is no longer "not yet"."""
        until(lambda: self.get(path, **query).status_code != 503)
        return self.json(path, **query)

    def frames(self, path: str, **query: str | int) -> list[wire.Frame]:
        response = self.get(path, **query)
        assert response.status_code == 200, response.text
        return list(wire.decode(response.content))


Serve = Callable[..., Server]  # starts one: conftest's fixture of that name


def serving_below(pid: int) -> list[int]:
    """The processes that serve for the one that was started; Linux alone tells."""
    found = [Path(task / "children").read_text().split() for task in Path(f"/proc/{pid}/task").iterdir()]
    pids = [int(pid) for some in found for pid in some]
    return [pid for pid in pids if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@contextmanager
def serving(
    data_dir: Path, cache_dir: Path, in_flight: InFlight, stalled_seconds: float = 300.0, **settings: Any
) -> Iterator[str]:
    """The address of a server with these settings of Server."""
    store = BlockStore(cache_dir)
    try:
        with serving_app(create_app(open_catalog(data_dir, None, store), in_flight), stalled_seconds, **settings) as url:
            yield url
    finally:
        store.close()


@contextmanager
def serving_app(app: FastAPI, stalled_seconds: float = 300.0, **settings: Any) -> Iterator[str]:
    """The address of a server of this app, with these settings of Server."""
    server = UvicornServer(app, **settings)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        disconnect_stalled(listener, stalled_seconds)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"{'https' if settings.get('tls') else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def response(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join([*head, "", ""]).encode() + body


def problem(slug: str, status: int, *headers: str) -> bytes:
    body = {"type": f"urn:penstock:problem:{slug}", "status": status, "detail": f"this is {slug}"}
    return response(json.dumps(body).encode(), f"{status} No", *headers)


def rank_that_prefers(*servers: str) -> int:
    """A rank that tries the servers in this order."""
    return next(rank for rank in count() if by_preference(servers, rank, 1) == servers)


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


class SlowReaders:
    """So many connections that ask for one URL; `heads` are the status lines and headers that came so far."""

    def __init__(
        self, number: int, url: str, path: str, query: dict[str, str | int], pause_seconds: float, source: str
    ) -> None:
        self._pause_seconds = pause_seconds
        address = urlsplit(url)
        assert address.hostname
        self._sockets = [_connect(address.hostname, address.port or 80, source) for _ in range(number)]
        self._received = [bytearray() for _ in range(number)]
        for own in self._sockets:
            own.sendall(f"GET {path}?{urlencode(query)} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
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
        until(lambda: len(self.heads) == len(self._sockets))
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
    number: int,
    url: str,
    path: str,
    query: dict[str, str | int],
    *,
    pause_seconds: float = 1.0,
    source: str = "127.0.0.1",
) -> Iterator[SlowReaders]:
    """Readers that are there until they leave, or the block ends; `source` is their address."""
    readers = SlowReaders(number, url, path, query, pause_seconds, source)
    try:
        yield readers
    finally:
        readers.leave()


def _connect(host: str, port: int, source: str) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)  # before it connects, or it has no effect on the window
    made.bind((source, 0))
    made.connect((host, port))
    return made


def penstock(*arguments: str | Path, folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process that has made its imports before, in this working directory."""
    with closing(Fork(*arguments, environment={**_plain_environment(), **environment}, folder=folder)) as process:
        status, out, errors = process.communicate(timeout=120)
    return subprocess.CompletedProcess(arguments, status, out, errors)


def penstock_without(modules: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Where these cannot be imported."""
    code = f"import sys; sys.modules |= dict.fromkeys({modules!r}); from penstock.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, timeout=120, check=False, env=_plain_environment(),
    )  # fmt: skip


def penstock_in_terminal(columns: int, *arguments: str | Path, **environment: str) -> tuple[int, str]:
    """The exit status, and all that the terminal got."""
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    env = {**_plain_environment(), "TERM": "xterm-256color", **environment}
    with closing(Fork(*arguments, environment=env, terminal=terminal)) as process:
        os.close(terminal)
        received = bytearray()
        with os.fdopen(reader, "rb", buffering=0) as screen, suppress(OSError):  # as Linux reports that the other end is closed
            while chunk := screen.read(65536):
                received += chunk
        return process.communicate(60)[0], received.decode()


def printed(make: Callable[[Console], Iterable[RenderableType]]) -> str:
    """The plain text that a console of 80 columns gets."""
    file = io.StringIO()
    console = Console(file=file, width=80, color_system=None, markup=False, highlight=False)
    for line in make(console):
        console.print(line, soft_wrap=not isinstance(line, Padding))
    return file.getvalue()


def _plain_environment() -> dict[str, str]:
    unwanted = ("COLUMNS", "LINES", "NO_COLOR", "TERM", "RANK", "WORLD_SIZE")
    return {name: value for name, value in os.environ.items() if name not in unwanted}


def compose_command() -> list[str] | None:
    """The command on this machine: the plugin, or the older program."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and subprocess.run([*command, "version"], capture_output=True, check=False).returncode == 0:
            return command
    return None


def _reason_to_skip() -> str | None:
    if not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0:
        return "no Docker engine answers"
    return None if compose_command() else "there is neither docker compose nor docker-compose"


REASON = _reason_to_skip()
