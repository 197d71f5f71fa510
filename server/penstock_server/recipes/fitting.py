"""Which types of columns can be what a recipe takes them for: the fields of a row, tools, and what travels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from penstock.batch import TENSOR_NAMES
from penstock_server.recipes.column_types import is_chats, is_of_nothing, is_raw, is_text, is_tokens, is_tools
from penstock_server.recipes.fields import Field, FieldError

Kind = Literal["tokens", "text", "prompt_response", "messages", "preference"]

Fields = tuple[tuple[str, Field], ...]  # by their roles

# Which types the fields of a row may have, and how that is said.
_FITTING: Mapping[Kind, tuple[Callable[[pa.DataType], bool], str]] = {
    "tokens": (is_tokens, "lists of integers"),
    "text": (is_text, "text"),
    "prompt_response": (is_text, "text"),
    "messages": (is_chats, "lists of messages, each with a role and a content, or such lists as JSON texts"),
    "preference": (is_chats, "text or lists of messages"),
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column that travels beside the tokens, as values of one type, whatever shards have."""

    field: Field
    type: pa.DataType

    @property
    def name(self) -> str:
        """What it is called in penstock.toml, and in a batch."""
        return self.field.text


def check_field(kind: Kind, role: str, source: Field, schema: pa.Schema) -> None:
    """Whether a field can play a role. Raises FieldError: it is not there, or of a type that will not do."""
    type_ = source.type(schema)
    fits, wanted = _FITTING[kind]
    if not fits(type_):
        told = f"column {source.text!r} is {type_}, but {role} must be {wanted}"
        if wanted == "text" and (pa.types.is_integer(type_) or pa.types.is_floating(type_)):
            told += f'. A template with other text beside the number prints it: {role} = " {{{source.text.strip("{}")}}}"'
        raise FieldError(told)


def check_tools(source: Field, schema: pa.Schema) -> None:
    """Whether a field can hold definitions of tools. Raises FieldError: it is not there, or of a type that will not do."""
    if not _may_be_tools(type_ := source.type(schema)):
        raise FieldError(
            f"column {source.text!r} is {type_}, but tools must be lists of definitions, or such lists as JSON texts"
        )


def holds_tools(schema: pa.Schema) -> bool:
    """Whether there is a column with definitions of tools by its name and type."""
    return any(field.name == "tools" and is_tools(field.type) for field in schema)


def may_hold_tools(schema: pa.Schema) -> bool:
    """Whether there may be one: in this shard that column may be null throughout."""
    return any(field.name == "tools" and _may_be_tools(field.type) for field in schema)


def _may_be_tools(type_: pa.DataType) -> bool:
    """Whether a column holds definitions of tools, or nothing throughout a shard."""
    return is_tools(type_) or is_of_nothing(type_)


def travelling_column(name: str, schema: pa.Schema) -> Column:
    """The column of that name: numbers, lists of a fixed number of them, text or bytes. Raises FieldError: it cannot travel."""
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
