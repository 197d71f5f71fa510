"""Store that servers share: a second tier behind the cache folder, in an object store or a folder.

Its objects are the files of the cache, with seals, under the same names. A name is a hash of all that the content depends on,
so an object is written once and never changes. Losing the store costs time, never a batch: a failed request is a miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from penstock_server.files import Damaged, Piece, map_sealed, sealed, unsealed
from penstock_server.logs import Seldom
from penstock_server.monitoring.metrics import Metrics
from penstock_server.sources.objects import ObjectStore
from penstock_server.sources.remote import Retryable

T = TypeVar("T")
log = logging.getLogger("penstock.store")

_THREADS = 16  # they wait for the network
_PENDING = 32  # objects that wait to be written, of some megabytes each
_PAUSE_SECONDS = 30.0  # after a failure, in which no request is made


class SharedStore:
    """Objects by name, at a URL or in a folder. No method raises an error of the store."""

    def __init__(self, place: Path | str, metrics: Metrics) -> None:
        self.place = str(place)
        self._objects = ObjectStore(place if isinstance(place, str) else place.absolute().as_uri(), metrics)
        self._metrics = metrics
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="penstock-store")
        self._room = threading.Semaphore(_PENDING)
        self._pause_until = 0.0
        self._warnings = Seldom()

    def get(self, name: str) -> memoryview | None:
        """Return the content of a file, without its seal; None if the store does not have it, or fails."""
        content = self._attempt(lambda: self._objects.get(name))
        if content is None:
            self._metrics.store_requests.labels("miss").inc()
            return None
        try:
            body = unsealed(memoryview(content), name)
        except Damaged:
            log.warning("%s/%s is damaged and will be made again", self.place, name)
            self._metrics.store_requests.labels("corrupt").inc()
            self._attempt(lambda: self._objects.delete(name))  # otherwise the new one would not be written
            return None
        self._metrics.store_requests.labels("hit").inc()
        return body

    def put(self, name: str, pieces: Iterable[Piece]) -> None:
        """Write a file in the background, unless the store has it. Waits while many others wait."""
        if time.monotonic() < self._pause_until:
            return
        content = b"".join([*map(bytes, pieces)])
        self._room.acquire()
        self._threads.submit(self._put, name, content).add_done_callback(lambda _: self._room.release())

    def put_file(self, path: Path) -> None:
        """Write a sealed file of this machine in the background."""
        with suppress(OSError, Damaged):
            if (body := map_sealed(path)) is not None:
                self.put(path.name, [body])

    def fetch_files(self, paths: Iterable[Path]) -> None:
        """Copy the files of these names to their paths, several at a time; those that the store has and the machine lacks."""
        missing = [path for path in paths if not path.exists()]
        futures: list[Future[None]] = [self._threads.submit(self._fetch, path) for path in missing]
        for future in futures:
            future.result()

    def map(self, function: Callable[[str], T], names: Iterable[str]) -> list[T]:
        """Return the results of a function that reads from the store, for several names at a time."""
        return [*self._threads.map(function, names)]

    def flush(self) -> None:
        """Wait until all files are written."""
        for _ in range(_PENDING):
            self._room.acquire()
        self._room.release(_PENDING)

    def close(self) -> None:
        """Write what waits, and end the threads."""
        self._threads.shutdown(wait=True)
        self._objects.close()

    def _put(self, name: str, content: bytes) -> None:
        is_new = self._attempt(lambda: self._objects.create(name, sealed(content, name)))
        if is_new is not None:
            self._metrics.store_requests.labels("written" if is_new else "known").inc()

    def _fetch(self, path: Path) -> None:
        if (body := self.get(path.name)) is not None:
            with suppress(OSError):
                temporary = path.with_name(f"{path.name}.{threading.get_ident()}.tmp")
                temporary.write_bytes(sealed(bytes(body), path.name))
                temporary.replace(path)

    def _attempt(self, request: Callable[[], T]) -> T | None:
        """Return the result of a request; None if it fails. Then none is made for some seconds."""
        if time.monotonic() < self._pause_until:
            return None
        try:
            return request()
        except FileNotFoundError:
            return None
        except (OSError, Retryable) as error:
            self._pause_until = time.monotonic() + _PAUSE_SECONDS
            self._metrics.store_requests.labels("failed").inc()
            if self._warnings.is_due():
                cause = error.strerror if isinstance(error, OSError) else error
                log.warning("the store %s fails: %s; blocks are made without it meanwhile", self.place, cause)
            return None
