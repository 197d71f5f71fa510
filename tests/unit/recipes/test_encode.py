import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

from penstock_server.problems import DatasetInvalid
from penstock_server.recipes import encode as encode_module
from penstock_server.recipes import tokenizer as tokenizer_module
from penstock_server.recipes.encode import Selected
from penstock_server.recipes.fields import Field
from penstock_server.recipes.infer import Kind
from penstock_server.recipes.recipe import Recipe
from penstock_server.recipes.split import Place, is_validation
from penstock_server.recipes.tokenizer import TokenizerFile, load_tokenizer
from support.corpora import EOS, none_is_bad, write_tokenizer

ROLES: dict[str, tuple[str, ...]] = {"tokens": ("tokens",), "text": ("text",), "prompt_response": ("prompt", "response")}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFile:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"))


def recipe(kind: Kind, *columns: str, tokenizer: TokenizerFile | None = None, eos_id: int | None = None) -> Recipe:
    fields = tuple((role, Field(column, (("", (column,)),))) for role, column in zip(ROLES[kind], columns, strict=True))
    return Recipe(kind=kind, fields=fields, tokenizer=tokenizer, eos_id=eos_id)


def encode(rows: pa.Table, recipe: Recipe, token_dtype: str, token_bound: int) -> pa.RecordBatch:
    [batch] = rows.combine_chunks().to_batches()
    selected = Selected.of(batch, recipe, Place("part.parquet", 0))
    return encode_module.encode(selected, recipe, token_dtype, token_bound)


def test_text_becomes_its_tokens_and_an_eos(tokenizer: TokenizerFile) -> None:
    texts = ["the quick fox", "dog", "\N{SNOWMAN} über 狐"]
    batch = encode(pa.table({"t": texts}), recipe("text", "t", tokenizer=tokenizer, eos_id=0), "uint16", 400)
    direct = Tokenizer.from_file(str(tokenizer.path))
    assert batch["tokens"].to_pylist() == [[*direct.encode(text).ids, direct.token_to_id(EOS)] for text in texts]
    assert batch["tokens"].type == pa.large_list(pa.uint16())


def test_validation_holds_out_a_share_of_all_hashes() -> None:
    hashes = np.array([0, 1 << 31, (1 << 32) - 1], np.uint32)
    shares = {share: is_validation(hashes, share).tolist() for share in (0.0, 0.5, 1.0)}
    assert shares == {0.0: [False, False, False], 0.5: [True, False, False], 1.0: [True, True, True]}


