r"""Fields that a recipe reads of a row: a column, a field inside a nested one, or a text made of several.

content                 a column
meta.body               a field of a struct, unless a column has exactly that name
{title}\n\n{meta.body}  a template: text, with the values of columns in braces; {{ and }} are braces themselves
"""

from __future__ import annotations

from dataclasses import dataclass
from string import Formatter

import pyarrow as pa
import pyarrow.compute as pc

from penstock.text import listed, perhaps
from penstock_server.arrow import without_json_type

_Path = tuple[str, ...]


class FieldError(ValueError):
    """The field is not in the data, or has an unsuitable type; the message says what there is."""


@dataclass(frozen=True, slots=True)
class Field:
    """Column or template, as declared in `text`.

    `parts` are (text, path of the column after it); the last text may have no column. A single column has the text "".
    """

    text: str
    parts: tuple[tuple[str, _Path | None], ...]

    @classmethod
    def parse(cls, text: str, schema: pa.Schema) -> Field:
        """Parse a field that a recipe names, in data of this schema. Raises FieldError: see the class."""
        if text in schema.names or "{" not in text:
            return cls(text, (("", _resolve(text, schema)),))
        try:
            parsed = list(Formatter().parse(text))
        except ValueError as error:
            raise FieldError(f"the template {text!r} is not well formed: {error}") from error
        parts = []
        for literal, name, spec, conversion in parsed:
            if spec or conversion:
                raise FieldError(f"the template {text!r} formats {{{name}}}; a column's name alone may stand in braces")
            parts.append((literal, None if name is None else _resolve(name, schema)))
        if all(path is None for _, path in parts):
            raise FieldError(f"the template {text!r} reads no column, so all rows would be alike")
        return cls(text, tuple(parts))

    @property
    def is_template(self) -> bool:
        """Return whether its value is a text made from columns, not a column's value."""
        return len(self.parts) > 1 or self.parts[0][0] != ""

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the top-level columns that it reads."""
        return tuple(dict.fromkeys(path[0] for _, path in self.parts if path))

    def type(self, schema: pa.Schema) -> pa.DataType:
        """Return the type of its values. Raises FieldError: the schema has no such column."""
        types = [type_at(path, schema) for _, path in self.parts if path]
        if not self.is_template:
            return types[0]
        if nested := [type_ for type_ in types if pa.types.is_nested(type_)]:
            raise FieldError(f"the template {self.text!r} would print a {nested[0]}; text and numbers can stand in it")
        return pa.string()

    def array(self, rows: pa.RecordBatch) -> pa.Array:
        """Return its values, shape [num_rows]; a template is null in rows with a null in one of its columns.

        Raises FieldError: the rows have no such column.
        """
        if not self.is_template:
            [(_, path)] = self.parts
            assert path
            return _values(path, rows)
        strings: list[pa.Array | pa.Scalar] = []
        for literal, path in self.parts:
            strings.append(pa.scalar(literal, pa.large_string()))
            if path:
                strings.append(_as_text(_values(path, rows)))
        return pc.binary_join_element_wise(*strings, pa.scalar("", pa.large_string()))

    def nulls(self, rows: pa.RecordBatch) -> dict[str, list[bool]]:
        """Return for each column of a template whether it is null in each row."""
        paths = dict.fromkeys(path for _, path in self.parts if path)
        return {".".join(path): _as_text(_values(path, rows)).is_null().to_pylist() for path in paths}


def _resolve(name: str, schema: pa.Schema) -> _Path:
    path = (name,) if name in schema.names else tuple(name.split("."))
    type_at(path, schema)
    return path


def type_at(path: _Path, schema: pa.Schema) -> pa.DataType:
    """Return the type of a column, or of a field inside it. Raises FieldError: the schema has no such column or field."""
    column, columns = path[0], schema.names
    if columns.count(column) > 1:
        raise FieldError(f"{columns.count(column)} columns are called {column!r}. Rename all but one")
    if column not in columns:
        raise FieldError(f"there is no column {column!r}; there are: {listed(columns)}{perhaps(column, columns)}")
    type_ = schema.field(column).type
    for depth, name in enumerate(path[1:], 1):
        inside = ".".join(path[:depth])
        if not pa.types.is_struct(type_):
            raise FieldError(f"column {inside!r} is {type_}, which has no fields, so no {name!r}")
        names = [type_.field(i).name for i in range(type_.num_fields)]
        if name not in names:
            raise FieldError(f"column {inside!r} has no field {name!r}; it has: {listed(names)}{perhaps(name, names)}")
        type_ = type_.field(name).type
    return type_


def _values(path: _Path, rows: pa.RecordBatch) -> pa.Array:
    type_at(path, rows.schema)
    column = rows.column(path[0])
    return pc.struct_field(column, list(path[1:])) if path[1:] else column


def _as_text(values: pa.Array) -> pa.Array:
    values = without_json_type(values)
    return pc.cast(values, pa.large_string(), safe=False)  # bytes that are not UTF-8 make a bad row, not a bad block
