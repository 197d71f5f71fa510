"""Store that servers share: a second tier behind the cache folder, in an object store or a folder.

Its objects are the files of the cache, with seals, under the same names. A name is a hash of all that the content depends on,
so an object is written once and never changes. Losing the store costs time, never a batch: a failed request is a miss.

A claim is an object that says that a server makes the blocks of a row group. Its owner rewrites it every few seconds. A claim
that has not changed for longer belongs to a dead server, by the clock of the one that waits. Without claims only work is lost.

A preparation needs to know what the store has. It sets `is_patient`: then all requests are repeated, and raise OSError after
ten minutes. `write`, `has`, `names`, `ensure` and `remove` do so in any case.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from datetime import datetime
from errno import ENOENT
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from penstock_server.files import Damaged, Piece, map_sealed, sealed, unsealed, write_sealed
from penstock_server.logs import Seldom
from penstock_server.monitoring.metrics import Metrics
from penstock_server.problems import DatasetInvalid
from penstock_server.sources.objects import SCHEMES, ObjectStore
from penstock_server.sources.remote import Retryable

T = TypeVar("T")
SeenClaims = dict[str, tuple[bytes, float, float]]  # content of claims, seconds without a change, and when it was last read
log = logging.getLogger("penstock.store")

CLAIM = ".claim"
_THREADS = 16  # they wait for the network
_PENDING = 32  # objects that wait to be written, of some megabytes each
_RENEW_SECONDS, _CLAIM_SECONDS, _POLL_SECONDS = 5.0, 20.0, 0.5
_PAUSE_SECONDS = 30.0  # after a failure, in which no request is made
_PATIENT_SECONDS = 600.0  # of preparations, which no request waits for


class SharedStore:
    """Objects by name, at a URL or in a folder. Only methods that say so raise errors of the store, or all if it `is_patient`.

    Raises DatasetInvalid: the URL is not valid.
    """

    def __init__(self, place: Path | str, metrics: Metrics) -> None:
        self.place, self.is_patient = str(place), False
        if isinstance(place, str) and place.partition("://")[0] not in SCHEMES:
            known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
            raise DatasetInvalid(f"the store {place} is not supported. Supported: {known}, and folders.")
        self._objects = ObjectStore(place if isinstance(place, str) else place.absolute().as_uri(), metrics)
        self._metrics = metrics
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="penstock-store")
        self._releases = ThreadPoolExecutor(1, thread_name_prefix="penstock-claims")
        self._room = threading.Semaphore(_PENDING)
        self._written = set[Future[None]]()  # that are being written
        self._claims, self._claiming = set[str](), threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._renew, name="penstock-renew", daemon=True).start()
        self._pause_until = 0.0
        self._warnings = Seldom()

    def get(self, name: str) -> memoryview | None:
        """Return the content of a file, without its seal; None if the store does not have it, or fails."""

        def request() -> Any:
            try:
                return self._objects.get(name)
            except FileNotFoundError:
                self._metrics.store_requests.labels("miss").inc()
                raise

        content = self._attempt(request)
        if content is None:
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

    def put(self, name: str, pieces: Iterable[Piece], *, replaces: bool = False) -> None:
        """Write a file in the background, unless the store has it, or in its place. Waits while many others wait."""
        if self._is_paused:
            return
        content = sealed(pieces, name)  # a copy: the pieces may belong to a file that is evicted
        self._room.acquire()
        future = self._threads.submit(self._put, name, content, replaces)
        self._written.add(future)
        future.add_done_callback(self._noted)

    def put_file(self, path: Path, *, replaces: bool = False) -> None:
        """Write a sealed file of this machine in the background; see `put`."""
        with suppress(OSError, Damaged):
            if (body := map_sealed(path)) is not None:
                self.put(path.name, [body], replaces=replaces)

    @contextmanager
    def claimed(self, name: str) -> Iterator[bool]:
        """Claim work while the block runs; yields False if another server has claimed it.

        The claim ends when everything that was put until then is written.
        """
        key = f"{name}{CLAIM}"
        is_ours = self._attempt(lambda: self._objects.create(key, uuid.uuid4().bytes))
        if not is_ours:
            yield is_ours is None  # without the store, do the work
            return
        self._claims.add(key)
        try:
            yield True
        finally:
            written = list(self._written)
            try:
                self._releases.submit(self._release, key, written)
            except RuntimeError:  # the server stops
                self._release(key, written)

    def release(self, name: str) -> None:
        """End a claim of this process now."""
        self._release(f"{name}{CLAIM}", [])

    def wait(self, name: str, is_done: Callable[[], bool]) -> None:
        """Wait until the work that another server has claimed is done, or its claim has ended or is dead."""
        seen: SeenClaims = {}
        while not is_done() and self.is_claimed(name, seen):
            time.sleep(_POLL_SECONDS)

    def is_claimed(self, name: str, seen: SeenClaims) -> bool:
        """Return whether a live server claims work; ends the claim of a dead one. `seen` is what earlier calls have seen."""
        key = f"{name}{CLAIM}"
        content = self._attempt(lambda: bytes(self._objects.get(key)))
        if content is None:
            return False
        now = time.monotonic()
        before, age, read_at = seen.get(name, (b"", 0.0, now))
        # A gap counts little: if the store failed meanwhile, a live server could not renew its claim either.
        age = age + min(now - read_at, _RENEW_SECONDS) if content == before else 0.0
        if age > _CLAIM_SECONDS:
            log.warning("the server that makes %s/%s does not respond; its work is taken over", self.place, name)
            del seen[name]
            self._attempt(lambda: self._objects.delete(key))
            return False
        seen[name] = content, age, now
        return True

    def fetch_files(self, paths: Iterable[Path]) -> None:
        """Copy the files of these names to their paths, several at a time; those that the store has and the machine lacks."""
        missing = [path for path in paths if not path.exists()]
        futures: list[Future[None]] = [self._threads.submit(self._fetch, path) for path in missing]
        for future in futures:
            future.result()

    def map(self, function: Callable[[str], T], names: Iterable[str]) -> list[T]:
        """Return the results of a function that reads from the store, for several names at a time."""
        return [*self._threads.map(function, names)]

    def write(self, name: str, pieces: Iterable[Piece], *, replaces: bool = False) -> bool:
        """Write a file now, unless the store has it, or in its place. Return whether it was written. Raises OSError."""
        content, write = sealed(pieces, name), self._objects.replace if replaces else self._objects.create
        is_written = self._repeated(lambda: write(name, content))
        self._metrics.store_requests.labels("written" if is_written else "known").inc()
        return is_written

    def has(self, name: str) -> bool:
        """Return whether the store has a file. Raises OSError."""
        return self._repeated(lambda: self._objects.has(name))

    def names(self, folder: str) -> set[str]:
        """Return the names of all files in a folder of the store, without the folder. Raises OSError."""
        return {name.removeprefix(f"{folder}/") for name, _, _ in self._objects.entries(folder, _PATIENT_SECONDS)}

    def ensure(self, paths: Iterable[Path]) -> None:
        """Write the sealed files of this machine that the store lacks. Raises OSError, Damaged."""
        for _ in self._threads.map(self._ensure, paths):
            pass

    def objects(self) -> Iterator[tuple[str, int, datetime]]:
        """Yield the name, the bytes and the time of the last write of each object. Raises OSError."""
        yield from self._objects.entries()

    def remove(self, name: str, retry_seconds: float | None = None) -> None:
        """Remove an object, if it is there. Raises OSError."""
        with suppress(FileNotFoundError):
            self._repeated(lambda: self._objects.delete(name), retry_seconds)

    def flush(self) -> None:
        """Wait until all files are written."""
        for _ in range(_PENDING):
            self._room.acquire()
        self._room.release(_PENDING)

    def close(self) -> None:
        """Write what waits, and end the threads."""
        self._closed.set()
        self._releases.shutdown(wait=True)
        self._threads.shutdown(wait=True)
        self._objects.close()

    def _ensure(self, path: Path) -> None:
        if not self.has(path.name):
            body = map_sealed(path)
            if body is None:
                raise OSError(ENOENT, "it could not be stored", str(path))
            self.write(path.name, [body])

    def _put(self, name: str, content: bytes, replaces: bool) -> None:
        write = self._objects.replace if replaces else self._objects.create
        is_new = None if self._is_paused else self._once(lambda: write(name, content))
        if is_new is not None:
            self._metrics.store_requests.labels("written" if is_new else "known").inc()

    def _noted(self, future: Future[None]) -> None:
        self._written.discard(future)
        self._room.release()

    def _release(self, key: str, written: list[Future[None]]) -> None:
        wait(written)
        with self._claiming:
            if key in self._claims:
                self._claims.discard(key)
                self._once(lambda: self._objects.delete(key))

    def _renew(self) -> None:
        while not self._closed.wait(_RENEW_SECONDS):
            for key in list(self._claims):
                with self._claiming:  # otherwise a released claim could be written again
                    if key in self._claims:  # also in a pause, which is longer than a claim
                        self._once(partial(self._objects.replace, key, uuid.uuid4().bytes))

    def _fetch(self, path: Path) -> None:
        if (body := self.get(path.name)) is not None:
            write_sealed(path, [body], "the shared store is asked for it again")

    @property
    def _is_paused(self) -> bool:
        return time.monotonic() < self._pause_until

    def _attempt(self, request: Callable[[], T]) -> T | None:
        """Return the result of a request; None if the object is missing. If the store fails: None, or see `is_patient`."""
        if not self.is_patient:
            return None if self._is_paused else self._once(request)
        with suppress(FileNotFoundError):
            return self._repeated(request)
        return None

    def _repeated(self, request: Callable[[], T], retry_seconds: float | None = None) -> T:
        """Return the result of a request, which is repeated if it fails. Raises OSError."""

        def noted() -> T:
            try:
                return request()
            except Retryable as error:
                if not error.is_throttled and self._warnings.is_due():
                    log.warning("the store %s fails: %s; the request is repeated for up to ten minutes", self.place, error)
                raise

        return self._objects.attempt(noted, _PATIENT_SECONDS if retry_seconds is None else retry_seconds)

    def _once(self, request: Callable[[], T]) -> T | None:
        """Return the result of a request; None if it fails. Then none but of claims is made for some seconds."""
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