@pytest.mark.parametrize("type_", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_text_columns_of_every_type_are_read(tokenizer: TokenizerFile, type_: pa.DataType) -> None:
    rows = pa.table({"t": pa.array(["fox", None], pa.string()).cast(type_)})
    batch = encode(rows, recipe("text", "t", tokenizer=tokenizer), "uint16", 400)
    assert batch["tokens"].to_pylist() == [tokenizer.tokenizer.encode("fox").ids, None]


def test_bad_texts_are_null_with_a_reason(tokenizer: TokenizerFile) -> None:
    raw = pa.array([b"fox", None, b"", b"\xff\xfe", b"dog"], pa.binary())
    rows = pa.table({"t": pa.StringArray.from_buffers(len(raw), *raw.buffers()[1:], raw.buffers()[0], raw.null_count)})
    batch = encode(rows, recipe("text", "t", tokenizer=tokenizer, eos_id=0), "uint16", 400)
    assert batch["bad"].to_pylist() == [None, "t is null", "t is empty", "t is not valid UTF-8 at byte 0", None]
    assert [row is None for row in batch["tokens"].to_pylist()] == [False, True, True, True, False]


def test_text_without_tokens_is_bad() -> None:
    words = Tokenizer(models.WordLevel({"fox": 0}, unk_token="fox"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = recipe("text", "t", tokenizer=TokenizerFile(Path("words.json"), "digest", words, 1), eos_id=0)
    batch = encode(pa.table({"t": ["fox", " "]}), named, "uint16", 9)
    assert batch["bad"].to_pylist() == [None, "t has no tokens"]
    assert batch["tokens"].to_pylist() == [[0, 0], None]


@pytest.fixture
def letters() -> TokenizerFile:
    """A tokenizer that has a and b, and no unknown token."""
    unigram = Tokenizer(models.Unigram([("a", -1.0), ("b", -1.0)]))
    return TokenizerFile(Path("letters.json"), "digest", unigram, 2)


@pytest.mark.parametrize("characters", [1, 3, 1 << 17])
def test_text_is_bad_when_the_tokenizer_fails_on_it(
    letters: TokenizerFile, characters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "_PORTION_CHARACTERS", characters)
    snow = "a\N{SNOWMAN}"
    rows = pa.table({"q": ["ab", "a", snow, "a", None, "b"], "a": ["b", snow, "b", "ba", snow, "a"]})
    batch = encode(rows, recipe("prompt_response", "q", "a", tokenizer=letters), "uint16", 9)
    failed = "is a text that the tokenizer fails on: "
    assert [reason and reason.partition(failed)[:2] for reason in batch["bad"].to_pylist()] == [
        None, ("a ", failed), ("q ", failed), None, ("q is null", ""), None,
    ]  # fmt: skip
    assert "unk" in batch["bad"][1].as_py().partition(failed)[2]
    assert batch["tokens"].to_pylist() == [[0, 1, 1], None, None, [0, 1, 0], None, [1, 0]]


def test_chat_is_bad_when_the_tokenizer_fails_on_it(letters: TokenizerFile) -> None:
    bad: dict[int, str] = {}
    texts = ["aab", "a\N{SNOWMAN}b", "", "ba"]
    ids, lengths, is_inside = letters.encode_marked(texts, [[(1, 3)], [(1, 3)], [], [(0, 1)]], bad.__setitem__)
    assert (ids.tolist(), lengths.tolist()) == ([0, 0, 1, 1, 0], [3, 0, 0, 2])
    assert is_inside.tolist() == [False, True, True, True, False]
    assert list(bad) == [1]
    assert bad[1].startswith("is a text that the tokenizer fails on: ")


def test_text_is_bad_when_the_tokenizer_panics_on_it() -> None:
    words = Tokenizer(models.WordLevel({"fox": 0}, unk_token="fox"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    named = recipe("text", "t", tokenizer=TokenizerFile(Path("words.json"), "digest", words, 1))
    batch = encode(pa.table({"t": ["fox", "a" * 40 + "!"]}), named, "uint16", 9)
    assert batch["tokens"].to_pylist() == [[0], None]
    assert batch["bad"][1].as_py().startswith("t is a text that the tokenizer fails on: the library panics: ")


@pytest.mark.parametrize(
    ("batch", "one"), [([MemoryError], []), ([ValueError, MemoryError], [None]), ([ValueError], [MemoryError])]
)
def test_out_of_memory_makes_no_row_bad(batch: list[type[Exception]], one: list[Any]) -> None:
    """Whether the tokenizer meets it at once, where it fails on some text, or where that is looked for."""
    lacking = Mock(**{"encode_batch_fast.side_effect": batch, "encode.side_effect": one})
    short = recipe("text", "t", tokenizer=TokenizerFile(Path("words.json"), "digest", lacking, 1))
    with pytest.raises(MemoryError):
        encode(pa.table({"t": ["dog"]}), short, "uint16", 9)


@pytest.mark.parametrize(
    ("spans", "inside"),
    [
        pytest.param([], "----", id="none"),
        pytest.param([(3, 7)], "-x--", id="a word with its blank"),
        pytest.param([(4, 7)], "-x--", id="a word, whose token begins before it"),
        pytest.param([(1, 2)], "x---", id="a letter of a word"),
        pytest.param([(4, 7), (12, 15)], "-x-x", id="two words"),
        pytest.param([(4, 5), (6, 7)], "-x--", id="two letters of one token"),
        pytest.param([(0, 15)], "xxxx", id="all"),
    ],
)
def test_token_has_loss_when_any_of_its_characters_has(spans: list[tuple[int, int]], inside: str) -> None:
    pieces = {piece: number for number, piece in enumerate(["the", " fox", " and", " dog"])}
    split = Tokenizer(models.WordLevel(pieces, unk_token="the"))
    split.pre_tokenizer = pre_tokenizers.Split(Regex(" ?[a-z]+"), "isolated")
    words = TokenizerFile(Path("words.json"), "digest", split, 4)
    ids, lengths, found = words.encode_marked(["the fox and dog"], [spans], none_is_bad)
    assert (ids.tolist(), lengths.tolist()) == ([0, 1, 2, 3], [4])
    assert found.tolist() == [mark == "x" for mark in inside]


@pytest.mark.parametrize(
    ("text", "spans", "inside"),
    [
        ("a: \nb", [(3, 5)], "---xx"),  # a, :, the blank that is trimmed to nothing, the end of the line, b
        ("a: \nb", [(0, 2), (3, 5)], "xx-xx"),
        ("a: \nb", [(0, 5)], "xxxxx"),
        ("a  \nb", [(0, 1)], "x----"),
        ("a: \nb", [], "-----"),
    ],
)
def test_token_without_characters_has_loss_only_within_a_span(
    tmp_path: Path, text: str, spans: list[tuple[int, int]], inside: str
) -> None:
    trimming = Tokenizer.from_file(str(write_tokenizer(tmp_path / "tokenizer.json", ["a"])))
    trimming.post_processor = processors.ByteLevel(trim_offsets=True)
    trimming.save(str(tmp_path / "tokenizer.json"))
    _, _, found = load_tokenizer(tmp_path / "tokenizer.json").encode_marked([text], [spans], none_is_bad)
    assert found.tolist() == [mark == "x" for mark in inside]


@pytest.mark.parametrize(
    "type_",
    [pa.list_(pa.int64()), pa.large_list(pa.uint16()), pa.list_(pa.int32(), 2), pa.list_(pa.uint64()), pa.list_(pa.int8())],
)
def test_token_columns_of_every_type_are_read(type_: pa.DataType) -> None:
    rows = pa.table({"ids": pa.chunked_array([pa.array([[1, 2], None], type_), pa.array([[3, 4]], type_)])})
    batch = encode(rows, recipe("tokens", "ids"), "uint16", 2**16)
    assert batch["tokens"].to_pylist() == [[1, 2], None, [3, 4]]


def test_bad_token_lists_are_null_with_a_reason() -> None:
    lists: list[Any] = [[1], [], None, [1, 400, 2], [-1], [5, None], [399], [2**40]]
    batch = encode(pa.table({"ids": pa.array(lists, pa.list_(pa.int64()))}), recipe("tokens", "ids"), "uint16", 400)
    assert batch["bad"].to_pylist() == [
        None,
        "is empty",
        "is null",
        "has token id 400, outside 0 to 399",
        "has token id -1, outside 0 to 399",
        "has a null token",
        None,
        "has token id 1099511627776, outside 0 to 399",
    ]
    assert batch["tokens"].to_pylist() == [[1], None, None, None, None, None, [399], None]


def test_spelled_special_token_is_split_only_with_split_special_tokens(tokenizer: TokenizerFile) -> None:
    split = load_tokenizer(tokenizer.path, split_special_tokens=True)
    assert split.digest != tokenizer.digest
    assert (split.tokenizer.encode_special_tokens, tokenizer.tokenizer.encode_special_tokens) == (True, False)
    rows = pa.table({"t": [f"fox{EOS} dog"]})
    [plain], [of_split] = (
        encode(rows, recipe("text", "t", tokenizer=one, eos_id=0), "uint16", 400)["tokens"].to_pylist()
        for one in (tokenizer, split)
    )
    assert (plain.count(0), of_split.count(0)) == (2, 1)  # the one that closes the text is no spelling
    assert split.decode(of_split) == tokenizer.decode(plain) == f"fox{EOS} dog{EOS}"


def test_tokenizer_is_read_again_when_it_is_replaced_with_the_same_mtime(tmp_path: Path) -> None:
    digests = set()
    for text in ("fox fox fox", "dog dog dog"):
        write_tokenizer(tmp_path / "new.json", [text])
        os.utime(tmp_path / "new.json", (1_700_000_000, 1_700_000_000))
        path = (tmp_path / "new.json").rename(tmp_path / "tokenizer.json")
        digests.add(load_tokenizer(path).digest)
    assert len(digests) == 2


SEP = {"content": "<|sep|>", "special": True}


def test_digest_covers_tokens_added_by_files_beside_the_tokenizer(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    write_tokenizer(store / "blob")
    path = tmp_path / "tokenizer.json"
    path.symlink_to(store / "blob")  # as in the hub's cache, where nothing is beside the file itself
    config, plain = tmp_path / "tokenizer_config.json", load_tokenizer(path)
    size = plain.vocab_size
    eos = {"content": EOS, "special": True, "normalized": False}
    config.write_text(json.dumps({"eos_token": EOS, "added_tokens_decoder": {"0": eos}}))
    assert load_tokenizer(path).digest == plain.digest

    digests = {plain.digest}
    tokens: list[dict[str, Any]] = [SEP, SEP | {"lstrip": True}, {"content": "<|other|>"}]
    for token in tokens:
        config.write_text(json.dumps({"added_tokens_decoder": {"0": eos, str(size): token}}))
        loaded = load_tokenizer(path)
        digests.add(loaded.digest)
        assert loaded.tokenizer.token_to_id(token["content"]) == size
        assert loaded.vocab_size == size + 1
    assert len(digests) == 4

    config.unlink()
    assert load_tokenizer(path).digest == plain.digest
    assert load_tokenizer(path).vocab_size == size


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"tokenizer_config.json": {"added_tokens_decoder": {"500": SEP}}}, r"'<\|sep\|>' the id 500, but .* has the id"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"3": SEP}}}, r"'<\|sep\|>' the id 3, but .* has the id"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"5": {"content": EOS}}}}, "the id 5, but .* has the id 0"),
        ({"added_tokens.json": {"<|sep|>": 500}}, r"'<\|sep\|>' the id 500, but .* has the id"),
        ({"tokenizer_config.json": {"added_tokens_decoder": [1]}}, "add tokens in a form that transformers does not write"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"0": 7}}}, "add tokens in a form that transformers does not"),
    ],
)
def test_added_tokens_with_impossible_ids_are_refused(tmp_path: Path, files: dict[str, Any], reason: str) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json")
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(DatasetInvalid, match=reason):
        load_tokenizer(path)


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json")
    cutting = Tokenizer.from_file(str(path))
    cutting.enable_truncation(3)
    cutting.enable_padding(length=9)
    cutting.save(str(path))
    batch = encode(
        pa.table({"t": ["the quick brown fox"] * 2}), recipe("text", "t", tokenizer=load_tokenizer(path)), "uint16", 9
    )
    cutting.no_truncation()
    cutting.no_padding()
    assert batch["tokens"].to_pylist() == [cutting.encode("the quick brown fox").ids] * 2


def test_dropout_of_the_file_is_off(tmp_path: Path) -> None:
    """A tokenizer that was trained with it leaves merges out at random: no text would have the same tokens twice."""
    path = write_tokenizer(tmp_path / "tokenizer.json")
    dropping = Tokenizer.from_file(str(path))
    whole = dropping.encode("the quick brown fox").ids
    digest = load_tokenizer(path).digest
    dropping.model.dropout = 0.9
    dropping.save(str(path))
    loaded = load_tokenizer(path)
    batch = encode(pa.table({"t": ["the quick brown fox"] * 20}), recipe("text", "t", tokenizer=loaded), "uint16", 9)
    assert batch["tokens"].to_pylist() == [whole] * 20
    assert loaded.digest != digest
