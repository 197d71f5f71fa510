"""SQL of a filter: sqlglot parses it, and this module turns each part of the tree into a term, or refuses it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial

import pyarrow as pa
import sqlglot
from sqlglot import exp
from sqlglot import parser as sqlglot_parser
from sqlglot.dialects.dialect import Dialect
from sqlglot.errors import SqlglotError

from penstock.text import cut, one_line
from penstock_server.recipes.fields import FieldError, type_at
from penstock_server.recipes.filter import terms
from penstock_server.recipes.filter.terms import Mismatch, Term

SHOWN = 200  # characters of a filter in a message
_KNOWN = (
    "A filter may have columns, literals, = <> < <= > >=, and, or, not, in (...), between, is null, like, ilike, + - * / %, "
    "length(x), lower(x), upper(x), starts_with(x, 'text') and regexp_like(x, 'expression')"
)
# sqlglot keeps further parts of an expression in other arguments. To ignore one would change the meaning of the filter.
_ARGUMENTS = {"this", "expression", "expressions", "low", "high", "negate", "is_string", "quoted", "table", "db", "catalog"}

_UNARY: dict[type[exp.Expr], Callable[[Term], Term]] = {
    exp.Not: terms.opposite,
    exp.Neg: terms.negated,
    exp.Length: terms.length,
    exp.Lower: partial(terms.cased, "utf8_lower"),
    exp.Upper: partial(terms.cased, "utf8_upper"),
}
_BINARY: dict[type[exp.Expr], Callable[[Term, Term], Term]] = {
    exp.EQ: partial(terms.compared, operator.eq),
    exp.NEQ: partial(terms.compared, operator.ne),
    exp.LT: partial(terms.compared, operator.lt),
    exp.LTE: partial(terms.compared, operator.le),
    exp.GT: partial(terms.compared, operator.gt),
    exp.GTE: partial(terms.compared, operator.ge),
    exp.Add: partial(terms.calculated, "add"),
    exp.Sub: partial(terms.calculated, "subtract"),
    exp.Mul: partial(terms.calculated, "multiply"),
    exp.Div: terms.quotient,
    exp.Mod: terms.remainder,
    exp.StartsWith: terms.starts_with,
    exp.RegexpLike: terms.regexp_like,
}


class _Words(Dialect):
    """sqlglot's default dialect, except that `a = b is null` tests whether a = b is null, as in SQLite and DuckDB."""

    class Parser(sqlglot_parser.Parser):
        """Parser of the dialect."""

        IS_PREDICATE_PRECEDENCE = sqlglot_parser.IsPredicatePrecedence.LOW


class FilterError(ValueError):
    """A filter cannot be used, or not on these rows; the message says why and what to do."""


def parse(text: str) -> exp.Expr:
    """Return the syntax tree of a condition. Raises FilterError: the text is not a condition."""
    try:
        return sqlglot.parse_one(text, into=exp.Condition, dialect=_Words)
    except SqlglotError as error:
        raise FilterError(f"the filter {cut(text, SHOWN)!r} cannot be read: {one_line(error)}. {_KNOWN}.") from error


class Binder:
    """Converter of syntax trees to terms over a schema. `columns` are the top-level ones met so far, in their order."""

    def __init__(self, schema: pa.Schema) -> None:
        self.columns: list[str] = []
        self._schema = schema

    def condition(self, tree: exp.Expr) -> Term:
        """Return a term that is true, false or null for each row. Raises FilterError: a part of the tree is unsupported."""
        return self._apply(tree, terms.truth, tree)

    def _term(self, node: exp.Expr) -> Term:
        kind = type(node)
        extra = {name for name, value in node.args.items() if value not in (None, False, [])} - _ARGUMENTS
        if kind in _UNARY and not extra:
            return self._apply(node, _UNARY[kind], node.this)
        if kind in _BINARY and not extra:
            return self._apply(node, _BINARY[kind], node.this, node.expression)
        if kind in _SPECIAL and not extra:
            return _SPECIAL[kind](self, node)
        raise FilterError(f"the filter cannot have {_quoted(node)}. {_KNOWN}.")

    def _apply(self, node: exp.Expr, operation: Callable[..., Term], *parts: exp.Expr) -> Term:
        operands = [self._term(part) for part in parts]
        try:
            return operation(*operands)
        except Mismatch as error:
            raise FilterError(f"the filter's {_quoted(node)} {error}.") from error

    def _chain(self, node: exp.Expr) -> Term:
        """Combine two or thousands of conditions by AND, or by OR."""
        combine = terms.all_of if isinstance(node, exp.And) else terms.any_of
        parts = [self._apply(node, terms.truth, part) for part in node.flatten(unnest=False)]
        while len(parts) > 1:  # in pairs: a plain loop would nest each in the next
            parts = [combine(*parts[at : at + 2]) if at + 1 < len(parts) else parts[at] for at in range(0, len(parts), 2)]
        return parts[0]

    def _literal(self, node: exp.Expr) -> Term:
        if node.is_string:
            return terms.literal(pa.scalar(node.name))
        value = int(node.name) if node.name.isdecimal() else float(node.name)
        return self._apply(node, lambda: terms.number(value))

    def _column(self, node: exp.Expr) -> Term:
        path = _path(node)
        try:
            type_ = type_at(path, self._schema)
        except FieldError as error:
            raise FilterError(f"the filter reads {_quoted(node)}, but {error}. Write texts in single quotes.") from error
        if path[0] not in self.columns:
            self.columns.append(path[0])
        return terms.column(path, type_)

    def _between(self, node: exp.Expr) -> Term:
        low = self._apply(node, partial(terms.compared, operator.ge), node.this, node.args["low"])
        high = self._apply(node, partial(terms.compared, operator.le), node.this, node.args["high"])
        return terms.all_of(low, high)

    def _among(self, node: exp.Expr) -> Term:
        if not node.expressions:
            raise FilterError(f"the filter's {_quoted(node)} has nothing between its parentheses.")
        return self._apply(node, terms.among, node.this, *node.expressions)

    def _is_null(self, node: exp.Expr) -> Term:
        if not isinstance(node.expression, exp.Null):
            raise FilterError(f"the filter's {_quoted(node)} tests for something else than null. Write it with = or <>.")
        return self._apply(node, terms.is_null, node.this)

    def _like(self, node: exp.Expr) -> Term:
        ignore_case = isinstance(node, exp.ILike)
        term = self._apply(node, partial(terms.like, ignore_case=ignore_case), node.this, node.expression)
        return terms.opposite(term) if node.args.get("negate") else term


_SPECIAL: dict[type[exp.Expr], Callable[[Binder, exp.Expr], Term]] = {
    exp.Paren: lambda binder, node: binder._term(node.this),
    exp.Column: Binder._column,
    exp.Dot: Binder._column,
    exp.Literal: Binder._literal,
    exp.Boolean: lambda _, node: terms.literal(pa.scalar(bool(node.this))),
    exp.Null: lambda *_: terms.literal(pa.scalar(None)),
    exp.And: Binder._chain,
    exp.Or: Binder._chain,
    exp.Between: Binder._between,
    exp.In: Binder._among,
    exp.Is: Binder._is_null,
    exp.Like: Binder._like,
    exp.ILike: Binder._like,
}


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
