"""Parsed footers: to parse that of 20,000 row groups takes longer than to read one of them."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock_server.snapshots.folders import is_settled
from penstock_server.snapshots.shard import FileStat, stat_of

_FOOTER_BYTES = 4 << 20  # of footers as they are stored; parsed they take some ten times as much
_MAX_FOOTERS = 64  # those of a few row groups are parsed in less time than one of these takes to decode


class ParsedFooters:
    """The footers of the shards that were read last: the last one, and others within a budget. For any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[Path, FileStat], pq.FileMetaData] = OrderedDict()

    def of(self, path: Path, file: pa.OSFile, date: FileStat) -> pq.FileMetaData:
        """The footer of a shard's file, opened and of this date. Raises OSError, ArrowException: it cannot be read."""
        key = path, date
        with self._lock:
            if found := self._known.get(key):
                self._known.move_to_end(key)
                return found
        found = pq.read_metadata(file)
        if is_settled(date, time.time()) and stat_of(file) == date:
            with self._lock:
                self._known[key] = found
                while len(self._known) > 1 and self._are_too_many():
                    self._known.popitem(last=False)
        return found

    def _are_too_many(self) -> bool:
        nbytes = sum(footer.serialized_size for footer in self._known.values())
        return nbytes > _FOOTER_BYTES or len(self._known) > _MAX_FOOTERS
