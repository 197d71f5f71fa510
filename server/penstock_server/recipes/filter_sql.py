"""SQL of a filter, as in a WHERE: sqlglot parses it, this module gives each part a meaning, or refuses it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial

import pyarrow as pa
import sqlglot
from sqlglot import exp
from sqlglot import parser as sqlglot_parser
from sqlglot.dialects.dialect import Dialect
from sqlglot.errors import ParseError, SqlglotError

from penstock.text import cut, did_you_mean, listed
from penstock_server.recipes import filter_conditions as conditions
from penstock_server.recipes import filter_functions as functions
from penstock_server.recipes import filter_terms as terms
from penstock_server.recipes.filter_terms import Mismatch, Term

_KNOWN = (
    "There are columns, literals, = <> < <= > >=, and, or, not, in (...), between, is null, like, ilike, + - * / %, "
    "length(x), lower(x), upper(x), starts_with(x, 'text') and regexp_like(x, 'expression')"
)
SHOWN = 200  # characters of a filter in a message
# sqlglot keeps further parts of an expression in other arguments. To ignore one would change the meaning of the filter.
_ARGUMENTS = {"this", "expression", "expressions", "low", "high", "negate", "is_string", "quoted", "table", "db", "catalog"}


class _Words(Dialect):
    """sqlglot's default dialect, except that `a = b is null` tests whether a = b is null, as in SQLite and DuckDB."""

    class Parser(sqlglot_parser.Parser):
        """Parser of the dialect."""

        IS_PREDICATE_PRECEDENCE = sqlglot_parser.IsPredicatePrecedence.LOW


class FilterError(ValueError):
    """A filter cannot be used, or not on these rows; the message says why and what to do."""


def parse(text: str) -> exp.Expr:
    """Return the syntax tree of a condition. Raises FilterError: the text is not a condition."""
    if not text.strip():
        raise FilterError("the filter is empty. Write a condition, as \"lang = 'en' and score > 0.5\", or leave it out.")
    try:
        return sqlglot.parse_one(text, into=exp.Condition, dialect=_Words)
    except ParseError as error:
        at = error.errors[0] if error.errors else {}
        what = f"the filter {cut(text, SHOWN)!r} cannot be read at {at.get('highlight')!r}, after {at.get('start_context')!r}"
        raise FilterError(f"{what}: something is missing there, or is too much. {_KNOWN}.") from error
    except SqlglotError as error:
        raise FilterError(
            f"the filter {cut(text, SHOWN)!r} cannot be read: a quote or a comment in it is not closed."
        ) from error
    except RecursionError as error:
        raise _too_deep() from error


class Meaning:
    """Meaning of syntax trees over a schema's columns. `columns` are the top-level ones met so far, in their order."""

    def __init__(self, schema: pa.Schema) -> None:
        self.columns: list[str] = []
        self._schema = schema

    def condition(self, tree: exp.Expr) -> Term:
        """Return a term that is true, false or null for each row. Raises FilterError: a part of the tree is unsupported."""
        try:
            return self._apply(tree, conditions.truth, tree)
        except RecursionError as error:
            raise _too_deep() from error

    def term(self, node: exp.Expr) -> Term:
        """Return the term of a part. Raises FilterError: the part is unsupported."""
        further = {name for name, value in node.args.items() if value not in (None, False, [])} - _ARGUMENTS
        if further or type(node) not in _MEANINGS:
            raise FilterError(f"the filter's {_quoted(node)} is nothing that a filter can have. {_KNOWN}.")
        return _MEANINGS[type(node)](self, node)

    def _apply(self, node: exp.Expr, what: Callable[..., Term], *parts: exp.Expr) -> Term:
        operands = [self.term(part) for part in parts]
        try:
            return what(*operands)
        except Mismatch as error:
            raise FilterError(f"the filter's {_quoted(node)} {error}.") from error

    def _chain(self, node: exp.Expr, what: Callable[[Term, Term], Term]) -> Term:
        """Combine two or thousands of conditions by AND, or by OR."""
        parts = [self._apply(node, conditions.truth, part) for part in node.flatten(unnest=False)]
        while len(parts) > 1:  # in pairs: a plain loop would nest each in the next
            parts = [what(*parts[at : at + 2]) if at + 1 < len(parts) else parts[at] for at in range(0, len(parts), 2)]
        return parts[0]

    def _literal(self, node: exp.Expr) -> Term:
        if node.is_string:
            return terms.literal(pa.scalar(node.name))
        # 21 digits already exceed 64 bits; Python refuses to parse thousands of digits.
        value = int(node.name.lstrip("0")[:21] or 0) if node.name.isdecimal() else float(node.name)
        return self._apply(node, lambda: terms.number(value))

    def _column(self, node: exp.Expr) -> Term:
        path = _path(node)
        type_: pa.DataType = pa.struct(list(self._schema))
        for depth, name in enumerate(path):
            owner = ".".join(path[:depth])
            if not pa.types.is_struct(type_):
                raise FilterError(f"the filter reads {_quoted(node)}, but {owner} is of type {type_} and has no fields.")
            names = [type_.field(i).name for i in range(type_.num_fields)]
            if names.count(name) != 1:
                what = f"a field {name!r} of {owner}" if owner else f"a column {name!r}"
                there = "There are two of them" if name in names else f"There is none; there are: {listed(names)}"
                raise FilterError(f"the filter reads {what}. {there}.{self._hint(node, path, name, names)}")
            type_ = type_.field(name).type
        if path[0] not in self.columns:
            self.columns.append(path[0])
        return terms.column(path, type_)

    def _hint(self, node: exp.Expr, path: Sequence[str], name: str, names: Sequence[str]) -> str:
        if ".".join(path) in self._schema.names:
            return f' A name with a dot stands in double quotes: "{".".join(path)}".'
        quoted = len(path) == 1 and node.this.args.get("quoted")
        return did_you_mean(name, names) + (f" A text stands in single quotes: '{name}'." if quoted else "")

    def _between(self, node: exp.Expr) -> Term:
        low = self._apply(node, partial(conditions.compared, operator.ge), node.this, node.args["low"])
        high = self._apply(node, partial(conditions.compared, operator.le), node.this, node.args["high"])
        return conditions.all_of(low, high)

    def _among(self, node: exp.Expr) -> Term:
        if not node.expressions:
            raise FilterError(f"the filter's {_quoted(node)} has nothing between its parentheses.")
        return self._apply(node, conditions.among, node.this, *node.expressions)

    def _is_null(self, node: exp.Expr) -> Term:
        if not isinstance(node.expression, exp.Null):
            raise FilterError(f"the filter's {_quoted(node)} asks for something else than null. Write it with = or <>.")
        return self._apply(node, conditions.is_null, node.this)

    def _like(self, node: exp.Expr) -> Term:
        ignore_case = isinstance(node, exp.ILike)
        term = self._apply(node, partial(functions.like, ignore_case=ignore_case), node.this, node.expression)
        return conditions.opposite(term) if node.args.get("negate") else term


