"""Recipe: how a dataset's rows become tokens. `config` reads it from a dataset's penstock.toml."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, Literal

import pyarrow as pa

from penstock.text import as_utf8, cut
from penstock_server.recipes.chat import ChatTemplate
from penstock_server.recipes.encoders import Encoder
from penstock_server.recipes.fields import Column, Field, FieldError, is_text, passthrough_type
from penstock_server.recipes.filter import SHOWN, Filter
from penstock_server.recipes.infer import MASKS_OF_DOCUMENTS, MASKS_OF_LOSS, Fields, FirstShard, Kind, check_type
from penstock_server.recipes.tokenizer import Note, TokenizerFile
from penstock_server.recipes.transform import Transform

# Raise this if equal recipes make other tokens of equal rows than before: it ends all runs and tokenizes all rows again.
_READING = 1
_JSON_READING = 1  # likewise if equal values of Parquet's JSON type are read differently, for recipes that read some
_FILTERING = 3  # likewise if equal filters keep other rows, for recipes with one

FEATURES = ("tokens", "chosen", "rejected")  # all possible token lists of a row: see `Recipe.features`
DEFAULT_VALIDATION, DEFAULT_BAD_SHARE = 0.005, 0.01  # frozen: another value would change the splits of every run


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recipe:
    """Conversion of rows to tokens. Equal identities make equal tokens of equal rows.

    kind, fields, masks, unused  see `infer.Roles`; rows of ids are of kind "tokens" whatever the roles of their fields
    vocab_size     bounds the ids of pre-tokenized rows; None if unknown
    bos_id         opens a text or a prompt, None for nothing; pre-tokenized rows that begin with it are left as they are
    eos_id         closes a text or a response, likewise
    columns        passthrough columns
    reads_json     whether columns that are read hold Parquet's JSON type in the first shard
    first          columns of the first shard: no other shard may have further columns that select the tokens with loss
    unsaid_bos     token that the tokenizer would open a text with, if penstock.toml does not set bos
    guessed_eos    candidates for the EOS in the tokenizer, if no file names it; the first of several is taken
    splits         whether the shards' names give the splits, or a hash; None: the names decide
    validation     share of rows held out by the hash of `split_by`, or of the row's place; None: the default of the rule
    split_type     type of `split_by` in the first shard
    max_bad_share  with a larger share of bad rows the dataset is refused
    encoder        the processes that run the tokenizer and the chat template; None: this process runs them
    """

    kind: Kind
    fields: Fields
    masks: Fields = ()
    tokenizer: TokenizerFile | None = None
    vocab_size: int | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int = 0
    chat: ChatTemplate | None = None
    tools: Field | None = None
    columns: tuple[Column, ...] = ()
    reads_json: bool = False
    first: FirstShard | None = None
    unused: tuple[str, ...] = ()
    unsaid_bos: str | None = None
    guessed_eos: tuple[str, ...] = ()
    filter: Filter | None = None
    transform: Transform | None = None
    splits: Literal["files", "hash"] | None = None
    validation: float | None = None
    split_by: Field | None = None
    split_type: pa.DataType | None = None
    on_bad_row: Literal["fail", "replace"] = "fail"
    max_bad_share: float = DEFAULT_BAD_SHARE
    encoder: Encoder | None = None

    @property
    def features(self) -> tuple[str, ...]:
        """Return the names of a row's token lists."""
        return ("chosen", "rejected") if "chosen" in dict(self.fields) else ("tokens",)

    @property
    def has_turns(self) -> bool:
        """Return whether only parts of a row have loss: responses, not prompts."""
        return not (dict(self.fields).keys() <= {"tokens", "text"} or self.kind == "prompt") or self.has_loss_mask

    @property
    def has_prompts(self) -> bool:
        """Return whether a row is a prompt and one or two responses to it."""
        return "prompt" in dict(self.fields) and self.chat is None and self.kind != "prompt"

    @property
    def has_many_turns(self) -> bool:
        """Return whether a row may have more than a prompt and its response."""
        return self.chat is not None or self.has_loss_mask

    @property
    def has_loss_mask(self) -> bool:
        """Return whether a mask selects the ids with loss of pre-tokenized rows; never a packed document's first id."""
        return any(role in MASKS_OF_LOSS for role, _ in self.masks) or self.has_documents

    @property
    def has_documents(self) -> bool:
        """Return whether a column of pre-tokenized rows separates the documents packed into each row."""
        return any(role in MASKS_OF_DOCUMENTS for role, _ in self.masks)

    @property
    def adds_eos_to_chats(self) -> bool:
        """Return whether an EOS is appended to chats: not if their template writes it."""
        if not (self.chat and self.tokenizer) or self.eos_id is None or self.kind == "prompt":
            return False
        token = self.tokenizer.tokenizer.id_to_token(self.eos_id)
        return token is None or token not in self.chat.answer_end

    @property
    def token_columns(self) -> tuple[str, ...]:
        """Return the top-level columns that must have a value in each row, since its tokens are made of them."""
        return _columns(source for _, source in self.fields)

    @property
    def selecting_columns(self) -> list[str]:
        """Return the top-level stored columns that decide whether the filter keeps a row, and its split."""
        return list(_columns([self.filter, self.split_by]))

    @property
    def encoded_columns(self) -> list[str]:
        """Return the top-level columns that tokens are made of, and those that control it: masks and tools."""
        return list(_columns([*(source for _, source in (*self.fields, *self.masks)), self.tools]))

    @property
    def read_columns(self) -> list[str] | None:
        """Return the top-level columns to read from a shard; None for all, since a transform may use them."""
        if self.transform:
            return None
        passthrough = _columns(column.field for column in self.columns)
        return list(dict.fromkeys([*self.encoded_columns, *passthrough, *self.selecting_columns]))

    @property
    def identity(self) -> dict[str, Any]:
        """Return all that changes a row's tokens or passthrough columns; it names snapshots and cached blocks.

        Unset settings are left out, so that a new setting renames only snapshots and blocks that use it.
        """
        settings = {
            "reading": _READING,
            "kind": self.kind,
            "fields": [[role, source.text] for role, source in self.fields],
            "tokenizer": self.tokenizer.digest if self.tokenizer else None,
            "vocab_size": self.vocab_size,
            "bos_id": self.bos_id,
            "eos_id": self.eos_id,
            "pad_id": self.pad_id,
            "chat": self.chat.digest if self.chat else None,
            "columns": [[column.name, passthrough_type(column.type)] for column in self.columns],
            "filter": [_FILTERING, self.filter.text] if self.filter else None,
            "transform": self.transform.digest if self.transform else None,
            "split_by": self.split_by.text if self.split_by else None,
            "masks": [[role, source.text] for role, source in self.masks] or None,
            "tools": self.tools.text if self.tools else None,
            "json": _JSON_READING if self.reads_json else None,
        }
        return {key: value for key, value in settings.items() if value is not None}

    @property
    def encoding_identity(self) -> str:
        """Return a hash of what its processes have loaded: the tokenizer, the chat template, and their options."""
        names = ("kind", "fields", "tokenizer", "bos_id", "eos_id", "chat", "tools", "masks")
        content = [self.identity.get(name) for name in names]
        return blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included. Raises ValueError: see Encoder."""
        assert self.tokenizer
        return self.encoder.decode(ids) if self.encoder else self.tokenizer.decode(ids)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token as it continues the text before it. Raises ValueError: see Encoder."""
        assert self.tokenizer
        return self.encoder.token_texts(ids) if self.encoder else self.tokenizer.token_texts(ids)

    def is_like(self, other: Recipe) -> bool:
        """Return whether another recipe gives each row the same tokens, split, error or replacement."""
        settings = ("identity", "splits", "validation", "on_bad_row", "max_bad_share")
        return all(getattr(self, name) == getattr(other, name) for name in settings)

    def check(self, schema: pa.Schema) -> None:
        """Check that a shard of this schema has all columns that are read. Raises FieldError, FilterError: it has not."""
        for name in self.selecting_columns:
            Field.parse(name, schema)
        if self.filter:
            self.filter.check(schema)
        if self.split_by and self.split_type:
            type_ = self.split_by.type(schema)
            if len({_split_type(self.split_type), _split_type(type_), "null"}) > 2:  # 7 and 7.0 have two hashes
                raise FieldError(
                    f"split_by reads {self.split_by.text!r}, which is {type_} here and {self.split_type} in the first shard, "
                    f"so that rows of one value would be in both splits. Write it with one type"
                )
        if not self.transform:  # the output of a transform is checked when a block is made
            self.check_made(schema)

    def check_made(self, schema: pa.Schema) -> None:
        """Check that transformed rows of this schema have all columns that tokens need. Raises FieldError: they have not."""
        for role, source in self.fields:
            check_type(role, source, schema, self.kind)
        for role, source in (*self.masks, *([("tools", self.tools)] if self.tools else [])):
            check_type(role, source, schema)
        if self.first:
            self.first.check(schema)
        for column in self.columns:
            if passthrough_type(type_ := column.field.type(schema)) != passthrough_type(column.type):
                raise FieldError(f"column {column.name!r} is {type_}, but {column.type} in the first shard")

    def describe(self) -> str:
        """Describe the recipe in a line, for people."""
        parts = [" + ".join(source.text for _, source in self.fields).replace("\n", "\\n")]
        if self.tokenizer:
            spelled = ", special tokens spelled out" if self.tokenizer.tokenizer.encode_special_tokens else ""
            parts.append(f"tokenizer {self.tokenizer.path.name} ({self.tokenizer.vocab_size:,} ids{spelled})")
        else:
            parts.append("pre-tokenized" + (f", ids below {self.vocab_size:,}" if self.vocab_size else ""))
        if self.kind != "tokens" and not self.chat:
            parts += ["no BOS" if self.bos_id is None else f"BOS {self.bos_id}"]
            parts += ["no EOS" if self.eos_id is None else f"EOS {self.eos_id}"]
        details = {
            "chat template": self.chat and self.chat.digest[:8] + (f" with {self.tools.text}" if self.tools else ""),
            "masked by": ", ".join(source.text for _, source in self.masks),
            "where": self.filter and cut(self.filter.text, SHOWN),
            "transform": self.transform and self.transform.name,
            "with": ", ".join(column.name for column in self.columns),
            "without": ", ".join(self.unused),
        }
        return ", ".join([*parts, *(f"{name} {detail}" for name, detail in details.items() if detail)])


