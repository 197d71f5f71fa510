"""Filters: a condition in SQL selects the rows of a dataset. sqlglot parses it, and each part of the tree becomes a term.

filter = "lang = 'en' and score > 0.5"      # in penstock.toml

A row is kept if the condition is true. If it is false or null, the dataset behaves as if it had no such row.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import sqlglot
from sqlglot import exp
from sqlglot import parser as sqlglot_parser
from sqlglot.dialects.dialect import Dialect
from sqlglot.errors import SqlglotError

from penstock.text import cut, one_line
from penstock_server.arrow import without_json_type
from penstock_server.recipes import terms
from penstock_server.recipes.fields import FieldError, RecipeError, type_at
from penstock_server.recipes.terms import Mismatch, Term

SHOWN = 200  # characters of a filter in a message
_KNOWN = (
    "A filter may have columns, literals, = <> < <= > >=, and, or, not, in (...), between, is null, like, ilike, + - * / %, "
    "length(x), lower(x), upper(x), starts_with(x, 'text') and regexp_like(x, 'expression')"
)
# sqlglot keeps further parts of an expression in other arguments. To ignore one would change the meaning of the filter.
_ARGUMENTS = {"this", "expression", "expressions", "low", "high", "negate", "is_string", "quoted", "table", "db", "catalog"}

_OPERATIONS: dict[type[exp.Expr], Callable[..., Term]] = {
    exp.Paren: lambda term: term,
    exp.And: partial(terms.chain, pc.and_kleene),
    exp.Or: partial(terms.chain, pc.or_kleene),
    exp.Not: terms.opposite,
    exp.EQ: partial(terms.compared, operator.eq),
    exp.NEQ: partial(terms.compared, operator.ne),
    exp.LT: partial(terms.compared, operator.lt),
    exp.LTE: partial(terms.compared, operator.le),
    exp.GT: partial(terms.compared, operator.gt),
    exp.GTE: partial(terms.compared, operator.ge),
    exp.Between: terms.between,
    exp.In: terms.among,
    exp.Is: terms.is_null,
    exp.Add: partial(terms.calculated, "add"),
    exp.Sub: partial(terms.calculated, "subtract"),
    exp.Mul: partial(terms.calculated, "multiply"),
    exp.Div: terms.quotient,
    exp.Mod: terms.remainder,
    exp.Neg: terms.negated,
    exp.Like: partial(terms.matches, pc.match_like),
    exp.ILike: partial(terms.matches, partial(pc.match_like, ignore_case=True)),
    exp.StartsWith: partial(terms.matches, pc.starts_with),
    exp.RegexpLike: partial(terms.matches, pc.match_substring_regex),
    exp.Lower: partial(terms.cased, pc.utf8_lower),
    exp.Upper: partial(terms.cased, pc.utf8_upper),
    exp.Length: terms.length,
}


class FilterError(RecipeError):
    """A filter cannot be used, or not on these rows; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Filter:
    """Condition on rows, bound to the types of each shard. `columns` are the top-level columns that it reads."""

    text: str
    columns: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, schema: pa.Schema) -> Filter:
        """Parse a filter for rows of this schema.

        Raises FilterError: it is not a condition, reads a missing column, or compares incompatible types.
        """
        tree = _parse(text)
        _condition(tree, schema)
        columns = dict.fromkeys(column.parts[0].name for column in tree.find_all(exp.Column))
        if not columns:
            raise FilterError(f"the filter {cut(text, SHOWN)!r} reads no column, so it keeps all rows or none.")
        parsed = cls(text=text, columns=tuple(columns))
        parsed.check(schema)
        return parsed

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


@lru_cache(maxsize=256)
def _bound(text: str, columns: tuple[str, ...], types: tuple[pa.DataType, ...]) -> pc.Expression:
    """Bind a filter's text to the types of its columns."""
    return _condition(_parse(text), pa.schema(list(zip(columns, types, strict=True))))


