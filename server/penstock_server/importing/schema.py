"""One schema for all files: column types made plain, merged, and rows cast to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import pyarrow as pa

from penstock.cli.output import CommandError
from penstock.text import cut, listed, one_line
from penstock_server.recipes.fields import is_tokens


class ImportRefused(CommandError):
    """The files cannot be imported. The message names the file, the reason and the remedy."""


class IdsTooLarge(Exception):
    """A number does not fit the int32 or int64 that `plain` made of its type."""


def plain(schema: pa.Schema, *, narrow: bool) -> pa.Schema:
    """Return a schema with one type for each kind of value, such as string for large, viewed and dictionary-encoded text.

    Token ids become int32 if `narrow`, otherwise int64; `narrow` also makes uint64 int64.
    """
    return pa.schema([pa.field(field.name, _plain(field.type, narrow=narrow)) for field in schema])


def merge(files: Sequence[tuple[object, pa.Schema]], columns: Sequence[str] | None) -> pa.Schema:
    """Merge plain schemas: the columns named, or all. Integers mixed with decimals become float64, nulls alone string.

    Raises ImportRefused: a column is in no file, twice in one, or has types without a common type.
    """
    check_names("--columns", columns or (), [schema for _, schema in files])
    merged = pa.schema([])
    for path, schema in files:
        chosen = pa.schema([field for field in schema if columns is None or field.name in columns])
        for name in chosen.names:
            if chosen.names.count(name) > 1:
                raise ImportRefused(f"{path}: {chosen.names.count(name)} columns are called {name!r}. Rename one.")
        try:
            merged = pa.unify_schemas([merged, chosen], promote_options="permissive")
        except pa.ArrowException as error:
            raise ImportRefused(
                f"{path} differs from an earlier file: {one_line(error)}. Convert one, choose other columns with --columns, or "
                f"import the files into separate folders."
            ) from error
    if not merged.names:
        raise ImportRefused(f"{listed([str(path) for path, _ in files])}: no column holds a value. Nothing was written.")
    return pa.schema([(name, _with_text_for_null(merged.field(name).type)) for name in columns or merged.names])


def check_names(option: str, columns: Sequence[str], schemas: Iterable[pa.Schema]) -> None:
    """Raise ImportRefused if an option names a column that is in no file."""
    known = list(dict.fromkeys(name for schema in schemas for name in schema.names))
    for name in columns:
        if name not in known:
            raise ImportRefused(f"{option}: no file has a column {name!r}. The columns are {listed(known)}.")


def conform(path: object, table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Cast rows of a file to a schema; missing columns are null.

    Raises:
        IdsTooLarge: A number does not fit a type that `plain` has narrowed.
        ImportRefused: Another value does not fit its column.
    """
    arrays = []
    for field in schema:
        column = table[field.name] if field.name in table.schema.names else None
        if column is None or column.null_count == len(column):
            arrays.append(pa.nulls(table.num_rows, field.type))
            continue
        try:
            # Through text: Arrow does not cast JSON stored as large strings to JSON stored as strings.
            arrays.append(column.cast(_without_json(field.type)).cast(field.type))
        except pa.ArrowException as error:
            if _plain(column.type, narrow=True) == field.type != _plain(column.type, narrow=False):
                raise IdsTooLarge from error
            raise ImportRefused(
                f"{path}: column {field.name!r} does not fit {cut(str(field.type), 60)}: {one_line(error)}. "
                f"Nothing was written. Leave it out with --columns."
            ) from error
    return pa.Table.from_arrays(arrays, schema=schema)


def _plain(type_: pa.DataType, *, narrow: bool) -> pa.DataType:
    types = pa.types
    if isinstance(type_, pa.JsonType):
        return pa.json_()
    if isinstance(type_, pa.BaseExtensionType):
        return _plain(type_.storage_type, narrow=narrow)
    if types.is_dictionary(type_):
        return _plain(type_.value_type, narrow=narrow)
    if types.is_large_string(type_) or types.is_string_view(type_):
        return pa.string()
    if types.is_large_binary(type_) or types.is_binary_view(type_):
        return pa.binary()
    if is_tokens(type_):
        return pa.list_(pa.int32() if narrow else pa.int64())
    if narrow and types.is_uint64(type_):
        return pa.int64()
    return _rebuilt(type_, partial(_plain, narrow=narrow))


def _with_text_for_null(type_: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_null(type_) else _rebuilt(type_, _with_text_for_null)


def _without_json(type_: pa.DataType) -> pa.DataType:
    return pa.string() if isinstance(type_, pa.JsonType) else _rebuilt(type_, _without_json)


def _rebuilt(type_: pa.DataType, convert: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Return a nested type with its inner types converted; other types unchanged."""
    types = pa.types
    if types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_):
        return pa.list_(convert(type_.value_type))
    if types.is_struct(type_):
        return pa.struct([(field.name, convert(field.type)) for field in type_])
    if types.is_map(type_):
        return pa.map_(convert(type_.key_type), convert(type_.item_type))
    return type_
