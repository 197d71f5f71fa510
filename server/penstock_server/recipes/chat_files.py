"""What lies beside a tokenizer: its chat template, its special tokens, and the tokens that are added to it."""

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
    """The chat template of a name beside a tokenizer.json, None for none: the default, or tool_use.

    That is chat_template.jinja, else what tokenizer_config.json has under "chat_template", else what chat_template.json has.
    Others than the default are with it, or in the folder additional_chat_templates.

    `tokenizer_path` is where the tokenizer lies by name: in a folder of links, the template is where the link is.

    Raises TemplateError: a file cannot be read, or has several templates and none of them is the default.
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
    """The chat template of a file that a recipe names: its text, or, of a JSON file, what stands under "chat_template".

    Raises TemplateError: it cannot be read, or has none, or several of which none is the default.
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
    """The chat templates of a file by their names; a single one is the default."""
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
    """The special tokens that the files beside a tokenizer.json name: eos_token and others, of those that are there.

    Raises TemplateError: a file cannot be read.
    """
    config = _read_json(tokenizer_path.with_name("tokenizer_config.json"))
    files = [_read_json(tokenizer_path.with_name("special_tokens_map.json")), config]
    if "added_tokens_decoder" not in config:  # written before tokenizer_config.json had all of them
        files.reverse()
    tokens: dict[str, str] = {}
    extra = (file.get("extra_special_tokens") for file in files)  # by names, or a list of those that have none
    for name, value in (item for each in [*extra, *files] if isinstance(each, dict) for item in each.items()):
        token = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(token, str):
            tokens[name] = token
    if any(file.get("bos_token", "") is None for file in files):  # as transformers writes that there is none
        tokens.setdefault("bos_token", "")
    return tokens


class NamedToken(NamedTuple):
    """A token that a file beside a tokenizer.json adds to it, as `tokenizers.AddedToken` describes it.

    `id` is None where the file gives no id.
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
        """An id and a token of `tokenizers`."""
        flags = (token.special, token.single_word, token.lstrip, token.rstrip, token.normalized)
        return cls(id_, token.content, *flags)

    @property
    def token(self) -> AddedToken:
        """The token as `tokenizers` takes it."""
        return AddedToken(**{name: value for name, value in self._asdict().items() if name != "id"})


class NamedTokens(NamedTuple):
    """The tokens that the files beside a tokenizer.json add to it, in the order in which transformers adds them.

    `restated` replace tokens of the same content; `others` are added only where the tokenizer has no such added token.
    """

    restated: tuple[NamedToken, ...]
    others: tuple[NamedToken, ...]


def load_added_tokens(tokenizer_path: Path) -> NamedTokens:
    """The tokens that transformers' AutoTokenizer adds to a tokenizer.json because the files beside it name them.

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
    """The special tokens that a configuration names: those with a usual name first, then others."""
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
