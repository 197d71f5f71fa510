"""A dataset's recipe: penstock.toml decides, and for undeclared settings the columns' names and types."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from penstock.numbers import is_whole
from penstock_server.arrow import holds_json
from penstock_server.files import may_exist, open_regular
from penstock_server.problems import DatasetInvalid
from penstock_server.recipes.allowed import EVERYTHING, AllowedFiles
from penstock_server.recipes.chat import TEMPLATE_FILES, ChatTemplate, load_chat_templates, read_chat_templates
from penstock_server.recipes.encoders import Encoders
from penstock_server.recipes.fields import Column, Field, RecipeError, is_null
from penstock_server.recipes.filter import Filter
from penstock_server.recipes.infer import FILE_NAME, MASKS, ROLES, FirstShard, Roles
from penstock_server.recipes.recipe import DEFAULT_BAD_SHARE, Recipe
from penstock_server.recipes.tokenizer import TOKEN_FILES, TokenizerFile, load_tokenizer
from penstock_server.recipes.transform import load_transform

_EOS_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "[EOS]", "[SEP]")
_PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>")
_MAX_FILE = 128 << 10  # characters
_MAX_DOTS = 100


_OF_ROWS = ("transform", "filter", "split_by", "columns")  # keys that concern rows before and beside tokenization


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value) and "\0" not in value  # no file can have that in its name


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value)) and len(set(value)) == len(value)


_KEYS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(ROLES, (_is_text, "a text")),
    **dict.fromkeys(("shards", "tokenizer", "chat_template", "filter", "transform", "split_by"), (_is_text, "a text")),
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


def read_recipe(
    folder: Path,
    schema: pa.Schema,
    default_tokenizer: Path | None,
    encoders: Encoders | None = None,
    files: Mapping[str, Any] = MappingProxyType({}),
    allowed: AllowedFiles = EVERYTHING,
) -> Recipe:
    """Read the recipe of a dataset folder whose first shard has this schema.

    With `encoders`, a process tries the tokenizer and the chat template before this one loads them, and tokenizes later.
    `files` are the stats of the recipe's files: the process is kept while they are the same.

    Raises DatasetInvalid: penstock.toml is wrong, no column can be used, or a tokenizer is missing or invalid.
    """
    given = _read_declaration(folder)
    try:
        _check_files(folder, given, allowed)
        transform = load_transform(given["transform"], folder) if "transform" in given else None
        # A transform shows its columns when it is called with no rows.
        made = transform(pa.RecordBatch.from_pylist([], schema=schema)).schema if transform else schema
        encoder = None
        if encoders and _needs_tokenizer(given, made):
            declared = {key: value for key, value in given.items() if key not in _OF_ROWS}
            encoder = encoders.open(folder, declared, made, default_tokenizer, files)
        recipe = replace(recipe_of(folder, given, made, default_tokenizer, schema), transform=transform, encoder=encoder)
        if encoder:
            encoder.check(recipe.encoding_identity)
        return recipe
    except (RecipeError, RecursionError) as error:
        raise DatasetInvalid(f"{folder}: {str(error).rstrip('.')}. Correct {FILE_NAME}, or the data.") from error


def _read_declaration(folder: Path) -> dict[str, Any]:
    """Return the validated values of penstock.toml; empty if there is no such file. Raises DatasetInvalid."""
    path = folder / FILE_NAME
    if not may_exist(path):  # a broken symlink is a missing recipe: without it other rows would be served
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
        with TextIOWrapper(open_regular(path), "utf-8-sig") as file:  # editors on Windows write a byte order mark
            text = file.read(_MAX_FILE + 1)
        if len(text) > _MAX_FILE:
            raise ValueError(f"it has more than {_MAX_FILE:,} characters")
        # tomllib takes quadratic time for a key of many parts.
        if any(line.partition("=")[0].count(".") > _MAX_DOTS for line in text.splitlines()):
            raise ValueError(f"a key has more than {_MAX_DOTS} dots")
        document = tomllib.loads(text)
        repr(document)  # raises for what no message could show: numbers of thousands of digits, deep nesting
        return document
    except (OSError, ValueError, RecursionError) as error:
        raise DatasetInvalid(f"{path} cannot be read: {error}.") from error


def _check_files(folder: Path, given: Mapping[str, Any], allowed: AllowedFiles) -> None:
    """Check the files that a recipe names, and those that are read with them. Raises DatasetInvalid."""
    if "transform" in given:
        allowed.check_transforms(folder)
        allowed.check(folder / f"{given['transform'].partition(':')[0]}.py")
    if "chat_template" in given:
        allowed.check(folder / given["chat_template"])
    if "tokenizer" in given:
        tokenizer = folder / given["tokenizer"]
        for path in (tokenizer, *(tokenizer.parent / name for name in (*TOKEN_FILES, *TEMPLATE_FILES))):
            allowed.check(path)


def _needs_tokenizer(given: Mapping[str, Any], schema: pa.Schema) -> bool:
    return "tokenizer" in given or Roles.of(given, schema).kind != "tokens"


def recipe_of(
    folder: Path, given: dict[str, Any], schema: pa.Schema, default_tokenizer: Path | None, stored: pa.Schema | None = None
) -> Recipe:
    """Return the recipe that these values declare, without the transform, for rows of a schema after the transform.

    `stored` is the schema of the shards. Raises RecipeError, DatasetInvalid.
    """
    stored = stored or schema
    roles = Roles.of(given, schema)
    tokenizer = _tokenizer(folder, given, roles, default_tokenizer)
    special = _SpecialTokens(given, tokenizer)
    templates = _chat_templates(folder, given, roles, tokenizer)
    chat = _chat_template(templates, roles, special) if templates else None
    takes_tools = chat is not None and chat.takes_tools
    if given.get("tools") and not takes_tools:
        what = "the chat template does not look at any" if chat else "rows are no chats"
        raise RecipeError(f"tools are given, but {what}. Remove tools, or take a template with tools")
    # By default pre-tokenized rows stay as they are, and a chat template closes its turns.
    is_closed = roles.kind in ("tokens", "prompt") or chat is not None
    eos_id = special.model_eos() if "eos" not in given and not is_closed else special.declared_id("eos")
    row_filter = Filter.parse(given["filter"], stored) if "filter" in given else None
    split_by = Field.parse(given["split_by"], stored) if "split_by" in given else None
    columns = tuple(Column.parse(name, schema) for name in given.get("columns", []))
    recipe = Recipe(
        kind=roles.kind,
        fields=roles.fields,
        masks=roles.masks,
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size if tokenizer else given.get("vocab_size"),
        bos_id=special.declared_id("bos"),
        eos_id=eos_id,
        pad_id=special.pad_id(eos_id),
        chat=chat,
        tools=roles.tools if takes_tools else None,
        columns=columns,
        unsaid_bos=tokenizer.opening if tokenizer and not (is_closed or "bos" in given) else None,
        guessed_eos=special.guessed_eos,
        first=FirstShard(given, schema, takes_tools=takes_tools or "tool_use" in templates),
        filter=row_filter,
        splits=given.get("splits"),
        validation=float(given["validation"]) if "validation" in given else None,
        split_by=split_by,
        split_type=split_by.type(stored) if split_by else None,
        on_bad_row=given.get("on_bad_row", "fail"),
        max_bad_share=float(given.get("max_bad_share", DEFAULT_BAD_SHARE)),
    )
    unused, read = roles.unused, None if "transform" in given else recipe.read_columns
    if chat and not takes_tools and roles.tools and not is_null(roles.tools.type(schema)):
        unused = ("tools",)
    is_labelled = any(field.name == "label" and pa.types.is_boolean(field.type) for field in schema)  # as in KTO's data
    if is_labelled and "response" in dict(roles.fields) and read is not None and "label" not in read:
        unused = ("label",)
    reads_json = any(holds_json(field.type) for field in stored if read is None or field.name in read)
    return replace(recipe, unused=unused, reads_json=reads_json)


def _tokenizer(folder: Path, given: dict[str, Any], roles: Roles, default: Path | None) -> TokenizerFile | None:
    is_text = roles.kind != "tokens"
    # Unresolved: a symlink may lead to a store without files beside the tokenizer.
    path = folder / given["tokenizer"] if "tokenizer" in given else default if is_text else None
    if path is None and is_text:
        raise DatasetInvalid(
            f"the data is text (in {_named(roles)}) and no tokenizer is given. Start with --tokenizer FILE (a tokenizer.json), "
            f'or name one in {folder / FILE_NAME}, relative to its folder: tokenizer = "FILE".'
        )
    spells = given.get("split_special_tokens", False)
    if spells and (not is_text or roles.are_chats):
        raise RecipeError(
            "split_special_tokens is for texts, but rows are token ids or chats, whose template writes special tokens itself. "
            "Remove it, and take spellings of special tokens out of texts with a transform"
        )
    if path and "vocab_size" in given:
        raise RecipeError("vocab_size is given, but the tokenizer already tells it; remove vocab_size")
    return load_tokenizer(path, split_special_tokens=spells) if path else None


def _named(roles: Roles) -> str:
    return " and ".join(source.text for _, source in roles.fields)


def _chat_templates(folder: Path, given: dict[str, Any], roles: Roles, tokenizer: TokenizerFile | None) -> Mapping[str, str]:
    """Return the chat templates of a tokenizer by name, with a default; empty if rows are no chats."""
    declared = given.get("chat_template")
    if not roles.are_chats:
        if declared:
            raise RecipeError(
                f"chat_template renders messages, but rows are made of {_named(roles)}. Leave it out, or name the column of "
                f'messages: messages = "COLUMN"'
            )
        return {}
    assert tokenizer  # only rows of token ids have none
    templates = read_chat_templates(folder / declared) if declared else load_chat_templates(tokenizer.path)
    if "default" not in templates:
        raise RecipeError(
            f"its rows are chats, but beside {tokenizer.path} there is no chat template (chat_template.jinja, or "
            f'"chat_template" in tokenizer_config.json). Put one there, or name a file in {FILE_NAME}: chat_template = "FILE"'
        )
    return templates


def _chat_template(templates: Mapping[str, str], roles: Roles, special: _SpecialTokens) -> ChatTemplate:
    with_tools = None
    # Without tools it must neither refuse the dataset nor change its fingerprint.
    if roles.tools and (text := templates.get("tool_use")):
        with_tools = ChatTemplate(text=text, special_tokens=special.written_by(text))
    text = templates["default"]
    return ChatTemplate(text=text, special_tokens=special.written_by(text), with_tools=with_tools)


class _SpecialTokens:
    """Special tokens, as penstock.toml declares them, by id or text, or as the tokenizer has them.

    `guessed_eos` are the candidates for the EOS, if it had to be guessed and there are several.
    """

    def __init__(self, given: dict[str, Any], tokenizer: TokenizerFile | None) -> None:
        self._given, self._tokenizer = given, tokenizer
        self._named = tokenizer.special_tokens if tokenizer else {}
        self.guessed_eos: tuple[str, ...] = ()

    def declared_id(self, key: str) -> int | None:
        """Return the id of a token declared by its id or its text; None without one. Raises RecipeError: it is unknown."""
        token = self._given.get(key, False)
        size = self._tokenizer.vocab_size if self._tokenizer else self._given.get("vocab_size", 2**32)
        if token is False:
            return None
        if is_whole(token) and 0 <= token < size:
            return token
        if isinstance(token, str) and (id_ := self._id_of(token)) is not None:
            return id_
        if isinstance(token, str) and self._tokenizer is None:
            what = "a text, but rows are token ids: there is no tokenizer to look it up in. Give the id"
        else:
            what = f"not in the vocabulary of {size:,} ids. Name a token that is in it, by its text or id, or leave {key} out"
        raise RecipeError(f"{key} = {token!r} is {what}")

    def model_eos(self) -> int:
        """Return the id of the EOS that a file beside the tokenizer names, otherwise of a usual one."""
        named = self._named.get("eos_token")
        if (id_ := self._id_of(named) if named else self._usual_eos()) is None:
            token = named or f"usual end-of-text token ({', '.join(_EOS_NAMES)})"
            raise RecipeError(f'the tokenizer has no {token}. Set eos = "<the token>" or its id, or eos = false')
        return id_

    def _usual_eos(self) -> int | None:
        usual = [name for name in _EOS_NAMES if self._id_of(name) is not None]
        self.guessed_eos = tuple(usual) if len(usual) > 1 else ()
        return self._id_of(usual[0]) if usual else None

    def pad_id(self, eos_id: int | None) -> int:
        """Return the id of padding; padding is masked in any case."""
        usual = (self._id_of(name) for name in _PAD_NAMES)
        return next((id_ for id_ in (self.declared_id("pad"), *usual, eos_id) if id_ is not None), 0)

    def written_by(self, template: str) -> dict[str, str]:
        """Return the texts of the special tokens that a chat template may write, by name, such as `eos_token`."""
        assert self._tokenizer  # chats have one
        tokens = dict(self._named)
        for key in ("eos", "bos"):
            if (name := f"{key}_token") not in template or name in tokens:
                continue
            if key == "bos" and self._given.get("bos") is False:
                tokens[name] = ""
                continue
            id_ = self.declared_id(key)
            id_ = self._usual_eos() if id_ is None and key == "eos" else id_
            if id_ is None or not (token := self._tokenizer.tokenizer.id_to_token(id_)):
                none = ", or bos = false" if key == "bos" else ""  # turns need an end
                raise RecipeError(
                    f"its chat template writes {name}, but nothing says what that is. Name it in the tokenizer_config.json "
                    f'beside {self._tokenizer.path}, as {{"{name}": "..."}}, or in {FILE_NAME}: {key} = "<the token>"{none}'
                )
            tokens[name] = token
        return tokens

    def _id_of(self, token: str | None) -> int | None:
        return self._tokenizer.tokenizer.token_to_id(token) if self._tokenizer and token else None
