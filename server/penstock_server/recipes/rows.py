"""A block's rows on their way to tokens, and why they are bad."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from penstock.text import as_utf8
from penstock_server.recipes.fields import Field
from penstock_server.recipes.recipe import Recipe


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows that tokens are made of, and what is said of those that cannot be used.

    stored   their columns, as the filter and the transform leave them
    reasons  why each row is bad, None where it is not
    """

    stored: pa.RecordBatch
    recipe: Recipe
    reasons: list[str | None]

    @classmethod
    def of(cls, stored: pa.RecordBatch, recipe: Recipe) -> Rows:
        """Rows of which none is bad yet."""
        return cls(stored, recipe, [None] * stored.num_rows)

    def __len__(self) -> int:
        return len(self.reasons)

    def field(self, role: str) -> Field:
        """The field that plays this role."""
        return dict(self.recipe.fields)[role]

    def values(self, source: Field) -> pa.Array:
        """The values of a field, shape [len(self)]. Raises FieldError: the rows have no such column."""
        return source.array(self.stored)

    def note(self, row: int, reason: str, of: str = "") -> None:
        """Notes that a row is bad for what is said `of` a column; the first reason stays."""
        self.reasons[row] = self.reasons[row] or as_utf8(f"{of} {reason}" if of else reason)  # as they are stored
