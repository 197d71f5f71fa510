"""Opening datasets: what is found, how the recipe is decided, and what is refused, with a message that helps."""

import contextlib
import errno
import json
import os
import re
import shutil
import socket
from base64 import b64decode, b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.parquet import encryption
from tokenizers import Tokenizer, models

from corpora import REAL_DATA, needs_real_data, write_numbered, write_pairs, write_shards, write_text, write_tokenizer
from penstock.spec import Spec
from penstock_server.datasets import dataset as dataset_module
from penstock_server.datasets.catalog import Catalog, open_catalog
from penstock_server.problems import BadRow, DatasetRefused, UnknownDataset
from penstock_server.serving.serve import _greeting
from penstock_server.settings import Settings
from penstock_server.snapshots import shard as shard_module
from penstock_server.snapshots.reading import read_folder
from penstock_server.snapshots.snapshot import Snapshot
from penstock_server.storage.block import Block
from penstock_server.storage.blocks import Blocks
from penstock_server.storage.cache import CacheFolder
from penstock_server.storage.store import BlockStore
from planned import open_snapshot

Opener = Callable[..., Catalog]
Loader = Callable[[], tuple[Blocks, Block]]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "tokenizer.json")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def open_all(tmp_path: Path, data: Path) -> Opener:
    def run(tokenizer: Path | None = None) -> Catalog:
        return open_catalog(data, tokenizer, BlockStore(CacheFolder(tmp_path / "cache")))

    return run


@pytest.fixture
def load(tmp_path: Path, data: Path, tokenizer: Path) -> Loader:
    """Opens the data as it is, and loads its first block."""

    def loaded() -> tuple[Blocks, Block]:
        blocks = Blocks(snapshot_of(data, tokenizer), BlockStore(CacheFolder(tmp_path / "cache")))
        return blocks, blocks.get([0])[0]

    return loaded


def snapshot_of(folder: Path, tokenizer: Path | None = None) -> Snapshot:
    return open_snapshot(folder, tokenizer)


def test_every_folder_with_shards_is_a_dataset_named_after_it(data: Path, tokenizer: Path, open_all: Opener) -> None:
    write_text(data / "wiki", ["one"])
    write_numbered(data / "code" / "python", 3)
    (data / "empty").mkdir()
    write_numbered(data / ".hidden", 3)
    assert sorted(open_all(tokenizer).datasets) == ["code.python", "wiki"]


def test_a_folder_that_holds_shards_itself_is_a_dataset(data: Path, open_all: Opener) -> None:
    write_numbered(data, 3)
    assert list(open_all().datasets) == ["data"]


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        ({"input_ids": [[1]], "text": ["a"]}, "tokens"),
        ({"tokens": [[1]]}, "tokens"),
        ({"text": ["a"], "prompt": ["a"], "response": ["a"]}, "text"),
        ({"prompt": ["a"], "response": ["a"], "score": [1.0]}, "prompt_response"),
    ],
)
def test_without_a_recipe_the_columns_decide(data: Path, tokenizer: Path, columns: dict[str, list[object]], kind: str) -> None:
    data.mkdir()
    pq.write_table(pa.table(columns), data / "a.parquet")
    assert snapshot_of(data, tokenizer).recipe.kind == kind


def test_columns_that_say_nothing_are_listed_with_what_to_write(data: Path, tokenizer: Path) -> None:
    data.mkdir()
    pq.write_table(pa.table({"instruction": ["a"], "output": ["b"]}), data / "a.parquet")
    with pytest.raises(DatasetRefused, match=r'instruction .*"content", or prompt = "question" and response = "answer"\.'):
        snapshot_of(data, tokenizer)


def test_a_recipe_names_columns_tokenizer_and_tokens(data: Path, tokenizer: Path) -> None:
    write_shards(data, "content", [["one"]], type_=pa.string(), row_group_size=1)
    (data / "penstock.toml").write_text('text = "content"\ntokenizer = "../tokenizer.json"\neos = false\npad = 7\n')
    recipe = snapshot_of(data).recipe
    assert (recipe.kind, recipe.token_columns, recipe.eos_id, recipe.pad_id) == ("text", ("content",), None, 7)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("text = content", "cannot be read: Invalid value .* In TOML, texts need quotes"),
        ('text = "text"\ntext = "body"', r"cannot be read: Cannot overwrite a value \(at [^.]*\)\.$"),
        ('mix = "docs:1"', "unknown key 'mix'; a mixture is declared in a folder of its own"),
        ('txet = "content"', "unknown key 'txet'.*Known keys: tokens, text"),
        ("text = 3", r"text must be a text, not 3\.$"),
        ('text = ""', r"text must be a text, not ''\.$"),
        ('columns = ["text", "text"]', "columns must be a list of different names, not"),
        ("validation = 1.0", r"validation must be a share from 0 to below 1, not 1\.0\.$"),
        ("validation = false", "validation must be a share from 0 to below 1, not False"),
        ('prompt = "text"', "name either tokens, or text, or prompt and response"),
        ('text = "body"', "no column 'body'; there are: text"),
        ('tokens = "text"', "'text' is string, but tokens must be lists of integers"),
        ('tokenizer = "none.json"', "none.json cannot be read: No such file"),
        ('eos = "<nope>"', "eos = '<nope>' is not in the vocabulary"),
        ("eos = 4000", "eos = 4000 is not in the vocabulary"),
        ("split_special_tokens = 1", r"split_special_tokens must be true or false, not 1\.$"),
        (
            'text = "<|endoftext|>{text}"\nsplit_special_tokens = true',
            r"would split <\|endoftext\|> in the template of text, too\. Remove it, and take spellings",
        ),
        ("vocab_size = 0", "vocab_size must be a whole number from 1"),
        ('on_bad_row = "ignore"', 'on_bad_row must be "fail" or "substitute"'),
        ("max_bad_share = 0.1", "max_bad_share limits what is substituted, but nothing is"),
        ("vocab_size = 9", "vocab_size is given, but the tokenizer already tells it"),
        ('vocab_size = 9\ntokenizer = "../tokenizer.json"', "vocab_size is given, but the tokenizer already"),
    ],
)
def test_a_wrong_recipe_is_refused_with_what_is_wrong(data: Path, tokenizer: Path, toml: str, message: str) -> None:
    write_text(data, ["one"])
    (data / "penstock.toml").write_text(toml)
    with pytest.raises(DatasetRefused, match=message):
        snapshot_of(data, tokenizer)


