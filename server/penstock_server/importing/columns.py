"""Column types: normalized, merged into one schema for all files, and rows cast to fit them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.text import cut, did_you_mean, listed
from penstock_server.arrow import holds_json
from penstock_server.importing.source import ImportRefused, Survey
from penstock_server.recipes.fields import is_tokens, num_leaves

_MAX_LEAVES = 1_000  # columns, including those within objects; each takes memory in a writer
_INT32 = (-(2**31), 2**31 - 1)


class ColumnsDiffer(ValueError):
    """A column has types without a common type, or there are too many columns."""


def normal(type_: pa.DataType, *, dates: bool = True) -> pa.DataType:
    """Return the plain type with the same values as `type_`, whatever its storage.

    Text that is a dictionary, large or a view is string, JSON stays JSON, lists of any kind are list; without `dates`, a
    timestamp is string. Raises ValueError: pyarrow cannot make it a list.
    """
    types = pa.types
    if isinstance(type_, pa.JsonType):
        return pa.json_()
    if isinstance(type_, pa.BaseExtensionType):
        return normal(type_.storage_type, dates=dates)
    if types.is_dictionary(type_):
        return normal(type_.value_type, dates=dates)
    if types.is_large_string(type_) or types.is_string_view(type_) or (types.is_timestamp(type_) and not dates):
        return pa.string()
    if types.is_large_binary(type_) or types.is_binary_view(type_):
        return pa.binary()
    if types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_):
        return pa.list_(normal(type_.value_type, dates=dates))
    if types.is_struct(type_):
        return pa.struct([(field.name, normal(field.type, dates=dates)) for field in type_])
    if types.is_map(type_):
        return pa.map_(normal(type_.key_type), normal(type_.item_type, dates=dates))
    if types.is_list_view(type_) or types.is_large_list_view(type_):  # its cast loses items
        raise ValueError(f"{type_} cannot be turned into list")
    return type_


def normal_schema(schema: pa.Schema, columns: Sequence[str] | None, *, dates: bool = True) -> pa.Schema:
    """Return the columns to import, `columns` or all, in normal types.

    Raises ValueError: two columns have one name, or a type cannot be read; the message names the column.
    """
    chosen = [field for field in schema if columns is None or field.name in columns]
    fields = []
    for field in chosen:
        if schema.names.count(field.name) > 1:
            raise ValueError(f"{schema.names.count(field.name)} columns are called {field.name!r}")
        try:
            fields.append(pa.field(field.name, normal(field.type, dates=dates)))
        except ValueError as error:
            raise ValueError(f"column {field.name!r}: {error}") from error
    return pa.schema(fields)


def merge(known: pa.Schema, new: pa.Schema) -> pa.Schema:
    """Merge two schemas: missing columns are null, whole numbers mixed with others become float64.

    Raises ColumnsDiffer: a column has incompatible types, such as text and numbers, or there are too many columns.
    """
    if new.equals(known):
        return known
    common = [(known.field(field.name), field) for field in new if field.name in known.names]
    for mine, other in common:
        if _are_changed(mine.type, other.type):
            raise _differ(mine, other)
    try:
        merged = pa.unify_schemas([known, new], promote_options="permissive")
    except pa.ArrowException:
        for mine, other in common:
            _merge_one(mine, other)
        raise
    if (count := sum(map(num_leaves, merged.types))) > _MAX_LEAVES:
        largest = max(merged, key=lambda field: num_leaves(field.type)).name
        raise ColumnsDiffer(
            f"there would be {count:,} columns, those within objects counted too, of {_MAX_LEAVES:,} at most; most are in "
            f"{largest!r}. Keys that are data make no columns: write them as a list of pairs"
        )
    return merged


def _merge_one(known: pa.Field, new: pa.Field) -> None:
    try:
        pa.unify_schemas([pa.schema([known]), pa.schema([new])], promote_options="permissive")
    except pa.ArrowException as error:
        raise _differ(known, new) from error


def _differ(known: pa.Field, new: pa.Field) -> ColumnsDiffer:
    return ColumnsDiffer(f"column {new.name!r} is {_short(new.type)} here, and {_short(known.type)} in what was read before")


def _are_changed(one: pa.DataType, other: pa.DataType) -> bool:
    """Return whether merging would change values: Arrow turns decimals with floats to floats, and texts with bytes to bytes."""
    types = pa.types
    for is_changed, by in ((types.is_decimal, types.is_floating), (types.is_string, _is_bytes)):
        if (is_changed(one) and by(other)) or (is_changed(other) and by(one)):
            return True
    if types.is_struct(one) and types.is_struct(other):
        names = {field.name for field in one} & {field.name for field in other}
        return any(_are_changed(one.field(name).type, other.field(name).type) for name in names)
    if types.is_map(one) and types.is_map(other):
        return _are_changed(one.key_type, other.key_type) or _are_changed(one.item_type, other.item_type)
    return bool(types.is_list(one) and types.is_list(other)) and _are_changed(one.value_type, other.value_type)


def _is_bytes(type_: pa.DataType) -> bool:
    return bool(pa.types.is_binary(type_) or (pa.types.is_fixed_size_binary(type_) and not pa.types.is_decimal(type_)))


def one_schema(surveys: Sequence[tuple[Path, Survey]], columns: Sequence[str] | None) -> tuple[pa.Schema, list[str]]:
    """Return the schema of all shards, and the names of the columns left out: objects that never have a field.

    Token lists are list<int32> if that holds every id, otherwise list<int64>; a column that is null everywhere is string.
    Raises ImportRefused: files do not go together, a column is in none of them, Parquet has no such type, or no column is left.
    """
    check_names("--columns", columns or (), surveys)
    merged = pa.schema([])
    for path, survey in surveys:
        if columns and survey.names and not len(survey.schema):
            raise ImportRefused(
                f"{path} has none of the columns {', '.join(columns)}; its columns are {listed(survey.names)}. All of its "
                f"rows would be null: leave the file out, or choose other columns."
            )
        try:
            merged = merge(merged, survey.schema)
        except ColumnsDiffer as error:
            raise ImportRefused(
                f"{path}: {error}. All shards have one schema: make the columns alike, import the files into folders of their "
                f"own, or choose other columns with --columns."
            ) from error
    wide = frozenset[str]().union(*(survey.wide for _, survey in surveys))
    left_out: list[str] = []
    fields = []
    for name in columns or merged.names:
        type_ = _writable(merged.field(name).type, name, left_out)
        if type_ is not None:
            narrow = is_tokens(type_) and name not in wide
            fields.append(pa.field(name, pa.list_(pa.int32()) if narrow else type_))
    if not fields:
        raise ImportRefused(
            f"{listed([str(path) for path, _ in surveys])}: there is no column to import: no row holds a value. Nothing was "
            f"written."
        )
    for field in fields:
        try:
            written = pa.BufferOutputStream()
            pq.ParquetWriter(written, pa.schema([field])).close()
            pq.read_schema(pa.BufferReader(written.getvalue()))  # a deeply nested type can be written, but not read
        except (pa.ArrowException, OSError) as error:
            raise ImportRefused(
                f"column {field.name!r}: Parquet does not hold {_short(field.type)}. Nothing was written. Leave it out with "
                f"--columns, or write it as another type, such as text."
            ) from error
    return pa.schema(fields), left_out


def completed(schema: pa.Schema, whole: pa.Schema) -> pa.Schema:
    """Return a file's types; those that it has no values of, inside objects and lists, come from `whole`."""
    types = {field.name: field.type for field in whole}
    fields = [
        field if pa.types.is_null(field.type) else field.with_type(_completed(field.type, types.get(field.name)))
        for field in schema
    ]
    return pa.schema(fields)


