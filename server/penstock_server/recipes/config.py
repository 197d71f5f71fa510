"""A dataset's recipe: penstock.toml decides, and for undeclared settings the columns' names and types."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

import pyarrow as pa

from penstock.numbers import is_whole
from penstock_server.arrow import holds_json
from penstock_server.files import may_be_there
from penstock_server.problems import DatasetInvalid
from penstock_server.recipes.chat import ChatTemplate, load_chat_template, read_chat_template
from penstock_server.recipes.chat.messages import TemplateError
from penstock_server.recipes.fields import Column, Field, FieldError, is_null
from penstock_server.recipes.filter import Filter, FilterError
from penstock_server.recipes.infer import (
    FILE_NAME,
    MASKS,
    ROLES,
    Fields,
    FirstShard,
    are_chats,
    check_tools,
    find_masks,
    may_hold_tools,
    read_fields,
    unused_columns,
)
from penstock_server.recipes.recipe import DEFAULT_BAD_SHARE, Recipe
from penstock_server.recipes.tokenizer import TokenizerFile, load_special_tokens, load_tokenizer
from penstock_server.recipes.transform import TransformError, load_transform

_EOS_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "[EOS]", "[SEP]")
_PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value)) and len(set(value)) == len(value)


_KEYS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(ROLES, (_is_text, "a text")),
    **dict.fromkeys(("tokenizer", "chat_template", "filter", "transform", "split_by"), (_is_text, "a text")),
    "split_special_tokens": (lambda value: isinstance(value, bool), "true or false"),
    **dict.fromkeys(("tools", *MASKS), (lambda value: value is False or _is_text(value), "a text, or false")),
    **{name: (lambda _: True, "") for name in ("eos", "bos", "pad")},  # looked up in the vocabulary later
    "vocab_size": (lambda value: is_whole(value) and 1 <= value <= 2**32, f"a whole number from 1 to {2**32:,}"),
    "columns": (_is_names, "a list of different names"),
    "splits": (lambda value: value in ("files", "hash"), '"files" or "hash"'),
    "validation": (_is_share, "a share from 0 to below 1"),
    "on_bad_row": (lambda value: value in ("fail", "replace"), '"fail" or "replace"'),
    "max_bad_share": (_is_share, "a share from 0 to below 1"),
}


def read_recipe(folder: Path, schema: pa.Schema, default_tokenizer: Path | None) -> Recipe:
    """Read the recipe of a dataset folder whose first shard has this schema.

    Raises DatasetInvalid: penstock.toml is wrong, no column can be used, or a tokenizer is missing or invalid.
    """
    given = _read_declaration(folder)
    try:
        return _Reader(folder, given, schema, default_tokenizer).recipe()
    except (FieldError, FilterError, TemplateError, TransformError, RecursionError) as error:
        raise DatasetInvalid(f"{folder}: {str(error).rstrip('.')}. Correct {FILE_NAME}, or the data.") from error


def _read_declaration(folder: Path) -> dict[str, Any]:
    """Return the validated values of penstock.toml; empty if there is no such file. Raises DatasetInvalid."""
    path = folder / FILE_NAME
    if not may_be_there(path):  # a broken symlink is a missing recipe: without it other rows would be served
        return {}
    given = read_toml(path)
    for key, value in given.items():
        if key not in _KEYS:
            raise DatasetInvalid(
                f"{path}: unknown key {key!r}. Known keys: {', '.join(_KEYS)}; and, for a mixture in another folder, mix."
            )
        is_valid, wanted = _KEYS[key]
        if not is_valid(value):
            raise DatasetInvalid(f"{path}: {key} must be {wanted}, not {value!r}.")
    return given


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file. Raises DatasetInvalid: it cannot be read, or is not TOML."""
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))  # editors on Windows write a byte order mark
    except (OSError, ValueError, RecursionError) as error:
        raise DatasetInvalid(f"{path} cannot be read: {error}.") from error


