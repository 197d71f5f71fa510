"""Tokenizer: a file of the `tokenizers` library, and encoding of texts with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from penstock_server.files import read_file, spelled
from penstock_server.library_errors import LibraryError, library_errors
from penstock_server.machine import num_cores
from penstock_server.map_ordered import map_ordered
from penstock_server.problems import DatasetInvalid
from penstock_server.recipes.chat_files import NamedToken, NamedTokens, load_added_tokens
from penstock_server.recipes.messages import TemplateError

_PORTION_CHARACTERS = 1 << 17  # per thread at a time: an encoding takes some hundred bytes per token

Ids = npt.NDArray[np.int64]
Note = Callable[[int, str], None]  # receives a bad row's number and the reason
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """Tokenizer loaded from a `tokenizers` file.

    `digest` is the hash of its bytes, of the tokens that the files beside it add, and of its options. `vocab_size` is one
    more than the largest id, added tokens included.
    """

    path: Path
    digest: str
    tokenizer: Tokenizer
    vocab_size: int

    def encode(self, texts: list[str], note: Note) -> tuple[Ids, Ids]:
        """Return the ids of texts, end to end, and the length of each; without the tokenizer's special tokens.

        A text that the tokenizer fails on has no ids, and `note` is called. Raises ValueError: it fails on any text.
        """

        def ids_of(own: list[str], _: slice) -> tuple[Ids, list[int]]:
            # Not an array per text: that would hold the GIL, which other encoding threads need, twice as long.
            ids = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(own, add_special_tokens=False)]
            lengths = list(map(len, ids))
            return np.fromiter(chain.from_iterable(ids), np.int64, sum(lengths)), lengths

        found = self._by_portion(ids_of, texts, note)
        lengths = chain.from_iterable(lengths for _, lengths in found)
        return np.concatenate([values for values, _ in found]), np.fromiter(lengths, np.int64, len(texts))

    def encode_marked(self, texts: list[str], spans: Sequence[Sequence[tuple[int, int]]], note: Note) -> list[tuple[Ids, Ids]]:
        """Return each text's ids, and the lengths of their runs outside and inside its spans, alternating.

        Spans are half-open ranges of characters, sorted and disjoint. A token is inside if any of its characters is: after
        "Assistant: " the first token of an answer contains the blank before it. Runs are an even number, at least two;
        some may have length 0. A text that the tokenizer fails on has no ids, and `note` is called.
        Raises ValueError: it fails on any text.
        """

        def marked(own: list[str], at: slice) -> list[tuple[Ids, Ids]]:
            encodings = self.tokenizer.encode_batch(own, add_special_tokens=False)
            return [(np.array(e.ids, np.int64), _runs(e, inside)) for e, inside in zip(encodings, spans[at], strict=True)]

        return list(chain.from_iterable(self._by_portion(marked, texts, note)))

    @property
    def splits_special_tokens(self) -> bool:
        """Return whether a text that spells a special token becomes plain tokens, not that one."""
        return self.tokenizer.encode_special_tokens

    def spelled(self, text: str) -> list[str]:
        """Return the special tokens that a text spells."""
        special = (token.content for token in self.tokenizer.get_added_tokens_decoder().values() if token.special)
        return [content for content in special if content in text]

    @property
    def opening(self) -> str | None:
        """Return the token that the tokenizer puts before a text when it adds special tokens; None without one."""
        with_special, plain = self._example
        return with_special[0] if plain and with_special[1 : len(plain) + 1] == plain else None

    @property
    def closing(self) -> str | None:
        """Return the token that the tokenizer puts after a text when it adds special tokens; None without one."""
        with_special, plain = self._example
        return with_special[-1] if plain and with_special[-len(plain) - 1 : -1] == plain else None

    @property
    def _example(self) -> tuple[list[str], list[str]]:
        """Return the tokens of a sample text, with the special tokens that the tokenizer adds, and without."""
        try:
            with library_errors():
                encoded = [self.tokenizer.encode("a", add_special_tokens=special).tokens for special in (True, False)]
        except LibraryError:  # the tokenizer has no token for that text
            return [], []
        with_special, plain = encoded
        return with_special, plain

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        with library_errors():
            return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _by_portion(self, make: Callable[[list[str], slice], _Made], texts: list[str], note: Note) -> list[_Made]:
        """Process the texts on all cores, about a hundred thousand characters at a time.

        A text that the tokenizer fails on counts as empty.
        """

        def made(at: slice) -> _Made:
            own = texts[at]
            try:
                with library_errors():
                    return make(own, at)
            except LibraryError:  # the error does not name the text
                own = [self._encodable(text, at.start + n, note) for n, text in enumerate(own)]
            try:
                with library_errors():
                    return make(own, at)
            except LibraryError as error:
                raise ValueError(f"the tokenizer {spelled(self.path.name)} fails: {error}") from error

        return list(map_ordered(_threads(), num_cores(), made, _portions(texts)))

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
    """Load a tokenizer.json, without its truncation and padding: the spec decides both.

    Its dropout is also off: with it a text has other tokens each time. Tokens that the files beside it add are added.
    With `split_special_tokens` a text that spells a special token becomes plain tokens, not that one.

    Raises DatasetInvalid: the file does not exist, is not a tokenizer, or tokens cannot be added to it.
    """
    try:
        # If `path` is a symlink, as in the hub's cache, these files are beside the symlink.
        named = load_added_tokens(path)
        found = path.resolve(strict=True)
        # Use the ctime: an archive can set the mtime, but no program can set the ctime.
        loaded = _load(found, found.stat().st_ctime_ns, split_special_tokens, named)
    except TemplateError as error:
        raise DatasetInvalid(str(error)) from error
    except OSError as error:
        remedy = (
            "Name a file as the tokenizers library writes it, such as the tokenizer.json in the repository of a model; of "
            "others transformers' AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER) writes one."
        )
        if isinstance(error, PermissionError):
            remedy = "Let the server's user read it."
        raise DatasetInvalid(f"the tokenizer {path} cannot be read: {error.strerror}. {remedy}") from error
    for token in (*named.restated, *named.others):
        if token.id not in (None, own := loaded.tokenizer.token_to_id(token.content)):
            raise DatasetInvalid(
                f"the files beside {path} give the token {token.content!r} the id {token.id:,}, but added to this tokenizer it "
                f"has the id {own:,}: ids are given without gaps, and a token of the tokenizer keeps its own. Save all of "
                f"these files together with transformers' save_pretrained, or correct the ids."
            )
    return loaded


@lru_cache(maxsize=64)
def _load(
    path: Path,
    ctime_ns: int,  # noqa: ARG001 - part of the cache key: a changed file is another tokenizer
    split_special_tokens: bool,
    named: NamedTokens,
) -> TokenizerFile:
    content = read_file(path)
    try:
        with library_errors():
            tokenizer = Tokenizer.from_buffer(content)
    except LibraryError as error:
        raise DatasetInvalid(
            f"{path} is not a tokenizer: {error}. A tokenizer.json is what Tokenizer.save of the `tokenizers` library writes; "
            f"of other files transformers' AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER) makes one."
        ) from error
    if not tokenizer.get_vocab_size():
        raise DatasetInvalid(f"{path} is a tokenizer with an empty vocabulary: it was saved before it was trained.")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = split_special_tokens
    if getattr(tokenizer.model, "dropout", None):  # a text would have other tokens each time
        tokenizer.model.dropout = None
    added = _add(tokenizer, named)
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    person = b"special split" if split_special_tokens else b""
    digest = blake2b(content, digest_size=16, person=person)
    if added:  # otherwise the digest stays that of the file alone
        digest.update(json.dumps(added).encode())
    return TokenizerFile(path, digest.hexdigest(), tokenizer, vocab_size)


def _add(tokenizer: Tokenizer, named: NamedTokens) -> list[NamedToken]:
    """Add tokens as transformers' AutoTokenizer does; return those that are new or changed, with their ids."""
    before = _added_tokens(tokenizer)
    known, contents = {token[1:] for token in before}, {token.content for token in before}
    wanted = [token for token in named.restated if token[1:] not in known]
    contents |= {token.content for token in wanted}
    special = {token.content for token in named.others if token.special}
    wanted = [token._replace(special=token.special or token.content in special) for token in wanted]
    wanted += [token for token in named.others if token.content not in contents]
    tokenizer.add_tokens([token.token for token in wanted])
    return sorted(_added_tokens(tokenizer) - before)


def _added_tokens(tokenizer: Tokenizer) -> set[NamedToken]:
    return {NamedToken.of(id_, token) for id_, token in tokenizer.get_added_tokens_decoder().items()}


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_cores(), thread_name_prefix="penstock-tokenizer")


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


def _runs(encoding: Encoding, spans: Sequence[tuple[int, int]]) -> Ids:
    firsts, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    borders = np.array([border for span in spans for border in span], np.int64)
    # Number of borders before a token's first character: odd means inside a span.
    passed = np.searchsorted(borders, firsts, side="right")
    begun = np.searchsorted(borders, stops, side="left")
    passed += (passed % 2 == 0) & (begun > passed)
    # A token without characters, such as a trimmed blank, is inside if the span is on both sides.
    passed -= (passed % 2 == 1) & (firsts == stops) & (begun % 2 == 0)
    num_runs = (int(passed.max(initial=0)) // 2 + 1) * 2
    return np.bincount(passed, minlength=num_runs)
