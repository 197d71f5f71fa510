"""Processes that tokenize. A tokenizer or a chat template may take any time and memory, and a thread cannot be killed.

nursery   one per server process: a copy of it without data, which forks the loaders
loader    one per recipe: loads its tokenizer and template, and forks workers, which share that memory
worker    one per core and recipe: tokenizes portions of rows

The kernel kills a process at its limits of CPU time and address space. CPU time does not depend on other load, so a row exceeds
its limit on a busy machine and on an idle one alike. `encoder_process` is what the processes run.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import msgpack
import pyarrow as pa

from penstock_server.machine import map_ordered, num_cores
from penstock_server.problems import DatasetInvalid, OutOfMemory

log = logging.getLogger("penstock.encoders")

MEMORY_BYTES = 2 << 30  # of address space, beyond what a process has after its imports
LOADING_SECONDS = 15  # of CPU, for a tokenizer and a template
_SECONDS, _BYTES_A_SECOND = 5, 50_000  # of CPU, for a portion; usual tokenizers take a second for some megabytes
_TOTAL_SECONDS, _TOTAL_BYTES_A_SECOND = 60, 20_000  # likewise, for all rows of a recipe
_PORTION_BYTES = 1 << 17
_KEPT = 8  # recipes whose processes stay after opening
_MAX_REFUSALS = 1000
_UNUSED_SECONDS = 60.0
OUT_OF_MEMORY = 3  # exit status
_START = "from penstock_server.recipes.encoder_process import main; main({})"
_CHANGED = "the tokenizer or its files changed while they were read. Wait until they are complete"


class LimitExceeded(ValueError):
    """A process was killed at its limits. The message continues a sentence about its work: "takes more than 5 seconds"."""


class _Ended(Exception):
    """A process has ended. `status` is its exit status, negative for a signal."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class _Process:
    """A process at the other end of a socket. It ends when the socket is closed."""

    def __init__(self, connection: Connection, pid: int, parent: _Process | None = None) -> None:
        self._connection, self._pid, self._parent = connection, pid, parent
        self.has_ended = False
        self._lock = threading.Lock()

    def call(self, message: Any) -> Any:
        """Send a message, and return the reply. Raises _Ended."""
        try:
            self._connection.send_bytes(msgpack.packb(message))
            return msgpack.unpackb(self._connection.recv_bytes())
        except (OSError, EOFError):
            self.close()
            raise _Ended(self._parent.status_of(self._pid) if self._parent else -signal.SIGKILL) from None

    def fork(self) -> _Process:
        """Return a process that this one forks. Raises _Ended: this one has ended."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            try:
                self._connection.send_bytes(msgpack.packb("fork"))
                send_handle(self._connection, theirs.fileno(), self._pid)
                pid = msgpack.unpackb(self._connection.recv_bytes())
            except (OSError, EOFError):
                ours.close()
                self.close()
                raise _Ended(-signal.SIGKILL) from None
        return _Process(Connection(ours.detach()), pid, self)

    def status_of(self, pid: int) -> int:
        """Return the exit status of a process that this one has forked and that ends."""
        with self._lock, suppress(OSError, EOFError):
            self._connection.send_bytes(msgpack.packb(pid))
            status: int = msgpack.unpackb(self._connection.recv_bytes())
            return status
        return -signal.SIGKILL

    def close(self) -> None:
        """End the process, once it has replied."""
        self.has_ended = True
        with suppress(OSError):
            self._connection.close()


class Encoders:
    """Encoders of all recipes with a tokenizer in one server process."""

    def __init__(self) -> None:
        self._encoders = WeakValueDictionary[tuple[Any, ...], Encoder]()
        self._refusals = dict[tuple[Any, ...], str]()  # each poll of the folder tries again

    def open(
        self, folder: Path, declared: Mapping[str, Any], schema: pa.Schema, tokenizer: Path | None, files: Mapping[str, Any]
    ) -> Encoder:
        """Return the encoder of a recipe with files of these stats. Loads them in a process first.

        Raises DatasetInvalid: loading exceeds the limits of a process.
        """
        # As JSON: a TOML file may hold dates, where only texts and numbers are valid.
        source = str(folder), json.dumps(declared, default=str), schema.serialize().to_pybytes(), str(tokenizer or "")
        key = (*source, *sorted(files.items()))
        if refusal := self._refusals.get(key):
            raise DatasetInvalid(refusal)
        if (known := self._encoders.get(key)) is None:
            known = Encoder(source)
            try:
                known.load()
            except LimitExceeded as excess:
                if len(self._refusals) >= _MAX_REFUSALS:
                    self._refusals.clear()
                self._refusals[key] = (
                    f"{folder}: its tokenizer or chat template {excess} when it is loaded and tried on short texts. Correct "
                    f"it, or use another."
                )
                raise DatasetInvalid(self._refusals[key]) from None
            self._encoders[key] = known
            if len(self._encoders) > _KEPT:
                known.end()
        return known

    def let_go(self) -> None:
        """End the workers that were idle for a minute."""
        for encoder in list(self._encoders.values()):
            encoder.let_go()

    def close(self) -> None:
        """End all processes."""
        for encoder in list(self._encoders.values()):
            encoder.close()


class _Nursery:
    """The process that forks loaders. It ends with the server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def fork_here(self, main: Callable[[int], None]) -> None:
        """Start as a copy of this process, which runs `main` with the descriptor of its socket."""
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            # The server's atexit functions and buffered output are copied, too. os._exit leaves them alone.
            with suppress(BaseException):
                main(theirs.fileno())
            os._exit(0)
        theirs.close()
        _reap(partial(os.waitpid, pid, 0))
        self._process = _Process(Connection(ours.detach()), pid)

    def fork(self) -> _Process:
        """Return a new process with the libraries imported. Raises _Ended: it cannot start."""
        with self._lock:
            with suppress(_Ended):
                if self._process:
                    return self._process.fork()
            self._process = _start_nursery()
            return self._process.fork()


