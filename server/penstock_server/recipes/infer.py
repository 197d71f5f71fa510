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
from typing import Any, Literal

import pyarrow as pa

from penstock.text import listed
from penstock_server.recipes.fields import Field, FieldError, is_list, is_messages, is_null, is_text, is_tokens

FILE_NAME = "penstock.toml"
Kind = Literal["tokens", "text", "prompt", "prompt_response", "messages", "preference"]
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
_OTHER = {a: b for pair in (MASKS_OF_LOSS, MASKS_OF_DOCUMENTS) for a, b in (pair, pair[::-1])}

_KINDS: Mapping[tuple[str, ...], Kind] = {
    ("tokens",): "tokens",
    ("text",): "text",
    ("prompt",): "prompt",
    ("prompt", "response"): "prompt_response",
    ("messages",): "messages",
    ("chosen", "rejected"): "preference",
    ("prompt", "chosen", "rejected"): "preference",
}
_PAIRS = [{role: role for role in roles} for roles in (("prompt", "chosen", "rejected"), ("chosen", "rejected"))]
_ANSWERED = [{"prompt": "prompt", "response": answer} for answer in ANSWERS]
_GUESSES: list[tuple[Kind, Callable[[pa.DataType], bool], dict[str, str]]] = [
    ("tokens", is_tokens, {"tokens": "input_ids"}),
    ("tokens", is_tokens, {"tokens": "tokens"}),
    ("text", is_text, {"text": "text"}),
    ("messages", is_messages, {"messages": "messages"}),
    *(("preference", fits, pair) for pair in _PAIRS for fits in (is_text, is_messages)),
    *(("prompt_response", is_text, answered) for answered in _ANSWERED),
    ("messages", is_text, {"messages": "messages"}),  # as JSON
    *(("tokens", is_tokens, columns) for columns in (*_PAIRS, *_ANSWERED)),
]


def _is_chats(type_: pa.DataType) -> bool:
    return is_messages(type_) or is_text(type_)  # texts may be JSON


def _is_mask(type_: pa.DataType) -> bool:
    return is_tokens(type_) or (is_list(type_) and pa.types.is_boolean(type_.value_type))


def _may_be_tools(type_: pa.DataType) -> bool:
    is_list_of_tools = is_list(type_) and (pa.types.is_struct(type_.value_type) or is_text(type_.value_type))
    return is_list_of_tools or is_text(type_) or is_null(type_)  # null throughout a shard


# The types that the columns of a kind or role may have, and their names in messages.
_SUITABLE: Mapping[str, tuple[Callable[[pa.DataType], bool], str]] = {
    "text": (is_text, "text"),
    "prompt": (_is_chats, "text or lists of messages"),
    "prompt_response": (is_text, "text"),
    "messages": (_is_chats, "lists of messages, each with a role and a content, or such lists as JSON texts"),
    "preference": (_is_chats, "text or lists of messages"),
    **dict.fromkeys(("tokens", "labels", *MASKS_OF_DOCUMENTS), (is_tokens, "lists of integers")),
    **dict.fromkeys(("loss_mask", "attention_mask"), (_is_mask, "lists of integers; booleans may stand for 0 and 1")),
    "tools": (_may_be_tools, "lists of definitions, or such lists as JSON texts"),
}


def check_type(role: str, source: Field, schema: pa.Schema, kind: str = "") -> None:
    """Check that a field suits a role in rows of a kind. Raises FieldError: it is missing, or has an unsuitable type."""
    type_ = source.type(schema)
    fits, wanted = _SUITABLE[kind or role]
    if not fits(type_):
        raise FieldError(f"column {source.text!r} is {type_}, but {role} must be {wanted}")


@dataclass(frozen=True, slots=True)
class Roles:
    """Columns by their roles in rows of one kind.

    fields     the fields that hold a row
    are_chats  whether a chat template renders them
    masks      the fields that mark ids with loss, padding, and the start of documents
    tools      the field of tool definitions, for chats
    unused     other columns that, by name, select the tokens with loss: masks beside ids; chats or answers beside texts
    """

    kind: Kind
    fields: Fields
    are_chats: bool
    masks: Fields
    tools: Field | None
    unused: tuple[str, ...]

    @classmethod
    def of(cls, given: Mapping[str, Any], schema: pa.Schema) -> Roles:
        """Assign roles as penstock.toml gives them, and others by the columns' names and types.

        Raises FieldError: a column is missing, occurs twice or has an unsuitable type, or no row can be made.
        """
        kind, fields = _fields(given, schema)
        masks: Fields = ()
        unused: tuple[str, ...] = ()
        if "tokens" in dict(fields):
            masks, unused = _masks(given, schema)
        elif declared := [mask for mask in MASKS if given.get(mask)]:
            made_of = " and ".join(role for role, _ in fields)
            raise FieldError(f"{declared[0]} is a mask of tokens, but rows are made of {made_of}. Remove it")
        elif kind == "text" and not given.keys() & {*ROLES}:
            unused = _beside_text(schema)
        # A text of a preference pair may be anything: it is taken for a chat as JSON if a chat template is declared.
        is_pair_of_chats = kind == "preference" and ("chat_template" in given or is_messages(fields[-1][1].type(schema)))
        is_chat_prompt = kind == "prompt" and ("chat_template" in given or is_messages(fields[0][1].type(schema)))
        are_chats = kind == "messages" or is_pair_of_chats or is_chat_prompt
        tools = Field.parse(given["tools"], schema) if given.get("tools") else None
        if tools:
            check_type("tools", tools, schema)
        elif are_chats and "tools" not in given and any(f.name == "tools" and _may_be_tools(f.type) for f in schema):
            tools = Field.parse("tools", schema)
        return cls(kind, fields, are_chats, masks, tools, unused)


