"""Interface of an importable file: it reports its columns, then yields its rows, some MiB at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Protocol

import pyarrow as pa

TABLE_BYTES = 4 << 20  # approximate size of a source's tables

Advance = Callable[[int], None]  # takes the number of bytes of the file read so far


class ImportRefused(Exception):
    """The files cannot be imported. The message gives the place, the reason, the consequences and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """Columns and types of a whole file.

    `schema` has the columns to import, in the types of `columns.normal`; `names` are all columns of the file.
    `wide` are the columns of token lists with an id outside int32. `rounded` maps the path of a float64 column to a whole
    number of the file that float64 does not hold. `is_stream`: its rows are pieces of one stream of ids.
    """

    names: tuple[str, ...]
    schema: pa.Schema
    wide: frozenset[str] = frozenset()
    rounded: Mapping[str, Decimal] = field(default_factory=dict)
    is_stream: bool = False


class Source(Protocol):
    """One file. Both passes begin at its start; neither keeps more than a few portions of it in memory."""

    @property
    def path(self) -> Path:
        """Return the path of the file."""

    def survey(self, advance: Advance) -> Survey:
        """Find the columns and their types. Raises ImportRefused: the file is damaged, or cannot be read."""

    def tables(self, survey: Survey, advance: Advance) -> Iterator[pa.Table]:
        """Yield the rows in the file's order, with the columns of `survey` that each portion has.

        Raises ImportRefused: as `survey`, which has read the same rows before.
        """
