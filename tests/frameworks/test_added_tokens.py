"""Tokens that the files beside a tokenizer.json add have the ids that transformers' AutoTokenizer gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock_server.recipes.tokenizer import load_tokenizer
from support.corpora import EOS, none_is_bad, write_tokenizer

LIBRARY = "transformers"
TEXTS = [
    "the fox<|sep|>jumps <think> over",
    "a <|sep|> b<think>c",
    "<s>the</s> <|endoftext|>",
    "Fox <mask> <|image|>",
    "quickly quick",
]


def token(content: str, **flags: bool) -> dict[str, Any]:
    return {
        "content": content,
        "special": True,
        **dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False),
        **flags,
    }


DECODERS: list[list[dict[str, Any]]] = [
    [],
    [token("<|sep|>"), token("<think>", special=False)],
    [token("<think>", special=False, normalized=True), token("<|sep|>", lstrip=True, rstrip=True)],
    [token("quick", special=False, single_word=True), token("</s>"), token("<mask>", lstrip=True)],
]
NAMED: list[dict[str, Any]] = [
    {},
    {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "mask_token": "<mask>"},
    {"eos_token": EOS, "additional_special_tokens": ["<|sep|>", "<think>"]},
    {"eos_token": "</s>", "extra_special_tokens": {"image_token": "<|image|>"}},
]


def written(folder: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


def compared(folder: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(folder / "tokenizer.json"), AutoTokenizer.from_pretrained(str(folder))
    assert ours.vocab_size == len(theirs)
    ids, lengths = ours.encode(TEXTS, none_is_bad)
    expected = theirs(TEXTS, add_special_tokens=False)["input_ids"]
    assert lengths.tolist() == [len(row) for row in expected]
    assert ids.tolist() == [own for row in expected for own in row]


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("named", NAMED)
def test_tokens_of_the_configuration_are_those_of_transformers(
    tmp_path: Path, decoder: list[dict[str, Any]], named: dict[str, Any]
) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(path)
    tokens = {"0": token(EOS, lstrip=len(named) % 2 == 1)}
    ids = iter(range(loaded.vocab_size, loaded.vocab_size + 9))
    for each in decoder:
        own = loaded.tokenizer.token_to_id(each["content"])
        tokens[str(next(ids) if own is None else own)] = each
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": tokens, **named}
    written(tmp_path, {"tokenizer_config.json": config, "special_tokens_map.json": {"unk_token": "<unk>"}})
    compared(tmp_path)


@pytest.mark.parametrize("named", NAMED[:3])
@pytest.mark.parametrize("in_map", NAMED[:3])
@pytest.mark.parametrize("added", [[], ["<|sep|>", "<think>"], ["</s>", "<mask>"]])
def test_tokens_of_older_files_are_those_of_transformers(
    tmp_path: Path, named: dict[str, Any], in_map: dict[str, Any], added: list[str]
) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json")
    size = load_tokenizer(path).vocab_size
    files = {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **named},
        "special_tokens_map.json": {name: token(value) if isinstance(value, str) else value for name, value in in_map.items()},
        "added_tokens.json": {content: size + number for number, content in enumerate(added)},
    }
    written(tmp_path, files)
    compared(tmp_path)
