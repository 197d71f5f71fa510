"""Pages: what the kernel is told of mapped blocks, of which a few rows are needed at a time, from more than memory holds."""

from __future__ import annotations

import ctypes
import mmap
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pyarrow as pa

_LIBC = ctypes.CDLL(None)  # Python can advise on maps of its own alone, and those keep a descriptor each
_THIS_THREAD = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # on macOS of the whole process
PAGE_BYTES = mmap.PAGESIZE
_MANY_WAITS = 16
_ADVISED_COPIES = 64


def expect_few(content: pa.Buffer) -> None:
    """Has the kernel read no more of a map than is asked for.

    Otherwise it reads up to megabytes around each row, and drops pages that others need.
    """
    if content.size:
        _advise(content.address, content.size, mmap.MADV_RANDOM)


class Waits:
    """Tells the kernel beforehand what will be copied from maps, once a copy had to wait for a disk.

    The kernel then reads all of it at a time, and not page by page. To tell it takes longer than a copy that waits for nothing.
    """

    def __init__(self) -> None:
        self._num_to_advise = 0  # copies that the kernel is still to be told of

    @contextmanager
    def copying(self, spans: Iterable[tuple[int, int]]) -> Iterator[None]:
        """Around a copy that reads these spans, (address, nbytes) each."""
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
    _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)  # it may be refused: it is but advice


def _num_waits() -> int:
    """How often this thread has waited for a page to be read."""
    return resource.getrusage(_THIS_THREAD).ru_majflt