def test_a_recipe_may_begin_with_a_byte_order_mark(data: Path, tokenizer: Path) -> None:
    write_text(data, ["one"])
    (data / "penstock.toml").write_text('text = "text"', encoding="utf-8-sig")
    assert snapshot_of(data, tokenizer).recipe.kind == "text"


def test_a_special_token_of_ids_is_an_id(data: Path) -> None:
    write_numbered(data, 3)
    (data / "penstock.toml").write_text('eos = "</s>"')
    with pytest.raises(DatasetRefused, match=r"eos = '</s>' is a text, but rows are token ids: .* Give the id\."):
        snapshot_of(data)


def test_a_missing_folder_a_file_and_a_folder_without_parquet_are_told_apart(data: Path, open_all: Opener) -> None:
    with pytest.raises(DatasetRefused, match="data does not exist"):
        open_all()
    data.mkdir()
    (data / "notes.txt").write_text("no data")
    with pytest.raises(DatasetRefused, match=r"holds no file that ends in \.parquet, nor does any folder below it"):
        open_all()
    shutil.rmtree(data)
    data.write_text("a file")
    with pytest.raises(DatasetRefused, match="is a file, not a folder"):
        open_all()
    data.unlink()
    data.symlink_to(data)
    with pytest.raises(DatasetRefused, match=f"cannot be looked into: {os.strerror(errno.ELOOP)}"):
        open_all()


def test_a_recipe_that_may_be_there_is_not_passed_over(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_numbered(data, 3)
    (data / "penstock.toml").write_text("vocab_size = 777")
    with_recipe = snapshot_of(data).fingerprint

    def stale(path: str | Path, **options: Any) -> os.stat_result:
        if Path(path).name == "penstock.toml":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return Path(path).stat(follow_symlinks=False, **options)

    monkeypatch.setattr(os, "lstat", stale)
    monkeypatch.setattr(Path, "lstat", stale)
    assert snapshot_of(data).fingerprint == with_recipe
    (data / "penstock.toml").unlink()
    with pytest.raises(DatasetRefused, match=r"penstock\.toml cannot be read: .*No such file"):
        snapshot_of(data)


def test_text_without_a_tokenizer_is_refused_with_both_ways_out(data: Path) -> None:
    write_text(data, ["one"])
    with pytest.raises(DatasetRefused, match=r"--tokenizer FILE .* or name one in .*penstock.toml"):
        snapshot_of(data)


@pytest.mark.parametrize("content", ["", "{}", '{"model": 1}', "hello", "\x00\x01"])
def test_a_tokenizer_that_is_none_is_refused(data: Path, tmp_path: Path, open_all: Opener, content: str) -> None:
    write_text(data, ["one"])
    (tmp_path / "broken.json").write_text(content)
    with pytest.raises(DatasetRefused, match=r"broken.json is not a tokenizer"):
        open_all(tmp_path / "broken.json")


def test_a_tokenizer_without_an_eos_is_refused_with_the_way_out(data: Path, tokenizer: Path) -> None:
    write_text(data, ["one"])
    tokenizer.write_text(tokenizer.read_text().replace("<|endoftext|>", "<|unusual|>"))
    with pytest.raises(DatasetRefused, match=r'eos = "<the token>" or its id, or eos = false'):
        snapshot_of(data, tokenizer)


def test_shards_whose_schemas_differ_are_refused_with_file_and_column(data: Path, tokenizer: Path) -> None:
    write_text(data, ["one"])
    pq.write_table(pa.table({"text": [1, 2]}), data / "part-1.parquet")
    pq.write_table(pa.table({"body": ["one"]}), data / "part-2.parquet")
    with pytest.raises(DatasetRefused) as caught:
        snapshot_of(data, tokenizer)
    assert "part-1.parquet: column 'text' is int64, but text must be text" in str(caught.value)
    assert "part-2.parquet: there is no column 'text'" in str(caught.value)


def test_special_tokens_are_split_in_texts_alone(data: Path, tokenizer: Path) -> None:
    write_numbered(data / "ids", 3)
    (data / "ids" / "penstock.toml").write_text("split_special_tokens = true")
    with pytest.raises(DatasetRefused, match=r"is for texts, but rows are token ids\. Remove it\.$"):
        snapshot_of(data / "ids", tokenizer)
    (data / "chat").mkdir()
    said = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]]
    pq.write_table(pa.table({"messages": said}), data / "chat" / "a.parquet")
    (data / "chat" / "penstock.toml").write_text("split_special_tokens = true")
    with pytest.raises(DatasetRefused, match="would split the special tokens that the chat template writes, too"):
        snapshot_of(data / "chat", tokenizer)


