"""An object as a file. What has been fetched is read from memory; other reads fetch what they need."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from io import RawIOBase

from penstock_server.sources.remote import RemotePath
from penstock_server.sources.stats import FileStat

TAIL_BYTES = 64 << 10  # most footers are shorter; pyarrow reads as much
_PART_BYTES = 8 << 20  # of one request: several at a time are faster, and a failed one is soon repeated
_MAX_WINDOWS = 16
_MIN_AHEAD_BYTES, _MAX_AHEAD_BYTES = 1 << 20, 64 << 20  # of a file that is read from its start to its end
_MAX_FETCHED_BYTES = 256 << 20  # of a row group
_GAP_BYTES = 1 << 20  # bytes between two ranges that take less time than another request


class RemoteFile(RawIOBase):
    """A version of an object, as a binary file for reading. Raises what Source.read raises.

    After `fetch_all` of too many bytes, or `read_ahead`, a read fetches a window. The most recent windows are kept: each column
    reads on.
    """

    def __init__(self, path: RemotePath, stat: FileStat) -> None:
        super().__init__()
        self.path, self.stat = path, stat
        self._window = self._max_window = self._at = 0
        self._starts = list[int]()  # ascending, of the parts
        self._parts = dict[int, memoryview]()
        self._windows = list[int]()  # starts of the parts that may be dropped, the oldest first

    def fetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch ranges [start, stop), those near to each other together, and keep them."""
        wanted = [part for start, stop in coalesced(ranges) for part in _in_parts(start, stop)]
        bodies = self.path.source.read_many(self.path.key, self.stat, wanted)
        for (start, _), body in zip(wanted, bodies, strict=True):
            self._keep(start, body)

    def fetch_all(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch ranges if they are small enough for memory together; otherwise reads fetch a window at a time."""
        wanted = coalesced(ranges)
        if sum(stop - start for start, stop in wanted) <= _MAX_FETCHED_BYTES:
            self.fetch(wanted)
        else:
            self._window = self._max_window = _PART_BYTES

    def read_ahead(self) -> None:
        """Let reads fetch windows that grow, for a file that is read to its end."""
        self._window, self._max_window = _MIN_AHEAD_BYTES, _MAX_AHEAD_BYTES

    def fetch_tail(self) -> None:
        """Fetch the end of the object, which has the footer of most."""
        self.fetch([(max(0, self.stat.size_bytes - TAIL_BYTES), self.stat.size_bytes)])

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position, in bytes."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position, and return it."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.stat.size_bytes}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes. They may be a memoryview, which pyarrow takes as well."""
        stop = self.stat.size_bytes if size is None or size < 0 else min(self._at + size, self.stat.size_bytes)
        pieces = [*self._pieces(self._at, stop)]
        self._at = max(self._at, stop)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)  # type: ignore[return-value]

    def _pieces(self, at: int, stop: int) -> Iterator[memoryview]:
        while at < stop:
            number = bisect_right(self._starts, at) - 1
            start = self._starts[number] if number >= 0 else -1
            part = self._parts.get(start, memoryview(b""))
            if number < 0 or start + len(part) <= at:
                following = self._starts[number + 1] if number + 1 < len(self._starts) else self.stat.size_bytes
                part, start = self._fetch_window(at, min(max(stop, at + self._window), following)), at
            piece = part[at - start : stop - start]
            at += len(piece)
            yield piece

    def _fetch_window(self, start: int, stop: int) -> memoryview:
        wanted = [*_in_parts(start, stop)]
        bodies = self.path.source.read_many(self.path.key, self.stat, wanted)
        while self._windows and len(self._windows) + len(wanted) > _MAX_WINDOWS:
            oldest = self._windows.pop(0)
            self._starts.remove(oldest)
            del self._parts[oldest]
        for (begin, _), body in zip(wanted, bodies, strict=True):
            self._windows.append(begin)
            self._keep(begin, body)
        self._window = min(2 * self._window, self._max_window)
        return bodies[0]

    def _keep(self, start: int, body: memoryview) -> None:
        if start not in self._parts:
            self._starts.insert(bisect_right(self._starts, start), start)
        self._parts[start] = body


def coalesced(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ranges [start, stop) with small gaps between them."""
    joined = list[tuple[int, int]]()
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1] + _GAP_BYTES:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def _in_parts(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for at in range(start, stop, _PART_BYTES):
        yield at, min(at + _PART_BYTES, stop)