def _fields(given: Mapping[str, Any], schema: pa.Schema) -> tuple[Kind, Fields]:
    named = tuple(role for role in ROLES if role in given)
    if not named:
        return _guessed_fields(schema)
    if (kind := _KINDS.get(named)) is None:
        known = (
            "either tokens, or text, or prompt with or without response, or messages, or chosen and rejected with or without "
            "prompt"
        )
        raise FieldError(f"{FILE_NAME} names {', '.join(named)}; name {known}")
    fields = tuple((role, Field.parse(given[role], schema)) for role in named)
    types = {role: source.type(schema) for role, source in fields}
    if kind not in ("text", "messages", "prompt") and all(map(is_tokens, types.values())):
        return "tokens", fields
    for role, source in fields:
        check_type(role, source, schema, kind)
    if len({*map(is_messages, types.values())}) > 1 and "chat_template" not in given:
        listing = ", ".join(f"{role} is {type_}" for role, type_ in types.items())
        raise FieldError(f"a preference pair must be all text, or all chats, but {listing}")
    return kind, fields


def _guessed_fields(schema: pa.Schema) -> tuple[Kind, Fields]:
    types = {field.name: field.type for field in schema}
    for kind, fits, columns in _GUESSES:
        if all(column in types and fits(types[column]) for column in columns.values()):
            return kind, tuple((role, Field.parse(column, schema)) for role, column in columns.items())
    # A prompt alone only if nothing could be its answer: a text or a list in any other column.
    prompt = types.pop("prompt", pa.null())
    is_answered = any(name in types for name in (*ROLES, *ANSWERS)) or any(_is_chats(t) or is_tokens(t) for t in types.values())
    if (is_text(prompt) and not is_answered) or (is_messages(prompt) and not types.keys() & {*ROLES, *ANSWERS}):
        return "prompt", (("prompt", Field.parse("prompt", schema)),)
    raise FieldError(
        f"no column can be used. Expected input_ids or tokens (lists of integers), text (strings), prompt and response or "
        f"completion (strings), messages (lists of role and content), or chosen and rejected; there are: "
        f"{listed([f'{field.name} ({field.type})' for field in schema], most=8) or 'none'}. Name the columns in {FILE_NAME}, "
        f'for example: text = "content", or prompt = "question" and response = "answer"'
    )


def _masks(given: Mapping[str, Any], schema: pa.Schema) -> tuple[Fields, tuple[str, ...]]:
    """Return the masks of token ids by role, always in one order: the fingerprint depends on it; and unused columns."""
    masks, unused = dict[str, Field](), list[str]()
    for role, names in MASKS.items():
        other = _OTHER.get(role, "")
        if given.get(role):
            if given.get(other):
                raise FieldError(f"{role} and {other} say the same, and only one of them may be set")
            masks[role] = Field.parse(given[role], schema)
            check_type(role, masks[role], schema)
        elif role not in given and not given.get(other) and other not in masks:
            fits, _ = _SUITABLE[role]
            sources = [Field.parse(name, schema) for name in names if name in schema.names]
            if fitting := [source for source in sources if fits(source.type(schema))]:
                masks[role] = fitting[0]
            unused += [source.text for source in sources if source not in masks.values()]
    return tuple(masks.items()), tuple(unused)


def _beside_text(schema: pa.Schema) -> tuple[str, ...]:
    """Return the chats and answers beside a column of texts, whose tokens all have loss."""
    usable = {field.name for field in schema if _is_chats(field.type)}
    groups = [("messages",), *(("prompt", answer) for answer in ANSWERS), ("chosen", "rejected")]
    return tuple(dict.fromkeys(name for group in groups if usable.issuperset(group) for name in group))


@dataclass(frozen=True, slots=True, eq=False)
class FirstShard:
    """Columns of the first shard and the declaration, which decide all rows; and whether the chat template reads tools."""

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
        roles, used = self._used(self.schema)
        more = {field.name for field in schema if _has_role(field.name) and not is_null(field.type)} - used
        if not more:
            return
        # A column of the first shard that cannot be used counts as missing.
        others = [field for field in self.schema if field.name not in more]
        _, wanted = self._used(pa.schema([*others, *(field for field in schema if field.name in more)]))
        for name in sorted(wanted - used):
            role = next((role for role, names in (*MASKS.items(), ("tools", ("tools",))) if name in names), None)
            fields = " and ".join(f'{role} = "{source.text}"' for role, source in roles.fields)
            raise FieldError(
                f"column {name!r} is not in the first shard, or cannot be used there, so the rows of this shard would have "
                f"loss without it. Write it in the first shard, too; or, to do without it, say in {FILE_NAME}: "
                f"{f'{role} = false' if role else fields}"
            )

    def _used(self, schema: pa.Schema) -> tuple[Roles, set[str]]:
        """Return the roles of columns in rows of this schema, and the columns that have one."""
        roles = Roles.of(self.given, schema)
        sources = [source for _, source in (*roles.fields, *roles.masks)]
        sources += [roles.tools] if roles.tools and self.takes_tools else []
        return roles, {name for source in sources for name in source.columns}


def _has_role(name: str) -> bool:
    """Return whether a column may have a role by its name."""
    return name in ("input_ids", "tools", *ROLES, *ANSWERS) or any(name in names for names in MASKS.values())