@pytest.mark.parametrize("broken_first", [True, False])
def test_truncated_and_foreign_files_are_named_one_by_one(data: Path, broken_first: bool) -> None:
    write_numbered(data, 100)
    whole = (data / "part-000.parquet").read_bytes()
    footer = int.from_bytes(whole[-8:-4], "little")
    prefix = "a" if broken_first else "z"
    for name, content in {
        "cut": whole[: len(whole) // 2],
        "empty": b"",
        "foreign": b"id,text\n1,hello\n" * 10,
        "garbled": whole[: -8 - footer] + b"\xff" * footer + whole[-8:],
        "overlong": whole[:-8] + b"\xff\xff\xff\x7f" + b"PAR1",
    }.items():
        (data / f"{prefix}-{name}.parquet").write_bytes(content)
    with pytest.raises(DatasetRefused) as caught:
        snapshot_of(data)
    lines = sorted(str(caught.value).splitlines())
    expected = ["is truncated: its end is missing", "is 0 bytes long", "is not a Parquet file", "has a damaged footer",
                "is truncated: its footer claims"]  # fmt: skip
    assert len(lines) == len(expected)
    for line, text in zip(lines, expected, strict=True):
        assert text in line
        assert "Write it again, or move it out of the folder" in line


def with_footer(whole: bytes, edit: Callable[[bytes], bytes]) -> bytes:
    length = int.from_bytes(whole[-8:-4], "little")
    footer = edit(whole[-8 - length : -8])
    return whole[: -8 - length] + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def of_another_type(footer: bytes) -> bytes:
    """That of int32 lists, as Thrift writes it, with int64 for the type of the column's statistics."""
    assert footer.count(b"\x15\x02\x19") == 1
    return footer.replace(b"\x15\x02\x19", b"\x15\x04\x19")


def with_a_short_histogram(footer: bytes) -> bytes:
    """That of lists with three of the four counts of their levels."""
    assert footer.count(b"\x19\x46") == 1
    at = footer.index(b"\x19\x46")
    return footer[:at] + b"\x19\x36" + footer[at + 3 :]


def with_no_text_for_a_name(footer: bytes) -> bytes:
    return footer.replace(b"tokens", b"tok\xffns")


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (of_another_type, "the types of its columns contradict each other"),
        (with_a_short_histogram, "size: 3, expected: 4"),
        (with_no_text_for_a_name, "'utf-8' codec can't decode byte 0xff in position 3: invalid start byte"),
    ],
)
def test_a_footer_in_which_a_bit_flipped_is_refused_and_never_a_crash(
    data: Path, edit: Callable[[bytes], bytes], reason: str
) -> None:
    write_shards(data, "tokens", [[[1, 2, 3], [4], [5]]], type_=pa.list_(pa.int32()), row_group_size=3)
    path = data / "part-000.parquet"
    path.write_bytes(with_footer(path.read_bytes(), edit))
    with pytest.raises(DatasetRefused, match=f"part-000.parquet has a damaged footer: .*{reason}. Write it again"):
        snapshot_of(data)


class Keys(encryption.KmsClient):  # type: ignore[misc]
    def wrap_key(self, key: bytes, _: str) -> bytes:
        return b64encode(key)


@pytest.mark.parametrize("of_footer", [True, False])
def test_an_encrypted_shard_is_refused(data: Path, of_footer: bool) -> None:
    table = pa.table({"text": ["a", "b"], "other": [1, 2]})
    config = encryption.EncryptionConfiguration("footer", column_keys={"key": ["other"]}, plaintext_footer=not of_footer)
    made = encryption.CryptoFactory(lambda _: Keys()).file_encryption_properties(encryption.KmsConnectionConfig(), config)
    data.mkdir()
    with pq.ParquetWriter(data / "a.parquet", table.schema, encryption_properties=made) as writer:
        writer.write_table(table)
    with pytest.raises(DatasetRefused, match="a.parquet is encrypted, which is not supported"):
        snapshot_of(data)


def test_a_type_that_is_not_supported_is_no_damage(data: Path) -> None:
    """Numbers of 128 bits, as Polars writes them."""
    data.mkdir()
    path = data / "a.parquet"
    pq.write_table(pa.table({"text": ["a"], "n": [1]}), path)
    told = pq.read_metadata(path).metadata[b"ARROW:schema"]
    other = b64encode(b64decode(told).replace((64).to_bytes(4, "little"), (128).to_bytes(4, "little")))
    path.write_bytes(with_footer(path.read_bytes(), lambda footer: footer.replace(told, other)))
    with pytest.raises(DatasetRefused, match="a.parquet has a column of a type that is not supported: .* Write it as another"):
        snapshot_of(data)


