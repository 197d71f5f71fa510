"""The tokenizer: a file of the `tokenizers` library, and texts to token ids with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from penstock_server.problems import DatasetRefused

_PORTION_CHARACTERS = 1 << 20  # tokenized at a time: an encoding takes some hundred bytes a token

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """A `tokenizers` file and what it holds.

    `digest` is the hash of its bytes, `vocab_size` one more than the largest id, added tokens included.
    """

    path: Path
    digest: str
    tokenizer: Tokenizer
    vocab_size: int

    def encode(self, texts: Sequence[str], name: str) -> tuple[Ids, Ids]:
        """The ids of a column's texts, end to end, and how many are each text's; without the tokenizer's special tokens.

        Raises ValueError: the tokenizer fails.
        """
        values, lengths = [], list[int]()
        try:
            for portion in _portions(texts):
                # Not an array a text: that takes the lock from others who encode for twice as long.
                ids = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(portion, add_special_tokens=False)]
                lengths += map(len, ids)
                values.append(np.fromiter(chain.from_iterable(ids), np.int64, sum(map(len, ids))))
        except Exception as error:  # the library raises bare Exception, as for a text that needs an unknown token it has not
            raise self._failure(name, error) from error
        return np.concatenate(values), np.array(lengths, np.int64)

    def encode_marked(
        self, texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]], name: str
    ) -> list[tuple[Ids, Ids]]:
        """Each text's ids, and the lengths of the runs of them that lie outside and inside its spans, in turn.

        Spans are half-open ranges of characters, sorted and disjoint; a token lies where its first character does. Runs are
        an even number, at least two; some may be of length 0. Raises ValueError: the tokenizer fails.
        """
        marked: list[tuple[Ids, Ids]] = []
        try:
            for portion in _portions(texts):
                for encoding in self.tokenizer.encode_batch(portion, add_special_tokens=False):
                    marked.append((np.array(encoding.ids, np.int64), _runs(encoding, spans[len(marked)])))
        except Exception as error:
            raise self._failure(name, error) from error
        return marked

    @property
    def opening(self) -> str | None:
        """The token that the tokenizer, asked to add its special tokens, puts before a text; None for none."""
        try:
            with_special, plain = (self.tokenizer.encode("a", add_special_tokens=special).tokens for special in (True, False))
        except Exception:  # of the library: it has no token for that text
            return None
        return with_special[0] if plain and with_special[1 : len(plain) + 1] == plain else None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _failure(self, name: str, error: Exception) -> ValueError:
        return ValueError(f"the tokenizer {self.path.name} fails on column {name!r}: {error}")


def load_tokenizer(path: Path) -> TokenizerFile:
    """Reads a tokenizer.json. Its own truncation and padding are switched off: the spec decides both.

    Raises DatasetRefused: there is no such file, or it is no tokenizer.
    """
    try:
        found = path.resolve(strict=True)
        return _load(found, found.stat().st_ctime_ns)  # nobody can set it, as an archive sets the mtime
    except OSError as error:
        way_out = "Name a file as the tokenizers library writes it, such as the tokenizer.json in the repository of a model."
        if isinstance(error, PermissionError):
            way_out = "Let the server's user read it."
        raise DatasetRefused(f"the tokenizer {path} cannot be read: {error.strerror}. {way_out}") from error


@lru_cache(maxsize=64)
def _load(path: Path, ctime_ns: int) -> TokenizerFile:  # noqa: ARG001 - a file that changed is another one
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
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    return TokenizerFile(path, blake2b(content, digest_size=16).hexdigest(), tokenizer, vocab_size)


def _portions(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts, in turn, about a million characters at a time."""
    portion: list[str] = []
    length = 0
    for text in texts:
        portion.append(text)
        length += len(text)
        if length >= _PORTION_CHARACTERS:
            yield portion
            portion, length = [], 0
    yield portion


def _runs(encoding: Encoding, spans: Sequence[tuple[int, int]]) -> Ids:
    firsts = np.array([start for start, _ in encoding.offsets], np.int64)
    borders = np.array([border for span in spans for border in span], np.int64)
    # Borders before a token's first character: an odd number of them is inside a span.
    passed = np.searchsorted(borders, firsts, side="right")
    num_runs = (int(passed.max(initial=0)) // 2 + 1) * 2
    return np.bincount(passed, minlength=num_runs)