def _columns(sources: Iterable[Field | Filter | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for source in sources if source for name in source.columns))


def _split_type(type_: pa.DataType) -> str:
    """Return one name for types whose equal values have one text in Python, and so one hash."""
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
    return "text" if is_text(type_) else "integer" if pa.types.is_integer(type_) else str(type_)


class Rows:
    """Rows to tokenize, after the filter and the transform; `reasons` say why a row cannot be used, None for a good row."""

    def __init__(self, stored: pa.RecordBatch, recipe: Recipe) -> None:
        self.stored, self.recipe = stored, recipe
        self.reasons: list[str | None] = [None] * stored.num_rows

    def __len__(self) -> int:
        return len(self.reasons)

    def field(self, role: str) -> Field:
        """Return the field of this role."""
        return dict(self.recipe.fields)[role]

    def values(self, source: Field) -> pa.Array:
        """Return the values of a field, shape [len(self)]. Raises FieldError: the rows have no such column."""
        return source.array(self.stored)

    def note(self, row: int, reason: str, of: str = "") -> None:
        """Mark a row as bad, for a reason about column `of`; the first reason stays."""
        self.reasons[row] = self.reasons[row] or as_utf8(f"{of} {reason}" if of else reason)  # the form that is stored

    def note_of(self, column: str) -> Note:
        """Return the function that marks rows as bad because of a column."""
        return partial(self.note, of=column)
