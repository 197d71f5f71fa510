"""A real server: `penstock serve` as a process of its own, on a real socket."""

from __future__ import annotations

import re
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx

from forks import Fork
from penstock import wire


class Server:
    """Serves a folder until it is stopped or killed. `start` again takes the same port."""

    def __init__(self, data_dir: Path, cache_dir: Path, *flags: str) -> None:
        self._arguments: list[str | Path] = ["serve", data_dir, "--cache-dir", cache_dir, *flags]
        self._port = 0
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
        [port] = re.findall(r"at http://[^:]+:(\d+)$", self.greeting, re.MULTILINE)[:1]
        self._port = int(port)
        self.url = f"http://127.0.0.1:{self._port}"

    def kill(self) -> None:
        """SIGKILL: no chance to say goodbye."""
        self._process.close()

    def children(self) -> list[int]:
        """The processes that serve, where `--processes` asked for several; Linux alone tells."""
        return serving_below(self.pid)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> str:
        """Asks the server to stop; what it wrote to its log."""
        self._process.send_signal(how)
        with closing(self._process):
            return self._process.communicate(timeout=20)[2]

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self.kill()

    def get(self, path: str, **query: str | int) -> httpx.Response:
        return self._client.get(f"{self.url}{path}", params=query or None)

    def json(self, path: str, **query: str | int) -> Any:
        response = self.get(path, **query)
        assert response.status_code == 200, response.text
        return response.json()

    def json_when_ready(self, path: str, **query: str | int) -> Any:
        """The answer once it is no longer "not yet"."""
        deadline = time.monotonic() + 60
        while (response := self.get(path, **query)).status_code == 503:
            assert time.monotonic() < deadline, response.text
            time.sleep(0.05)
        return self.json(path, **query)

    def frames(self, path: str, **query: str | int) -> list[wire.Frame]:
        response = self.get(path, **query)
        assert response.status_code == 200, response.text
        return list(wire.decode(response.content))


def serving_below(pid: int) -> list[int]:
    """The processes that serve for the one that was started; Linux alone tells."""
    found = [Path(task / "children").read_text().split() for task in Path(f"/proc/{pid}/task").iterdir()]
    pids = [int(pid) for some in found for pid in some]
    return [pid for pid in pids if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
