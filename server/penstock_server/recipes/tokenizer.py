"""Tokenizer: a file of the `tokenizers` library, and encoding of texts with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Encoding, Tokenizer

from penstock_server.files import may_exist, open_regular
from penstock_server.problems import DatasetInvalid, LibraryError, library_errors

TOKEN_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")  # in this order
_FLAGS = ("special", "single_word", "lstrip", "rstrip", "normalized")
_WRITE_IT = (
    "Name a file as the tokenizers library writes it, such as the tokenizer.json in the repository of a model; of others "
    "transformers' AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER) writes one."
)
_MAX_TOKENS_PER_CHARACTER = 8  # more of an invalid one are shown as they are
_PORTION_CHARACTERS = 1 << 17  # at a time: an encoding takes some hundred bytes per token

Ids = npt.NDArray[np.int64]
Marks = npt.NDArray[np.bool_]
_Json = dict[str, Any]
Note = Callable[[int, str], None]  # receives a bad row's number and the reason


@dataclass(frozen=True, slots=True, eq=False)
class TokenizerFile:
    """Tokenizer loaded from a `tokenizers` file.

    path            as named: a symlink may lead to a store without the files beside it
    digest          hash of its bytes, of the tokens that the files beside it add, and of its options
    vocab_size      one more than the largest id, added tokens included
    special_tokens  the texts of special tokens that the files beside it name, such as eos_token
    """

    path: Path
    digest: str
    tokenizer: Tokenizer
    vocab_size: int
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    def encode(self, texts: list[str], note: Note) -> tuple[Ids, Ids]:
        """Return the ids of texts, end to end, and the length of each; without the tokenizer's special tokens.

        A text that the tokenizer fails on has no ids, and `note` is called.
        """
        ids, lengths, _ = self._encoded(self.tokenizer.encode_batch_fast, texts, note)
        return ids, lengths

    def encode_marked(self, texts: list[str], spans: Sequence[Sequence[tuple[int, int]]], note: Note) -> tuple[Ids, Ids, Marks]:
        """Return the same, and whether each token is inside its text's spans.

        Spans are half-open ranges of characters, sorted and disjoint. A token is inside if any of its characters is: after
        "Assistant: " the first token of an answer contains the blank before it.
        """
        ids, lengths, marks = self._encoded(self.tokenizer.encode_batch, texts, note, spans)
        return ids, lengths, np.concatenate([*marks, np.zeros(0, np.bool_)])

    @property
    def opening(self) -> str | None:
        """Return the token that the tokenizer puts before a text when it adds special tokens; None without one."""
        try:
            with library_errors():
                closed, plain = (self.tokenizer.encode("a", add_special_tokens=adds).tokens for adds in (True, False))
        except LibraryError:  # the tokenizer has no token for that text
            return None
        return closed[0] if plain and closed[1 : len(plain) + 1] == plain else None

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        with library_errors():
            return self.tokenizer.decode(ids, skip_special_tokens=False)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token as it continues the text before it; a character of several tokens is at the last."""
        texts, known, start, stop = list[str](), "", 0, 0  # `known` is the text of ids[start:stop], the context
        for end in range(1, len(ids) + 1):
            text = self.decode(ids[start:end])
            if text.endswith("\ufffd") and end - stop < _MAX_TOKENS_PER_CHARACTER and end < len(ids):
                texts.append("")
                continue
            texts.append(text[len(known) :])
            start, stop = stop, end
            known = self.decode(ids[start:stop])
        return texts

    def _encoded(
        self, encode: Callable[..., list[Encoding]], texts: list[str], note: Note, spans: Sequence[Any] = ()
    ) -> tuple[Ids, Ids, list[Marks]]:
        """Encode the texts, about a hundred thousand characters at a time."""

        def encoded(at: slice) -> tuple[Ids, list[int], list[Marks]]:
            portion = texts[at]
            try:
                with library_errors():
                    encodings = encode(portion, add_special_tokens=False)
            except LibraryError:  # the error does not name the text
                portion = [self._encodable(text, at.start + n, note) for n, text in enumerate(portion)]
                encodings = encode(portion, add_special_tokens=False)
            marks = [_is_inside(*pair) for pair in zip(encodings, spans[at], strict=True)] if spans else []
            ids = [encoding.ids for encoding in encodings]
            lengths = list(map(len, ids))
            return np.fromiter(chain.from_iterable(ids), np.int64, sum(lengths)), lengths, marks

        portions, lengths, marks = zip(*map(encoded, _portions(texts)), strict=True)
        return np.concatenate(portions), np.array([*chain.from_iterable(lengths)], np.int64), [*chain.from_iterable(marks)]

    def _encodable(self, text: str, number: int, note: Note) -> str:
        """Return the text, or "" if the tokenizer fails on it: it may lack a token for a character, and an unknown token."""
        try:
            with library_errors():
                self.tokenizer.encode(text, add_special_tokens=False)
        except LibraryError as error:
            note(number, f"is a text that the tokenizer fails on: {error}")
            return ""
        return text


