"""madvise hints for mapped blocks: random reads of a few rows, from more data than fits into memory."""

from __future__ import annotations

import ctypes
import mmap
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pyarrow as pa

_LIBC = ctypes.CDLL(None)  # Python's madvise works only on mmap objects, and each keeps a descriptor open
_THIS_THREAD = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # macOS counts the whole process
PAGE_BYTES = mmap.PAGESIZE
_MANY_WAITS = 16
_ADVISED_COPIES = 64


def expect_few(content: pa.Buffer) -> None:
    """Advises random access, so that the kernel reads only the requested pages of a map.

    Otherwise it reads up to megabytes around each row, and evicts pages that others need.
    """
    if content.size:
        _advise(content.address, content.size, mmap.MADV_RANDOM)


class Waits:
    """Announces copies from maps to the kernel, after a copy had to wait for the disk.

    The kernel then reads all pages at a time, not one by one. The hints take longer than a copy that does not wait.
    """

    def __init__(self) -> None:
        self._num_to_advise = 0  # number of copies still to announce

    @contextmanager
    def copying(self, spans: Iterable[tuple[int, int]]) -> Iterator[None]:
        """Wraps a copy that reads these spans, (address, nbytes) each."""
        if self._num_to_advise:
            self._num_to_advise -= 1
            for address, nbytes in spans:
                within = address % PAGE_BYTES
                _advise(address - within, within + nbytes, mmap.MADV_WILLNEED)
        before = _num_waits()
        yield
        if _num_waits() - before >= _MANY_WAITS:
            self._num_to_advise = _ADVISED_COPIES


def _advise(address: int, nbytes: int, advice: int) -> None:
    _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)  # errors are ignored: it is only advice


def _num_waits() -> int:
    """Returns the number of page reads that this thread has waited for."""
    return resource.getrusage(_THIS_THREAD).ru_majflt
