"""Roles of a row's fields: as penstock.toml names them, by default from the names and types of the columns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.text import listed
from penstock_server.problems import DatasetInvalid
from penstock_server.recipes.column_types import is_bytes, is_chats, is_list_of, is_messages, is_of_nothing, is_text, is_tokens
from penstock_server.recipes.declaration import ANSWERS, FILE_NAME, ROLES
from penstock_server.recipes.fields import Field, FieldError
from penstock_server.recipes.fitting import Fields, Kind, check_field, may_hold_tools
from penstock_server.recipes.mask_columns import Masks, find_masks, mask_of, masks_of_turns, unused_masks
from penstock_server.recipes.transform import OF_NO_ROWS

_KINDS: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    ("tokens", ("tokens",)),
    ("text", ("text",)),
    ("prompt_response", ("prompt", "response")),
    ("messages", ("messages",)),
    ("preference", ("chosen", "rejected")),
    ("preference", ("prompt", "chosen", "rejected")),
)


def read_fields(folder: Path, given: Mapping[str, Any], schema: pa.Schema) -> tuple[Kind, Fields]:
    """Return the kind of rows of this schema, and the fields that hold them, by role.

    Raises FieldError: a declared field is missing, or has an unsuitable type.
    Raises DatasetInvalid: the declared fields do not make a row, or none is declared and no column can be used.
    """
    named = [role for role in ROLES if role in given]
    if not named:
        return _guess(folder, given, schema)
    for kind, roles in _KINDS:
        if set(roles) == set(named):
            fields = tuple((role, Field.parse(given[role], schema)) for role in roles)
            if kind not in ("text", "messages") and all(is_tokens(source.type(schema)) for _, source in fields):
                return "tokens", fields
            for role, source in fields:
                check_field(kind, role, source, schema)
            are_chats = {role: is_messages(source.type(schema)) for role, source in fields}
            if len(set(are_chats.values())) > 1 and "chat_template" not in given:
                told = ", ".join(f"{role} is {'chats' if are else 'text'}" for role, are in are_chats.items())
                raise FieldError(f"of a preference pair all must be text, or all chats, but {told}")
            return kind, fields
    raise DatasetInvalid(
        f"{folder / FILE_NAME} names {', '.join(named)}; name either tokens, or text, or prompt and response, or "
        f"messages, or chosen and rejected with or without prompt."
    )


def are_chats(kind: Kind, fields: Fields, given: Mapping[str, Any], schema: pa.Schema) -> bool:
    """Return whether rows are rendered by a chat template."""
    # A text of a preference pair may be anything: it is taken for a chat as JSON if a chat template is declared.
    is_said = "chat_template" in given
    return kind == "messages" or (kind == "preference" and (is_said or is_messages(dict(fields)["chosen"].type(schema))))


def unused_columns(kind: Kind, fields: Fields, masks: Masks, given: Mapping[str, Any], schema: pa.Schema) -> tuple[str, ...]:
    """Return the columns that would matter to these rows, but are not used; tools excepted."""
    if "tokens" in dict(fields):
        return unused_masks(given, schema, masks)
    if kind == "tokens":
        return masks_of_turns(given, schema, [source.text for _, source in fields])
    is_guessed = not given.keys() & set(ROLES)
    types = {field.name: field.type for field in schema}
    if kind == "text" and is_guessed:
        chats = ("messages",) if "messages" in types and is_chats(types["messages"]) else ()
        texts = [name for name in ("prompt", *ANSWERS) if name in types and is_text(types[name])]
        pair = [name for name in ("chosen", "rejected") if name in types and is_chats(types[name])]
        return (*chats, *(texts[:2] if "prompt" in texts[:-1] else ()), *(pair if len(pair) == 2 else ()))
    # If the pairs had its type, it would be their prompt.
    has_prompt = kind == "preference" and is_guessed and "prompt" in types and is_chats(types["prompt"])
    return ("prompt",) if has_prompt and is_text(types["prompt"]) != is_text(types["chosen"]) else ()


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
        known = [(field.name, str(field.type)) for field in self.schema if _is_known(field.name)]
        return json.dumps([self.given, known, self.takes_tools], default=str)

    def check(self, schema: pa.Schema) -> None:
        """Check a shard's columns. Raises FieldError: a column would be used if the first shard had it."""
        read = self._read(self.schema)
        more = {field.name: field for field in schema if _is_known(field.name) and not is_of_nothing(field.type)}
        names = more.keys() - read
        if not names:
            return
        # A column of the first shard that cannot be used counts as missing.
        others = [field for field in self.schema if field.name not in names]
        both = pa.schema([*others, *(field for field in schema if field.name in names)])
        for name in sorted(self._read(both) - read):
            raise FieldError(
                f"column {name!r} is not in the first shard, or cannot be used there, so the rows of this shard would "
                f"have loss without it. Write it in the first shard, too; or, to do without it, say in {FILE_NAME}: "
                f"{self._way_without(name)}"
            )

    def _read(self, schema: pa.Schema) -> set[str]:
        """Return the columns that rows of this schema are made of, and those that select the tokens with loss."""
        kind, fields = read_fields(self.folder, self.given, schema)
        masks = find_masks(self.given, schema) if [role for role, _ in fields] == ["tokens"] else ()
        read = {name for _, source in (*fields, *masks) for name in source.columns}
        has_tools = self.takes_tools and "tools" not in self.given and may_hold_tools(schema)
        return read | {"tools"} if has_tools and are_chats(kind, fields, self.given, schema) else read

    def _way_without(self, name: str) -> str:
        if role := "tools" if name == "tools" else mask_of(name):
            return f"{role} = false"
        _, fields = read_fields(self.folder, self.given, self.schema)
        return " and ".join(f'{role} = "{source.text}"' for role, source in fields)


