"""Cache of parsed footers: parsing a footer of 20,000 row groups takes longer than reading one row group."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock_server.snapshots.folders import is_settled
from penstock_server.snapshots.shard import FileStat, stat_of

_FOOTER_BYTES = 4 << 20  # of stored footers; parsed, they take some ten times as much memory
_MAX_FOOTERS = 64  # parsing a footer of a few row groups takes less time than decoding one of them


class ParsedFooters:
    """Footers of the most recently read shards: the last one, and others within a budget. For any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[Path, FileStat], pq.FileMetaData] = OrderedDict()

    def of(self, path: Path, file: pa.OSFile, date: FileStat) -> pq.FileMetaData:
        """Returns the footer of an opened shard file with this stat. Raises OSError, ArrowException: it is unreadable."""
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
