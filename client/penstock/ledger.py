"""The ledger: a line for every batch that a training loop was handed, so that `penstock audit` can prove what a run saw.

Each process has a file of its own, and every start of the run appends to it. It is text, to be read and searched:

    begin {"ledger": 1, "launch": "5f0c77aa", ..., "epoch": 0, "step": 0, "spec": {...}} 1c9a0d1f
                   0 9f3c0d11a2b4c5d6 8c0d1f22
                   1 77aa0d11a2b4c5d6 09e3b7aa
    end 5b1e2c3d

begin    an iteration over the dataset begins, or goes on after lines of another; the fields are those of Begin
a step   the batch of this step was handed to the loop: the step in 16 columns, the batch's digest in 16 hex digits
end      the epoch was over: the loop asked for another batch

The last word of a line is its check in 8 hex digits: the CRC-32 of the text before it, without the space between them. Behind
a begin line, the check of that line is put before each line's own text, so that no line passes for one of another iteration.
A line that was cut off when its process died is closed by the newline with which the next start begins.

A line is given to the system before its batch is given to the loop: a process that is killed loses none. A thread has the disk
write them once a minute: a machine that goes down loses a minute at most.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import zlib
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import __version__
from penstock.errors import LedgerError
from penstock.ledger_file import cannot_be_written, hold_ledger, ledger_path, release_ledger
from penstock.spec import Spec
from penstock.threads import is_own_thread, own_thread

if TYPE_CHECKING:
    from penstock.place.progress import Round  # which imports torch

log = logging.getLogger("penstock")

VERSION = 1
STEP_COLUMNS = 16
_SYNC_SECONDS = 60.0
_CLOSE_SECONDS = 10.0
_OLD_WORKERS_SECONDS = 10.0  # loader workers that are let go take a moment to end, and those of the next epoch begin meanwhile
_MOST_PENDING_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """An iteration over a dataset: what it gives, from where on, and who began it.

    launch         names one RemoteDataset of one process, which may be a fork of another; the workers of its loader share it
    num_loads      how often a state was loaded into it before this iteration, by the loop or by workers when they began
    iteration      how many it began before this one, in this process; a gap in these tells that one was not recorded
    num_sequences  of an epoch, over all ranks, skipped ones included
    spec           resolved; its offset is the iteration's
    step           the first one; in a loader's worker that of the round, to which its own number is added
    worker         its number, of `num_workers`; 0 of 0 in the process of the loop itself
    loader_seed    what the loader drew when its workers began, the same for all of them; 0 without workers
    """

    launch: str
    num_loads: int
    iteration: int
    dataset: str
    num_sequences: int
    rank: int
    epoch: int
    step: int
    spec: Spec
    worker: int = 0
    num_workers: int = 0
    loader_seed: int = 0
    time: datetime = field(default_factory=lambda: datetime.now(UTC))
    version: str = __version__

    def to_text(self) -> str:
        """The text of a begin line, without its check."""
        values = asdict(self) | {"time": self.time.isoformat(timespec="microseconds"), "spec": self.spec.to_dict()}
        return "begin " + json.dumps({"ledger": VERSION} | values)

    @classmethod
    def from_text(cls, text: str) -> Begin:
        """What such a text says. Raises LedgerError: it is in the words of another version."""
        values: dict[str, Any] = json.loads(text.removeprefix("begin "))
        try:
            if values["ledger"] != VERSION:
                raise ValueError(f"ledgers of version {values['ledger']} are unknown")
            values |= {"spec": Spec(**values["spec"]), "time": datetime.fromisoformat(values["time"])}
            return cls(**{f.name: values[f.name] for f in fields(cls)})
        except (KeyError, TypeError, ValueError) as error:
            raise LedgerError(f"penstock {values.get('version')} wrote it, this is {__version__}: {error}") from error


def check_of(text: str, begin: str = "") -> str:
    """The check of a line's text; `begin` is that of the begin line before it."""
    return f"{zlib.crc32((begin + text).encode()):08x}"


class Book:
    """The ledgers of one dataset: a file for this process's rank, opened for each iteration; workers have their own.

    Raises LedgerError: the file cannot be written, holds other things, or another process writes to it.
    """

    def __init__(self, ledger: str | os.PathLike[str], dataset: str, rank: int, num_sequences: int) -> None:
        self._num_iterations = 0
        self._ledger = Path(ledger).absolute()  # or a loop that changes its folder would go on in another file
        self._dataset, self._rank, self._num_sequences = dataset, rank, num_sequences
        path = ledger_path(self._ledger, rank)
        hold_ledger(path)  # whether it can be is said now, not when the first loop begins
        release_ledger(path)

    def open(self, spec: Spec, round_: Round) -> Ledger:
        """The ledger of an iteration that begins, and of what spec. Raises LedgerError: see Ledger."""
        position, worker = round_.stretch.position, round_.worker
        begin = Begin(
            launch=round_.launch,
            num_loads=round_.num_loads,
            iteration=self._num_iterations,
            dataset=self._dataset,
            num_sequences=self._num_sequences,
            rank=self._rank,
            epoch=position.epoch,
            step=position.step,
            spec=spec,
            worker=worker.first if worker else 0,
            num_workers=worker.stride if worker else 0,
            loader_seed=worker.loader_seed if worker else 0,
        )
        path = ledger_path(self._ledger, self._rank, worker.first if worker else None)
        ledger = Ledger(path, begin, is_first=round_.is_first)
        self._num_iterations += 1
        return ledger