def test_a_file_that_may_not_be_read_need_not_be_written_again(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    write_numbered(data, 9, num_shards=1)
    monkeypatch.setattr(shard_module, "open_file", refuse)
    with pytest.raises(DatasetRefused, match=r"part-000.parquet cannot be read: Permission denied. Let the server's user"):
        snapshot_of(data)


def test_a_file_cut_at_any_byte_is_refused_and_never_a_crash(data: Path, tmp_path: Path) -> None:
    write_numbered(tmp_path / "whole", 40, num_shards=1)
    whole = (tmp_path / "whole" / "part-000.parquet").read_bytes()
    data.mkdir()
    for length in range(0, len(whole), 7):
        (data / "part.parquet").write_bytes(whole[:length])
        with pytest.raises(DatasetRefused):
            snapshot_of(data)


def test_two_folders_of_one_name_are_both_refused(data: Path, open_all: Opener) -> None:
    write_numbered(data / "a.b", 3)
    write_numbered(data / "a" / "b", 3)
    write_numbered(data / "c", 3)
    catalog = open_all()
    assert list(catalog.datasets) == ["c"]
    assert "would both be the dataset 'a.b'" in catalog.refused["a.b"]


def test_a_mixture_takes_no_name_from_another_folder(data: Path, open_all: Opener) -> None:
    write_numbered(data / "c", 3)
    for folder in ("a.b", "a/b", "x/y"):
        (data / folder).mkdir(parents=True)
        (data / folder / "penstock.toml").write_text('mix = "c:1"')
    write_numbered(data / "x.y", 3)
    catalog = open_all()
    assert [*catalog.datasets, *catalog.mixtures] == ["c"]
    assert "would both be the dataset 'a.b'" in catalog.refused["a.b"]
    assert "would both be the dataset 'x.y'" in catalog.refused["x.y"]


def test_an_older_snapshot_is_known_after_a_server_was_away_for_months(data: Path, tmp_path: Path, open_all: Opener) -> None:
    folder = write_numbered(data / "ids", 30)
    older = open_all()["ids"].latest.snapshot.fingerprint
    (write_numbered(tmp_path / "more", 3, num_shards=1) / "part-000.parquet").rename(folder / "part-900.parquet")
    assert open_all()["ids"].latest.snapshot.fingerprint != older
    for notes in (tmp_path / "cache" / "notes").iterdir():
        os.utime(notes, (1, 1))
    assert open_all()["ids"].served(older).snapshot.num_rows == 30


def test_a_link_to_nothing_is_refused_and_never_a_shorter_epoch(data: Path) -> None:
    write_numbered(data, 30)
    (data / "part-999.parquet").symlink_to(data / "moved.parquet")
    with pytest.raises(DatasetRefused, match=r"part-999.parquet cannot be read: No such file"):
        snapshot_of(data)


def test_what_is_no_file_is_refused_and_not_waited_for(data: Path, open_all: Opener) -> None:
    write_numbered(data / "good", 3)
    write_numbered(data / "pipe", 3)
    os.mkfifo(data / "pipe" / "x.parquet")
    (data / "device").mkdir()
    (data / "device" / "x.parquet").symlink_to("/dev/zero")
    (data / "socket").mkdir()
    with socket.socket(socket.AF_UNIX) as end, contextlib.chdir(data / "socket"):  # its address may be of 108 characters
        end.bind("x.parquet")
    catalog = open_all()
    assert list(catalog.datasets) == ["good"]
    for name in ("pipe", "device", "socket"):
        assert f"{name}/x.parquet cannot be read: it is neither a file nor a link to one." in catalog.refused[name]


def test_no_pipe_and_no_device_is_read_as_a_recipe_or_what_it_names(data: Path, tokenizer: Path, open_all: Opener) -> None:
    write_numbered(data / "good", 3)
    odd = {
        "recipe": ("", "penstock.toml"),
        "tokenizer": ('tokenizer = "x.json"', "x.json"),
        "template": (f'tokenizer = "{tokenizer}"\nchat_template = "x.jinja"', "x.jinja"),
        "transform": ('transform = "clean:strip"', "clean.py"),
    }
    message = pa.struct({"role": pa.string(), "content": pa.string()})
    for name, (toml, file) in odd.items():
        write_shards(
            data / name, "messages", [[[{"role": "assistant", "content": "fox"}]]], type_=pa.list_(message), row_group_size=1
        )
        if toml:
            (data / name / "penstock.toml").write_text(toml)
        if name == "template":
            (data / name / file).symlink_to("/dev/zero")
        else:
            os.mkfifo(data / name / file)
    catalog = open_all()
    assert list(catalog.datasets) == ["good"]
    for name in odd:
        assert "it is neither a file nor a link to one" in catalog.refused[name]


@pytest.mark.parametrize("text", [f"x = {'[' * 100_000}", f"{'a.' * 3_000}a = 1"], ids=["lists", "tables"])
def test_a_recipe_that_is_nested_too_deeply_refuses_one_dataset(data: Path, open_all: Opener, text: str) -> None:
    write_numbered(data / "good", 3)
    write_numbered(data / "deep", 3)
    (data / "deep" / "penstock.toml").write_text(text)
    catalog = open_all()
    assert list(catalog.datasets) == ["good"]
    assert "penstock.toml" in catalog.refused["deep"]
    catalog.poll()  # and looks at the others


def test_links_that_lead_back_are_followed_once(data: Path, open_all: Opener) -> None:
    write_numbered(data / "n", 3)
    (data / "n" / "up").symlink_to(data)
    (data / "n" / "self").symlink_to(data / "n")
    (data / "n" / "n").symlink_to("n")
    assert list(open_all().datasets) == ["n"]


def test_folders_that_link_to_each_other_have_few_names(data: Path, open_all: Opener) -> None:
    names = [f"n{number}" for number in range(5)]
    for name in names:
        write_numbered(data / name, 3)
        for other in names:
            if other != name:
                (data / name / other).symlink_to(data / other)
    assert list(open_all().datasets) == sorted([*names, *(f"{a}.{b}" for a in names for b in names if a != b)])


def test_a_link_gives_a_dataset_a_second_name_and_takes_none_away(data: Path, open_all: Opener) -> None:
    write_numbered(data / "stories", 3)
    write_numbered(data / "more" / "deep", 3)
    catalog = open_all()
    (data / "latest").symlink_to("stories")
    (data / "again").symlink_to("more")
    (data / "more" / "up").symlink_to(data / "again")
    catalog.refresh("stories")
    catalog.refresh("latest")
    catalog.refresh("again.deep")
    for looked in (catalog, open_all()):
        assert (list(looked.datasets), looked.refused) == (["again.deep", "latest", "more.deep", "stories"], {})


def test_names_that_are_no_text_are_refused_in_words_that_an_answer_can_hold(data: Path, open_all: Opener) -> None:
    for name in ("good", "shard", "bad/cafe"):
        write_numbered(data / name, 9)
    (data / "bad" / "cafe").rename(data / "bad" / "caf\udce9")
    (data / "shard" / "part-001.parquet").rename(data / "shard" / "\udcff.parquet")
    (data / "other").mkdir()
    (data / "other" / "\udce9.csv").touch()
    catalog = open_all()
    assert list(catalog.datasets) == ["good"]
    assert catalog.refused == {
        "bad.caf\\xe9": f"{data}/bad/caf\\xe9 has a name that is not UTF-8, and no URL could hold it. Rename it.",
        "shard": f"{data}/shard/\\xff.parquet has a name that is not UTF-8, and no answer could hold it. Rename it.",
    }
    with pytest.raises(UnknownDataset, match=r"holds \\xe9.csv and no file"):
        catalog["other"]
    data.rename(data.with_name("caf\udce9"))
    with pytest.raises(DatasetRefused, match=r"caf\\xe9 has a name that is not UTF-8, .* or make a link to it"):
        open_catalog(data.with_name("caf\udce9"), None, BlockStore(CacheFolder(data.with_name("cache"))))
    data.symlink_to("caf\udce9")
    assert list(open_all().datasets) == ["good"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_a_folder_that_cannot_be_read_is_refused_and_not_left_out(data: Path, open_all: Opener) -> None:
    write_numbered(data / "n", 3)
    write_numbered(data / "secret", 3)
    (data / "secret").chmod(0)
    assert "Permission denied" in open_all().refused["secret"]
    (data / "secret").chmod(0o700)


@pytest.mark.parametrize("number", [errno.ENOTCONN, errno.EMFILE])
@pytest.mark.parametrize("away", [".", "team", "team/own"])
def test_where_a_folder_cannot_be_looked_into_all_below_it_is_served_on_and_told_why(
    data: Path, open_all: Opener, monkeypatch: pytest.MonkeyPatch, away: str, number: int
) -> None:
    for name in ("other", "team/own"):
        write_numbered(data / name, 3)
    (data / "team" / "mixed").mkdir()
    (data / "team" / "mixed" / "penstock.toml").write_text('mix = "other:1,team.own:1"')
    catalog = open_all()
    before = {name: served.snapshot.fingerprint for name, served in catalog.datasets.items()}

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: str | Path, *args: Any, **options: Any) -> Any:
            if Path(path).is_relative_to(data / away):
                raise OSError(number, os.strerror(number), str(path))
            return call(path, *args, **options)

        return called

    with monkeypatch.context() as patch:
        if number == errno.EMFILE:
            patch.setattr(os, "scandir", failing(os.scandir))
        else:
            patch.setattr(Path, "stat", failing(Path.stat))
        catalog.poll()
        expected = {name: name == "team.own" or away == "." for name in ("other", "team.own")}
        errors = {name: catalog[name].held.error or "" for name in expected}
        assert {name: "cannot be read: " in error for name, error in errors.items()} == expected
        assert {name: os.strerror(number) in error for name, error in errors.items()} == expected
        assert catalog.plan("team.mixed", Spec(batch_size=1, seq_len=2)).schedule.num_steps == 6
        with pytest.raises(DatasetRefused, match=os.strerror(number)):
            catalog.refresh("team.own")
    assert {name: served.snapshot.fingerprint for name, served in catalog.datasets.items()} == before
    catalog.refresh("team.own")
    assert catalog["team.own"].held.error is None


def test_a_link_to_what_cannot_be_reached_is_refused_alone_unless_it_is_a_shard(data: Path, open_all: Opener) -> None:
    write_numbered(data / "other", 3)
    (data / "linked").symlink_to("x" * 300)  # longer than a name can be: asking what it is fails, as at a mount that died
    catalog = open_all()
    assert set(catalog.datasets) == {"other"}
    assert "linked cannot be read: File name too long" in catalog.refused["linked"]
    (data / "other" / "part-9.parquet").symlink_to("x" * 300)
    with pytest.raises(DatasetRefused, match=r"part-9.parquet cannot be read: File name too long"):
        catalog.refresh("other")


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (ZeroDivisionError, "because of a fault in penstock: ZeroDivisionError"),
        (pa.ArrowMemoryError, "for lack of memory: ArrowMemoryError"),
        (RuntimeError("can't start new thread"), "for lack of threads (for the server: raise its limit of processes"),
    ],
)
def test_what_goes_wrong_in_one_dataset_refuses_that_one_only(
    data: Path, open_all: Opener, monkeypatch: pytest.MonkeyPatch, fault: type[Exception] | Exception, told: str
) -> None:
    write_numbered(data / "good", 3)
    write_numbered(data / "odd", 3)

    def read(folder: Path, *rest: Any, **more: Any) -> Any:
        if folder.name == "odd":
            raise fault
        return read_folder(folder, *rest, **more)

    monkeypatch.setattr(dataset_module, "read_folder", read)
    catalog = open_all()
    assert list(catalog.datasets) == ["good"]
    assert told in catalog.refused["odd"]


