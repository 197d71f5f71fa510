"""Objects below a URL: listed, and read by ranges of a pinned version."""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from errno import EACCES, EIO, ENOENT, ESTALE
from typing import Any, TypeVar

from penstock_server.monitoring.metrics import Metrics
from penstock_server.sources.stats import FileStat

T = TypeVar("T")

_RETRY_SECONDS = 20.0  # after that the client gets a 503, and retries
_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.1, 5.0
_REQUESTS = 32  # at a time; they wait for the network, not for a core


class Changed(OSError):
    """The object is no longer the version that was listed."""

    def __init__(self) -> None:
        super().__init__(ESTALE, "it was replaced by another version")


class Retryable(Exception):
    """A request failed and may succeed later. `is_throttled`: the store asked for fewer requests."""

    def __init__(self, cause: str, *, is_throttled: bool = False) -> None:
        super().__init__(cause)
        self.is_throttled = is_throttled


class Away(OSError):
    """The source does not respond as expected for now; later it may."""

    def __init__(self, reason: str) -> None:
        super().__init__(EIO, reason)


def not_found() -> FileNotFoundError:
    """Return the error for an object that does not exist."""
    return FileNotFoundError(ENOENT, "there is no such object")


def forbidden(status: str) -> PermissionError:
    """Return the error for a refused request; `status` is what the store answered."""
    return PermissionError(EACCES, f"the store answered {status}: the server's credentials do not allow it, or are missing")


class Source(ABC):
    """A root of objects, at `url`, which has no credentials and no slash at its end.

    Keys are relative to the root. `_read` raises Retryable, FileNotFoundError, PermissionError or Changed; the other methods
    raise OSError.
    """

    def __init__(self, url: str, metrics: Metrics) -> None:
        self.url = url
        self._metrics = metrics
        self._pause_until = 0.0  # monotonic time: a store that throttles one request throttles all
        self._threads = ThreadPoolExecutor(_REQUESTS, thread_name_prefix="penstock-source")

    @abstractmethod
    def objects(self) -> Iterator[tuple[str, FileStat]]:
        """Yield the key and the FileStat of each object, in any order."""

    def content(self, stat: FileStat) -> str:
        """Return what identifies the content of a version, wherever it lies."""
        return stat.version

    def read(self, key: str, stat: FileStat, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) of an object of this version."""
        body = memoryview(self.attempt(lambda: self._read(key, stat, start, stop)))
        if len(body) != stop - start:
            raise OSError(EIO, f"the store sent {len(body):,} bytes instead of {stop - start:,}")
        self._metrics.source_bytes.inc(len(body))
        return body

    def read_many(self, key: str, stat: FileStat, ranges: Iterable[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of several ranges of an object, which are requested at the same time."""
        return [*self._threads.map(lambda bounds: self.read(key, stat, *bounds), ranges)]

    def attempt(self, request: Callable[[], T], retry_seconds: float | None = None) -> T:
        """Return the result of a request. After a failure, it tries again for some seconds, with random pauses that grow."""
        failed_at, pause = float("inf"), _MIN_PAUSE_SECONDS
        while True:
            while (wait := self._pause_until - time.monotonic()) > 0:
                time.sleep(wait * random.uniform(1, 1.2))
            try:
                result = request()
                self._metrics.source_requests.labels("ok").inc()
                return result
            except Retryable as error:
                self._metrics.source_requests.labels("throttled" if error.is_throttled else "failed").inc()
                failed_at = min(failed_at, time.monotonic())
                if time.monotonic() - failed_at > (_RETRY_SECONDS if retry_seconds is None else retry_seconds):
                    raise Away(f"the store does not respond as expected: {error}") from None
                delay = pause * random.uniform(0.5, 1.5)
                if error.is_throttled:
                    self._pause_until = time.monotonic() + delay
                time.sleep(delay)
                pause = min(2 * pause, _MAX_PAUSE_SECONDS)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @abstractmethod
    def _read(self, key: str, stat: FileStat, start: int, stop: int) -> Any:
        """Return an object with the buffer protocol."""


@dataclass(frozen=True, slots=True)
class RemoteFolder:
    """The objects of a source whose keys begin with `prefix`, which is "" or ends with a slash."""

    source: Source
    prefix: str = ""

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self, name)

    def __str__(self) -> str:
        return f"{self.source.url}/{self.prefix}".rstrip("/")

    def shards(self) -> dict[str, FileStat]:
        """Return the shards directly in the folder, by name. Raises OSError."""
        found = dict[str, FileStat]()
        for key, stat in self.source.objects():
            name = key.removeprefix(self.prefix)
            if key.startswith(self.prefix) and is_shard(name):
                found[name] = stat
        return dict(sorted(found.items()))


def is_shard(name: str) -> bool:
    """Return whether a key relative to a folder is a shard directly in it."""
    return "/" not in name and name[:1] not in (".", "_", "") and name.lower().endswith(".parquet")


@dataclass(frozen=True, slots=True)
class RemotePath:
    """Path of an object."""

    parent: RemoteFolder
    name: str

    @property
    def source(self) -> Source:
        """Return the source."""
        return self.parent.source

    @property
    def key(self) -> str:
        """Return the key relative to the source's root."""
        return f"{self.parent.prefix}{self.name}"

    def __str__(self) -> str:
        return f"{self.parent}/{self.name}"