def load_tokenizer(path: Path, *, split_special_tokens: bool = False) -> TokenizerFile:
    """Load a tokenizer.json with the tokens that files beside it add, without its truncation, padding and dropout.

    With `split_special_tokens` a text that spells a special token becomes plain tokens, not that one.

    Raises DatasetInvalid: the file does not exist, is not a tokenizer, or tokens cannot be added to it.
    """
    beside = tuple(read_beside(path.with_name(name)) if may_exist(path.with_name(name)) else "" for name in TOKEN_FILES)
    try:
        # Use the ctime: an archive can set the mtime, but no program can set the ctime.
        resolved = path.resolve(strict=True)
        return _load(path, resolved, resolved.stat().st_ctime_ns, split_special_tokens, beside)
    except OSError as error:
        remedy = _WRITE_IT if not isinstance(error, PermissionError) else "Let the server's user read it."
        raise DatasetInvalid(f"the tokenizer {path} cannot be read: {error.strerror}. {remedy}") from error


@lru_cache(maxsize=64)
def _load(
    path: Path, resolved: Path, _ctime_ns: int, split_special_tokens: bool, beside: tuple[str, ...]
) -> TokenizerFile:  # a file with another ctime is another tokenizer
    with open_regular(resolved) as file:
        content = file.read()
    try:
        with library_errors():
            tokenizer = Tokenizer.from_buffer(content)
    except LibraryError as error:
        raise DatasetInvalid(f"{path} is not a tokenizer: {error}. {_WRITE_IT}") from error
    if not tokenizer.get_vocab_size():
        raise DatasetInvalid(f"{path} is a tokenizer with an empty vocabulary: it was saved before it was trained.")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = split_special_tokens
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    before = _added_tokens(tokenizer)
    config, named, more = (_parsed(text, path.with_name(name)) for text, name in zip(beside, TOKEN_FILES, strict=True))
    _add_tokens(tokenizer, path, config, named, more)
    digest = blake2b(content, digest_size=16, person=b"special split" if split_special_tokens else b"")
    if added := sorted(_added_tokens(tokenizer) - before):  # otherwise the digest stays that of the file alone
        digest.update(json.dumps(added).encode())
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    return TokenizerFile(path, digest.hexdigest(), tokenizer, vocab_size, _named_tokens(config, named))


def _add_tokens(tokenizer: Tokenizer, path: Path, config: _Json, named: _Json, more: _Json) -> None:
    """Add the tokens that transformers' AutoTokenizer adds to a tokenizer.json because the files beside it name them.

    Those are in added_tokens_decoder of tokenizer_config.json. Older files have none: there special_tokens_map.json and
    added_tokens.json count as well. Special tokens, such as eos_token, are added too.
    """
    decoder = config.get("added_tokens_decoder")
    replacing, others = list[AddedToken](), list[AddedToken]()
    try:
        special = _special_tokens(config if decoder is not None else config | named)
        if decoder is not None:
            ids = {token["content"]: int(id_) for id_, token in decoder.items()}
            replacing = [AddedToken(**decoder[id_]) for id_ in sorted(decoder, key=int)]
        else:
            ids = {content: int(id_) for content, id_ in more.items()}
            is_special = [(content, content in special) for content in sorted(ids, key=lambda content: ids[content])]
            others = [AddedToken(content, special=special, normalized=not special) for content, special in is_special]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise DatasetInvalid(
            f"the files beside {path} add tokens in a form that transformers does not write: {error}. Save them again with "
            f"save_pretrained, or remove what cannot be read."
        ) from error
    before = {_fields(token) for token in tokenizer.get_added_tokens_decoder().values()}
    replacing = [token for token in replacing if _fields(token) not in before]
    for token in replacing:
        token.special = token.special or token.content in special
    present = {content for content, *_ in before} | {token.content for token in replacing}
    tokenizer.add_tokens([*replacing, *(token for token in (*others, *special.values()) if token.content not in present)])
    for content, id_ in ids.items():
        if (actual := tokenizer.token_to_id(content)) != id_:
            raise DatasetInvalid(
                f"the files beside {path} give the token {content!r} the id {id_:,}, but added to this tokenizer it has the id "
                f"{actual:,}. Save all of these files together with transformers' save_pretrained, or correct the ids."
            )


