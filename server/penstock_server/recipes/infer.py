"""Roles of columns: as penstock.toml names them, otherwise inferred from their names and types.

A row is made of the fields of one kind. Columns beside token ids may be masks:

labels          the id if it has loss, otherwise -100; not shifted, as Hugging Face's models take them
loss_mask       1 if an id has loss, otherwise 0
attention_mask  0 at padding, which is left out of the row
seq_lengths     of rows that hold several documents: the ids of each document, as TRL packs them
position_ids    or the position of each id in its document, from 0 on
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from penstock.text import listed
from penstock_server.problems import DatasetInvalid
from penstock_server.recipes.fields import Field, FieldError, is_list, is_messages, is_null, is_text, is_tokens

FILE_NAME = "penstock.toml"
Kind = Literal["tokens", "text", "prompt_response", "messages", "preference"]
Fields = tuple[tuple[str, Field], ...]  # by role

ROLES = ("tokens", "text", "prompt", "response", "messages", "chosen", "rejected")
ANSWERS = ("response", "completion")  # columns that may hold the answer to a prompt
MASKS: Mapping[str, tuple[str, ...]] = {  # the columns of each role, if penstock.toml names none
    "labels": ("labels",),
    "loss_mask": ("loss_mask", "completion_mask", "assistant_masks"),
    "attention_mask": ("attention_mask",),
    "seq_lengths": ("seq_lengths",),
    "position_ids": ("position_ids",),
}
MASKS_OF_LOSS = ("labels", "loss_mask")  # a row has one of them
MASKS_OF_DOCUMENTS = ("seq_lengths", "position_ids")  # likewise
_ALTERNATIVES = (MASKS_OF_LOSS, MASKS_OF_DOCUMENTS)

_KINDS: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    ("tokens", ("tokens",)),
    ("text", ("text",)),
    ("prompt_response", ("prompt", "response")),
    ("messages", ("messages",)),
    ("preference", ("chosen", "rejected")),
    ("preference", ("prompt", "chosen", "rejected")),
)


def _is_chats(type_: pa.DataType) -> bool:
    return is_messages(type_) or is_text(type_)  # texts may be JSON


# The types that the fields of a row may have, and their names in messages.
_FITTING: Mapping[Kind, tuple[Callable[[pa.DataType], bool], str]] = {
    "tokens": (is_tokens, "lists of integers"),
    "text": (is_text, "text"),
    "prompt_response": (is_text, "text"),
    "messages": (_is_chats, "lists of messages, each with a role and a content, or such lists as JSON texts"),
    "preference": (_is_chats, "text or lists of messages"),
}


def read_fields(folder: Path, given: Mapping[str, Any], schema: pa.Schema) -> tuple[Kind, Fields]:
    """Return the kind of rows of this schema, and the fields that hold them, by role.

    Raises FieldError: a declared field is missing, or has an unsuitable type.
    Raises DatasetInvalid: the declared fields do not make a row, or none is declared and no column can be used.
    """
    named = [role for role in ROLES if role in given]
    if not named:
        return _guess(folder, schema)
    for kind, roles in _KINDS:
        if set(roles) == set(named):
            fields = tuple((role, Field.parse(given[role], schema)) for role in roles)
            if kind not in ("text", "messages") and all(is_tokens(source.type(schema)) for _, source in fields):
                return "tokens", fields
            for role, source in fields:
                check_field(kind, role, source, schema)
            if len({is_messages(source.type(schema)) for _, source in fields}) > 1 and "chat_template" not in given:
                types = ", ".join(f"{role} is {source.type(schema)}" for role, source in fields)
                raise FieldError(f"a preference pair must be all text, or all chats, but {types}")
            return kind, fields
    raise DatasetInvalid(
        f"{folder / FILE_NAME} names {', '.join(named)}; name either tokens, or text, or prompt and response, or "
        f"messages, or chosen and rejected with or without prompt."
    )


def check_field(kind: Kind, role: str, source: Field, schema: pa.Schema) -> None:
    """Check that a field suits a role. Raises FieldError: it is missing, or has an unsuitable type."""
    type_ = source.type(schema)
    fits, wanted = _FITTING[kind]
    if not fits(type_):
        raise FieldError(f"column {source.text!r} is {type_}, but {role} must be {wanted}")


def are_chats(kind: Kind, fields: Fields, given: Mapping[str, Any], schema: pa.Schema) -> bool:
    """Return whether rows are rendered by a chat template."""
    # A text of a preference pair may be anything: it is taken for a chat as JSON if a chat template is declared.
    has_template = "chat_template" in given
    return kind == "messages" or (kind == "preference" and (has_template or is_messages(dict(fields)["chosen"].type(schema))))


def _guess(folder: Path, schema: pa.Schema) -> tuple[Kind, Fields]:
    """Guess kind and fields from the columns' names and types, when nothing is declared."""
    ids, text, chats = ({field.name for field in schema if fits(field.type)} for fits in (is_tokens, is_text, is_messages))
    pairs = [{role: role for role in roles} for roles in (("prompt", "chosen", "rejected"), ("chosen", "rejected"))]
    answers = [{"prompt": "prompt", "response": answer} for answer in ANSWERS]
    ways: tuple[tuple[Kind, list[dict[str, str]], tuple[set[str], ...]], ...] = (
        ("tokens", [{"tokens": "input_ids"}, {"tokens": "tokens"}], (ids,)),
        ("text", [{"text": "text"}], (text,)),
        ("messages", [{"messages": "messages"}], (chats,)),
        ("preference", pairs, (text, chats)),
        ("prompt_response", answers, (text,)),
        ("messages", [{"messages": "messages"}], (text,)),  # as JSON
        ("tokens", [*pairs, *answers], (ids,)),
    )
    for kind, guesses, of_types in ways:
        for columns in guesses:
            if any(names.issuperset(columns.values()) for names in of_types):
                return kind, tuple((role, Field.parse(column, schema)) for role, column in columns.items())
    raise DatasetInvalid(
        f"{folder}: no column can be used. Expected input_ids or tokens (lists of integers), text (strings), prompt and "
        f"response or completion (strings), messages (lists of role and content), or chosen and rejected; there are: "
        f"{listed([f'{field.name} ({field.type})' for field in schema], most=8) or 'none'}. Name the columns in {FILE_NAME}, "
        f'for example: text = "content", or prompt = "question" and response = "answer".'
    )