nursery = _Nursery()  # one per process


def _start_nursery() -> _Process:
    ours, theirs = socket.socketpair()
    with theirs:
        # One thread each: the processes fork.
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-c", _START.format(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    _reap(process.wait)
    return _Process(Connection(ours.detach()), process.pid)


def _reap(wait: Callable[[], object]) -> None:
    """Wait for a process in a thread, since it would stay a zombie."""
    threading.Thread(target=wait, name="penstock-nursery", daemon=True).start()


class Encoder:
    """Processes of one recipe. Methods raise ValueError: the rows cannot be read."""

    def __init__(self, source: Sequence[Any]) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._loader: _Process | None = None
        self._idle: list[_Process] = []
        self._num_busy = self._bytes = 0
        self._seconds = 0.0  # of CPU, for `_bytes` of rows
        self._used_at = time.monotonic()
        self._threads = ThreadPoolExecutor(num_cores(), thread_name_prefix="penstock-tokenizer")
        self.identity: str | None = None

    def load(self) -> None:
        """Load the tokenizer and the template in a process. Raises LimitExceeded. Raises OutOfMemory: it was killed."""
        with self._lock, _limited(LOADING_SECONDS):
            self._find_loader()

    def check(self, identity: str) -> None:
        """Check that the process has loaded the recipe of this identity. Raises DatasetInvalid: it has loaded another."""
        if self.identity != identity:
            raise DatasetInvalid(f"{self._source[0]}: {_CHANGED}.")

    def encode(self, rows: pa.RecordBatch, bound: int) -> Iterator[tuple[int, Any]]:
        """Yield portions of rows, in order: the number of rows, and the reply of `encoder_process.encoded`.

        The reply for a single row that exceeds the limits is the reason, a text.
        """
        replies = map_ordered(self._threads, num_cores(), lambda portion: self._encoded(portion, bound), _portions(rows))
        return chain.from_iterable(replies)

    def _encoded(self, rows: pa.RecordBatch, bound: int) -> list[tuple[int, Any]]:
        if self._seconds > _TOTAL_SECONDS + self._bytes / _TOTAL_BYTES_A_SECOND:
            raise DatasetInvalid(
                f"{self._source[0]}: its tokenizer or chat template took {self._seconds:,.0f} seconds for {self._bytes:,} "
                f"bytes of rows, which is too slow to train. Use another, or correct the rows and restart the server."
            )
        try:
            reply = self._call("encoded", rows.nbytes, _as_bytes(rows), bound)
        except LimitExceeded as excess:
            if rows.num_rows == 1:
                return [(1, str(excess))]
            return [pair for row in range(rows.num_rows) for pair in self._encoded(rows.slice(row, 1), bound)]
        return [(rows.num_rows, reply)]

    def lacks_separator(self, rows: pa.RecordBatch) -> bool:
        """Run text.lacks_separator in a process."""
        lacks: bool = self._call("lacks_separator", rows.nbytes, _as_bytes(rows))
        return lacks

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        text: str = self._shown("decode", ids)
        return text

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token; see TokenizerFile.token_texts."""
        texts: list[str] = self._shown("token_texts", ids)
        return texts

    def _shown(self, function: str, ids: Sequence[int]) -> Any:
        try:
            return self._call(function, 8 * len(ids), list(ids))
        except LimitExceeded as excess:
            raise DatasetInvalid(f"{self._source[0]}: its tokenizer {excess} to show tokens as text. Use another.") from None

    def let_go(self) -> None:
        """End the workers if they were idle for a minute."""
        # The loader stays: a run on an older snapshot needs it after the files have changed.
        with self._lock:
            if time.monotonic() - self._used_at >= _UNUSED_SECONDS:
                for worker in self._idle:
                    worker.close()
                self._idle = []

    def end(self) -> None:
        """End the processes; the next call starts them again."""
        with self._lock:
            self._end()

    def close(self) -> None:
        """End the processes, and cancel the calls that have not begun."""
        self.end()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _end(self) -> None:
        for process in (*self._idle, *([self._loader] if self._loader else [])):
            process.close()
        self._idle, self._loader = [], None

    def _call(self, function: str, nbytes: int, *arguments: Any) -> Any:
        """Call a function of `encoder_process` in a worker. Raises LimitExceeded, OutOfMemory, and ValueError of the data."""
        seconds = _SECONDS + nbytes // _BYTES_A_SECOND
        with self._lock:
            self._num_busy += 1
        worker, spent = None, float(seconds)
        try:
            with _limited(seconds):
                with self._lock:
                    worker = self._idle.pop() if self._idle else self._find_loader().fork()
                error, reply, spent = worker.call([function, seconds, *arguments])
        except BaseException:
            worker = None
            raise
        finally:
            with self._lock:
                self._idle += [worker] if worker else []
                self._num_busy -= 1
                self._used_at = time.monotonic()
                self._seconds += spent
                self._bytes += nbytes
        if error:
            raise ValueError(error)
        return reply

    def _find_loader(self) -> _Process:
        """Return the loader; starts one. Raises _Ended. Raises ValueError: the files have changed."""
        if self._loader is None or self._loader.has_ended:
            self._idle = []  # of a loader that was killed
            loader = nursery.fork()
            identity = loader.call(self._source)
            if self.identity is not None and identity != self.identity:
                loader.close()
                raise ValueError(_CHANGED)
            self.identity, self._loader = identity, loader
        return self._loader


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    """Convert the end of a process to LimitExceeded, or to OutOfMemory after a SIGKILL: a retry may then succeed."""
    try:
        yield
    except _Ended as ended:
        if ended.status == -signal.SIGKILL:  # by the kernel, which is out of memory, or with its parent
            killed = MemoryError("a process that tokenizes was killed")
            raise OutOfMemory("to tokenize", killed, "write smaller rows") from None
        if ended.status == -signal.SIGXCPU:
            raise LimitExceeded(f"takes more than {seconds} seconds") from None
        if ended.status in (OUT_OF_MEMORY, -signal.SIGABRT):
            raise LimitExceeded(f"takes more than {MEMORY_BYTES >> 20:,} MiB of memory") from None
        name = signal.Signals(-ended.status).name if ended.status < 0 else f"status {ended.status}"
        raise LimitExceeded(f"crashes with {name}") from None


def _portions(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the rows in slices of up to _PORTION_BYTES, or of one longer row; at least one slice."""
    if rows.num_rows <= 1 or rows.nbytes <= _PORTION_BYTES:
        yield rows
        return
    half = rows.num_rows // 2
    yield from _portions(rows.slice(0, half))
    yield from _portions(rows.slice(half))


def _as_bytes(rows: pa.RecordBatch) -> memoryview:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_batch(rows)
    return memoryview(sink.getvalue())
