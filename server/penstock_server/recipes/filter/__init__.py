"""Filters: a condition in SQL selects the rows of a dataset.

filter = "lang = 'en' and score > 0.5"      # in penstock.toml

A row is kept if the condition is true. If it is false or null, the dataset behaves as if it had no such row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.acero as acero
import pyarrow.compute as pc

from penstock.text import cut
from penstock_server.arrow import without_json_type
from penstock_server.recipes.filter.sql import SHOWN, Binder, FilterError, parse


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
        try:
            self.keep(_nulls(self.columns, types))
        except FilterError as error:
            columns = zip(self.columns, types, self.types, strict=True)
            changed = [f"{name} is {new} here and {first} in the first shard" for name, new, first in columns if new != first]
            raise FilterError(f"{str(error).rstrip('.')}; {', '.join(changed)}.") from error

    def keep(self, rows: pa.RecordBatch) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows that are kept, shape [num_rows].

        Raises FilterError: the rows lack a column, or have another type in it; a whole number does not fit 64 bits; a text
        is not valid UTF-8 and its case is changed.
        """
        try:
            rows = pa.record_batch({name: without_json_type(rows.column(name)) for name in self.columns})
            return _evaluate(rows, _bound(self.text, self.columns, tuple(rows.schema.types)))
        except MemoryError:
            raise
        except (pa.ArrowException, KeyError) as error:
            reason = str(error).split("\n")[0].rstrip(".")
            if reason == "overflow":
                reason = "a whole number that it calculates does not fit 64 bits"
            raise FilterError(f"the filter {cut(self.text, SHOWN)!r} fails: {reason}.") from error


def parse_filter(text: str, schema: pa.Schema) -> Filter:
    """Parse a filter for rows of this schema.

    Raises FilterError: it is not a condition, reads a missing column, or compares incompatible types.
    """
    binder = Binder(schema)
    binder.condition(parse(text))
    if not binder.columns:
        raise FilterError(f"the filter {cut(text, SHOWN)!r} reads no column, so it keeps all rows or none.")
    columns = tuple(binder.columns)
    parsed = Filter(text=text, columns=columns, types=tuple(schema.field(name).type for name in columns))
    parsed.keep(_nulls(columns, parsed.types))
    return parsed


@lru_cache(maxsize=256)
def _bound(text: str, columns: tuple[str, ...], types: tuple[pa.DataType, ...]) -> pc.Expression:
    """Bind a filter's text to the types of its columns."""
    return Binder(pa.schema(list(zip(columns, types, strict=True)))).condition(parse(text)).value


def _nulls(columns: tuple[str, ...], types: tuple[pa.DataType, ...]) -> pa.RecordBatch:
    """Return one row of nulls: with no row, errors that only data shows, such as times with and without a zone, stay hidden."""
    return pa.record_batch({name: pa.nulls(1, type_) for name, type_ in zip(columns, types, strict=True)})


def _evaluate(rows: pa.RecordBatch, expression: pc.Expression) -> npt.NDArray[np.bool_]:
    # Use Acero directly: a scanner over the same rows takes two to three times as long to set up, and must keep an order.
    source = acero.Declaration("table_source", acero.TableSourceNodeOptions(pa.Table.from_batches([rows])))
    project = acero.Declaration("project", acero.ProjectNodeOptions([expression], ["keep"]))
    kept = acero.Declaration.from_sequence([source, project]).to_table(use_threads=False)["keep"]
    mask: npt.NDArray[np.bool_] = pc.fill_null(kept, False).to_numpy()
    return mask