def find_masks(given: Mapping[str, Any], schema: pa.Schema) -> Fields:
    """Return the declared masks, and for undeclared roles the masks present under a usual name.

    Raises FieldError: a column is missing, occurs twice, or has an unsuitable type.
    """
    for roles in _ALTERNATIVES:
        if all(given.get(role) for role in roles):
            raise FieldError(f"{' and '.join(roles)} say the same, and only one of them may be set")
    masks = {role: Field.parse(given[role], schema) for role in MASKS if given.get(role)}
    for role, source in masks.items():
        check_mask(role, source, schema)
    for role, names in MASKS.items():
        alternatives = next((roles for roles in _ALTERNATIVES if role in roles), (role,))
        if role in given or masks.keys() & set(alternatives):
            continue
        sources = [Field.parse(name, schema) for name in names if name in schema.names]
        if fitting := [source for source in sources if _is_mask(role, source.type(schema))]:
            masks[role] = fitting[0]
    return tuple((role, masks[role]) for role in MASKS if role in masks)  # in a fixed order: the fingerprint depends on it


def check_mask(role: str, source: Field, schema: pa.Schema) -> None:
    """Check that a field can be a mask. Raises FieldError: it is missing, or has an unsuitable type."""
    if not _is_mask(role, type_ := source.type(schema)):
        raise FieldError(
            f"column {source.text!r} is {type_}, but {role} must be lists of integers; booleans may stand for 0 and 1"
        )


def _is_mask(role: str, type_: pa.DataType) -> bool:
    is_boolean = is_list(type_) and pa.types.is_boolean(type_.value_type)
    return is_tokens(type_) or (role in ("loss_mask", "attention_mask") and is_boolean)


def mask_of(name: str) -> str | None:
    """Return the mask role of a column's name; None for any other name."""
    return next((role for role in MASKS if name in MASKS[role]), None)


def check_tools(source: Field, schema: pa.Schema) -> None:
    """Check that a field can hold tool definitions. Raises FieldError: it is missing, or has an unsuitable type."""
    if not _may_be_tools(type_ := source.type(schema)):
        raise FieldError(
            f"column {source.text!r} is {type_}, but tools must be lists of definitions, or such lists as JSON texts"
        )