class _Reader:
    """Builder of one recipe from the declaration and the schema of its data."""

    def __init__(self, folder: Path, given: dict[str, Any], schema: pa.Schema, default_tokenizer: Path | None) -> None:
        self._path, self._folder, self._given, self._file_schema = folder / FILE_NAME, folder, given, schema
        self._transform = load_transform(given["transform"], folder) if "transform" in given else None
        # A transform shows its columns when it is called with no rows.
        self._schema = self._transform(pa.RecordBatch.from_pylist([], schema=schema)).schema if self._transform else schema
        self._kind, self._fields = read_fields(folder, given, self._schema)
        self._are_chats = are_chats(self._kind, self._fields, given, self._schema)
        # Unresolved: a symlink may lead to a store without files beside the tokenizer.
        self._tokenizer_path = None if self._kind == "tokens" else default_tokenizer
        if "tokenizer" in given:
            self._tokenizer_path = folder / given["tokenizer"]
        self._tokenizer = self._load_tokenizer()
        self._guessed_eos: tuple[str, ...] = ()

    def recipe(self) -> Recipe:
        given, kind, fields = self._given, self._kind, self._fields
        chat = self._chat()
        # By default pre-tokenized rows stay as they are, and a chat template closes its turns.
        is_closed = kind == "tokens" or chat is not None
        eos_id = self._eos_id(is_closed)
        masks = self._masks()
        row_filter = Filter.parse(given["filter"], self._file_schema) if "filter" in given else None
        split_by = Field.parse(given["split_by"], self._file_schema) if "split_by" in given else None
        takes_tools = chat is not None and (chat.takes_tools or self._template("tool_use") is not None)
        recipe = Recipe(
            kind=kind,
            fields=fields,
            masks=masks,
            tokenizer=self._tokenizer,
            vocab_size=self._tokenizer.vocab_size if self._tokenizer else given.get("vocab_size"),
            bos_id=self._declared_id("bos") if given.get("bos", False) is not False else None,
            eos_id=eos_id,
            pad_id=self._pad_id(eos_id),
            chat=chat,
            tools=self._tools(chat),
            columns=tuple(Column.parse(name, self._schema) for name in given.get("columns", [])),
            unsaid_bos=self._tokenizer.opening if self._tokenizer and not (is_closed or "bos" in given) else None,
            guessed_eos=self._guessed_eos,
            first=FirstShard(self._folder, given, self._schema, takes_tools=takes_tools),
            unused=unused_columns(kind, fields, masks, given, self._schema) or self._unused(chat, row_filter),
            filter=row_filter,
            transform=self._transform,
            splits=given.get("splits"),
            validation=float(given["validation"]) if "validation" in given else None,
            split_by=split_by,
            split_type=split_by.type(self._file_schema) if split_by else None,
            on_bad_row=given.get("on_bad_row", "fail"),
            max_bad_share=float(given.get("max_bad_share", DEFAULT_BAD_SHARE)),
        )
        read = recipe.read_columns
        are_json = [holds_json(field.type) for field in self._file_schema if read is None or field.name in read]
        return replace(recipe, reads_json=any(are_json))

    def _masks(self) -> Fields:
        roles = [role for role, _ in self._fields]
        if roles == ["tokens"]:
            return find_masks(self._given, self._schema)
        for mask in MASKS:
            if self._given.get(mask):
                raise DatasetInvalid(
                    f"{self._path}: {mask} is a mask of tokens, but rows are made of {' and '.join(roles)}. Remove it."
                )
        return ()

    def _unused(self, chat: ChatTemplate | None, row_filter: Filter | None) -> tuple[str, ...]:
        """Return unused tools of chats, or the unused label of good and bad answers, as in KTO's data."""
        types = {field.name: field.type for field in self._schema}
        if chat and not chat.takes_tools and "tools" not in self._given and may_hold_tools(self._schema):
            return () if is_null(types["tools"]) else ("tools",)
        if self._transform or "response" not in dict(self._fields) or "label" in self._given.get("columns", []):
            return ()
        is_there = "label" in types and pa.types.is_boolean(types["label"])
        return ("label",) if is_there and not (row_filter and "label" in row_filter.columns) else ()

    def _load_tokenizer(self) -> TokenizerFile | None:
        path, columns = self._tokenizer_path, " and ".join(source.text for _, source in self._fields)
        if path is None and self._kind != "tokens":
            raise DatasetInvalid(
                f"the data is text (in {columns}) and no tokenizer is given. Start with --tokenizer FILE (a "
                f'tokenizer.json), or name one in {self._path}, relative to its folder: tokenizer = "FILE".'
            )
        splits = self._given.get("split_special_tokens", False)
        tokenizer = load_tokenizer(path, split_special_tokens=splits) if path else None
        if splits and (self._kind == "tokens" or self._are_chats):
            raise DatasetInvalid(
                f"{self._path}: split_special_tokens is for texts, but rows are token ids or chats, whose template writes "
                f"special tokens itself. Remove it, and take spellings of special tokens out of texts with a transform."
            )
        if tokenizer and "vocab_size" in self._given:
            raise DatasetInvalid(f"{self._path}: vocab_size is given, but the tokenizer already tells it; remove vocab_size.")
        return tokenizer

    def _chat(self) -> ChatTemplate | None:
        if not self._are_chats:
            if "chat_template" in self._given:
                raise DatasetInvalid(
                    f"{self._path}: chat_template renders messages, but rows are made of "
                    f"{' and '.join(source.text for _, source in self._fields)}. Leave it out, or name the column of messages: "
                    f'messages = "COLUMN".'
                )
            return None
        text = self._template("default")
        if text is None:
            raise DatasetInvalid(
                f"{self._folder}: its rows are chats, but beside {self._tokenizer_path} there is no chat template "
                f'(chat_template.jinja, or "chat_template" in tokenizer_config.json). Put one there, or name a file in '
                f'{self._path}: chat_template = "FILE".'
            )
        of_tools = self._template("tool_use") if self._given.get("tools", may_hold_tools(self._schema)) else None
        with_tools = ChatTemplate(text=of_tools, special_tokens=self._special_tokens(of_tools)) if of_tools else None
        return ChatTemplate(text=text, special_tokens=self._special_tokens(text), with_tools=with_tools)

    def _template(self, name: str) -> str | None:
        """Return the chat template of a name, from the declared file or from beside the tokenizer; None without one."""
        if declared := self._given.get("chat_template"):
            return read_chat_template(self._folder / declared, name)
        assert self._tokenizer_path  # only rows of token ids have no tokenizer
        return load_chat_template(self._tokenizer_path, name)

    def _special_tokens(self, template: str) -> dict[str, str]:
        """Return the texts of the special tokens that a chat template may write, by name, such as `eos_token`."""
        assert self._tokenizer_path
        tokens = load_special_tokens(self._tokenizer_path)
        for name, key in (("eos_token", "eos"), ("bos_token", "bos")):
            if name in template and name not in tokens:
                tokens[name] = self._written(name, key)
        return tokens

    def _written(self, name: str, key: str) -> str:
        """Return the text of a special token that a template writes but no file beside the tokenizer names."""
        declared = self._given.get(key)
        if key == "bos" and declared is False:
            return ""
        if _is_id(declared) and self._tokenizer:
            declared = self._tokenizer.tokenizer.id_to_token(declared)
        if isinstance(declared, str):
            return declared
        if key == "eos" and (usual := self._usual_eos()):
            return usual
        raise DatasetInvalid(
            f"{self._folder}: its chat template writes {name}, but nothing says what that is: turns would never be closed "
            f'or opened. Name it in tokenizer_config.json beside {self._tokenizer_path}, as {{"{name}": "..."}}, or in '
            f'{self._path}: {key} = "<the token>".'
        )

    def _tools(self, chat: ChatTemplate | None) -> Field | None:
        """Return the column of tools, declared or found by name and type; None if the template does not read tools."""
        declared = self._given.get("tools")
        if declared:
            if not (chat and chat.takes_tools):
                what = "the chat template does not look at any" if chat else "rows are no chats"
                raise DatasetInvalid(f"{self._path}: tools are given, but {what}. Remove tools, or take a template with tools.")
            check_tools(source := Field.parse(declared, self._schema), self._schema)
            return source
        if declared is False or not (chat and chat.takes_tools) or not may_hold_tools(self._schema):
            return None
        return Field.parse("tools", self._schema)

    def _eos_id(self, is_closed: bool) -> int | None:
        """Return the id that closes a text, a response or a row of ids; None if rows are closed already, or eos is false."""
        if "eos" in self._given:
            return None if self._given["eos"] is False else self._declared_id("eos")
        if is_closed:
            return None
        named = load_special_tokens(self._tokenizer_path).get("eos_token") if self._tokenizer_path else None
        id_ = self._id_of(named or self._usual_eos())
        if id_ is None:
            token = named or f"usual end-of-text token ({', '.join(_EOS_NAMES)})"
            raise DatasetInvalid(
                f"{self._folder}: the tokenizer has no {token}. Name another in {self._path}: "
                f'eos = "<the token>" or its id, or eos = false for none.'
            )
        return id_

    def _pad_id(self, eos_id: int | None) -> int:
        """Return the id of padding; padding is masked in any case."""
        if "pad" in self._given:
            return self._declared_id("pad")
        usual = next((id_ for name in _PAD_NAMES if (id_ := self._id_of(name)) is not None), eos_id)
        return 0 if usual is None else usual

    def _usual_eos(self) -> str | None:
        """Return the first of the usual end-of-text tokens in the tokenizer; None without one."""
        names = [name for name in _EOS_NAMES if self._id_of(name) is not None]
        self._guessed_eos = tuple(names) if len(names) > 1 else ()
        return names[0] if names else None

    def _declared_id(self, key: str) -> int:
        """Return the id of a token declared by its id or its text. Raises DatasetInvalid: it is unknown."""
        token, size = self._given[key], self._tokenizer.vocab_size if self._tokenizer else self._given.get("vocab_size", 2**32)
        if _is_id(token) and token < size:
            return token
        if isinstance(token, str) and (id_ := self._id_of(token)) is not None:
            return id_
        if isinstance(token, str) and self._tokenizer is None:
            raise DatasetInvalid(
                f"{self._path}: {key} = {token!r} is a text, but rows are token ids: there is no tokenizer to look it up in. "
                f"Give the id."
            )
        raise DatasetInvalid(
            f"{self._path}: {key} = {token!r} is not in the vocabulary of {size:,} ids. Name a token that is in it, by its "
            f"text or id, or leave {key} out."
        )

    def _id_of(self, token: str | None) -> int | None:
        return self._tokenizer.tokenizer.token_to_id(token) if self._tokenizer and token else None


def _is_id(value: object) -> TypeGuard[int]:
    return is_whole(value) and 0 <= value < 2**32
