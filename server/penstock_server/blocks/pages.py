"""Sizes of the pages of a Parquet column. pyarrow allocates the size that a page's header states, so it is checked first.

A header is a struct of Thrift's compact protocol:
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow.parquet as pq

_HEADER_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)  # read one after another: a header may have the largest value of its page
_MAX_DEPTH = 8
_EMPTY_PAGES = 16  # in a chunk; all others have a value
_DICTIONARY_PAGE = 2
_MIN_PAGE_BYTES, _MAX_GROWTH = 64 << 20, 256
_BOOLEANS, _BYTE, _INTEGERS, _DOUBLE, _BINARY, _LISTS, _STRUCT = (1, 2), 3, (4, 5, 6), 7, 8, (9, 10), 12


class Page(NamedTuple):
    """Sizes of a page in bytes, by its header."""

    is_dictionary: bool
    nbytes: int
    stored_bytes: int


def start_of(chunk: pq.ColumnChunkMetaData) -> int:
    """Return the first byte of a column chunk."""
    first: int = chunk.data_page_offset
    dictionary = chunk.dictionary_page_offset
    return dictionary if dictionary is not None and 0 < dictionary < first else first


def pages(file: Any, chunk: pq.ColumnChunkMetaData) -> Iterator[Page]:
    """Yield the pages of a column chunk. Raises ValueError: a header cannot be read, or a page grows too much."""
    start = start_of(chunk)
    stop = start + chunk.total_compressed_size
    left = chunk.num_values + _EMPTY_PAGES
    while start < stop:
        if not left:
            raise ValueError(f"column {chunk.path_in_schema} has more pages than values")
        left -= 1
        fields, length = _header(file, start)
        page = Page(fields.get(1) == _DICTIONARY_PAGE, fields.get(2, -1), fields.get(3, -1))
        if page.nbytes < 0 or page.stored_bytes < 0:
            raise ValueError(f"the header of a page of column {chunk.path_in_schema} states no sizes")
        if page.nbytes > max(_MIN_PAGE_BYTES, _MAX_GROWTH * page.stored_bytes):
            raise ValueError(
                f"a page of column {chunk.path_in_schema} has {page.stored_bytes:,} bytes that grow to {page.nbytes:,} when "
                f"they are decompressed. The limit is {_MIN_PAGE_BYTES:,} bytes, or {_MAX_GROWTH} times the stored bytes"
            )
        yield page
        start += length + page.stored_bytes


def _header(file: Any, start: int) -> tuple[dict[int, int], int]:
    """Return the integers of the page header at an offset, by field, and the length of the header."""
    for num_bytes in _HEADER_BYTES:
        file.seek(start)
        reader = _Reader(file.read(num_bytes))
        try:
            return reader.struct(), reader.at
        except IndexError:  # the header is longer
            continue
    raise ValueError(f"the header of the page at byte {start:,} is longer than {_HEADER_BYTES[-1]:,} bytes")


class _Reader:
    """Reader of Thrift's compact protocol. Raises IndexError at the end of the bytes."""

    def __init__(self, content: bytes) -> None:
        self._content, self.at = content, 0

    def struct(self, depth: int = 0) -> dict[int, int]:
        """Read a struct; return its integers by field."""
        fields, number = dict[int, int](), 0
        while kind := self._byte():
            number = number + (kind >> 4) if kind >> 4 else self._integer()
            value = self._value(kind & 15, depth)
            if kind & 15 in _INTEGERS:
                fields[number] = value
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError("the header of a page is nested too deeply")
        if kind in _INTEGERS:
            return self._integer()
        if kind in _LISTS:
            head = self._byte()
            for _ in range(self._varint() if head >> 4 == 15 else head >> 4):
                self._value(_BYTE if head & 15 in _BOOLEANS else head & 15, depth + 1)
        elif kind == _STRUCT:
            self.struct(depth + 1)
        elif kind not in _BOOLEANS:
            sizes = {_BYTE: 1, _DOUBLE: 8}
            self._skip(self._varint() if kind == _BINARY else sizes.get(kind, len(self._content)))
        return None

    def _skip(self, num_bytes: int) -> None:
        self.at += num_bytes
        if self.at > len(self._content):
            raise IndexError

    def _byte(self) -> int:
        self.at += 1
        return self._content[self.at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 128:
            value |= (byte & 127) << shift
            shift += 7
            if shift > 63:  # Python's integers grow, so that each further byte would copy all before it
                raise ValueError("the header of a page has an integer of more than 64 bits")
        return value | byte << shift

    def _integer(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