def may_hold_tools(schema: pa.Schema) -> bool:
    """Return whether a column may have tool definitions: in this shard it may be null throughout."""
    return any(field.name == "tools" and _may_be_tools(field.type) for field in schema)


def _may_be_tools(type_: pa.DataType) -> bool:
    is_list_of_tools = is_list(type_) and (pa.types.is_struct(type_.value_type) or is_text(type_.value_type))
    return is_list_of_tools or is_text(type_) or is_null(type_)


def unused_columns(kind: Kind, fields: Fields, masks: Fields, given: Mapping[str, Any], schema: pa.Schema) -> tuple[str, ...]:
    """Return the columns that, by name, select the tokens with loss of these rows, but are not used; tools excepted.

    Beside ids they are masks; beside texts, whose tokens all have loss, chats or answers.
    """
    types = {field.name: field.type for field in schema}
    if "tokens" in dict(fields):
        return _unused_masks(fields, masks, given, schema)
    if kind == "text" and not given.keys() & set(ROLES):
        chats = ("messages",) if "messages" in types and _is_chats(types["messages"]) else ()
        texts = [name for name in ("prompt", *ANSWERS) if name in types and is_text(types[name])]
        pair = [name for name in ("chosen", "rejected") if name in types and _is_chats(types[name])]
        return (*chats, *(texts[:2] if "prompt" in texts[:-1] else ()), *(pair if len(pair) == 2 else ()))
    return ()


def _unused_masks(fields: Fields, masks: Fields, given: Mapping[str, Any], schema: pa.Schema) -> tuple[str, ...]:
    settled = {role for role in MASKS if role in given}
    used = {source.text for _, source in (*fields, *masks)}
    for roles in _ALTERNATIVES:
        if roles[0] in dict(masks) or any(given.get(role) for role in roles):
            settled |= {*roles}
    names = [name for role in MASKS if role not in settled for name in MASKS[role]]
    return tuple(name for name in names if name in schema.names and name not in used)


@dataclass(frozen=True, slots=True, eq=False)
class FirstShard:
    """Columns of the first shard and the declaration, which decide the rows of all shards.

    `takes_tools`: a chat template of the dataset reads tools.
    """

    folder: Path
    given: Mapping[str, Any]
    schema: pa.Schema
    takes_tools: bool = False

    @property
    def key(self) -> str:
        """Return the key that decides which further columns other shards may have."""
        known = [(field.name, str(field.type)) for field in self.schema if _has_role(field.name)]
        return json.dumps([self.given, known, self.takes_tools], default=str)

    def check(self, schema: pa.Schema) -> None:
        """Check a shard's columns. Raises FieldError: a column would be used if the first shard had it."""
        used = self._used(self.schema)
        more = {field.name for field in schema if _has_role(field.name) and not is_null(field.type)} - used
        if not more:
            return
        # A column of the first shard that cannot be used counts as missing.
        others = [field for field in self.schema if field.name not in more]
        both = pa.schema([*others, *(field for field in schema if field.name in more)])
        for name in sorted(self._used(both) - used):
            role = "tools" if name == "tools" else mask_of(name)
            _, fields = read_fields(self.folder, self.given, self.schema)
            without = f"{role} = false" if role else " and ".join(f'{role} = "{source.text}"' for role, source in fields)
            raise FieldError(
                f"column {name!r} is not in the first shard, or cannot be used there, so the rows of this shard would "
                f"have loss without it. Write it in the first shard, too; or, to do without it, say in {FILE_NAME}: {without}"
            )

    def _used(self, schema: pa.Schema) -> set[str]:
        """Return the columns that rows of this schema are made of, and those that select the tokens with loss."""
        kind, fields = read_fields(self.folder, self.given, schema)
        masks = find_masks(self.given, schema) if [role for role, _ in fields] == ["tokens"] else ()
        used = {name for _, source in (*fields, *masks) for name in source.columns}
        has_tools = self.takes_tools and "tools" not in self.given and may_hold_tools(schema)
        return used | {"tools"} if has_tools and are_chats(kind, fields, self.given, schema) else used


def _has_role(name: str) -> bool:
    """Return whether a column may have a role by its name."""
    return name in ("input_ids", "tools", *ROLES, *ANSWERS) or mask_of(name) is not None
