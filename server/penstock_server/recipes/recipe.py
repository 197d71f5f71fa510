"""The recipe: how a dataset's rows become tokens. `recipe_file` reads it from a dataset's penstock.toml."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from penstock.text import cut
from penstock_server.files import spelled
from penstock_server.recipes.chat import ChatTemplate
from penstock_server.recipes.column_types import are_told_alike, name_of_travelling
from penstock_server.recipes.fields import Field, FieldError
from penstock_server.recipes.filter_sql import SHOWN
from penstock_server.recipes.filters import Filter, not_empty, not_null
from penstock_server.recipes.fitting import Column, Fields, Kind, check_field, check_tools
from penstock_server.recipes.mask_columns import OF_DOCUMENTS, OF_LOSS, Masks, check_mask
from penstock_server.recipes.roles import FirstShard
from penstock_server.recipes.tokenizer import TokenizerFile
from penstock_server.recipes.transform import Transform

# To be raised where equal recipes come to make other tokens of equal rows: all runs end then, and all rows are tokenized anew.
_READING = 1
_JSON_READING = 1  # likewise where equal values of Parquet's JSON type come to be read otherwise, for recipes that read some
_FILTERING = 3  # likewise where equal filters come to keep other rows, for those that have one

FEATURES = ("tokens", "chosen", "rejected")  # all token lists that a row may become: see `Recipe.features`
DEFAULT_VALIDATION, DEFAULT_BAD_SHARE = 0.005, 0.01  # frozen: with another the rows of every run would be split anew


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recipe:
    """How rows become tokens. Equal identities make equal tokens of equal rows.

    kind, fields  what a row is, and which fields hold it, by their role: tokens, text, prompt, response, messages, chosen
                  and rejected. Rows of ids are of kind "tokens" whatever the roles: a prompt and a response of ids, too
    masks         of pre-tokenized rows: which fields tell what of their ids has loss or padding, and where documents begin,
                  see `mask_columns`
    vocab_size    bounds the ids of pre-tokenized rows; None if nothing is known of them
    bos_id        opens a text or a prompt, None for nothing; pre-tokenized rows that begin with it are left as they are
    eos_id        closes a text or a response, likewise
    chat          renders messages
    tools         the definitions of tools that it is given, if rows have any
    columns       what travels beside the tokens
    reads_json    whether columns that are read are of Parquet's JSON type, or hold it, in the first shard
    first         the columns of the first shard: no other shard may have more that tell what has loss
    unused        columns that tell what has loss, by their names, and are not used. Of ids they are masks; of texts, of which
                  every token has loss, chats or answers; of preference pairs, a prompt of another type than the answers;
                  of chats, tools that their template does not look at; of prompts and responses, the label of KTO's data
    unsaid_bos    the token that the tokenizer itself would open a text with, where penstock.toml does not say bos
    guessed_eos   the tokens of which the first was taken for the EOS, where nothing names one and the tokenizer has several
    filter        which rows are served; None for all
    splits        whether the shards' names give the splits, or a hash does; None: as the names are
    validation    the share of rows that are held out for validation, by the hash of `split_by`, a field, or of the row's place;
                  None: the default of the rule that gives the splits
    split_type    what `split_by` is in the first shard
    max_bad_share more bad rows than this share of those kept are not replaced: the dataset is refused
    """

    kind: Kind
    fields: Fields
    masks: Masks = ()
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

    @property
    def features(self) -> tuple[str, ...]:
        """The token lists that a row becomes."""
        return ("chosen", "rejected") if "chosen" in dict(self.fields) else ("tokens",)

    @property
    def has_turns(self) -> bool:
        """Whether only parts of a row have loss: responses, not prompts."""
        return not dict(self.fields).keys() <= {"tokens", "text"} or self.has_loss_mask

    @property
    def has_prompts(self) -> bool:
        """Whether a row is a prompt and a response to it, or two."""
        return "prompt" in dict(self.fields) and self.chat is None

    @property
    def has_many_turns(self) -> bool:
        """Whether a row may have more than a prompt and the response behind it."""
        return self.chat is not None or self.has_loss_mask

    @property
    def has_loss_mask(self) -> bool:
        """Whether a column of pre-tokenized rows tells which ids have loss. The first of a packed document never is."""
        return any(role in OF_LOSS for role, _ in self.masks) or self.has_documents

    @property
    def has_documents(self) -> bool:
        """Whether a column of pre-tokenized rows tells which documents are packed into each row."""
        return any(role in OF_DOCUMENTS for role, _ in self.masks)

    @property
    def adds_eos_to_chats(self) -> bool:
        """Whether an EOS is put behind chats: not where their template writes it there."""
        if not (self.chat and self.tokenizer) or self.eos_id is None:
            return False
        token = self.tokenizer.tokenizer.id_to_token(self.eos_id)
        return token is None or token not in self.chat.trial.behind + self.chat.trial.tail

    @property
    def token_columns(self) -> tuple[str, ...]:
        """The top-level columns that a row must have values in, since its tokens are made of them."""
        return tuple(dict.fromkeys(column for _, source in self.fields for column in source.columns))

    @property
    def filter_of_missing(self) -> str:
        """The line of penstock.toml that leaves out rows without a value that tokens are made of, or with an empty one.

        "" where no filter can ask: for what lies inside a column, and for what a transform makes.
        """
        if self.transform:
            return ""
        terms: dict[str, None] = {}
        for _, source in self.fields:
            may_be_empty = source.is_template or self.chat
            columns = [path[0] for _, path in source.parts if path and len(path) == 1]
            terms |= dict.fromkeys(not_null(column) if may_be_empty else not_empty(column) for column in columns)
        kept = [f"({self.filter.text})"] if self.filter else []
        return f"filter = {json.dumps(' and '.join([*kept, *terms]), ensure_ascii=False)}" if terms else ""

    def calls_missing(self, reason: str) -> bool:
        """Whether a row is bad because a value is missing, or empty, that its tokens are made of."""
        names = ("", *(f"{source.text} " for _, source in self.fields))
        return reason.startswith(tuple(f"{name}is {what}" for name in names for what in ("null", "empty")))

    @property
    def selecting_columns(self) -> list[str]:
        """The top-level columns, as they are stored, that tell whether the filter keeps a row and of which split it is."""
        by_filter, by_split = (self.filter.columns if self.filter else ()), (self.split_by.columns if self.split_by else ())
        return list(dict.fromkeys([*by_filter, *by_split]))

    @property
    def encoded_columns(self) -> list[str]:
        """The top-level columns that tokens are made of, and those that say how: masks and tools."""
        masks = (name for _, source in self.masks for name in source.columns)
        return list(dict.fromkeys([*self.token_columns, *masks, *(self.tools.columns if self.tools else ())]))

    @property
    def read_columns(self) -> list[str] | None:
        """The top-level columns that are read from a shard; None for all, which a transform may use."""
        if self.transform:
            return None
        travelling = (name for column in self.columns for name in column.field.columns)
        return list(dict.fromkeys([*self.encoded_columns, *travelling, *self.selecting_columns]))

    @property
    def identity(self) -> dict[str, Any]:
        """All that changes a row's tokens or what travels with them; snapshots and cached blocks have their names of it.

        What is not set is left out, so that a setting that comes later renames only what uses it.
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
            "columns": [[column.name, name_of_travelling(column.type)] for column in self.columns],
            "filter": [_FILTERING, self.filter.text] if self.filter else None,
            "transform": self.transform.digest if self.transform else None,
            "split_by": self.split_by.text if self.split_by else None,
            "masks": [[role, source.text] for role, source in self.masks] or None,
            "tools": self.tools.text if self.tools else None,
            "json": _JSON_READING if self.reads_json else None,
        }
        return {key: value for key, value in settings.items() if value is not None}

    def is_like(self, other: Recipe) -> bool:
        """Whether another recipe makes the same of each row: tokens, a split, an error or a replacement."""
        mine, theirs = ((r.identity, r.splits, r.validation, r.on_bad_row, r.max_bad_share) for r in (self, other))
        return mine == theirs

    def check(self, schema: pa.Schema) -> None:
        """Whether a shard of this schema has all that is read. Raises FieldError, FilterError: it has not."""
        for name in self.selecting_columns:
            Field.parse(name, schema)
        if self.filter:
            self.filter.check(schema)
        if self.split_by and self.split_type:
            self._check_split(self.split_by, self.split_type, schema)
        if not self.transform:  # what it makes of the columns is seen when a block is made
            self.check_made(schema)

    def _check_split(self, source: Field, first: pa.DataType, schema: pa.Schema) -> None:
        if not are_told_alike(first, own := source.type(schema)):  # 7 and 7.0 have two hashes
            raise FieldError(
                f"split_by reads {source.text!r}, which is {own} here and {first} in the first shard, so that rows of one "
                f"value would be in both splits. Write it with one type, as penstock import makes of such shards"
            )

    def check_made(self, schema: pa.Schema) -> None:
        """Whether rows of this schema, transformed, have all that tokens are made of. Raises FieldError: they have not."""
        for role, source in self.fields:
            check_field(self.kind, role, source, schema)
        for role, source in self.masks:
            check_mask(role, source, schema)
        if self.tools:
            check_tools(self.tools, schema)
        if self.first:
            self.first.check(schema)
        for column in self.columns:
            if name_of_travelling(own := column.field.type(schema)) != name_of_travelling(column.type):
                raise FieldError(f"column {column.name!r} is {own}, but {column.type} in the first shard")

    def describe(self) -> str:
        """The recipe in a line, for people."""
        parts = [" + ".join(source.text for _, source in self.fields).replace("\n", "\\n")]
        if self.tokenizer:
            split = ", special tokens split" if self.tokenizer.splits_special_tokens else ""
            parts.append(f"tokenizer {spelled(self.tokenizer.path.name)} ({self.tokenizer.vocab_size:,} ids{split})")
        elif self.vocab_size:
            parts.append(f"pre-tokenized, ids below {self.vocab_size:,}")
        else:
            parts.append("pre-tokenized")
        if self.chat:
            parts.append(f"chat template {self.chat.digest[:8]}{f' with {self.tools.text}' if self.tools else ''}")
        elif self.kind != "tokens":
            parts.append("no BOS" if self.bos_id is None else f"BOS {self.bos_id}")
            parts.append("no EOS" if self.eos_id is None else f"EOS {self.eos_id}")
        if self.masks:
            parts.append(f"masked by {', '.join(source.text for _, source in self.masks)}")
        if self.filter:
            parts.append(f"where {cut(self.filter.text, SHOWN)}")
        if self.transform:
            parts.append(f"transform {self.transform.name}")
        if self.columns:
            parts.append(f"with {', '.join(column.name for column in self.columns)}")
        if self.unused:
            parts.append(f"without {', '.join(self.unused)}")
        return ", ".join(parts)
