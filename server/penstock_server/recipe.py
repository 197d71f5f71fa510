"""The recipe: how a dataset's columns become tokens. Declared by `penstock.toml` in its folder, else by the columns.

text = "content"                  # column names: text, or prompt and response, or tokens
tokenizer = "../tokenizer.json"   # relative to the folder
eos = "<|endoftext|>"             # a token or an id; false for none
pad = "<pad>"                     # a token or an id; padding is masked, so it matters to people only
vocab_size = 50257                # of pre-tokenized data: ids must be below it
on_bad_row = "substitute"         # or "fail"
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from tokenizers import Tokenizer

from penstock_server.problems import DatasetRefused

FILE_NAME = "penstock.toml"
Kind = Literal["tokens", "text", "prompt_response"]

_KINDS: dict[Kind, tuple[str, ...]] = {
    "tokens": ("tokens",),
    "prompt_response": ("prompt", "response"),
    "text": ("text",),
}
_TOKEN_COLUMNS = ("input_ids", "tokens")
_COLUMN_KEYS = ("tokens", "text", "prompt", "response")
_OPTION_KEYS = ("tokenizer", "eos", "pad", "vocab_size", "on_bad_row")
_EOS_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "[EOS]", "[SEP]")
_PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>")


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """A `tokenizers` file and what it holds; `digest` is the hash of its bytes."""

    path: Path
    digest: str
    tokenizer: Tokenizer

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How rows become tokens. Equal identities make equal tokens of equal rows.

    `columns` are the columns read: one of text, one of token ids, or prompt and response. `vocab_size` bounds the ids
    of pre-tokenized rows, None if nothing is known of them. `eos_id` closes a text or a response, None for nothing;
    pre-tokenized rows that end with it are left as they are.
    """

    kind: Kind
    columns: tuple[str, ...]
    tokenizer: TokenizerFile | None
    vocab_size: int | None
    eos_id: int | None
    pad_id: int
    on_bad_row: Literal["fail", "substitute"]

    @property
    def identity(self) -> dict[str, Any]:
        """All that changes a token. `on_bad_row` is not in it: to change it never changes a batch that was served."""
        return {
            "kind": self.kind,
            "columns": list(self.columns),
            "tokenizer": self.tokenizer.digest if self.tokenizer else None,
            "vocab_size": self.vocab_size,
            "eos_id": self.eos_id,
            "pad_id": self.pad_id,
        }

    def describe(self) -> str:
        """The recipe in a line, for people."""
        parts = [" + ".join(self.columns)]
        if self.tokenizer:
            parts.append(f"tokenizer {self.tokenizer.path.name} ({self.tokenizer.vocab_size:,} ids)")
        elif self.vocab_size:
            parts.append(f"pre-tokenized, ids below {self.vocab_size:,}")
        else:
            parts.append("pre-tokenized")
        if self.kind != "tokens":
            parts.append("no EOS" if self.eos_id is None else f"EOS {self.eos_id}")
        return ", ".join(parts)


def read_recipe(folder: Path, schema: pa.Schema, default_tokenizer: Path | None) -> Recipe:
    """The recipe of a dataset folder whose first shard has this schema.

    Raises DatasetRefused: penstock.toml is wrong, no column can be used, or a tokenizer is missing or is none.
    """
    given = _read_file(folder)
    kind, columns = _columns(folder, given, schema)
    path = folder / given["tokenizer"] if "tokenizer" in given else None if kind == "tokens" else default_tokenizer
    if path is None and kind != "tokens":
        raise DatasetRefused(
            f"the data is text (column {' and '.join(columns)}) and no tokenizer is given. Start with --tokenizer FILE (a "
            f'tokenizer.json), or name one in {folder / FILE_NAME}, relative to its folder: tokenizer = "FILE".'
        )
    tokenizer = load_tokenizer(path) if path else None
    vocab_size = tokenizer.vocab_size if tokenizer else given.get("vocab_size")
    # Pre-tokenized rows are taken as they are, unless the recipe says what closes them.
    eos_id = None if kind == "tokens" and "eos" not in given else _eos(folder, given, tokenizer, vocab_size)
    return Recipe(
        kind=kind,
        columns=columns,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        eos_id=eos_id,
        pad_id=_pad(folder, given, tokenizer, vocab_size, eos_id),
        on_bad_row=given.get("on_bad_row", "fail"),
    )


def load_tokenizer(path: Path) -> TokenizerFile:
    """Reads a tokenizer.json. Its own truncation and padding are switched off: the spec decides both.

    Raises DatasetRefused: there is no such file, or it is no tokenizer.
    """
    try:
        found = path.resolve(strict=True)
        stat = found.stat()
        return _load_tokenizer(found, (stat.st_size, stat.st_mtime_ns, stat.st_ino))
    except OSError as error:
        raise DatasetRefused(f"the tokenizer {path} cannot be read: {error.strerror}. Check the path.") from error


@lru_cache(maxsize=64)
def _load_tokenizer(path: Path, _date: tuple[int, ...]) -> TokenizerFile:
    content = path.read_bytes()
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception
        raise DatasetRefused(
            f"{path} is not a tokenizer: {error}. A tokenizer.json is what Tokenizer.save of the `tokenizers` library writes."
        ) from error
    if not tokenizer.get_vocab_size():
        raise DatasetRefused(f"{path} is a tokenizer with an empty vocabulary: it was saved before it was trained.")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return TokenizerFile(path, blake2b(content, digest_size=16).hexdigest(), tokenizer)


def is_text(type_: pa.DataType) -> bool:
    """Whether a column of this type holds text."""
    if pa.types.is_dictionary(type_):
        return is_text(type_.value_type)
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_))


