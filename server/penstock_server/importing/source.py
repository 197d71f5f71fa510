"""What a file must do to be imported: tell its columns, then give its rows, some MiB at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Protocol

import pyarrow as pa

TABLE_BYTES = 4 << 20  # about what a source gives at a time

Advance = Callable[[int], None]  # takes how many bytes of the file have been read


class ImportRefused(Exception):
    """The files cannot be imported. The message says where and why, what follows and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """What a whole file holds.

    `schema` is of the columns to import, in the types that `columns.normal` gives; `names` are all the file has.
    `wide` are the columns of token lists with an id that int32 does not hold. `rounded` gives of each column of float64, by
    its path, a whole number that the file holds and float64 does not. `is_stream`: its rows are pieces of one stream of ids.
    """

    names: tuple[str, ...]
    schema: pa.Schema
    wide: frozenset[str] = frozenset()
    rounded: Mapping[str, Decimal] = field(default_factory=dict)
    is_stream: bool = False


class Source(Protocol):
    """One file. Both passes begin at its start; neither holds more than a few portions of it."""

    @property
    def path(self) -> Path:
        """The file."""

    def survey(self, advance: Advance) -> Survey:
        """Finds the columns and their types. Raises ImportRefused: the file is damaged, or cannot be read."""

    def tables(self, survey: Survey, advance: Advance) -> Iterator[pa.Table]:
        """The rows in the file's order, with the columns of `survey` that each portion has.

        Raises ImportRefused: as `survey`, which has read the same before.
        """
