"""What columns can be: the types of text, of token ids and of chats."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa


def is_text(type_: pa.DataType) -> bool:
    """Whether a column of this type holds text."""
    if pa.types.is_dictionary(type_):
        return is_text(type_.value_type)
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_))


def is_bytes(type_: pa.DataType) -> bool:
    """Whether a column of this type holds bytes, of any number."""
    return bool(pa.types.is_binary(type_) or pa.types.is_large_binary(type_) or pa.types.is_binary_view(type_))


def is_raw(type_: pa.DataType) -> bool:
    """Whether a column of this type holds text or bytes."""
    return is_text(type_) or is_bytes(type_)


def is_tokens(type_: pa.DataType) -> bool:
    """Whether a column of this type holds lists of integers."""
    return _is_list(type_) and bool(pa.types.is_integer(type_.value_type))


def is_messages(type_: pa.DataType) -> bool:
    """Whether a column of this type holds lists of messages: structs with a role and a content."""
    return is_list_of(type_, {"role", "content"})


def is_chats(type_: pa.DataType) -> bool:
    """Whether a column of this type holds lists of messages, or may hold them as JSON texts."""
    return is_messages(type_) or is_text(type_)


def is_list_of(type_: pa.DataType, names: set[str]) -> bool:
    """Whether a column of this type holds lists of structs that have fields of these names."""
    if not (_is_list(type_) and pa.types.is_struct(type_.value_type)):
        return False
    return names <= {type_.value_type.field(i).name for i in range(type_.value_type.num_fields)}


def is_tools(type_: pa.DataType) -> bool:
    """Whether a column of this type holds definitions of tools: lists of structs or of texts, or JSON texts."""
    if is_text(type_):
        return True
    return _is_list(type_) and bool(pa.types.is_struct(type_.value_type) or is_text(type_.value_type))


@lru_cache(maxsize=32)
def numpy_type(type_: pa.DataType) -> np.dtype[Any]:
    """What numpy calls a type of numbers. Arrow's own word for it needs pandas in many a version."""
    found: np.dtype[Any] = pa.nulls(0, type_).to_numpy(zero_copy_only=False).dtype
    return found


def _is_list(type_: pa.DataType) -> bool:
    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_))