def _is_read_from_json(type_: pa.DataType) -> bool:
    """Return whether pyarrow's reader takes this type for a column whose values are null or missing."""
    types = pa.types
    if types.is_list(type_) or types.is_struct(type_):
        return all(_is_read_from_json(type_.field(number).type) for number in range(type_.num_fields))
    kinds = (types.is_null, types.is_map, types.is_duration, types.is_float16, types.is_fixed_size_binary, types.is_interval)
    return not any(is_kind(type_) for is_kind in kinds)


def _completed(type_: pa.DataType, whole: pa.DataType | None) -> pa.DataType:
    if whole is None:
        return type_
    if pa.types.is_null(type_):
        return whole if _is_read_from_json(whole) else type_
    if pa.types.is_list(type_) and pa.types.is_list(whole):
        return pa.list_(_completed(type_.value_type, whole.value_type))
    if pa.types.is_struct(type_) and pa.types.is_struct(whole):
        types = {field.name: field.type for field in whole}
        return pa.struct([(field.name, _completed(field.type, types.get(field.name))) for field in type_])
    return type_


def check_names(option: str, columns: Sequence[str], surveys: Sequence[tuple[Path, Survey]]) -> None:
    """Check that an option names columns of the files. Raises ImportRefused: a column is in no file."""
    known = list(dict.fromkeys(name for _, survey in surveys for name in survey.names))
    for name in columns:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ImportRefused(f"{option}: no file has a column {name!r}.{hint} There are: {listed(known)}.")


