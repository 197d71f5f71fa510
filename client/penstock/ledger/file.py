"""Ledger file for appends by one process: one descriptor and one queue of waiting lines for all iterations.

Lines that the system does not take wait in memory, in their order. A later line, the next sync or a later iteration tries
again to write them. A begin line precedes the first line of an iteration, and the first line that follows lines of another
iteration. The file's content at the time of the write decides that.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from pathlib import Path

from penstock.errors import LedgerError
from penstock.ledger.lines import NOWHERE, Lines
from penstock.ledger.opening import cannot_be_written, close_last_line, has_locked, is_deleted, open_ledger, telling
from penstock.logs import log

_MAX_WAITING_BYTES = 16 << 20
_WRITE_BYTES = 1 << 16


class LedgerFile:
    """One ledger file. Any thread may append to it; penstock.ledger.held opens it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_holders = 0
        # How long the first open waits for another writer process to end.
        self.wait_seconds = 0.0
        self._fd = -1
        # File size after the last write; NOWHERE (unknown) if a signal handler interrupted a write.
        self._size = NOWHERE
        # The last begin line that this descriptor wrote.
        self._begin = ""
        # The file ends with a part of a line that no longer waits.
        self._is_torn = False
        # File size when this process last closed it.
        self._left_size = 0
        self._waiting: deque[Lines] = deque()
        self._num_bytes = 0  # waiting bytes
        self._num_lost = 0  # lines
        self._failure = ""
        # A thread that needs both locks takes _syncing first: otherwise two threads could deadlock.
        self._writing, self._syncing = threading.RLock(), threading.RLock()
        self.locks = self._writing, self._syncing
        # Another process writes to the file, too.
        self._is_shared = False

    def check(self) -> None:
        """Open the file. Raises LedgerError: it cannot be written, is no ledger, or has another writer."""
        with self._writing:
            self._open()

    def append(self, begin: str, line: str = "") -> None:
        """Write a line of the iteration with this begin line; without a line, only the begin line if it is due.

        Never raises if the disk cannot be written: the line waits, as long as there is room.
        """
        with self._writing:
            if self._num_bytes < _MAX_WAITING_BYTES:
                self._put(begin, line)
            else:
                self._num_lost += 1
            self._write_what_it_takes()

    def begin(self, begin: str) -> None:
        """Write a begin line. Raises LedgerError: it cannot be written; the line does not wait."""
        with self._writing:
            self._put(begin, "")
            try:
                self._write()
            except (LedgerError, OSError) as error:
                self._take_back()
                raise _told(self.path, error) from error

    def sync(self) -> None:
        """Flush appended lines to the disk, and try again to write the waiting lines."""
        with self._syncing:
            with self._writing:
                self._leave_if_deleted()
                self._keep_others_out()
                self._write_what_it_takes()
                fd = self._fd
            try:
                if fd >= 0:
                    os.fsync(fd)
            except OSError as error:
                log.error("penstock: %s", cannot_be_written(self.path, error))

    def close(self, *, is_last: bool = False) -> None:
        """Close the file for other writers. Waiting lines stay for later iterations, unless `is_last`."""
        with self._writing:
            self._close()
            for lines in self._waiting:
                lines.is_over = True
            if is_last:
                self._drop_what_is_over()
            if self._num_lost:
                log.error("penstock: %d lines are not in the ledger %s", self._num_lost, self.path)
            if self._waiting:
                log.error(
                    "penstock: %d lines are not in the ledger %s. They wait for another iteration of this process, and are "
                    "lost if there is none.",
                    sum(lines.num_lines for lines in self._waiting),
                    self.path,
                )
            self._num_lost = 0

    @property
    def has_waiting(self) -> bool:
        """Whether lines wait to be written."""
        return bool(self._waiting)

    def _put(self, begin: str, line: str) -> None:
        if not self._waiting or self._waiting[-1].begin != begin:
            self._num_bytes += len(begin) if self._waiting else 0
            self._waiting.append(Lines(begin, (NOWHERE, bytearray())))
        if line:
            text = self._waiting[-1].placed[1]
            text += f"{line}\n".encode()
            self._num_bytes += len(line) + 1

    def _take_back(self) -> None:
        """Remove the lines that were put last from the queue; the file may already hold a part of them."""
        lines = self._waiting.pop()
        if lines.placed[0] != NOWHERE:  # they were the first in the queue
            self._is_torn = self._is_torn or self._size != lines.placed[0]
            self._begin, self._num_bytes = "", 0

    def _drop_what_is_over(self) -> None:
        """Discard waiting lines of iterations that had ended when the file was closed; count them as lost."""
        while self._waiting and self._waiting[0].is_over:
            self._num_lost += self._waiting.popleft().num_lines

    def _write_what_it_takes(self) -> None:
        """Write as many of the waiting lines as the system takes."""
        try:
            self._write()
        except (LedgerError, OSError) as error:
            failure = str(_told(self.path, error))
            if not self._failure:
                log.error("penstock: %s. Training goes on; the audit will miss what is not written.", failure)
            self._failure = failure
        else:
            if self._failure:
                log.warning("penstock: the ledger %s is written again; %d lines are lost", self.path, self._num_lost)
            self._failure = ""

    def _write(self) -> None:
        if self._waiting:
            self._open()
        if self._waiting:  # _open may have dropped lines of ended iterations
            self._look_at_size()
            if self._is_torn:
                self._give(b"\n")
                self._is_torn = False
        while self._waiting:
            self._write_lines(self._waiting[0])
            self._waiting.popleft()
        self._num_bytes = 0

    def _look_at_size(self) -> None:
        """Check the file size: a signal handler may have interrupted a write, or another program truncated it."""
        size, first = os.fstat(self._fd).st_size, self._waiting[0]
        if size < max(self._size, first.placed[0]):
            log.error(
                "penstock: the ledger %s was cut off while it was written: unless they were copied, the lines that it held are "
                "lost, and the audit will miss them",
                self.path,
            )
            self._begin, self._is_torn = "", size > 0  # the cut may be inside a line
            first.placed = (NOWHERE, first.placed[1])
        self._size = size

    def _write_lines(self, lines: Lines) -> None:
        if lines.placed[0] == NOWHERE:
            if lines.begin != self._begin:
                lines.begin_anew()
                self._begin = lines.begin
            lines.placed = (self._size, lines.placed[1])
        while True:
            start, text = lines.placed
            num_bytes = self._size - start
            if num_bytes >= len(text):
                return
            self._give(text[num_bytes : num_bytes + _WRITE_BYTES])
            if self._size - start < len(text):
                self._num_bytes -= lines.cut(start, self._size - start)

    def _give(self, content: bytes | bytearray) -> None:
        size, self._size = self._size, NOWHERE
        try:
            size += os.write(self._fd, content)
        except OSError:  # nothing was written
            self._size = size
            raise
        self._size = size

    def _open(self) -> None:
        """Open the file and complete its last line with a newline. Raises LedgerError: see check."""
        if self._fd >= 0:
            return
        wait_seconds, self.wait_seconds = self.wait_seconds, 0.0
        with telling(self.path):
            fd = open_ledger(self.path, wait_seconds)
            try:
                size = os.fstat(fd).st_size
                close_last_line(fd, self.path)
            except BaseException:
                os.close(fd)
                raise
        if size not in (0, self._left_size):  # the old lines would follow lines of another process
            self._drop_what_is_over()
        self._fd = fd

    def _close(self) -> None:
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            self._left_size = os.fstat(fd).st_size
        except OSError:  # a shared file system may have lost the file
            self._left_size = 0
        if self._waiting:
            self._leave_lines(self._waiting[0])
        self._size, self._begin, self._is_torn = NOWHERE, "", False
        try:
            os.close(fd)
        except OSError as error:
            log.error("penstock: %s", cannot_be_written(self.path, error))

    def _leave_lines(self, lines: Lines) -> None:
        """Mark the unwritten rest of the lines as not placed: it goes first into the file that is opened next.

        If only a line's newline is missing, the newline that the next open writes completes the line.
        """
        start, text = lines.placed
        if start == NOWHERE:
            return
        num_bytes = max(0, self._left_size - start)
        is_whole = text[num_bytes : num_bytes + 1] == b"\n"
        self._num_bytes -= lines.cut(start, num_bytes + is_whole)
        lines.placed = (NOWHERE, lines.placed[1])
        if not lines.placed[1]:
            self._waiting.popleft()

    def _leave_if_deleted(self) -> None:
        if self._fd >= 0 and is_deleted(self._fd, self.path):
            log.error(
                "penstock: the ledger %s was deleted while it was written: what it held is lost, and the audit will miss it. "
                "Further lines go to a new one.",
                self.path,
            )
            self._close()
            self._left_size = 0

    def _keep_others_out(self) -> None:
        """Lock the file again: this process loses its lock when any of its code opens and closes the file, as for a copy."""
        if self._fd < 0:
            return
        try:
            was_shared, self._is_shared = self._is_shared, not has_locked(self._fd)
        except OSError:  # the open has already reported it
            return
        if self._is_shared and not was_shared:
            log.error(
                "penstock: another process writes to the ledger %s, too: the audit cannot read lines that are written into one "
                "another. Is there another run with this ledger and rank?",
                self.path,
            )


def _told(path: Path, error: LedgerError | OSError) -> LedgerError:
    return error if isinstance(error, LedgerError) else LedgerError(cannot_be_written(path, error))
