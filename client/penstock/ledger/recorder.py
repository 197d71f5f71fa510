"""Recorder of a dataset's iterations in its ledgers."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import SpecError
from penstock.ledger import held
from penstock.ledger.begin import STEP_COLUMNS, Begin, check_of
from penstock.ledger.held import hold_ledger, is_at_a_ledger, release_ledger
from penstock.ledger.names import ledger_path
from penstock.logs import log
from penstock.spec import Spec
from penstock.threads import Flag, is_own_thread, own_thread, start

if TYPE_CHECKING:
    from penstock.state.progress import Pass, Progress  # imports torch, which the audit does not need

_SYNC_SECONDS = 60.0
_CLOSE_SECONDS = 10.0
_OLD_WORKERS_SECONDS = 10.0  # the next epoch's loader workers may begin before the last epoch's have ended


class Recorder:
    """Ledgers of one dataset: a file for this process's rank, opened for each iteration; one more per worker.

    Raises:
        SpecError: `ledger` is no path.
        LedgerError: the file cannot be written, is no ledger, or another process writes to it.
    """

    def __init__(self, ledger: str | os.PathLike[str], dataset: str, rank: int) -> None:
        path = os.fspath(ledger) if isinstance(ledger, str | os.PathLike) else None
        if not isinstance(path, str) or not path or "\0" in path or not _can_be_a_name(path):
            raise SpecError(f"ledger must be the path of a file, not {ledger!r}", ("ledger",))
        self._ledger = Path(path).absolute()  # os.chdir in the loop must not change the file
        self._dataset, self._rank = dataset, rank
        file = hold_ledger(ledger_path(self._ledger, rank))
        try:
            file.check()  # raise now, not when the first loop begins
        finally:
            release_ledger(file)

    @contextmanager
    def recording(self, spec: Spec, num_samples: int, round_: Pass, progress: Progress) -> Iterator[Ledger]:
        """Open the ledger of an iteration, and close it when the iteration ends. Raises what `open` raises."""
        ledger = None
        try:
            ledger = self.open(spec, num_samples, round_, progress)
            yield ledger
        finally:
            if ledger:
                ledger.close()

    def open(self, spec: Spec, num_samples: int, round_: Pass, progress: Progress) -> Ledger:
        """Open the ledger of an iteration that begins; it then counts as recorded.

        `num_samples` is the number of samples of its epoch, over all ranks.

        Raises LedgerError: see Ledger.
        """
        ledger = None
        try:
            with held.opening:  # otherwise iterations of two threads could get the same number
                num_before = progress.num_before(round_)
                ledger = self._open(spec, num_samples, round_, num_before)
                progress.put_on_record(round_, num_before)
        except BaseException:
            if ledger:
                ledger.close()
            raise
        return ledger

    def _open(self, spec: Spec, num_samples: int, round_: Pass, iteration: int) -> Ledger:
        position, worker = round_.stretch.position, round_.worker
        begin = Begin(
            launch=round_.launch,
            num_loads=round_.num_loads,
            state_epoch=round_.state_epoch,
            iteration=iteration,
            dataset=self._dataset,
            num_samples=num_samples,
            rank=self._rank,
            epoch=position.epoch,
            step=position.step,
            spec=spec,
            worker=worker.first if worker else 0,
            num_workers=worker.stride if worker else 0,
            round=round_.name if worker else 0,
        )
        path = ledger_path(self._ledger, self._rank, worker.first if worker else None)
        return Ledger(path, begin, is_first=round_.is_first)


def _can_be_a_name(path: str) -> bool:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


class Ledger:
    """Record of one iteration's batches in a file. One thread uses it; iterations of a process may take turns.

    Later iterations of a launch, and `record`, never stop a run: they log an error, and up to 16 MiB wait in memory until this
    or a later iteration can write the file again.

    Raises LedgerError: only if `is_first`, before any batch of the launch: the file cannot be written, is no ledger, or
    another process writes to it.
    """

    def __init__(self, path: Path, begin: Begin, *, is_first: bool) -> None:
        text = begin.to_text()
        self._check = check_of(text)
        self._begin = f"{text} {self._check}"
        self._pid = os.getpid()
        self._closing, self._holds = Flag(), threading.Lock()  # the thread that releases the file takes the lock
        self._file = hold_ledger(path, _OLD_WORKERS_SECONDS if begin.num_workers else 0.0)
        self._thread = own_thread("ledger", self._sync)
        try:
            if is_first:
                self._file.begin(self._begin)
            else:
                self._file.append(self._begin)
            # Otherwise a loop that is abandoned at interpreter shutdown would wait for a stopped thread.
            atexit.register(self.close)
            start(self._thread, self._closing.set)
        except BaseException:  # no more threads can start, or Ctrl-C
            atexit.unregister(self.close)
            self._give_back()
            raise

    @property
    def is_closed(self) -> bool:
        """Whether the ledger is closed for records."""
        return self._closing.is_set()

    def record(self, step: int, digest: str) -> None:
        """Record the batch of a step, with its digest, right before the loop gets it.

        Never raises if the disk cannot be written.
        """
        if self.is_closed:
            raise ValueError(f"the ledger {self._file.path} is closed")
        self._note(f"{step:>{STEP_COLUMNS}} {digest}")

    def finish(self) -> None:
        """Record the end of the epoch: the loop requested a batch after the last one."""
        self._note("end")

    def close(self) -> None:
        """Flush to the disk and close. Idempotent; does nothing in a fork."""
        if self.is_closed or self._pid != os.getpid():
            return
        self._closing.set()
        atexit.unregister(self.close)
        # Python may collect a dropped iterator in any thread: in this ledger's, in one that fetches for another loop, or in
        # one that holds a lock that this ledger's thread waits for. Do not join there: it would deadlock.
        if not is_own_thread() and not is_at_a_ledger():
            self._thread.join(_CLOSE_SECONDS)
            if self._thread.is_alive():  # the process may end before this thread logs the lost lines
                log.error("penstock: the disk of the ledger %s hangs: its last lines may not be written", self._file.path)

    def _note(self, text: str) -> None:
        self._file.append(self._begin, f"{text} {check_of(text, self._check)}")

    def _sync(self) -> None:
        """Flush appended lines to the disk, in a thread: a shared file system may be slow."""
        is_closing = False
        while not self._holds.locked():  # after the release a sync would reopen the file, and leave it open
            self._file.sync()
            if is_closing:
                break
            is_closing = self._closing.wait(_SYNC_SECONDS)
        self._give_back()

    def _give_back(self) -> None:
        """Release the file once, whether the thread began or not."""
        if self._holds.acquire(blocking=False):
            release_ledger(self._file)
