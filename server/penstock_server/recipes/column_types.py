"""Types of columns: text, token ids and chats."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa


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


def travelling_as(type_: pa.DataType) -> pa.DataType:
    """Return the type that a passthrough column is stored and sent as, whatever Arrow calls it: see `travelling`."""
    if pa.types.is_dictionary(type_) and not is_text(type_):
        return travelling_as(type_.value_type)
    if is_raw(type_):
        return pa.large_string() if is_text(type_) else pa.large_binary()
    return pa.float32() if pa.types.is_float16(type_) else type_


def name_of_travelling(type_: pa.DataType) -> str:
    """Return one name for all types that are sent alike: the one that a recipe sees depends on the first shard."""
    own = travelling_as(type_)
    if pa.types.is_fixed_size_list(own):
        own = pa.list_(own.value_type, own.list_size)  # the name of a list's items makes no difference
    return str(own).removeprefix("large_")


def is_tokens(type_: pa.DataType) -> bool:
    """Return whether a column of this type holds lists of integers."""
    return _is_list(type_) and bool(pa.types.is_integer(type_.value_type))


def is_booleans(type_: pa.DataType) -> bool:
    """Return whether a column of this type holds lists of booleans."""
    return _is_list(type_) and bool(pa.types.is_boolean(type_.value_type))


def is_messages(type_: pa.DataType) -> bool:
    """Return whether a column of this type holds lists of messages: structs with role and content, or JSON values."""
    return is_list_of(type_, {"role", "content"}) or (_is_list(type_) and isinstance(type_.value_type, pa.JsonType))


def is_chats(type_: pa.DataType) -> bool:
    """Return whether a column of this type holds lists of messages, or may hold them as JSON texts."""
    return is_messages(type_) or is_text(type_)


def is_of_nothing(type_: pa.DataType) -> bool:
    """Return whether a column of this type is null, or lists of nothing, throughout a shard."""
    item = type_.value_type if pa.types.is_list(type_) or pa.types.is_large_list(type_) else type_
    return bool(pa.types.is_null(item))


def is_list_of(type_: pa.DataType, names: set[str]) -> bool:
    """Return whether a column of this type holds lists of structs that have fields of these names."""
    if not (_is_list(type_) and pa.types.is_struct(type_.value_type)):
        return False
    return names <= {type_.value_type.field(i).name for i in range(type_.value_type.num_fields)}


def is_tools(type_: pa.DataType) -> bool:
    """Return whether a column of this type holds definitions of tools: lists of structs or of texts, or JSON texts."""
    if is_text(type_):
        return True
    return _is_list(type_) and bool(pa.types.is_struct(type_.value_type) or is_text(type_.value_type))


def are_told_alike(a: pa.DataType, b: pa.DataType) -> bool:
    """Return whether equal values of two types have the same text in Python; nulls have one text in all types."""
    a, b = (type_.value_type if pa.types.is_dictionary(type_) else type_ for type_ in (a, b))
    if a == b or pa.types.is_null(a) or pa.types.is_null(b):
        return True
    if pa.types.is_struct(a) and pa.types.is_struct(b):
        return [field.name for field in a] == [field.name for field in b] and _all_alike(a, b)
    if any(of_kind(a) and of_kind(b) for of_kind in (_is_list, pa.types.is_map)):
        return _all_alike(a, b)
    if pa.types.is_decimal(a) and pa.types.is_decimal(b):
        return bool(a.scale == b.scale)
    if pa.types.is_timestamp(a) and pa.types.is_timestamp(b):
        return bool(a.tz == b.tz)
    return any(of_kind(a) and of_kind(b) for of_kind in _KINDS)


def _all_alike(a: pa.DataType, b: pa.DataType) -> bool:
    return all(are_told_alike(a.field(i).type, b.field(i).type) for i in range(a.num_fields))


_KINDS = (
    is_text,
    lambda type_: is_bytes(type_) or pa.types.is_fixed_size_binary(type_),
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_date,
    pa.types.is_time,
    pa.types.is_duration,
)


def num_leaves(type_: pa.DataType) -> int:
    """Return the number of leaf columns that Parquet has for a column of this type."""
    type_ = type_.storage_type if isinstance(type_, pa.BaseExtensionType) else type_
    return sum(num_leaves(type_.field(n).type) for n in range(type_.num_fields)) if pa.types.is_nested(type_) else 1


@lru_cache(maxsize=32)
def numpy_type(type_: pa.DataType) -> np.dtype[Any]:
    """Return numpy's type for a type of numbers. Arrow's own conversion needs pandas in many versions."""
    found: np.dtype[Any] = pa.nulls(0, type_).to_numpy(zero_copy_only=False).dtype
    return found


def _is_list(type_: pa.DataType) -> bool:
    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_))
