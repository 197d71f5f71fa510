r"""Fields that a recipe reads of a row, and the types and values of columns.

content                 a column
meta.body               a field of a struct, unless a column has exactly that name
{title}\n\n{meta.body}  a template: text, with the values of columns in braces; {{ and }} are braces themselves
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from string import Formatter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.text import listed
from penstock.wire.names import TENSOR_NAMES
from penstock_server.arrow import parsed_json, without_json_type

_Path = tuple[str, ...]


class RecipeError(ValueError):
    """A recipe cannot be used, or not on these rows; the message says why and what to do, without a full stop."""


class FieldError(RecipeError):
    """The field is not in the data, or has an unsuitable type; the message says what there is."""


@dataclass(frozen=True, slots=True)
class Field:
    """Column or template, as declared in `text`; `parts` are (text, path of the column after it, None at the end)."""

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
        """Return its values, shape [num_rows]; a template is null where a column is. Raises FieldError: the rows lack one."""
        if not self.is_template:
            [(_, path)] = self.parts
            assert path
            return _values(path, rows)
        strings: list[pa.Array | pa.Scalar] = []
        for literal, path in self.parts:
            strings.append(pa.scalar(literal, pa.large_string()))
            if path:  # bytes that are not UTF-8 make a bad row, not a bad block
                strings.append(pc.cast(without_json_type(_values(path, rows)), pa.large_string(), safe=False))
        return pc.binary_join_element_wise(*strings, pa.scalar("", pa.large_string()))


def _resolve(name: str, schema: pa.Schema) -> _Path:
    path = (name,) if name in schema.names else tuple(name.split("."))
    type_at(path, schema)
    return path


def type_at(path: _Path, schema: pa.Schema) -> pa.DataType:
    """Return the type of a column, or of a field inside it. Raises FieldError: the schema has no such column or field."""
    column, names = path[0], schema.names
    if names.count(column) > 1:
        raise FieldError(f"{names.count(column)} columns are called {column!r}. Rename all but one")
    if column not in names:
        raise FieldError(f"there is no column {column!r}; there are: {listed(names)}")
    type_ = schema.field(column).type
    for depth, name in enumerate(path[1:], 1):
        names = type_.names if pa.types.is_struct(type_) else []
        if name not in names:
            fields = f"has no field {name!r}; it has: {listed(names)}"
            inside = f"column {'.'.join(path[:depth])!r}"
            raise FieldError(f"{inside} {fields}" if names else f"{inside} is {type_}, which has no fields, so no {name!r}")
        type_ = type_.field(name).type
    return type_


def _values(path: _Path, rows: pa.RecordBatch) -> pa.Array:
    type_at(path, rows.schema)
    column = rows.column(path[0])
    return pc.struct_field(column, list(path[1:])) if path[1:] else column


@dataclass(frozen=True, slots=True)
class Column:
    """Passthrough column, sent as one type, whatever the shards' types.

    Numbers and fixed-size lists of them become tensors; text and bytes stay; structs, maps and other lists become JSON.
    """

    field: Field
    type: pa.DataType

    @classmethod
    def parse(cls, name: str, schema: pa.Schema) -> Column:
        """Parse a column that a recipe names. Raises FieldError: it is missing, or has another type or the name of a tensor."""
        field = Field.parse(name, schema)
        type_ = field.type(schema)
        if name in TENSOR_NAMES:
            raise FieldError(f"column {name!r} cannot be passed through: a batch has a tensor of that name. Rename it")
        if not (not _holds_bytes(type_) if is_nested(type_) else is_raw(type_) or _is_number(_item(type_))):
            raise FieldError(
                f"column {name!r} is {type_}; numbers, text and bytes pass through, and lists, structs and maps without bytes"
            )
        return cls(field, type_)

    @property
    def is_nested(self) -> bool:
        """Return whether it is sent as JSON."""
        return is_nested(self.type)

    @property
    def name(self) -> str:
        """Return its name in penstock.toml and in a batch."""
        return self.field.text


def is_nested(type_: pa.DataType) -> bool:
    """Return whether a passthrough column of this type is sent as JSON: structs, maps and lists, but vectors of numbers."""
    is_vector = pa.types.is_fixed_size_list(type_) and _is_number(type_.value_type)
    return bool(pa.types.is_nested(type_)) and not is_vector


def _item(type_: pa.DataType) -> pa.DataType:
    return type_.value_type if pa.types.is_fixed_size_list(type_) or pa.types.is_dictionary(type_) else type_


def _is_number(type_: pa.DataType) -> bool:
    return bool(pa.types.is_integer(type_) or pa.types.is_floating(type_) or pa.types.is_boolean(type_))


def _holds_bytes(type_: pa.DataType) -> bool:
    return is_bytes(type_) or any(_holds_bytes(type_.field(i).type) for i in range(type_.num_fields))


def passthrough_type(type_: pa.DataType) -> str:
    """Return the name of the type that a passthrough column is sent as, whatever Arrow calls it."""
    if is_nested(type_):
        return "json"
    if pa.types.is_dictionary(type_) and not is_text(type_):
        return passthrough_type(type_.value_type)
    if is_raw(type_):
        return "string" if is_text(type_) else "binary"
    if pa.types.is_float16(type_):
        type_ = pa.float32()
    if pa.types.is_fixed_size_list(type_):
        type_ = pa.list_(type_.value_type, type_.list_size)  # the name of a list's items makes no difference
    return str(type_)


def is_text(type_: pa.DataType) -> bool:
    """Return whether a column of this type holds text. JSON is text, also in Arrow's JSON type."""
    if isinstance(type_, pa.BaseExtensionType):
        return is_text(type_.storage_type)
    if pa.types.is_dictionary(type_):
        return is_text(type_.value_type)
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_))