def _of_one(what: Callable[[Term], Term]) -> Callable[[Meaning, exp.Expr], Term]:
    return lambda meaning, node: meaning._apply(node, what, node.this)


def _of_two(what: Callable[[Term, Term], Term]) -> Callable[[Meaning, exp.Expr], Term]:
    return lambda meaning, node: meaning._apply(node, what, node.this, node.expression)


_MEANINGS: dict[type[exp.Expr], Callable[[Meaning, exp.Expr], Term]] = {
    exp.Paren: lambda meaning, node: meaning.term(node.this),
    exp.Column: Meaning._column,
    exp.Dot: Meaning._column,
    exp.Literal: Meaning._literal,
    exp.Boolean: lambda _, node: terms.literal(pa.scalar(bool(node.this))),
    exp.Null: lambda *_: terms.literal(pa.scalar(None)),
    exp.And: lambda meaning, node: meaning._chain(node, conditions.all_of),
    exp.Or: lambda meaning, node: meaning._chain(node, conditions.any_of),
    exp.Not: _of_one(conditions.opposite),
    exp.EQ: _of_two(partial(conditions.compared, operator.eq)),
    exp.NEQ: _of_two(partial(conditions.compared, operator.ne)),
    exp.LT: _of_two(partial(conditions.compared, operator.lt)),
    exp.LTE: _of_two(partial(conditions.compared, operator.le)),
    exp.GT: _of_two(partial(conditions.compared, operator.gt)),
    exp.GTE: _of_two(partial(conditions.compared, operator.ge)),
    exp.Between: Meaning._between,
    exp.In: Meaning._among,
    exp.Is: Meaning._is_null,
    exp.Like: Meaning._like,
    exp.ILike: Meaning._like,
    exp.Add: _of_two(partial(functions.calculated, "add")),
    exp.Sub: _of_two(partial(functions.calculated, "subtract")),
    exp.Mul: _of_two(partial(functions.calculated, "multiply")),
    exp.Div: _of_two(functions.quotient),
    exp.Mod: _of_two(functions.remainder),
    exp.Neg: _of_one(functions.negated),
    exp.Length: _of_one(functions.length),
    exp.Lower: _of_one(partial(functions.cased, "utf8_lower")),
    exp.Upper: _of_one(partial(functions.cased, "utf8_upper")),
    exp.StartsWith: _of_two(functions.starts_with),
    exp.RegexpLike: _of_two(functions.regexp_like),
}


def _path(node: exp.Expr) -> list[str]:
    """Return the names of a column and of the fields in it, outermost first. Raises FilterError: one is not a name."""
    if isinstance(node, exp.Dot):
        return [*_path(node.this), *_path(node.expression)]
    names = node.parts if isinstance(node, exp.Column) else [node]
    if not all(isinstance(name, exp.Identifier) for name in names):
        raise FilterError(f"the filter's {_quoted(node)} is not the name of a column. {_KNOWN}.")
    return [name.name for name in names]


def _quoted(node: exp.Expr) -> str:
    return repr(cut(node.sql(comments=False), 100))


def _too_deep() -> FilterError:
    return FilterError("the filter is nested too deeply. Write it with fewer parentheses, nots and sums within one another.")
