"""Special tokens of a recipe: from penstock.toml, otherwise from the files beside the tokenizer, otherwise the usual ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeGuard

from penstock.numbers import is_whole
from penstock_server.problems import DatasetInvalid
from penstock_server.recipes.chat_files import load_special_tokens
from penstock_server.recipes.declaration import FILE_NAME
from penstock_server.recipes.tokenizer import TokenizerFile

_EOS_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "[EOS]", "[SEP]")
_PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>")


class SpecialTokens:
    """Tokens that open, close and pad the rows of a dataset folder; `given` is its declaration.

    `path` is the tokenizer's, unresolved: a symlink may lead to a store without files beside it. Without a tokenizer
    the rows are token ids, below `vocab_size` if that is known.

    guessed_eos  candidates for the EOS in the tokenizer, if no file names it; the first of several is taken

    Raises DatasetInvalid: a named token is not in the vocabulary, or the token is unknown.
    Raises TemplateError: a file beside the tokenizer cannot be read.
    """

    def __init__(
        self, folder: Path, given: dict[str, Any], path: Path | None, tokenizer: TokenizerFile | None, vocab_size: int | None
    ) -> None:
        self._folder, self._given, self._vocab_size = folder, given, vocab_size
        self._path, self._tokenizer = path, tokenizer
        self.guessed_eos: tuple[str, ...] = ()

    def bos_id(self) -> int | None:
        """Return the id that opens a text, a prompt or a row of ids; None for nothing."""
        return self._declared("bos") if self._given.get("bos", False) is not False else None

    def eos_id(self, *, is_closed: bool) -> int | None:
        """Return the id that closes a text, a response or a row of ids; None if rows are closed already, or eos is false."""
        if "eos" in self._given:
            return None if self._given["eos"] is False else self._declared("eos")
        if is_closed:
            return None
        named = load_special_tokens(self._path).get("eos_token") if self._path else None
        found = self._id_of(named or self._usual_eos())
        if found is None:
            sought = named or f"usual end-of-text token ({', '.join(_EOS_NAMES)})"
            raise DatasetInvalid(
                f"{self._folder}: the tokenizer has no {sought}. Name its "
                f'own in {self._folder / FILE_NAME}: eos = "<the token>" or its id, or eos = false for none.'
            )
        return found

    def pad_id(self, eos_id: int | None) -> int:
        """Return the id of padding; padding is masked in any case."""
        if "pad" in self._given:
            return self._declared("pad")
        usual = next((found for name in _PAD_NAMES if (found := self._id_of(name)) is not None), eos_id)
        return 0 if usual is None else usual

    def of_template(self, template: str) -> dict[str, str]:
        """Return the texts of the special tokens that a chat template may write, by name, such as `eos_token`."""
        assert self._path  # only rows of token ids have no tokenizer
        tokens = load_special_tokens(self._path)
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
            f'or opened. Name it in tokenizer_config.json beside {self._path}, as {{"{name}": "..."}}, or in '
            f'{self._folder / FILE_NAME}: {key} = "<the token>".'
        )

    def _usual_eos(self) -> str | None:
        """Return the first of the usual end-of-text tokens in the tokenizer; None without one."""
        found = [name for name in _EOS_NAMES if self._id_of(name) is not None]
        self.guessed_eos = tuple(found) if len(found) > 1 else ()
        return found[0] if found else None

    def _declared(self, key: str) -> int:
        """Return the id of a token declared by its id or its text."""
        token, size = self._given[key], self._vocab_size or 2**32
        if _is_id(token) and token < size:
            return token
        if isinstance(token, str) and (found := self._id_of(token)) is not None:
            return found
        if isinstance(token, str) and self._tokenizer is None:
            raise DatasetInvalid(
                f"{self._folder / FILE_NAME}: {key} = {token!r} is a text, but rows are token ids: there is no tokenizer to "
                f"look it up in. Give the id."
            )
        raise DatasetInvalid(
            f"{self._folder / FILE_NAME}: {key} = {token!r} is not in the vocabulary of {size:,} ids. Name a token that is in "
            f"it, by its text or id, or leave {key} out."
        )

    def _id_of(self, token: str | None) -> int | None:
        return self._tokenizer.tokenizer.token_to_id(token) if self._tokenizer and token else None


def _is_id(value: object) -> TypeGuard[int]:
    return is_whole(value) and 0 <= value < 2**32
