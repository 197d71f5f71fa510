"""Rows that cannot be used: what stands in for them, and what is listed."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path

import pyarrow as pa
import pytest
from tokenizers import Tokenizer, models

from penstock_server.blocks import quarantine as quarantine_module
from penstock_server.catalog import snapshot as snapshot_module
from penstock_server.problems import ShardUnreadable
from support.corpora import CHATML, IDS, index_of, open_blocks, write
from support.engine import rows_of


def test_answer_is_the_last_message_when_both_sides_are_equal(data: Path) -> None:
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    asked, said = {"role": "user", "content": "fox"}, {"role": "assistant", "content": "dog"}
    write(data, "", {"chosen": [[asked, said]], "rejected": [[asked, said]]})
    [block] = open_blocks(data).get([0])
    assert block.bad == {}
    assert [is_in_loss for _, is_in_loss in block.features["chosen"].row(0)] == [False, True]


def test_bad_rows_are_replaced_up_to_max_bad_share(data: Path) -> None:
    for num_bad in (2, 3):
        rows = pa.array([[]] * num_bad + [[1]] * (100 - num_bad), IDS)
        write(data, 'on_bad_row = "replace"\nmax_bad_share = 0.02', {"tokens": rows})
        blocks = open_blocks(data)
        blocks.get([0])
        assert (blocks.quarantine.num_bad_rows, blocks.quarantine.refusal is None) == (num_bad, num_bad == 2)


@pytest.mark.parametrize("counted", ["rows", "lengths"])
def test_max_bad_share_counts_the_rows_kept_by_the_filter(data: Path, counted: str) -> None:
    rows = {"tokens": pa.array([[]] * 2 + [[1]] * 998, IDS), "n": range(1000)}
    write(data, 'on_bad_row = "replace"\nfilter = "n < 100"', rows)
    blocks = open_blocks(data)
    blocks.get([0])
    assert blocks.quarantine.refusal is None
    getattr(index_of(blocks, data), counted).make(lambda _: None)
    assert "2 of 100 rows (2.00%) are known to be bad" in str(blocks.quarantine.refusal)


def test_bad_row_is_listed_by_its_place_in_the_shard_with_a_filter(data: Path) -> None:
    rows = {"tokens": pa.array([[1], [2], [3], [], [4]], IDS), "n": range(5)}
    write(data, 'on_bad_row = "replace"\nfilter = "n > 1"', rows)
    blocks = open_blocks(data)
    blocks.get([0])
    assert [(row.row, row.row_in_group) for row in blocks.quarantine.rows()] == [(3, 3)]


def test_unreadable_row_group_is_listed_with_its_error(data: Path) -> None:
    write(data, 'on_bad_row = "replace"', {"text": ["fox", None]})
    path = data / "part-0.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + b"\xff" * 30 + whole[34:])
    blocks = open_blocks(data)
    [loaded] = blocks.request([0])
    assert isinstance(loaded, Future)
    assert isinstance(loaded.exception(), ShardUnreadable)
    blocks.quarantine.note_load(0, loaded)  # whoever waits may wake before it is noted
    assert [group.reason for group in blocks.quarantine.groups()] == [str(loaded.exception())]


def test_text_is_replaced_and_counted_when_the_tokenizer_fails(data: Path) -> None:
    unigram = Tokenizer(models.Unigram([("a", -1.0), (" ", -1.0), ("b", -1.0)]))
    unigram.save(str(data / "../tokenizer.json"))
    keys = 'eos = false\non_bad_row = "replace"\nmax_bad_share = 0.1'
    write(data, keys, {"text": ["a b"] * 9 + ["emoji \N{GRINNING FACE}"]})
    blocks = open_blocks(data)
    [block] = blocks.get([0])
    assert list(block.bad) == [9]
    assert rows_of(block)[:9] == [[0, 1, 2]] * 9
    assert (blocks.quarantine.num_bad_rows, blocks.quarantine.refusal) == (1, None)
    assert [(row.row, row.reason) for row in blocks.quarantine.rows()] == [(9, block.bad[9])]


def test_bad_rows_are_listed_in_order_up_to_a_limit(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "_BLOCK_ROWS", 2)
    monkeypatch.setattr(quarantine_module, "_LISTED_ROWS", 3)
    shards = [["fox", None, "", "", "dog", None], ["fox", None]]
    write(data, 'on_bad_row = "replace"', *({"text": texts} for texts in shards))
    blocks = open_blocks(data)
    for index in (2, 1, 0):
        blocks.get([index])
    assert [(row.row, row.row_in_group) for row in blocks.quarantine.rows()] == [(2, 2), (3, 3), (5, 5)]
    assert blocks.quarantine.num_bad_rows == 4
    for _ in range(2):  # the second time the counts are there, and no block need be looked at
        blocks = open_blocks(data)
        index_of(blocks, data).lengths.make(lambda _: None)
        assert blocks.quarantine.num_bad_rows == 5
