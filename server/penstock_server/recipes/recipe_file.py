"""Reader of a dataset's recipe: penstock.toml decides, and for undeclared settings the columns' names and types."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock_server.arrow import holds_json
from penstock_server.problems import DatasetInvalid
from penstock_server.recipes.chat import ChatTemplate
from penstock_server.recipes.chat_files import load_chat_template, read_chat_template
from penstock_server.recipes.declaration import FILE_NAME, read_declaration
from penstock_server.recipes.fields import Field, FieldError
from penstock_server.recipes.filter import Filter, parse_filter
from penstock_server.recipes.filter.sql import FilterError
from penstock_server.recipes.fitting import Fields, Kind, check_tools, holds_tools, may_hold_tools, travelling_column
from penstock_server.recipes.mask_columns import NAMES, Masks, find_masks
from penstock_server.recipes.messages import TemplateError
from penstock_server.recipes.recipe import DEFAULT_BAD_SHARE, Recipe
from penstock_server.recipes.roles import FirstShard, are_chats, read_fields, unused_columns
from penstock_server.recipes.special_tokens import SpecialTokens
from penstock_server.recipes.tokenizer import TokenizerFile, load_tokenizer
from penstock_server.recipes.transform import OF_NO_ROWS, Transform, TransformError, load_transform


def read_recipe(folder: Path, schema: pa.Schema, default_tokenizer: Path | None) -> Recipe:
    """Read the recipe of a dataset folder whose first shard has this schema.

    Raises DatasetInvalid: penstock.toml is wrong, no column can be used, or a tokenizer is missing or invalid.
    """
    given = read_declaration(folder)
    try:
        return _Reader(folder, given, schema, default_tokenizer).recipe()
    except (FieldError, FilterError, TransformError, TemplateError) as error:
        is_of_rows = "transform" in given and not isinstance(error, TransformError)
        hint = OF_NO_ROWS if is_of_rows else ""
        said = str(error).rstrip(".")
        stop = "" if said.endswith("?") else "."
        raise DatasetInvalid(f"{folder}: {said}{stop} Mend {FILE_NAME}, or the data.{hint}") from error


def _transformed(transform: Transform, schema: pa.Schema) -> pa.Schema:
    """Return the columns that a transform makes. Raises TransformError: it fails."""
    try:
        return transform(pa.RecordBatch.from_pylist([], schema=schema)).schema
    except TransformError as error:
        raise TransformError(f"{error}. It was called with no rows, to learn its columns, and must bear that") from error


class _Reader:
    """Builder of one recipe from the declaration and the schema of its data."""

    def __init__(self, folder: Path, given: dict[str, Any], schema: pa.Schema, default_tokenizer: Path | None) -> None:
        self._folder, self._given, self._default_tokenizer = folder, given, default_tokenizer
        self._file_schema = schema
        self._transform: Transform | None = load_transform(given["transform"], folder) if "transform" in given else None
        self._schema = _transformed(self._transform, schema) if self._transform else schema

    def recipe(self) -> Recipe:
        given = self._given
        kind, fields = read_fields(self._folder, given, self._schema)
        tokenizer = self._tokenizer(kind, fields)
        if tokenizer and "vocab_size" in given:
            raise DatasetInvalid(
                f"{self._folder / FILE_NAME}: vocab_size is given, but the tokenizer already tells it; remove vocab_size."
            )
        vocab_size = tokenizer.vocab_size if tokenizer else given.get("vocab_size")
        special = SpecialTokens(self._folder, given, self._tokenizer_path(kind), tokenizer, vocab_size)
        chat = self._chat(kind, fields, special)
        # By default pre-tokenized rows stay as they are, and a chat template closes its turns.
        is_closed = kind == "tokens" or chat is not None
        eos_id = special.eos_id(is_closed=is_closed)
        masks = self._masks(fields)
        row_filter = parse_filter(given["filter"], self._file_schema) if "filter" in given else None
        split_by = Field.parse(given["split_by"], self._file_schema) if "split_by" in given else None
        recipe = Recipe(
            kind=kind,
            fields=fields,
            masks=masks,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            bos_id=special.bos_id(),
            eos_id=eos_id,
            pad_id=special.pad_id(eos_id),
            chat=chat,
            tools=self._tools(chat),
            columns=tuple(travelling_column(name, self._schema) for name in given.get("columns", [])),
            unsaid_bos=tokenizer.opening if tokenizer and not (is_closed or "bos" in given) else None,
            guessed_eos=special.guessed_eos,
            first=FirstShard(self._folder, given, self._schema, takes_tools=self._takes_tools(chat)),
            unused=unused_columns(kind, fields, masks, given, self._schema)
            or self._unused_tools(chat)
            or self._unused_label(fields, row_filter),
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

    def _masks(self, fields: Fields) -> Masks:
        roles = [role for role, _ in fields]
        if roles == ["tokens"]:
            return find_masks(self._given, self._schema)
        if declared := [mask for mask in NAMES if self._given.get(mask)]:
            raise DatasetInvalid(
                f"{self._folder / FILE_NAME}: {declared[0]} is a mask of tokens, but rows are made of {' and '.join(roles)}. "
                f"Remove it."
            )
        return ()

    def _unused_tools(self, chat: ChatTemplate | None) -> tuple[str, ...]:
        return ("tools",) if holds_tools(self._schema) and chat and not chat.takes_tools and "tools" not in self._given else ()

    def _unused_label(self, fields: Fields, row_filter: Filter | None) -> tuple[str, ...]:
        """Return the unused label column that marks good and bad answers, as in KTO's data."""
        if self._transform or "response" not in dict(fields) or "label" in self._given.get("columns", []):
            return ()
        is_there = any(field.name == "label" and pa.types.is_boolean(field.type) for field in self._schema)
        return ("label",) if is_there and not (row_filter and "label" in row_filter.columns) else ()

    def _tokenizer(self, kind: Kind, fields: Fields) -> TokenizerFile | None:
        path = self._tokenizer_path(kind)
        if path is None and kind != "tokens":
            columns = " and ".join(source.text for _, source in fields)
            raise DatasetInvalid(
                f"the data is text (in {columns}) and no tokenizer is given. Start with --tokenizer FILE (a "
                f'tokenizer.json), or name one in {self._folder / FILE_NAME}, relative to its folder: tokenizer = "FILE".'
            )
        splits = self._given.get("split_special_tokens", False)
        tokenizer = load_tokenizer(path, split_special_tokens=splits) if path else None
        if splits:
            self._check_split(kind, fields, tokenizer)
        return tokenizer

    def _check_split(self, kind: Kind, fields: Fields, tokenizer: TokenizerFile | None) -> None:
        """Check split_special_tokens. Raises DatasetInvalid: rows are ids, or a template's special tokens would split."""
        remedy = "Remove it, and take spellings of special tokens out of what people wrote with a transform."
        reason = ""
        if kind == "tokens":
            reason, remedy = "is for texts, but rows are token ids", "Remove it."
        elif are_chats(kind, fields, self._given, self._schema):
            reason = "would split the special tokens that the chat template writes, too"
        else:
            assert tokenizer
            told = []
            for role, source in fields:
                if spelled := [token for text, _ in source.parts for token in tokenizer.spelled(text)]:
                    told.append(f"{', '.join(dict.fromkeys(spelled))} in the template of {role}")
            reason = f"would split {' and '.join(told)}, too" if told else ""
        if reason:
            raise DatasetInvalid(f"{self._folder / FILE_NAME}: split_special_tokens {reason}. {remedy}")

    def _tokenizer_path(self, kind: Kind) -> Path | None:
        if "tokenizer" in self._given:
            return Path(self._folder, self._given["tokenizer"])
        return None if kind == "tokens" else self._default_tokenizer

    def _chat(self, kind: Kind, fields: Fields, special: SpecialTokens) -> ChatTemplate | None:
        if not are_chats(kind, fields, self._given, self._schema):
            if "chat_template" in self._given:
                names = " and ".join(source.text for _, source in fields)
                raise DatasetInvalid(
                    f"{self._folder / FILE_NAME}: chat_template renders messages, but rows are made of {names}. Leave it out, "
                    f'or name the column of messages: messages = "COLUMN".'
                )
            return None
        path = self._tokenizer_path(kind)
        text = self._template("default")
        if text is None:
            raise DatasetInvalid(
                f"{self._folder}: its rows are chats, but beside {path} there is no chat template "
                f'(chat_template.jinja, or "chat_template" in tokenizer_config.json). Put one there, or name a file in '
                f'{self._folder / FILE_NAME}: chat_template = "FILE".'
            )
        of_tools = self._template("tool_use") if self._given.get("tools", may_hold_tools(self._schema)) else None
        with_tools = ChatTemplate(text=of_tools, special_tokens=special.of_template(of_tools)) if of_tools else None
        return ChatTemplate(text=text, special_tokens=special.of_template(text), with_tools=with_tools)

    def _template(self, name: str) -> str | None:
        """Return the chat template of a name, from the declared file or from beside the tokenizer; None without one."""
        if named := self._given.get("chat_template"):
            return read_chat_template(self._folder / named, name)
        path = self._tokenizer_path("messages")
        assert path  # only rows of token ids have no tokenizer
        return load_chat_template(path, name)

    def _takes_tools(self, chat: ChatTemplate | None) -> bool:
        """Return whether tools of a chat would be rendered, if any shard had them."""
        return chat is not None and (chat.takes_tools or self._template("tool_use") is not None)

    def _tools(self, chat: ChatTemplate | None) -> Field | None:
        """Return the column of tools, declared or found by name and type; None if the template does not read tools."""
        declared = self._given.get("tools")
        if declared:
            if not chat:
                raise DatasetInvalid(
                    f"{self._folder / FILE_NAME}: tools are for a chat template, but rows are no chats. Remove it."
                )
            if not chat.takes_tools:
                raise DatasetInvalid(
                    f"{self._folder / FILE_NAME}: tools are given, but the chat template does not look at any. Remove tools, "
                    f"or take a template that writes them."
                )
            check_tools(source := Field.parse(declared, self._schema), self._schema)
            return source
        if declared is False or not chat or not chat.takes_tools or not may_hold_tools(self._schema):
            return None
        return Field.parse("tools", self._schema)
