"""The identity of a recipe: whatever changes a token is in it, or two recipes would pass for one another."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tokenizers import Tokenizer, models

from penstock_server.recipes.encoders import Encoder
from penstock_server.recipes.fields import Column, Field
from penstock_server.recipes.infer import FirstShard
from penstock_server.recipes.recipe import Recipe
from penstock_server.recipes.tokenizer import TokenizerFile

NUMBER = Field("n", (("", ("n",)),))
IDS = Field("ids", (("", ("ids",)),))
COLUMN = Column(NUMBER, pa.int32())
RECIPE = Recipe(kind="tokens", fields=(("tokens", IDS),), columns=(COLUMN,))
WORDS = TokenizerFile(Path("words.json"), "digest", Tokenizer(models.WordLevel({"fox": 0}, unk_token="fox")), 1)

CHANGES: dict[str, Any] = {
    "fields": (("tokens", NUMBER),),
    "masks": (("labels", NUMBER),),
    "tokenizer": WORDS,
    "vocab_size": 100,
    "bos_id": 0,
    "eos_id": 0,
    "pad_id": 1,
    "tools": NUMBER,
    "reads_json": True,
    "columns": (),
    "split_by": NUMBER,
}
ALIKE: dict[str, Any] = {
    "split_type": pa.int64(),
    "first": FirstShard({}, pa.schema({"ids": pa.list_(pa.int32())})),
    "unused": ("labels",),
    "unsaid_bos": "<s>",
    "guessed_eos": ("<s>", "</s>"),
    "encoder": Encoder(()),
}
BESIDE: dict[str, Any] = {
    "splits": "hash",
    "validation": 0.1,
    "on_bad_row": "replace",
    "max_bad_share": 0.5,
}  # changes no token
ELSEWHERE = {"kind", "chat", "filter", "transform"}  # the fields' roles tell the kind; the others are texts, and tested as such


def test_fields_of_a_recipe_are_all_tested_here() -> None:
    assert {field.name for field in fields(Recipe)} == CHANGES.keys() | ALIKE.keys() | BESIDE.keys() | ELSEWHERE


@pytest.mark.parametrize("name", CHANGES)
def test_identity_covers_what_changes_a_batch(name: str) -> None:
    assert replace(RECIPE, **{name: CHANGES[name]}).identity != RECIPE.identity


@pytest.mark.parametrize("changed", [{"field": IDS}, {"type": pa.int64()}])
def test_identity_covers_field_and_type_of_a_column(changed: dict[str, Any]) -> None:
    assert replace(RECIPE, columns=(replace(COLUMN, **changed),)).identity != RECIPE.identity


@pytest.mark.parametrize(
    "types",
    [
        [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.large_string())],
        [pa.binary(), pa.large_binary(), pa.binary_view()],
        [pa.float32(), pa.float16(), pa.dictionary(pa.int8(), pa.float32())],
        [pa.list_(pa.float32(), 3), pa.list_(pa.field("element", pa.float32()), 3)],
    ],
)
def test_identity_is_equal_for_types_of_one_wire_format(types: list[pa.DataType]) -> None:
    """Else a shard that comes, and is the first from then on, would end all runs, and have every row tokenized again."""
    [first, *others] = (replace(RECIPE, columns=(replace(COLUMN, type=type_),)).identity["columns"] for type_ in types)
    assert first == [["n", str(types[0])]]
    assert others == [first] * len(others)


@pytest.mark.parametrize("name", BESIDE)
def test_identity_ignores_settings_that_change_no_token(name: str) -> None:
    other = replace(RECIPE, **{name: BESIDE[name]})
    assert other.identity == RECIPE.identity
    assert not other.is_like(RECIPE)


@pytest.mark.parametrize("name", ALIKE)
def test_is_like_ignores_reported_settings(name: str) -> None:
    assert replace(RECIPE, **{name: ALIKE[name]}).is_like(RECIPE)


def test_identity_ignores_unset_settings() -> None:
    assert None not in RECIPE.identity.values()
    assert "tools" not in RECIPE.identity
