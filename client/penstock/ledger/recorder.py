"""Recorder of a dataset's iterations in its ledgers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import LedgerError
from penstock.ledger.begin import STEP_COLUMNS, Begin, check_of
from penstock.ledger.file import LedgerFile, ledger_path, open_ledger
from penstock.logs import log
from penstock.spec import Spec

if TYPE_CHECKING:
    from penstock.progress import Pass  # imports torch, which the audit does not need

_OLD_WORKERS_SECONDS = 10.0  # the next epoch's loader workers may begin before the last epoch's have ended


class Recorder:
    """Ledgers of one dataset: a file for this process's rank, and one more per loader worker.

    Raises LedgerError: the file cannot be written, is no ledger, or another process writes to it.
    """

    def __init__(self, ledger: str | os.PathLike[str], dataset: str, rank: int) -> None:
        self._ledger = Path(ledger).absolute()  # os.chdir in the loop must not change the file
        self._dataset, self._rank = dataset, rank
        self._file: LedgerFile | None = open_ledger(ledger_path(self._ledger, rank))  # keeps it open, and other writers out
        self._process = os.getpid()

    def open(self, spec: Spec, num_samples: int, this: Pass) -> IterationRecord | None:
        """Begin the record of an iteration; `num_samples` is the number of samples of an epoch, over all ranks.

        None if the file cannot be written, which is only logged, unless this is the first iteration of the process.

        Raises LedgerError: the file cannot be written, is no ledger, or another process writes to it.
        """
        worker = this.worker
        path = ledger_path(self._ledger, self._rank, worker.first if worker else None)
        try:
            if not self._file or self._process != os.getpid():
                self._file, self._process = open_ledger(path, _OLD_WORKERS_SECONDS if worker else 0.0), os.getpid()
            return IterationRecord(self._file, self._begins(spec, num_samples, this))
        except (LedgerError, OSError) as error:
            text = str(error) if isinstance(error, LedgerError) else f"the ledger {path} cannot be written: {error.strerror}"
            if this.is_first:
                raise LedgerError(text) from error
            log.error("penstock: %s. Training goes on; the audit will miss this iteration.", text)
            return None

    def _begins(self, spec: Spec, num_samples: int, this: Pass) -> Iterator[Begin]:
        origin, worker = this.origin, this.worker
        for at, steps in this.epochs():
            yield Begin(
                run=origin.run or this.start,
                start=this.start,
                parent=origin.parent or "",
                parent_epoch=origin.epoch,
                parent_samples=origin.samples,
                dataset=self._dataset,
                num_samples=num_samples,
                rank=self._rank,
                epoch=at.epoch,
                step=at.step,
                spec=replace(spec, offset=at.offset),
                worker=steps.start - at.step,  # of an epoch that the pass goes on with, its number in the turn there
                num_workers=worker.stride if worker else 0,
                pass_name=this.name if worker else 0,
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return what a loader worker or a copy needs: each opens its own file."""
        return self.__dict__ | {"_file": None}


class IterationRecord:
    """Record of one iteration's batches in a file: for each epoch a begin line, its batches and its end.

    Raises OSError: the first begin line cannot be written.
    """

    def __init__(self, file: LedgerFile, begins: Iterator[Begin]) -> None:
        self._file, self._begins = file, begins
        self._enter(next(begins))
        file.write(self._begin)

    def record(self, epoch: int, step: int, digest: str) -> None:
        """Record the batch of a step, with its digest, right before the loop gets it."""
        while epoch != self.epoch:
            self._go_on(next(self._begins))
        self._note(f"{step:>{STEP_COLUMNS}} {digest}")

    def finish(self) -> None:
        """Record the end of the last epoch: the loop requested a batch after the last one."""
        for begin in self._begins:  # this loader worker has no step in these epochs
            self._go_on(begin)
        self._end()

    def _go_on(self, begin: Begin) -> None:
        self._end()
        self._enter(begin)
        self._file.append(self._begin)

    def _enter(self, begin: Begin) -> None:
        text = begin.to_text()
        self.epoch, self._check = begin.epoch, check_of(text)
        self._begin = f"{text} {self._check}"

    def _end(self) -> None:
        self._note("end")
        self._file.sync()

    def _note(self, text: str) -> None:
        self._file.append(self._begin, f"{text} {check_of(text, self._check)}")