class Ledger:
    """Appends the batches of one iteration to a file. One thread uses it; several iterations of a process may take turns.

    Raises LedgerError, where it `is_first`, before any batch of the launch: the file cannot be written, holds other things, or
    another process writes to it. Later iterations, and `record`, never stop a run: what goes wrong is logged as an error, and
    up to 16 MiB wait in memory until the file can be written again.
    """

    def __init__(self, path: Path, begin: Begin, *, is_first: bool) -> None:
        self._path, self._begin, self._is_first = path, begin, is_first
        self._begin_text = begin.to_text()
        self._begin_check = check_of(self._begin_text)
        self._fd = -1
        self._pending = bytearray()
        self._writing = threading.Lock()
        self._num_lost = 0
        self._failure = ""
        self._pid = os.getpid()
        self._closing = threading.Event()
        self._thread = own_thread("ledger", self._sync)
        self._begin_again()
        try:
            if self._failure and is_first:
                raise LedgerError(self._failure)
            self._thread.start()
        except BaseException:  # no more threads may be started, or Ctrl-C
            del _latest[self._pid, path]
            self._close_file()
            raise
        atexit.register(self.close)  # or a loop that is left when modules are taken apart would wait for a stopped thread

    @property
    def is_closed(self) -> bool:
        """Whether nothing more is written to it."""
        return self._closing.is_set()

    def record(self, step: int, digest: str) -> None:
        """The loop is about to be handed the batch of this step, which has this digest.

        Never raises for a disk that cannot be written.
        """
        if self.is_closed:
            raise ValueError(f"the ledger {self._path} is closed")
        self._note(f"{step:>{STEP_COLUMNS}} {digest}")

    def finish(self) -> None:
        """The epoch is over: the loop asked for another batch."""
        self._note("end")

    def close(self) -> None:
        """Has the disk write what is not written. Idempotent; does nothing in a process that was forked off."""
        if self.is_closed or self._pid != os.getpid():
            return
        atexit.unregister(self.close)
        self._closing.set()
        # Python may collect an iterator that was dropped in this thread, or in one that fetches for another loop.
        if not is_own_thread():
            self._thread.join(_CLOSE_SECONDS)
            if self._thread.is_alive():  # it may be ended before it tells what is lost
                log.error("penstock: the disk of the ledger %s hangs: its last lines may not be written", self._path)

    def _note(self, text: str) -> None:
        """Appends a line of the iteration, after its begin line or others of its own."""
        if not self._is_latest:
            self._begin_again()
        self._append(text, self._begin_check)

    @property
    def _is_latest(self) -> bool:
        """Whether the last begin line in the file is that of this iteration."""
        return _latest.get((self._pid, self._path)) is self

    def _begin_again(self) -> None:
        self._append(self._begin_text, "")
        _latest[self._pid, self._path] = self

    def _append(self, text: str, begin_check: str) -> None:
        with self._writing:
            if len(self._pending) < _MOST_PENDING_BYTES:
                self._pending += f"{text} {check_of(text, begin_check)}\n".encode()
            else:
                self._num_lost += 1
            self._write()

    def _write(self) -> None:
        """Gives the system what waits in memory, as far as it takes it."""
        try:
            if self._fd < 0:
                is_new_worker = self._begin.num_workers > 0 and (self._pid, self._path) not in _latest
                self._fd = hold_ledger(self._path, _OLD_WORKERS_SECONDS if is_new_worker else 0.0)
            while self._pending:
                del self._pending[: os.write(self._fd, self._pending)]
        except (LedgerError, OSError) as error:
            failure = cannot_be_written(self._path, error) if isinstance(error, OSError) else str(error)
            if not self._failure and (not self._is_first or (self._pid, self._path) in _latest):
                log.error("penstock: %s. Training goes on; the audit will miss what is not written.", failure)
            self._failure = failure
        else:
            if self._failure:
                log.warning("penstock: the ledger %s is written again; %d lines are lost", self._path, self._num_lost)
            self._failure = ""

    def _sync(self) -> None:
        """Has the disk write what was appended, in a thread: on a file system that is shared it may take its time.

        Each time it tries again to write what waits in memory, unless the file has gone on with another iteration by now.
        """
        is_closing = False
        while True:
            with self._writing:
                if self._is_latest:
                    self._write()
            try:
                if self._fd >= 0:
                    os.fsync(self._fd)
            except OSError as error:
                log.error("penstock: %s", cannot_be_written(self._path, error))
            if is_closing:
                break
            is_closing = self._closing.wait(_SYNC_SECONDS)
        if num_lost := self._num_lost + self._pending.count(b"\n"):
            log.error("penstock: %d lines are not in the ledger %s. %s", num_lost, self._path, self._failure)
        self._close_file()

    def _close_file(self) -> None:
        if self._fd >= 0:
            self._fd = -1
            release_ledger(self._path)


# Whose begin line is the last in a file. By process, so that what a fork inherits is nobody's.
_latest: dict[tuple[int, Path], Ledger] = {}
