"""Filters: which rows of a dataset there are, said by a condition in SQL's words.

filter = "lang = 'en' and score > 0.5"      # in penstock.toml

A row is kept where the condition is true; where it is false or null, the dataset is as if it had no such row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.acero as acero
import pyarrow.compute as pc
import pyarrow.dataset as ds

from penstock_server.recipes.filter_sql import FilterError, Meaning, parse


@dataclass(frozen=True, kw_only=True, slots=True)
class Filter:
    """A condition on rows, bound to the columns of one schema.

    `columns` are the top-level columns that it reads. `expression` is true, false or null of each row. Every row of which
    it is true is in `bounds`, which is made of columns and literals alone: what statistics can speak of.
    """

    text: str
    columns: tuple[str, ...]
    expression: pc.Expression = field(compare=False, repr=False)
    bounds: pc.Expression = field(compare=False, repr=False)

    def keep(self, rows: pa.RecordBatch) -> npt.NDArray[np.bool_]:
        """Which rows are kept, shape [num_rows].

        Raises FilterError: the rows lack a column, or have another type in it; a whole number does not fit 64 bits; a text
        whose case is changed is not valid UTF-8.
        """
        try:
            table = pa.Table.from_batches([rows.select(list(self.columns))])
            return _evaluate(table, self.expression)
        except (pa.ArrowException, KeyError) as error:
            raise FilterError(f"the filter {self.text!r} fails: {_reason(error)}.") from error

    def groups_that_may_match(self, path: Path, file: pa.NativeFile) -> list[int]:
        """The row groups of a Parquet file, opened, that can hold a row that is kept, by the statistics in its footer.

        Raises FilterError: the file at `path` lacks a column, or has another type in it. OSError: it cannot be read.
        """
        fragment = ds.ParquetFileFormat().make_fragment(file)
        try:
            matching = fragment.subset(filter=self.bounds, schema=fragment.physical_schema)
        except pa.ArrowException as error:
            raise FilterError(f"the filter {self.text!r} fails on {path}: {_reason(error)}.") from error
        return [group.id for group in matching.row_groups]


def parse_filter(text: str, schema: pa.Schema) -> Filter:
    """The filter that a text says of rows with this schema.

    Raises FilterError: it is no condition, reads a column that is not there, or compares what cannot be compared.
    """
    meaning = Meaning(schema)
    condition = meaning.condition(parse(text))
    if not meaning.columns:
        raise FilterError(f"the filter {text!r} reads no column, so it keeps all rows or none.")
    found = Filter(text=text, columns=tuple(meaning.columns), expression=condition.value, bounds=condition.true_in)
    # One row of nulls, not none: what only the data would show, as times with and without a zone, is found as well.
    found.keep(pa.record_batch({name: pa.nulls(1, schema.field(name).type) for name in found.columns}))
    return found


def _evaluate(table: pa.Table, expression: pc.Expression) -> npt.NDArray[np.bool_]:
    # Acero itself: a scanner over the same rows takes two to three times as long to set up, and an order to keep.
    source = acero.Declaration("table_source", acero.TableSourceNodeOptions(table))
    project = acero.Declaration("project", acero.ProjectNodeOptions([expression], ["keep"]))
    kept = acero.Declaration.from_sequence([source, project]).to_table(use_threads=False)["keep"]
    mask: npt.NDArray[np.bool_] = pc.fill_null(kept, False).to_numpy()
    return mask


def _reason(error: Exception) -> str:
    reason = str(error).split("\n")[0].rstrip(".")
    return "a whole number that it calculates does not fit 64 bits" if reason == "overflow" else reason


def not_null(column: str) -> str:
    """The text of the filter that keeps the rows in which a column is not null."""
    return f"{_named(column)} is not null"


def not_empty(column: str) -> str:
    """The text of the filter that keeps the rows in which a column of texts or lists is neither null nor empty."""
    return f"length({_named(column)}) > 0"


def _named(column: str) -> str:
    return column if _is_plain(column) else '"' + column.replace('"', '""') + '"'


def _is_plain(name: str) -> bool:
    try:
        return parse_filter(f"{name} is not null", pa.schema([(name, pa.string())])).columns == (name,)
    except FilterError:
        return False
