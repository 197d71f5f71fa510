"""Rows of a block on their way to tokens, and why they are bad."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from penstock.text import as_utf8
from penstock_server.recipes.fields import Field
from penstock_server.recipes.recipe import Recipe


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows to tokenize, and the reasons of those that cannot be used.

    stored   their columns, after the filter and the transform
    reasons  why each row is bad, None for a good row
    """

    stored: pa.RecordBatch
    recipe: Recipe
    reasons: list[str | None]

    @classmethod
    def of(cls, stored: pa.RecordBatch, recipe: Recipe) -> Rows:
        """Make rows without any bad one."""
        return cls(stored, recipe, [None] * stored.num_rows)

    def __len__(self) -> int:
        return len(self.reasons)

    def field(self, role: str) -> Field:
        """Return the field of this role."""
        return dict(self.recipe.fields)[role]

    def values(self, source: Field) -> pa.Array:
        """Return the values of a field, shape [len(self)]. Raises FieldError: the rows have no such column."""
        return source.array(self.stored)

    def note(self, row: int, reason: str, of: str = "") -> None:
        """Mark a row as bad, for a reason about column `of`; the first reason stays."""
        self.reasons[row] = self.reasons[row] or as_utf8(f"{of} {reason}" if of else reason)  # the form that is stored