def _writable(type_: pa.DataType, name: str, left_out: list[str]) -> pa.DataType | None:
    """Return the type as Parquet can hold it: without null, and without objects that have no fields."""
    types = pa.types
    if types.is_null(type_):
        return pa.string()
    if types.is_list(type_):
        item = _writable(type_.value_type, f"{name}[]", left_out)
        if is_tokens(type_):
            item = pa.int64()
        return None if item is None else pa.list_(item)
    if types.is_struct(type_):
        kept = [(field.name, _writable(field.type, f"{name}.{field.name}", left_out)) for field in type_]
        if any(kind is not None for _, kind in kept):
            return pa.struct([(field, kind) for field, kind in kept if kind is not None])
        if not kept:
            left_out.append(name)
        return None
    return type_


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Cast rows to the columns and types of the schema; missing columns are null.

    Raises ValueError: a value does not fit the type; the message names the column.
    """
    arrays = []
    for field in schema:
        if field.name not in table.schema.names:
            arrays.append(pa.nulls(table.num_rows, field.type))
            continue
        try:
            column = _without_dictionary_of_views(table.column(field.name))
            # Arrow cannot cast JSON of large strings directly to JSON of strings.
            arrays.append((column.cast(_stored(field.type)) if holds_json(field.type) else column).cast(field.type))
        except MemoryError:
            raise
        except pa.ArrowException as error:
            raise ValueError(f"column {field.name!r} does not fit {_short(field.type)}: {error}") from error
    return pa.Table.from_arrays(arrays, schema=schema)


def _stored(type_: pa.DataType) -> pa.DataType:
    """Return a normal type with text in place of JSON."""
    if isinstance(type_, pa.JsonType):
        return pa.string()
    if pa.types.is_list(type_):
        return pa.list_(_stored(type_.value_type))
    if pa.types.is_struct(type_):
        return pa.struct([(field.name, _stored(field.type)) for field in type_])
    return pa.map_(type_.key_type, _stored(type_.item_type)) if pa.types.is_map(type_) else type_


def _without_dictionary_of_views(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Cast a dictionary of views, as Polars stores categories, to one of text: pyarrow cannot decode views."""
    if not (pa.types.is_dictionary(column.type) and pa.types.is_string_view(column.type.value_type)):
        return column
    return pa.chunked_array(
        [pa.DictionaryArray.from_arrays(each.indices, each.dictionary.cast(pa.large_string())) for each in column.chunks],
        pa.dictionary(column.type.index_type, pa.large_string()),
    )


def wide_columns(table: pa.Table) -> frozenset[str]:
    """Return the columns of token lists with an id outside int32."""
    found = []
    plain = pa.schema([(field.name, normal(field.type)) for field in table.schema])  # ids may be dictionary-encoded
    for name in may_be_wide(plain):
        bounds = [pc.min_max(chunk.flatten()).as_py() for chunk in table.column(name).cast(plain.field(name).type).chunks]
        lows, highs = ([b[end] for b in bounds if b[end] is not None] for end in ("min", "max"))
        if lows and (min(lows) < _INT32[0] or max(highs) > _INT32[1]):
            found.append(name)
    return frozenset(found)


def may_be_wide(schema: pa.Schema) -> list[str]:
    """Return the columns of token lists whose type may hold ids outside int32."""
    return [field.name for field in schema if is_tokens(field.type) and not _fits(field.type.value_type)]


def _fits(integer: pa.DataType) -> bool:
    return bool(integer.bit_width < 32 or integer == pa.int32())


def _short(type_: pa.DataType) -> str:
    return cut(str(type_), 60)
