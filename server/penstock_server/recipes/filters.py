"""Filters: a condition in SQL selects the rows of a dataset.

filter = "lang = 'en' and score > 0.5"      # in penstock.toml

A row is kept if the condition is true. If it is false or null, the dataset behaves as if it had no such row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.acero as acero
import pyarrow.compute as pc

from penstock.text import cut
from penstock_server.arrow import without_json_type
from penstock_server.parquet import parquet_fragment
from penstock_server.recipes.filter_sql import SHOWN, FilterError, Meaning, parse
from penstock_server.recipes.filter_terms import Term

_UNITS = ("s", "ms", "us", "ns")


@dataclass(frozen=True, kw_only=True, slots=True)
class Filter:
    """Condition on rows, bound to the types of each shard: a column may be integers in one shard and floats in another.

    `columns` are the top-level columns that it reads, `types` their types in the first shard.
    """

    text: str
    columns: tuple[str, ...]
    types: tuple[pa.DataType, ...] = field(compare=False, repr=False)

    def check(self, schema: pa.Schema) -> None:
        """Check that the filter works on a shard of this schema, which has its columns. Raises FilterError: it does not."""
        types = tuple(schema.field(name).type for name in self.columns)
        if types == self.types:
            return
        try:
            self.keep(_nulls(self.columns, types))
        except FilterError as error:
            others = [at for at in zip(self.columns, types, self.types, strict=True) if at[1] != at[2]]
            told = ", ".join(f"{name} is {type_} here and {first} in the first shard" for name, type_, first in others)
            raise FilterError(f"{str(error).rstrip('.')}; {told}.") from error

    def keep(self, rows: pa.RecordBatch) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows that are kept, shape [num_rows].

        Raises FilterError: the rows lack a column, or have another type in it; a whole number does not fit 64 bits; a text
        is not valid UTF-8 and its case is changed.
        """
        try:
            rows = pa.record_batch({name: without_json_type(rows.column(name)) for name in self.columns})
            return _evaluate(pa.Table.from_batches([rows]), self._condition(rows.schema).value)
        except MemoryError:
            raise
        except (pa.ArrowException, KeyError) as error:
            raise FilterError(f"the filter {cut(self.text, SHOWN)!r} fails: {_reason(error)}.") from error

    def groups_that_may_match(self, path: Path, file: pa.NativeFile) -> list[int]:
        """Return the row groups of an open Parquet file that may hold a kept row, by the statistics in its footer.

        Raises FilterError: the file at `path` lacks a column, or has another type in it. OSError: it cannot be read.
        """
        fragment = parquet_fragment(file)
        try:
            schema = fragment.physical_schema
            matching = fragment.subset(filter=self._condition(schema).true_in, schema=schema)
        except MemoryError:
            raise
        except (pa.ArrowException, KeyError) as error:
            raise FilterError(f"the filter {cut(self.text, SHOWN)!r} fails on {path}: {_reason(error)}.") from error
        return [group.id for group in matching.row_groups]

    def _condition(self, schema: pa.Schema) -> Term:
        """Bind the filter to the types of this schema. Raises KeyError: the schema lacks a column."""
        return _bound(self.text, self.columns, tuple(schema.field(name).type for name in self.columns), self.types)


def parse_filter(text: str, schema: pa.Schema) -> Filter:
    """Parse a filter for rows of this schema.

    Raises FilterError: it is not a condition, reads a missing column, or compares incompatible types.
    """
    meaning = Meaning(schema)
    meaning.condition(parse(text))
    if not meaning.columns:
        raise FilterError(f"the filter {cut(text, SHOWN)!r} reads no column, so it keeps all rows or none.")
    columns = tuple(meaning.columns)
    found = Filter(text=text, columns=columns, types=tuple(schema.field(name).type for name in columns))
    found.keep(_nulls(columns, found.types))
    return found


@lru_cache(maxsize=256)
def _bound(text: str, columns: tuple[str, ...], types: tuple[pa.DataType, ...], first: tuple[pa.DataType, ...]) -> Term:
    """Bind a filter's text to the types of its columns; if that fails, to their types in the first shard.

    So whole numbers that a shard stores as floats are calculated with as in the first shard, and have a remainder.
    """
    try:
        return Meaning(pa.schema(list(zip(columns, types, strict=True)))).condition(parse(text))
    except FilterError:
        if types == first or not all(map(_can_be_taken_for, types, first)):
            raise
        return _bound(text, columns, first, first)


def _can_be_taken_for(own: pa.DataType, first: pa.DataType) -> bool:
    """Return whether values of `own` may be compared as type `first`; times only if `first` is at least as fine."""
    if own == first:
        return True
    if pa.types.is_timestamp(first) and (pa.types.is_timestamp(own) or pa.types.is_date(own)):
        return pa.types.is_date(own) or _UNITS.index(own.unit) < _UNITS.index(first.unit)
    return not any(pa.types.is_null(type_) or pa.types.is_temporal(type_) for type_ in (own, first))


def _nulls(columns: tuple[str, ...], types: tuple[pa.DataType, ...]) -> pa.RecordBatch:
    """Return one row of nulls: with no row, errors that only data shows, such as times with and without a zone, stay hidden."""
    return pa.record_batch({name: pa.nulls(1, type_) for name, type_ in zip(columns, types, strict=True)})


def _evaluate(table: pa.Table, expression: pc.Expression) -> npt.NDArray[np.bool_]:
    # Use Acero directly: a scanner over the same rows takes two to three times as long to set up, and must keep an order.
    source = acero.Declaration("table_source", acero.TableSourceNodeOptions(table))
    project = acero.Declaration("project", acero.ProjectNodeOptions([expression], ["keep"]))
    kept = acero.Declaration.from_sequence([source, project]).to_table(use_threads=False)["keep"]
    mask: npt.NDArray[np.bool_] = pc.fill_null(kept, False).to_numpy()
    return mask


def _reason(error: Exception) -> str:
    reason = str(error).split("\n")[0].rstrip(".")
    return "a whole number that it calculates does not fit 64 bits" if reason == "overflow" else reason


def not_null(column: str) -> str:
    """Return the text of a filter that drops rows with a null in a column."""
    return f"{_named(column)} is not null"


def not_empty(column: str) -> str:
    """Return the text of a filter that drops rows with a null or empty text or list in a column."""
    return f"length({_named(column)}) > 0"


def _named(column: str) -> str:
    return column if _is_plain(column) else '"' + column.replace('"', '""') + '"'


def _is_plain(name: str) -> bool:
    try:
        return parse_filter(f"{name} is not null", pa.schema([(name, pa.string())])).columns == (name,)
    except FilterError:
        return False