@pytest.mark.parametrize(
    ("host", "told"),
    [("0.0.0.0", "localhost"), ("127.0.0.1", "localhost"), ("::", "[::1]"), ("::1", "[::1]"), ("fd00::7", "[fd00::7]")],
)
def test_a_server_tells_an_address_that_leads_to_it(data: Path, open_all: Opener, host: str, told: str) -> None:
    write_numbered(data / "numbers", 3)
    settings = Settings.read({"data_dir": str(data)}, {})
    greeting = _greeting(open_all(), settings, Mock(**{"getsockname.return_value": (host, 8000)}))
    assert set(re.findall(r"http://[^/\s]+", greeting)) == {f"http://{told}:8000"}


def test_a_column_that_is_there_twice_is_refused(data: Path, tokenizer: Path) -> None:
    data.mkdir()
    pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), data / "a.parquet")
    with pytest.raises(DatasetRefused, match=r"2 columns are called 'text'"):
        snapshot_of(data, tokenizer)
    pq.write_table(pa.table([["a"], ["b"], ["c"]], names=["text", "k", "k"]), data / "a.parquet")
    assert snapshot_of(data, tokenizer).recipe.token_columns == ("text",)


def test_a_chat_template_alone_may_be_declared_and_needs_messages(data: Path, tokenizer: Path) -> None:
    (data / "chat").mkdir(parents=True)
    said = [[{"role": "user", "content": "fox"}, {"role": "assistant", "content": "dog"}]]
    pq.write_table(pa.table({"messages": said}), data / "chat" / "a.parquet")
    (data / "chat" / "mine.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}")
    (data / "chat" / "penstock.toml").write_text('chat_template = "mine.jinja"')
    assert snapshot_of(data / "chat", tokenizer).recipe.kind == "messages"
    write_text(data / "plain", ["one"])
    (data / "plain" / "penstock.toml").write_text('chat_template = "mine.jinja"')
    with pytest.raises(DatasetRefused, match="chat_template renders messages, but rows are made of text. Leave it out, or"):
        snapshot_of(data / "plain", tokenizer)