def is_tokens(type_: pa.DataType) -> bool:
    """Whether a column of this type holds lists of integers."""
    is_list = pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_)
    return bool(is_list and pa.types.is_integer(type_.value_type))


def check_columns(kind: Kind, columns: tuple[str, ...], schema: pa.Schema, where: Path) -> None:
    """Whether a shard has the recipe's columns, of the right type.

    Raises DatasetRefused: it does not.
    """
    fits, wanted = (is_tokens, "lists of integers") if kind == "tokens" else (is_text, "text")
    for column in columns:
        if column not in schema.names:
            raise DatasetRefused(
                f"{where} has no column {column!r}, which the recipe reads; it has: {', '.join(schema.names)}."
                f"{_hint(column, schema.names)} Mend {FILE_NAME}, or give all shards of a dataset the same columns."
            )
        if schema.names.count(column) > 1:
            raise DatasetRefused(f"{where} has {schema.names.count(column)} columns {column!r}. Rename all but one.")
        if not fits(schema.field(column).type):
            raise DatasetRefused(
                f"{where}: column {column!r} is {schema.field(column).type}, but the recipe reads {wanted}. "
                f"Give all shards of a dataset the same schema, or move this one to a folder of its own."
            )


def _read_file(folder: Path) -> dict[str, Any]:
    path = folder / FILE_NAME
    if not path.exists():
        return {}
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DatasetRefused(f"{path} cannot be read: {error}. Texts stand in quotes in TOML.") from error
    keys = _COLUMN_KEYS + _OPTION_KEYS
    problems = [f"unknown key {key!r}.{_hint(key, keys)}".rstrip(".") for key in given if key not in keys]
    problems += [
        f"{key} must be a text, not {given[key]!r}"
        for key in (*_COLUMN_KEYS, "tokenizer")
        if key in given and not isinstance(given[key], str)
    ]
    size = given.get("vocab_size", 1)
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= 2**32:
        problems.append(f"vocab_size must be a whole number from 1 to {2**32:,}, not {size!r}")
    if given.get("on_bad_row", "fail") not in ("fail", "substitute"):
        problems.append(f'on_bad_row must be "fail" or "substitute", not {given["on_bad_row"]!r}')
    if "tokenizer" in given and "vocab_size" in given:
        problems.append("vocab_size contradicts tokenizer, which says it itself; remove one")
    if problems:
        raise DatasetRefused(f"{path}: {'; '.join(problems)}. Known keys: {', '.join(keys)}.")
    return given


def _hint(name: str, known: Sequence[str]) -> str:
    close = get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _columns(folder: Path, given: dict[str, Any], schema: pa.Schema) -> tuple[Kind, tuple[str, ...]]:
    named = {key: given[key] for key in _COLUMN_KEYS if key in given}
    if named:
        for kind, keys in _KINDS.items():
            if set(keys) == set(named):
                columns = tuple(named[key] for key in keys)
                check_columns(kind, columns, schema, folder)
                return kind, columns
        raise DatasetRefused(
            f"{folder / FILE_NAME} names the columns {', '.join(named)}; name tokens, or text, or prompt and response."
        )
    usable = {field.name for field in schema if is_text(field.type)}
    tokens = {field.name for field in schema if is_tokens(field.type)}
    for name in _TOKEN_COLUMNS:
        if name in tokens:
            return "tokens", (name,)
    if "text" in usable:
        return "text", ("text",)
    if {"prompt", "response"} <= usable:
        return "prompt_response", ("prompt", "response")
    fields = [f"{field.name} ({field.type})" for field in schema]
    found = ", ".join(fields[:8] + [f"and {len(fields) - 8} more"] * (len(fields) > 8)) or "none"
    raise DatasetRefused(
        f"{folder.name}: no column can be used. Expected input_ids or tokens (lists of integers), text, or prompt and "
        f'response; found: {found}. Name the columns in {folder / FILE_NAME}, for example: text = "content".'
    )


def _eos(folder: Path, given: dict[str, Any], tokenizer: TokenizerFile | None, vocab_size: int | None) -> int | None:
    if given.get("eos") is False:
        return None
    if "eos" in given:
        return _token_id(folder, "eos", given["eos"], tokenizer, vocab_size)
    for name in _EOS_NAMES:
        if tokenizer and (found := tokenizer.tokenizer.token_to_id(name)) is not None:
            return found
    raise DatasetRefused(
        f"{folder.name}: the tokenizer has none of the usual end-of-text tokens ({', '.join(_EOS_NAMES)}). Name it in "
        f'{folder / FILE_NAME}: eos = "<the token>" or its id, or eos = false for none.'
    )


def _pad(
    folder: Path, given: dict[str, Any], tokenizer: TokenizerFile | None, vocab_size: int | None, eos_id: int | None
) -> int:
    if "pad" in given:
        return _token_id(folder, "pad", given["pad"], tokenizer, vocab_size)
    for name in _PAD_NAMES:
        if tokenizer and (found := tokenizer.tokenizer.token_to_id(name)) is not None:
            return found
    return 0 if eos_id is None else eos_id


def _token_id(folder: Path, key: str, token: object, tokenizer: TokenizerFile | None, vocab_size: int | None) -> int:
    size = vocab_size or 2**32
    if isinstance(token, int) and not isinstance(token, bool) and 0 <= token < size:
        return token
    if isinstance(token, str) and tokenizer and (found := tokenizer.tokenizer.token_to_id(token)) is not None:
        return found
    raise DatasetRefused(
        f"{folder / FILE_NAME}: {key} = {token!r} is no token of the vocabulary, of {size:,} ids. Name "
        f"one that it has, by its text or id, or leave {key} out."
    )