def _is_known(name: str) -> bool:
    """Return whether a column may have a role by its name."""
    return name in ("input_ids", "tools", *ROLES, *ANSWERS) or mask_of(name) is not None


def _guess(folder: Path, given: Mapping[str, Any], schema: pa.Schema) -> tuple[Kind, Fields]:
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
    raise DatasetInvalid(f"{folder}: {_why_no_guess(schema, text, chats)}{OF_NO_ROWS if 'transform' in given else ''}")


def _why_no_guess(schema: pa.Schema, text: set[str], chats: set[str]) -> str:
    """Return why none of the columns can be used; `text` and `chats` are the columns of these types."""
    columns = [f"{field.name} ({field.type})" for field in schema]
    found = listed(columns, most=8) or "none"
    known = [field for field in schema if field.name in ("input_ids", *ROLES, *ANSWERS)]
    wrong = [f"{field.name} is {field.type}" for field in known if field.name not in text | chats]
    right = "texts must be strings, token ids lists of whole numbers (no list views), messages lists of role and content"
    more = f" {', '.join(wrong)}: {right}." if wrong else ""
    if {"prompt", *ANSWERS} & chats:
        more += " A prompt and its answer that are chats: a transform makes one list of messages of them."
    if named := [
        field.name
        for field in schema
        if is_list_of(field.type, {"role", "content"}) and field.name not in ("prompt", *ANSWERS, *ROLES)
    ]:
        more += f' {named[0]} has role and content: name it, messages = "{named[0]}".'
    if any(is_bytes(field.type) for field in known):
        more += " A transform makes texts of bytes: pyarrow.compute.cast(batch[NAME], pyarrow.string())."
    if any(pa.types.is_null(field.type) for field in known):
        more += " Where all of the first shard is null it has no type: write it with that of the others."
    if others := [field.name for field in schema if is_list_of(field.type, {"from", "value"})]:
        more += f" {others[0]} has from and value: a transform makes messages of it, as docs/guides/your-data.md shows."
    if ids := [field.name for field in schema if is_tokens(field.type)]:
        names = ", ".join(ids)
        more += f' Are {names} token ids? Name them: tokens = "{ids[0]}", or as prompt and response, or chosen and rejected.'
    return (
        f"no column can be used. Expected input_ids or tokens (lists of integers), text, prompt and response or completion, "
        f"messages, or chosen and rejected; found: {found}.{more} Name the columns in {FILE_NAME}, for example: "
        f'text = "content", or prompt = "question" and response = "answer".'
    )
