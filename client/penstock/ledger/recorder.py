"""A dataset's ledgers, and how one of its iterations is recorded in them."""

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
    from penstock.state.progress import Pass, Progress  # which imports torch

_SYNC_SECONDS = 60.0
_CLOSE_SECONDS = 10.0
_OLD_WORKERS_SECONDS = 10.0  # loader workers that are let go take a moment to end, and those of the next epoch begin meanwhile


class Recorder:
    """The ledgers of one dataset: a file for this process's rank, opened for each iteration; workers have their own.

    Raises SpecError: that is no path.
    Raises LedgerError: the file cannot be written, holds other things, or another process writes to it.
    """

    def __init__(self, ledger: str | os.PathLike[str], dataset: str, rank: int) -> None:
        path = os.fspath(ledger) if isinstance(ledger, str | os.PathLike) else None
        if not isinstance(path, str) or not path or "\0" in path or not _can_be_a_name(path):
            raise SpecError(f"ledger must be the path of a file, not {ledger!r}", ("ledger",))
        self._ledger = Path(path).absolute()  # or a loop that changes its folder would go on in another file
        self._dataset, self._rank = dataset, rank
        file = hold_ledger(ledger_path(self._ledger, rank))
        try:
            file.check()  # now, not when the first loop begins
        finally:
            release_ledger(file)

    @contextmanager
    def recording(self, spec: Spec, num_samples: int, round_: Pass, progress: Progress) -> Iterator[Ledger]:
        """The ledger of an iteration, opened when it begins and closed when it ends. Raises what `open` raises."""
        ledger = None
        try:
            ledger = self.open(spec, num_samples, round_, progress)
            yield ledger
        finally:
            if ledger:
                ledger.close()

    def open(self, spec: Spec, num_samples: int, round_: Pass, progress: Progress) -> Ledger:
        """The ledger of an iteration that begins, of an epoch of so many samples over all ranks; it counts as put on record.

        Raises LedgerError: see Ledger.
        """
        ledger = None
        try:
            with held.opening:  # or iterations of two threads would have one number
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
    """Appends the batches of one iteration to a file. One thread uses it; several iterations of a process may take turns.

    Raises LedgerError, where it `is_first`, before any batch of the launch: the file cannot be written, holds other things, or
    another process writes to it. Later iterations, and `record`, never stop a run: what goes wrong is logged as an error, and
    up to 16 MiB wait in memory until the file can be written again, by this iteration or a later one.
    """

    def __init__(self, path: Path, begin: Begin, *, is_first: bool) -> None:
        text = begin.to_text()
        self._check = check_of(text)
        self._begin = f"{text} {self._check}"
        self._pid = os.getpid()
        self._closing, self._holds = Flag(), threading.Lock()  # the latter is taken by who gives the file back
        self._file = hold_ledger(path, _OLD_WORKERS_SECONDS if begin.num_workers else 0.0)
        self._thread = own_thread("ledger", self._sync)
        try:
            if is_first:
                self._file.begin(self._begin)
            else:
                self._file.append(self._begin)
            # Or a loop that is left when modules are taken apart would wait for a stopped thread.
            atexit.register(self.close)
            start(self._thread, self._closing.set)
        except BaseException:  # no more threads may be started, or Ctrl-C
            atexit.unregister(self.close)
            self._give_back()
            raise

    @property
    def is_closed(self) -> bool:
        """Whether nothing more is written to it."""
        return self._closing.is_set()

    def record(self, step: int, digest: str) -> None:
        """The loop is about to be handed the batch of this step, which has this digest.

        Never raises for a disk that cannot be written.
        """
        if self.is_closed:
            raise ValueError(f"the ledger {self._file.path} is closed")
        self._note(f"{step:>{STEP_COLUMNS}} {digest}")

    def finish(self) -> None:
        """The epoch is over: the loop asked for another batch."""
        self._note("end")

    def close(self) -> None:
        """Has the disk write what is not written. Idempotent; does nothing in a process that was forked off."""
        if self.is_closed or self._pid != os.getpid():
            return
        self._closing.set()
        atexit.unregister(self.close)
        # Python may collect an iterator that was dropped in this thread, in one that fetches for another loop, or in one that
        # has what this thread waits for.
        if not is_own_thread() and not is_at_a_ledger():
            self._thread.join(_CLOSE_SECONDS)
            if self._thread.is_alive():  # it may be ended before it tells what is lost
                log.error("penstock: the disk of the ledger %s hangs: its last lines may not be written", self._file.path)

    def _note(self, text: str) -> None:
        self._file.append(self._begin, f"{text} {check_of(text, self._check)}")

    def _sync(self) -> None:
        """Has the disk write what was appended, in a thread: on a file system that is shared it may take its time."""
        is_closing = False
        while not self._holds.locked():  # or it would be opened again, and nobody close it
            self._file.sync()
            if is_closing:
                break
            is_closing = self._closing.wait(_SYNC_SECONDS)
        self._give_back()

    def _give_back(self) -> None:
        """Whether its thread began or not, this is done once."""
        if self._holds.acquire(blocking=False):
            release_ledger(self._file)
