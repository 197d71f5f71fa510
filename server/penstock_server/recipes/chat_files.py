"""Files beside a tokenizer: its chat template, its special tokens, and the tokens that they add to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken

from penstock_server.files import may_be_there, read_text
from penstock_server.recipes.messages import TemplateError

_JSON_TEMPLATE = "chat_template.json"  # as processors of several modalities write it
_OTHERS = "additional_chat_templates"  # a folder, as transformers writes them since its version 5
_ADDING = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")  # in this order
FILES_BESIDE_TOKENIZER = ("chat_template.jinja", f"{_OTHERS}/tool_use.jinja", _JSON_TEMPLATE, *_ADDING)


def load_chat_template(tokenizer_path: Path, name: str = "default") -> str | None:
    """Return the chat template of this name, the default or tool_use, beside a tokenizer.json; None without one.

    The first of these counts: chat_template.jinja, "chat_template" in tokenizer_config.json, chat_template.json.
    Other templates than the default are in the same file, or in the folder additional_chat_templates.

    `tokenizer_path` is not resolved: in a folder of symlinks, the template is beside the symlink.

    Raises TemplateError: a file cannot be read, or has several templates without a default.
    """
    default, others = tokenizer_path.with_name("chat_template.jinja"), tokenizer_path.with_name(_OTHERS)
    path = default if name == "default" else others / f"{name}.jinja"
    if may_be_there(path):
        return _read(path)
    if may_be_there(default):
        return None
    of_json = (tokenizer_path.with_name(file) for file in ("tokenizer_config.json", _JSON_TEMPLATE))
    found = (_templates_in(_read_json(path), path) for path in of_json)
    return next((templates.get(name) for templates in found if templates), None)


def read_chat_template(path: Path, name: str = "default") -> str | None:
    """Return the chat template of a file that a recipe names: its text, or the "chat_template" of a JSON file.

    Raises TemplateError: it cannot be read, or has no template, or several without a default.
    """
    text = _read(path)
    try:
        content = json.loads(text)
    except ValueError:
        return text if name == "default" else None
    found = _templates_in(content, path) if isinstance(content, dict) else {}
    if "default" not in found:
        raise TemplateError(f'{path} is JSON without a text under "chat_template". Name a file of the template itself.')
    return found.get(name)


def _templates_in(content: dict[str, Any], path: Path) -> dict[str, str]:
    """Return the chat templates of a file by name; a single one is the default."""
    given = content.get("chat_template")
    if isinstance(given, list):
        given = {str(each.get("name")): each.get("template") for each in given if isinstance(each, dict)}
    named = given if isinstance(given, dict) else {"default": given}
    if named and "default" not in named:
        raise TemplateError(
            f"{path} has the chat templates {', '.join(map(str, named))}, and none of them is called default. Put the one "
            f"to use beside it as chat_template.jinja."
        )
    return {name: text for name, text in named.items() if isinstance(text, str)}


def load_special_tokens(tokenizer_path: Path) -> dict[str, str]:
    """Return the special tokens that the files beside a tokenizer.json name, such as eos_token.

    Raises TemplateError: a file cannot be read.
    """
    config = _read_json(tokenizer_path.with_name("tokenizer_config.json"))
    files = [_read_json(tokenizer_path.with_name("special_tokens_map.json")), config]
    if "added_tokens_decoder" not in config:  # older files: tokenizer_config.json did not have all tokens
        files.reverse()
    tokens: dict[str, str] = {}
    extra = (file.get("extra_special_tokens") for file in files)  # a mapping by name, or a list of tokens without names
    for name, value in (item for each in [*extra, *files] if isinstance(each, dict) for item in each.items()):
        token = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(token, str):
            tokens[name] = token
    if any(file.get("bos_token", "") is None for file in files):  # transformers writes null for no BOS
        tokens.setdefault("bos_token", "")
    return tokens


class NamedToken(NamedTuple):
    """Token that a file beside a tokenizer.json adds to it, with the fields of `tokenizers.AddedToken`.

    `id`: None without an id in the file.
    """

    id: int | None
    content: str
    special: bool
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool

    @classmethod
    def of(cls, id_: int | None, token: AddedToken) -> NamedToken:
        """Make one from an id and a token of `tokenizers`."""
        flags = (token.special, token.single_word, token.lstrip, token.rstrip, token.normalized)
        return cls(id_, token.content, *flags)

    @property
    def token(self) -> AddedToken:
        """Return the token as `tokenizers` takes it."""
        return AddedToken(**{name: value for name, value in self._asdict().items() if name != "id"})


class NamedTokens(NamedTuple):
    """Tokens that the files beside a tokenizer.json add to it, in the order that transformers adds them.

    `restated` replace tokens of the same content; `others` are added only if the tokenizer has no such added token.
    """

    restated: tuple[NamedToken, ...]
    others: tuple[NamedToken, ...]


def load_added_tokens(tokenizer_path: Path) -> NamedTokens:
    """Return the tokens that transformers' AutoTokenizer adds to a tokenizer.json because the files beside it name them.

    Those are in added_tokens_decoder of tokenizer_config.json. Older files have none: there special_tokens_map.json and
    added_tokens.json count as well. Special tokens, such as eos_token, are added too.

    Raises TemplateError: a file cannot be read.
    """
    config, named, added = (_read_json(tokenizer_path.with_name(name)) for name in _ADDING)
    try:
        if (decoder := config.get("added_tokens_decoder")) is not None:
            restated = sorted(NamedToken.of(int(id_), AddedToken(**token)) for id_, token in decoder.items())
            return NamedTokens(tuple(restated), _special_tokens(config))
        special = _special_tokens(config | named)
        names = {token.content for token in special}
        by_id = sorted((int(id_), content) for content, id_ in added.items())
        stated = [
            NamedToken.of(id_, AddedToken(content, special=content in names, normalized=content not in names))
            for id_, content in by_id
        ]
        return NamedTokens((), (*stated, *special))
    except (AttributeError, TypeError, ValueError) as error:
        raise TemplateError(
            f"the files beside {tokenizer_path} add tokens in a form that transformers does not write: {error}. Save them "
            f"again with save_pretrained, or remove what cannot be read."
        ) from error


def _special_tokens(config: dict[str, Any]) -> tuple[NamedToken, ...]:
    """Return the special tokens that a configuration names: those with a usual name first, then others."""
    values = [config.get(name) for name in _SPECIAL]
    values += [value for name, value in config.items() if name.endswith("_token") and name not in _SPECIAL]
    for name in ("extra_special_tokens", "additional_special_tokens"):
        extra = config.get(name) or ()
        values += extra.values() if isinstance(extra, dict) else extra
    found: dict[str, NamedToken] = {}
    for value in values:
        given = {"content": value} if isinstance(value, str) else value
        if isinstance(given, dict) and given.get("content"):
            flags = {name: flag for name, flag in given.items() if name in NamedToken._fields}
            token = NamedToken.of(None, AddedToken(**{**flags, "special": True}))
            found.setdefault(token.content, token)
    return tuple(found.values())


def _read(path: Path) -> str:
    try:
        return read_text(path, "utf-8-sig")
    except (OSError, ValueError) as error:
        raise TemplateError(f"{path} cannot be read: {error}.") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not may_be_there(path):
        return {}
    try:
        content = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise TemplateError(f"{path} cannot be read: {error}.") from error
    return content if isinstance(content, dict) else {}