def _evaluate(rows: pa.RecordBatch, expression: pc.Expression) -> npt.NDArray[np.bool_]:
    # Use Acero directly: a scanner over the same rows takes two to three times as long to set up, and must keep an order.
    import pyarrow.acero as acero  # here: it imports pandas, which takes a quarter of the start of a process that tokenizes

    source = acero.Declaration("table_source", acero.TableSourceNodeOptions(pa.Table.from_batches([rows])))
    project = acero.Declaration("project", acero.ProjectNodeOptions([expression], ["keep"]))
    kept = acero.Declaration.from_sequence([source, project]).to_table(use_threads=False)["keep"]
    mask: npt.NDArray[np.bool_] = pc.fill_null(kept, False).to_numpy()
    return mask


class _Words(Dialect):
    """sqlglot's default dialect, except that `a = b is null` tests whether a = b is null, as in SQLite and DuckDB."""

    class Parser(sqlglot_parser.Parser):
        """Parser of the dialect."""

        IS_PREDICATE_PRECEDENCE = sqlglot_parser.IsPredicatePrecedence.LOW


def _parse(text: str) -> exp.Expr:
    try:
        return sqlglot.parse_one(text, into=exp.Condition, dialect=_Words)
    except SqlglotError as error:
        raise FilterError(f"the filter {cut(text, SHOWN)!r} cannot be read: {one_line(error)}. {_KNOWN}.") from error


def _condition(tree: exp.Expr, schema: pa.Schema) -> pc.Expression:
    """Return an expression that is true, false or null for each row."""
    return _applied(tree, terms.truth, _term(tree, schema)).value


def _term(node: exp.Expr, schema: pa.Schema) -> Term:
    """Convert a part of a syntax tree. Raises FilterError: it is unsupported, or its operands have unsuitable types."""
    kind = type(node)
    is_plain = _ARGUMENTS.issuperset(name for name, value in node.args.items() if value not in (None, False, []))
    if is_plain and kind in _OPERATIONS:
        is_chain = kind in (exp.And, exp.Or)  # may be thousands of conditions: flat, not nested
        parts = node.flatten(unnest=False) if is_chain else node.iter_expressions()
        term = _applied(node, _OPERATIONS[kind], *(_term(part, schema) for part in parts))
        return terms.opposite(term) if node.args.get("negate") else term
    if is_plain and kind in (exp.Column, exp.Dot):
        return _column(node, schema)
    if kind is exp.Literal and not node.is_string:
        value = int(node.name) if node.name.isdecimal() else float(node.name)
        return _applied(node, terms.number, value)
    if kind in (exp.Literal, exp.Boolean, exp.Null):
        return terms.literal(pa.scalar(node.args.get("this")))
    raise FilterError(f"the filter cannot have {_quoted(node)}. {_KNOWN}.")


def _applied(node: exp.Expr, operation: Callable[..., Term], *operands: Term | float) -> Term:
    try:
        return operation(*operands)
    except Mismatch as error:
        raise FilterError(f"the filter's {_quoted(node)} {error}.") from error


def _column(node: exp.Expr, schema: pa.Schema) -> Term:
    path = _path(node)
    try:
        return terms.column(path, type_at(path, schema))
    except FieldError as error:
        raise FilterError(f"the filter reads {_quoted(node)}, but {error}. Write texts in single quotes.") from error


def _path(node: exp.Expr) -> tuple[str, ...]:
    """Return the names of a column and of the fields in it, outermost first. Raises FilterError: one is not a name."""
    if isinstance(node, exp.Dot):
        return (*_path(node.this), *_path(node.expression))
    names = node.parts if isinstance(node, exp.Column) else [node]
    if not all(isinstance(name, exp.Identifier) for name in names):
        raise FilterError(f"the filter's {_quoted(node)} is not the name of a column. {_KNOWN}.")
    return tuple(name.name for name in names)


def _quoted(node: exp.Expr) -> str:
    return repr(cut(node.sql(comments=False), 100))