def test_who_asks_for_an_unknown_dataset_is_told_which_are_not_served(data: Path, open_all: Opener) -> None:
    write_numbered(data / "good", 3)
    write_numbered(data / "bad", 3)
    (data / "bad" / "penstock.toml").write_text('tokens = "none"')
    with pytest.raises(UnknownDataset, match=r"Served: good\. Not served, for reasons that GET .* gives: bad\.$"):
        open_all()["god"]


def test_who_asks_for_a_folder_of_other_files_is_told_to_import_them(data: Path, open_all: Opener) -> None:
    write_numbered(data / "good", 3)
    (data / "raw" / "mail").mkdir(parents=True)
    (data / "raw" / "mail" / "a.csv").write_text("text\nx\n")
    with pytest.raises(UnknownDataset, match="mail holds a.csv and no file that ends in .parquet: make shards with"):
        open_all()["raw.mail"]


def test_shards_may_end_in_capitals(data: Path, open_all: Opener) -> None:
    write_numbered(data / "good", 3)
    for shard in (data / "good").glob("*.parquet"):
        shard.rename(shard.with_suffix(".PARQUET"))
    assert open_all()["good"].latest.snapshot.num_rows == 3


def test_a_tokenizer_that_was_never_trained_is_refused(data: Path, tmp_path: Path) -> None:
    write_text(data, ["one"])
    Tokenizer(models.BPE()).save(str(tmp_path / "empty.json"))
    with pytest.raises(DatasetRefused, match=r"empty.json is a tokenizer with an empty vocabulary"):
        snapshot_of(data, tmp_path / "empty.json")


@pytest.mark.parametrize("largest", [2**32, 2**40, 2**63 + 5])
def test_ids_that_fit_no_uint32_are_refused_and_never_wrapped(data: Path, largest: int) -> None:
    write_shards(data, "tokens", [[[1, largest]]], type_=pa.list_(pa.uint64()), row_group_size=1)
    with pytest.raises(DatasetRefused, match=f"ids from 1 to {largest:,}, but ids must be from 0 to 4,294,967,295"):
        snapshot_of(data)


def test_ids_below_0_are_not_said_to_lack_a_vocabulary(data: Path) -> None:
    write_shards(data, "tokens", [[[3, -2]]], type_=pa.list_(pa.int32()), row_group_size=1)
    with pytest.raises(
        DatasetRefused, match=r"ids from -2 to 3, but ids must not be below 0. Mend the shard, or set on_bad_row"
    ):
        snapshot_of(data)


@pytest.mark.parametrize("rows", [[], [[]]])
def test_a_shard_without_tokens_says_nothing_of_the_vocabulary(data: Path, rows: list[list[int]]) -> None:
    write_shards(data, "tokens", [[[1, 3]], rows], type_=pa.list_(pa.int32()), row_group_size=1)
    snapshot = snapshot_of(data)
    assert (snapshot.vocab_size, snapshot.token_dtype) == (4, "uint16")


def test_a_token_that_closes_rows_is_of_the_vocabulary(data: Path) -> None:
    write_shards(data, "tokens", [[[1, 3]]], type_=pa.list_(pa.int32()), row_group_size=1)
    (data / "penstock.toml").write_text("eos = 70000")
    snapshot = snapshot_of(data)
    assert (snapshot.vocab_size, snapshot.token_dtype) == (70_001, "uint32")


def test_a_vocabulary_that_nobody_names_is_not_made_up(data: Path) -> None:
    data.mkdir()
    table = pa.table({"tokens": pa.array([[1, 3]], pa.list_(pa.int32()))})
    pq.write_table(table, data / "a.parquet", write_statistics=False)
    pq.write_table(table, data / "b.parquet")
    snapshot = snapshot_of(data)
    assert (snapshot.vocab_size, snapshot.token_dtype) == (None, "uint32")