def is_bytes(type_: pa.DataType) -> bool:
    """Return whether a column of this type holds bytes, of any number."""
    return bool(pa.types.is_binary(type_) or pa.types.is_large_binary(type_) or pa.types.is_binary_view(type_))


def is_raw(type_: pa.DataType) -> bool:
    """Return whether a column of this type holds text or bytes."""
    return is_text(type_) or is_bytes(type_)


def is_list(type_: pa.DataType) -> bool:
    """Return whether a column of this type holds lists, but no list views."""
    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_))


def is_tokens(type_: pa.DataType) -> bool:
    """Return whether a column of this type holds lists of integers."""
    return is_list(type_) and bool(pa.types.is_integer(type_.value_type))


def is_messages(type_: pa.DataType) -> bool:
    """Return whether a column of this type holds lists of messages: structs with role and content, or JSON values."""
    if not is_list(type_):
        return False
    item = type_.value_type
    return isinstance(item, pa.JsonType) or (pa.types.is_struct(item) and {"role", "content"} <= set(item.names))


def is_null(type_: pa.DataType) -> bool:
    """Return whether a column of this type is null, or lists of nothing, throughout a shard."""
    return bool(pa.types.is_null(type_.value_type if is_list(type_) else type_))


@lru_cache(maxsize=32)
def numpy_type(type_: pa.DataType) -> np.dtype[Any]:
    """Return numpy's type for a type of numbers. Arrow's own conversion needs pandas in many versions."""
    dtype: np.dtype[Any] = pa.nulls(0, type_).to_numpy(zero_copy_only=False).dtype
    return dtype


def python_values(array: pa.Array) -> list[Any]:
    """Convert values to Python objects; times are cut to the microsecond. Raises ValueError: bad UTF-8, or a far date."""
    type_ = _in_microseconds(array.type)
    try:
        values: list[Any] = (array if type_ == array.type else array.cast(type_, safe=False)).to_pylist()
    except OverflowError as error:
        raise ValueError("a date is outside the years 1 to 9999") from error
    return values


def json_values(array: pa.Array, note: Callable[[int, str], None], first: int = 0) -> list[Any]:
    """Convert values to JSON values, None for a bad row; `first` is the number of the first row.

    A null field of a struct is left out, since Parquet cannot store a row without it; a map key with a null value stays.
    """
    try:
        return [_as_json(value, array.type) for value in python_values(array)]
    except ValueError as error:  # it does not name the row
        if len(array) > 1:
            return [json_values(array[row : row + 1], note, row)[0] for row in range(len(array))]
        note(first, f"cannot be read: {error}")
        return [None]


def _as_json(value: Any, type_: pa.DataType) -> Any:
    if value is None:
        return None
    if isinstance(type_, pa.JsonType):
        return parsed_json(value)
    if isinstance(type_, pa.BaseExtensionType):
        type_ = type_.storage_type
    if isinstance(value, dict):
        fields = {field.name: _as_json(value[field.name], field.type) for field in type_}
        return {name: item for name, item in fields.items() if item is not None}
    if pa.types.is_map(type_):
        return {key: _as_json(item, type_.item_type) for key, item in value}
    return [_as_json(item, type_.value_type) for item in value] if isinstance(value, list) else value


def _in_microseconds(type_: pa.DataType) -> pa.DataType:
    """Replace nanoseconds by microseconds in a type, also inside nested types."""
    types = pa.types
    if types.is_struct(type_):
        return pa.struct([field.with_type(_in_microseconds(field.type)) for field in type_])
    if types.is_map(type_):
        return pa.map_(_in_microseconds(type_.key_type), type_.item_field.with_type(_in_microseconds(type_.item_type)))
    if types.is_fixed_size_list(type_):
        return pa.list_(_in_microseconds(type_.value_type), type_.list_size)
    if types.is_list(type_) or types.is_large_list(type_):  # pyarrow cannot cast list views
        item = type_.value_field.with_type(_in_microseconds(type_.value_type))
        return pa.list_(item) if types.is_list(type_) else pa.large_list(item)
    if not types.is_temporal(type_) or getattr(type_, "unit", "") != "ns":
        return type_
    if types.is_timestamp(type_):
        return pa.timestamp("us", type_.tz)
    return pa.duration("us") if types.is_duration(type_) else pa.time64("us")
