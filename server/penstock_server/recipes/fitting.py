"""Checks that columns have types that suit their use in a recipe: fields of a row, tools, passthrough columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from penstock.batch import TENSOR_NAMES
from penstock_server.recipes.column_types import is_chats, is_of_nothing, is_raw, is_text, is_tokens, is_tools
from penstock_server.recipes.fields import Field, FieldError

Kind = Literal["tokens", "text", "prompt_response", "messages", "preference"]

Fields = tuple[tuple[str, Field], ...]  # by role

# The types that the fields of a row may have, and their names in messages.
_FITTING: Mapping[Kind, tuple[Callable[[pa.DataType], bool], str]] = {
    "tokens": (is_tokens, "lists of integers"),
    "text": (is_text, "text"),
    "prompt_response": (is_text, "text"),
    "messages": (is_chats, "lists of messages, each with a role and a content, or such lists as JSON texts"),
    "preference": (is_chats, "text or lists of messages"),
}


@dataclass(frozen=True, slots=True)
class Column:
    """Passthrough column, sent with the tokens as values of one type, whatever the shards' types."""

    field: Field
    type: pa.DataType

    @property
    def name(self) -> str:
        """Return its name in penstock.toml and in a batch."""
        return self.field.text


def check_field(kind: Kind, role: str, source: Field, schema: pa.Schema) -> None:
    """Check that a field suits a role. Raises FieldError: it is missing, or has an unsuitable type."""
    type_ = source.type(schema)
    fits, wanted = _FITTING[kind]
    if not fits(type_):
        told = f"column {source.text!r} is {type_}, but {role} must be {wanted}"
        if wanted == "text" and (pa.types.is_integer(type_) or pa.types.is_floating(type_)):
            told += f'. A template with other text beside the number prints it: {role} = " {{{source.text.strip("{}")}}}"'
        raise FieldError(told)


def check_tools(source: Field, schema: pa.Schema) -> None:
    """Check that a field can hold tool definitions. Raises FieldError: it is missing, or has an unsuitable type."""
    if not _may_be_tools(type_ := source.type(schema)):
        raise FieldError(
            f"column {source.text!r} is {type_}, but tools must be lists of definitions, or such lists as JSON texts"
        )


def holds_tools(schema: pa.Schema) -> bool:
    """Return whether a column has tool definitions by its name and type."""
    return any(field.name == "tools" and is_tools(field.type) for field in schema)


def may_hold_tools(schema: pa.Schema) -> bool:
    """Return whether a column may have tool definitions: in this shard it may be null throughout."""
    return any(field.name == "tools" and _may_be_tools(field.type) for field in schema)


def _may_be_tools(type_: pa.DataType) -> bool:
    """Return whether a column of this type holds tool definitions, or only nulls in a shard."""
    return is_tools(type_) or is_of_nothing(type_)


def travelling_column(name: str, schema: pa.Schema) -> Column:
    """Return a passthrough column: numbers, fixed-size lists of them, text or bytes. Raises FieldError: another type."""
    source = Field.parse(name, schema)
    type_ = source.type(schema)
    if name in TENSOR_NAMES:
        raise FieldError(f"column {name!r} cannot travel: a batch has a tensor of that name. Rename the column")
    item = type_.value_type if pa.types.is_fixed_size_list(type_) or pa.types.is_dictionary(type_) else type_
    number = pa.types.is_integer(item) or pa.types.is_floating(item) or pa.types.is_boolean(item)
    if not (number or (is_raw(item) and not pa.types.is_fixed_size_list(type_))):
        raise FieldError(
            f"column {name!r} is {type_} and cannot travel; numbers, lists of a fixed number of them, text and bytes can"
        )
    return Column(source, type_)