def test_columns_with_a_dot_in_their_name_are_no_part_of_others(data: Path, tokenizer: Path) -> None:
    data.mkdir()
    tokens = pa.array([[1, 3]], pa.list_(pa.int32()))
    pq.write_table(pa.table({"tokens.n": [-1], "tokens": tokens}), data / "a.parquet")
    assert snapshot_of(data).vocab_size == 4
    both = pa.array([[{"a": 9, "b": [8]}]], pa.list_(pa.struct({"a": pa.int32(), "b": pa.list_(pa.int32())})))
    pq.write_table(pa.table({"tokens.m": both, "m": both, "tokens": tokens, "tokens.o": [[7]]}), data / "a.parquet")
    assert snapshot_of(data).vocab_size == 4
    pq.write_table(pa.table({"text.lang": pa.array([None], pa.string()), "text": ["a"]}), data / "a.parquet")
    assert snapshot_of(data, tokenizer).num_rows == 1


def test_text_that_another_writer_has_marked_as_json_is_text(data: Path, tokenizer: Path) -> None:
    data.mkdir()
    pq.write_table(pa.table({"text": pa.array(['{"a": 1}'], pa.json_())}), data / "a.parquet", store_schema=False)
    snapshot = snapshot_of(data, tokenizer)
    assert (snapshot.recipe.kind, snapshot.num_rows) == ("text", 1)


def test_other_columns_may_be_of_any_type_and_bear_one_name(data: Path) -> None:
    data.mkdir()
    tokens = pa.array([[1, 3]], pa.list_(pa.int32()))
    opaque = pa.opaque(pa.struct({"a": pa.int32(), "b": pa.int32()}), "pair", "somebody")
    pair = pa.ExtensionArray.from_storage(opaque, pa.array([{"a": 900, "b": 901}], opaque.storage_type))
    table = pa.table([pair, pair, tokens], names=["tokens.x", "tokens.x", "tokens"])
    pq.write_table(table, data / "a.parquet")
    assert snapshot_of(data).vocab_size == 4


def test_a_dataset_that_is_refused_holds_back_no_other(data: Path, open_all: Opener) -> None:
    write_numbered(data / "good", 10)
    (data / "bad").mkdir()
    (data / "bad" / "half.parquet").write_bytes(b"PAR1" + bytes(100))
    catalog = open_all()
    assert list(catalog.datasets) == ["good"]
    with pytest.raises(DatasetRefused, match="half.parquet is truncated"):
        catalog["bad"].latest  # noqa: B018
    with pytest.raises(UnknownDataset, match="no dataset 'goood'. Did you mean 'good'"):
        catalog["goood"]
    shutil.rmtree(data / "good")
    with pytest.raises(DatasetRefused, match=r"nothing in .* can be served(.|\n)*half.parquet is truncated"):
        open_all()


def test_null_rows_are_known_from_the_footer_and_refused_with_the_way_out(data: Path, tokenizer: Path) -> None:
    write_text(data, ["one", None, "two"])
    with pytest.raises(DatasetRefused, match=r'part-000.parquet, row group 0: 1 row is null.*on_bad_row = "substitute"'):
        snapshot_of(data, tokenizer)
    (data / "penstock.toml").write_text('on_bad_row = "substitute"')
    assert snapshot_of(data, tokenizer).num_rows == 3


@pytest.mark.parametrize(
    ("prompt", "response"), [("ask", "answer"), ("die Frage", 'a "good" one'), ("meta.ask", "wäre\\"), ("order", "null")]
)
def test_the_filter_that_leaves_null_rows_out_is_told_as_it_is_to_be_written(
    data: Path, tokenizer: Path, load: Loader, prompt: str, response: str
) -> None:
    data.mkdir()
    columns = {prompt: ["one", None, "two", "three"], response: ["four", "five", "six", None]}
    pq.write_table(pa.table(columns), data / "part-000.parquet")
    recipe = f"prompt = {json.dumps(prompt, ensure_ascii=False)}\nresponse = {json.dumps(response, ensure_ascii=False)}\n"
    (data / "penstock.toml").write_text(recipe)
    with pytest.raises(DatasetRefused, match="1 row is null in") as refusal:
        snapshot_of(data, tokenizer)
    [told] = re.findall(r"say in penstock.toml (filter = .*) to leave them out", str(refusal.value))
    (data / "penstock.toml").write_text(recipe + told)
    _, block = load()
    assert (block.stored_rows.tolist(), block.bad) == ([0, 2], {})


def test_where_texts_are_null_the_filter_that_is_told_leaves_empty_ones_out_too(
    data: Path, tokenizer: Path, load: Loader
) -> None:
    write_text(data, ["one", None, "", "two"])
    with pytest.raises(DatasetRefused, match="1 row is null in text") as refusal:
        snapshot_of(data, tokenizer)
    [told] = re.findall(r"say in penstock.toml (filter = .*) to leave them out", str(refusal.value))
    (data / "penstock.toml").write_text(told)
    _, block = load()
    assert (block.stored_rows.tolist(), block.bad) == ([0, 3], {})


