"""Filters: a condition in SQL selects the rows of a dataset.

filter = "lang = 'en' and score > 0.5"      # in penstock.toml

A row is kept if the condition is true. If it is false or null, the dataset behaves as if it had no such row.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    """Condition on rows, bound to the types of each shard. `columns` are the top-level columns that it reads."""

    text: str
    columns: tuple[str, ...]

    def check(self, schema: pa.Schema) -> None:
        """Check that the filter works on a shard of this schema. Raises FilterError: it does not."""
        # With no row, errors that only data shows, such as times with and without a zone, would stay hidden.
        self.keep(pa.record_batch({name: pa.nulls(1, schema.field(name).type) for name in self.columns}))

    def keep(self, rows: pa.RecordBatch) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows that are kept, shape [num_rows].

        Raises FilterError: the rows lack a column, or have another type in it; a whole number does not fit 64 bits.
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
    parsed = Filter(text=text, columns=tuple(binder.columns))
    parsed.check(schema)
    return parsed


@lru_cache(maxsize=256)
def _bound(text: str, columns: tuple[str, ...], types: tuple[pa.DataType, ...]) -> pc.Expression:
    """Bind a filter's text to the types of its columns."""
    return Binder(pa.schema(list(zip(columns, types, strict=True)))).condition(parse(text)).value


def _evaluate(rows: pa.RecordBatch, expression: pc.Expression) -> npt.NDArray[np.bool_]:
    # Use Acero directly: a scanner over the same rows takes two to three times as long to set up, and must keep an order.
    source = acero.Declaration("table_source", acero.TableSourceNodeOptions(pa.Table.from_batches([rows])))
    project = acero.Declaration("project", acero.ProjectNodeOptions([expression], ["keep"]))
    kept = acero.Declaration.from_sequence([source, project]).to_table(use_threads=False)["keep"]
    mask: npt.NDArray[np.bool_] = pc.fill_null(kept, False).to_numpy()
    return mask
