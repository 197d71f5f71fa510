r"""A dataset's penstock.toml: what it may say. Without the file the columns' names decide.

text = "content"                   # a column, a nested field "meta.body", or a template "{title}\n\n{body}"
prompt = "question"                # or prompt and response, joined as they are
response = "answer"
messages = "conversation"          # or a chat: a list of role and content, rendered with the tokenizer's chat template
chosen = "good"                    # or a preference pair: text or chats, with or without a prompt
rejected = "bad"
tokens = "input_ids"               # or token ids

tokenizer = "../tokenizer.json"    # relative to the folder
split_special_tokens = true        # a text that spells a special token becomes plain tokens; default: false, that token
chat_template = "chat.jinja"       # default: the one beside the tokenizer
tools = "functions"                # what its template is given as tools: lists, or JSON; false for none. Default: tools
eos = "<|endoftext|>"              # a token or an id; false for none. Closes a text or a response
bos = "<s>"                        # a token or an id; default: none. Opens a text or a prompt
pad = "<pad>"                      # a token or an id; padding is masked, so it matters to people only
labels = "labels"                  # of token ids: -100 where they have no loss; not shifted. Default: such a column
loss_mask = "completion_mask"      # or 0 where they have no loss
attention_mask = "attention_mask"  # 0 at padding, which is left out
seq_lengths = "seq_lengths"        # the lengths of the documents that are packed into a row; default: such a column
position_ids = "position_ids"      # or the position of each id in its document. Any of the five may be false for none
vocab_size = 50257                 # of pre-tokenized data: ids must be below it
columns = ["score", "meta.url"]    # travel with the tokens of their row
filter = "lang = 'en' and score > 0.5"
transform = "clean:strip_html"     # a function over record batches, of clean.py in the folder or of a module
splits = "files"                   # train, validation and test by the shards' names, or "hash". Default: files, if names differ
validation = 0.005                 # the share of rows in split=validation; with splits = "files" of train shards, default 0
split_by = "document"              # rows of one value stay in one split; default: each row by its place
on_bad_row = "replace"          # or "fail"
max_bad_share = 0.01               # of the rows kept; with more bad ones the dataset is refused
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.numbers import is_whole
from penstock.text import perhaps
from penstock_server.files import may_be_there, read_text
from penstock_server.problems import DatasetInvalid
from penstock_server.recipes.mask_columns import NAMES

FILE_NAME = "penstock.toml"
ROLES = ("tokens", "text", "prompt", "response", "messages", "chosen", "rejected")  # roles of fields
ANSWERS = ("response", "completion")  # columns that may hold the answer to a prompt


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def _is_size(value: object) -> bool:
    return is_whole(value) and 1 <= value <= 2**32


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value)) and len(set(value)) == len(value)


_KEYS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(ROLES, (_is_text, "a text")),
    **dict.fromkeys(("tokenizer", "chat_template", "filter", "transform", "split_by"), (_is_text, "a text")),
    "split_special_tokens": (lambda value: isinstance(value, bool), "true or false"),
    **dict.fromkeys(("tools", *NAMES), (lambda value: value is False or _is_text(value), "a text, or false")),
    **{name: (lambda _: True, "") for name in ("eos", "bos", "pad")},  # looked up in the vocabulary later
    "vocab_size": (_is_size, f"a whole number from 1 to {2**32:,}"),
    "columns": (_is_names, "a list of different names"),
    "splits": (lambda value: value in ("files", "hash"), '"files" or "hash"'),
    "validation": (_is_share, "a share from 0 to below 1"),
    "on_bad_row": (lambda value: value in ("fail", "replace"), '"fail" or "replace"'),
    "max_bad_share": (_is_share, "a share from 0 to below 1"),
}


def read_declaration(folder: Path) -> dict[str, Any]:
    """Return the validated values of penstock.toml; empty if there is no such file. Raises DatasetInvalid."""
    path = folder / FILE_NAME
    if not may_be_there(path):  # a broken symlink is a missing recipe: without it other rows would be served
        return {}
    given = read_toml(path)
    unknown = [key for key in given if key not in _KEYS]
    problems = [f"unknown key {key!r}{perhaps(key, _KEYS)}" for key in unknown]
    problems += [
        f"{key} must be {_KEYS[key][1]}, not {value!r}"
        for key, value in given.items()
        if key in _KEYS and not _KEYS[key][0](value)
    ]
    if "max_bad_share" in given and "on_bad_row" not in given:
        problems.append('max_bad_share limits what is replaced, but nothing is: set on_bad_row = "replace", or remove it')
    if "mix" in unknown:
        problems.append("a mixture is declared in a folder of its own, without shards")
    if problems:
        known = f" Known keys: {', '.join(_KEYS)}; and mix, by itself." if unknown else ""
        raise DatasetInvalid(f"{path}: {'; '.join(problems)}.{known}")
    return given


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file. Raises DatasetInvalid: it cannot be read, or is not TOML."""
    try:
        return tomllib.loads(read_text(path, "utf-8-sig"))  # editors on Windows write a byte order mark
    except (OSError, ValueError, RecursionError) as error:
        quotes = " In TOML, texts need quotes." if str(error).startswith("Invalid value") else ""
        raise DatasetInvalid(f"{path} cannot be read: {error}.{quotes}") from error