def _special_tokens(config: dict[str, Any]) -> dict[str, AddedToken]:
    """Return the special tokens that a configuration names, by their text: those with a usual name first, then others."""
    values = [config.get(name) for name in _SPECIAL]
    values += [value for name, value in config.items() if name.endswith("_token") and name not in _SPECIAL]
    for name in ("extra_special_tokens", "additional_special_tokens"):
        extra = config.get(name) or ()
        values += extra.values() if isinstance(extra, dict) else extra
    tokens: dict[str, AddedToken] = {}
    for value in values:
        given = {"content": value} if isinstance(value, str) else value
        if isinstance(given, dict) and given.get("content"):
            flags = {name: flag for name, flag in given.items() if name in _FLAGS}
            tokens.setdefault(given["content"], AddedToken(given["content"], **{**flags, "special": True}))
    return tokens


def _added_tokens(tokenizer: Tokenizer) -> set[tuple[Any, ...]]:
    """Return the id, the text and the flags of each added token."""
    return {(id_, *_fields(token)) for id_, token in tokenizer.get_added_tokens_decoder().items()}


def _fields(token: AddedToken) -> tuple[Any, ...]:
    return (token.content, *(getattr(token, name) for name in _FLAGS))


def _named_tokens(config: _Json, named: _Json) -> dict[str, str]:
    """Return the texts of special tokens by name; in older files tokenizer_config.json does not have all of them."""
    files = [named, config] if "added_tokens_decoder" in config else [config, named]
    extra = (file.get("extra_special_tokens") for file in files)  # a mapping by name, or a list of tokens without names
    tokens: dict[str, str] = {}
    for name, value in (item for each in [*extra, *files] if isinstance(each, dict) for item in each.items()):
        token = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(token, str):
            tokens[name] = token
    if any(file.get("bos_token", "") is None for file in files):  # transformers writes null for no BOS
        tokens.setdefault("bos_token", "")
    return tokens


def read_json_beside(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file beside a tokenizer; {} without the file. Raises DatasetInvalid: it cannot be read."""
    return _parsed(read_beside(path), path) if may_exist(path) else {}


def read_beside(path: Path) -> str:
    """Return the text of a file beside a tokenizer. Raises DatasetInvalid: it cannot be read."""
    try:
        with TextIOWrapper(open_regular(path), "utf-8-sig") as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise DatasetInvalid(f"{path} cannot be read: {error}.") from error


def _parsed(text: str, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise DatasetInvalid(f"{path} cannot be read: {error}.") from error
    return content if isinstance(content, dict) else {}


def _portions(texts: list[str]) -> Iterator[slice]:
    """Yield slices of up to _PORTION_CHARACTERS, or of one longer text; at least one slice."""
    first = length = 0
    for number, text in enumerate(texts, start=1):
        length += len(text)
        if length >= _PORTION_CHARACTERS:
            yield slice(first, number)
            first, length = number, 0
    if first < len(texts) or not first:
        yield slice(first, len(texts))


def _is_inside(encoding: Encoding, spans: Sequence[tuple[int, int]]) -> Marks:
    firsts, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    borders = np.array([border for span in spans for border in span], np.int64)
    # Number of borders before a token's first character: odd means inside a span.
    passed = np.searchsorted(borders, firsts, side="right")
    begun = np.searchsorted(borders, stops, side="left")
    passed += (passed % 2 == 0) & (begun > passed)
    # A token without characters, such as a trimmed blank, is inside if the span is on both sides.
    passed -= (passed % 2 == 1) & (firsts == stops) & (begun % 2 == 0)
    inside: Marks = passed % 2 == 1
    return inside