@pytest.mark.parametrize(
    ("columns", "toml"),
    [
        ({"text": ["one", "", "two"]}, ""),
        ({"text": ["one", "", "two"]}, "filter = \"text is null or text != 'three'\"\n"),
        ({"prompt": ["one", "two", "three"], "response": ["four", "", "five"]}, ""),
        ({"tokens": [[1, 2], [], [3]]}, ""),
        ({"tokens": [[1, 2], None, [3]]}, ""),
    ],
)
def test_an_empty_row_is_told_with_the_filter_that_leaves_it_out(
    data: Path, load: Loader, columns: dict[str, list[Any]], toml: str
) -> None:
    data.mkdir()
    pq.write_table(pa.table(columns), data / "part-000.parquet")
    (data / "penstock.toml").write_text(toml)
    blocks, block = load()
    with pytest.raises(BadRow) as refusal:
        blocks.quarantine.check_block(block, 0)
    (data / "penstock.toml").write_text(str(refusal.value).partition("such rows can be left out by ")[2].removesuffix("."))
    _, block = load()
    assert (block.stored_rows.tolist(), block.bad) == ([0, 2], {})


@pytest.mark.parametrize(
    ("columns", "toml"),
    [
        ({"meta": [{"text": "one"}, {"text": ""}]}, 'text = "meta.text"'),
        ({"text": ["one", "two"], "score": [1, None]}, 'columns = ["score"]'),
        ({"tokens": [[1], [2, None]]}, ""),
    ],
)
def test_where_no_filter_helps_none_is_told(data: Path, load: Loader, columns: dict[str, list[Any]], toml: str) -> None:
    data.mkdir()
    pq.write_table(pa.table(columns), data / "part-000.parquet")
    (data / "penstock.toml").write_text(toml)
    blocks, block = load()
    with pytest.raises(BadRow, match="row 1 of row group 0") as refusal:
        blocks.quarantine.check_block(block, 0)
    assert str(refusal.value).endswith("so a run can go on where it stopped.")


def test_ids_outside_the_vocabulary_are_known_from_the_footer_and_refused_with_the_bound(data: Path) -> None:
    write_numbered(data, 300)
    (data / "penstock.toml").write_text("vocab_size = 200")
    with pytest.raises(DatasetRefused, match=r"part-002.parquet: .*ids from 1 to 299, but ids must be from 0 to 199") as caught:
        snapshot_of(data)
    assert "vocab_size" in str(caught.value)


def test_a_negative_id_is_refused_even_when_no_vocabulary_is_given(data: Path) -> None:
    write_shards(data, "tokens", [[[1, -5]]], type_=pa.list_(pa.int64()), row_group_size=1)
    with pytest.raises(DatasetRefused, match="ids from -5 to 1"):
        snapshot_of(data)


def test_a_dataset_without_a_row_is_refused(data: Path) -> None:
    write_shards(data, "tokens", [[]], type_=pa.list_(pa.int64()), row_group_size=1)
    with pytest.raises(DatasetRefused, match="not one row"):
        snapshot_of(data)


@pytest.mark.parametrize(("largest", "dtype"), [(65_535, "uint16"), (65_536, "uint32")])
def test_token_ids_take_the_smallest_dtype_that_the_footers_allow(data: Path, largest: int, dtype: str) -> None:
    write_shards(data, "tokens", [[[1]], [[largest]]], type_=pa.list_(pa.int64()), row_group_size=1)
    assert snapshot_of(data).token_dtype == dtype


def test_the_fingerprint_is_of_shards_and_recipe_and_nothing_else(data: Path, tmp_path: Path) -> None:
    write_numbered(data, 50)
    first = snapshot_of(data).fingerprint
    shutil.copytree(data, tmp_path / "copy")  # elsewhere and with other dates
    assert snapshot_of(tmp_path / "copy").fingerprint == first
    (data / "penstock.toml").write_text('on_bad_row = "substitute"')
    assert snapshot_of(data).fingerprint == first
    (data / "penstock.toml").write_text("vocab_size = 60")
    assert snapshot_of(data).fingerprint != first
    (data / "penstock.toml").write_text("validation = 0.1")
    assert snapshot_of(data).fingerprint != first
    (data / "penstock.toml").unlink()
    (data / "part-000.parquet").rename(data / "part-00.parquet")  # of which split a row is, its shard's name decides
    assert snapshot_of(data).fingerprint != first
    (data / "part-00.parquet").rename(data / "part-000.parquet")
    assert snapshot_of(data).fingerprint == first
    write_shards(data, "input_ids", [[], [], [], [[1]]], type_=pa.list_(pa.int32()), row_group_size=1)
    assert snapshot_of(data).fingerprint != first


def test_blocks_are_row_groups_in_the_order_of_shards(data: Path) -> None:
    write_numbered(data, 100, num_shards=2, row_group_size=20)
    snapshot = snapshot_of(data)
    assert snapshot.rows_per_block.tolist() == [20, 20, 10, 20, 20, 10]
    found = [snapshot.block(index) for index in range(snapshot.num_blocks)]
    assert [(b.shard.path.name, b.row_group, b.num_rows) for b in found] == [
        (f"part-00{shard}.parquet", group, rows) for shard in (0, 1) for group, rows in enumerate((20, 20, 10))
    ]


def test_prompts_and_responses_are_opened_together(data: Path, tokenizer: Path) -> None:
    write_pairs(data, [("a", "b"), ("c", "d")])
    snapshot = snapshot_of(data, tokenizer)
    assert (snapshot.recipe.token_columns, snapshot.num_rows) == (("prompt", "response"), 2)
    assert np.array_equal(snapshot.rows_per_block, [2])


@needs_real_data
def test_files_that_crash_parquet_readers_are_refused_one_by_one(data: Path, tokenizer: Path) -> None:
    for path in sorted((REAL_DATA / "bad_parquet").glob("*.parquet")):
        shutil.rmtree(data, ignore_errors=True)
        data.mkdir()
        shutil.copy(path, data)
        with pytest.raises(DatasetRefused):
            snapshot_of(data, tokenizer)
