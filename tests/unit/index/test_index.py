"""What is counted over all blocks, as files: kept while it is used, made again when it is damaged, forgotten when it is old."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import TestCase

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from penstock_server.api.admission import InFlight
from penstock_server.app import create_app
from penstock_server.batches.assemble import chunks, load
from penstock_server.batches.writer import frames
from penstock_server.blocks import cache as maps_module
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog import dataset as dataset_module
from penstock_server.catalog.catalog import Catalog, open_catalog
from penstock_server.index import index as index_module
from penstock_server.index import row_lengths as lengths_module
from penstock_server.index.index import drop_old_counts
from penstock_server.index.row_lengths import BIN_STARTS, QUANTILES, RowLengths, ShardLengths
from penstock_server.recipes import encode
from penstock_server.recipes.split import select_rows
from support import examples
from support.corpora import damaged, write_numbered, write_text, write_tokenizer
from support.engine import plan_of

WAYS = [{"packing": "best_fit", "split": "train"}, {"packing": "concat"}, {"overflow": "split"}, {"split": "validation"}]
MONTH_AGO = time.time() - 31 * 86_400
WEEK_AGO = time.time() - 7 * 86_400


@pytest.fixture
def open_all(tmp_path: Path) -> Callable[[], Catalog]:
    """The catalog as a server sees it that has just been started."""
    folder = write_numbered(tmp_path / "data" / "d", 300, row_group_size=20)
    (folder / "penstock.toml").write_text("validation = 0.3")
    return lambda: open_catalog(folder.parent, None, BlockStore(tmp_path / "cache"))


def served(catalog: Catalog, way: dict[str, str]) -> bytes:
    """The first batches of an epoch."""
    plan = plan_of(catalog, "d", batch_size=4, seq_len=5, **way)
    return b"".join(frames(chunk, load(chunk)) for chunk in chunks(plan, 0, 0, range(min(5, plan.schedule.num_steps))))


def counts(folder: Path) -> dict[str, int]:
    """The files of counts, each with its inode: a file that is made again has another."""
    return {path.name: path.stat().st_ino for path in folder.iterdir() if path.suffix in (".lengths", ".index")}


def age(folder: Path, seconds_since_epoch: float) -> None:
    for name in counts(folder):
        os.utime(folder / name, (seconds_since_epoch,) * 2)


def test_counts_unused_for_a_month_are_dropped(open_all: Callable[[], Catalog], tmp_path: Path) -> None:
    cache, running = tmp_path / "cache", open_all()
    before = [served(running, way) for way in WAYS]
    assert sorted(Path(name).suffix for name in counts(cache)) == [".index", ".lengths", ".lengths", ".lengths"]
    blocks = set(cache.glob("*.block"))
    age(cache, MONTH_AGO)
    started = open_all()
    assert counts(cache) == {}
    assert set(cache.glob("*.block")) == blocks
    assert (cache / "notes").is_dir()
    assert [served(running, way) for way in WAYS] == before
    assert [served(started, way) for way in WAYS] == before
    assert len(counts(cache)) == 4


def test_used_counts_stay(open_all: Callable[[], Catalog], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for way in WAYS[::-1]:  # the rows of a split are counted by themselves as long as the tokens are not
        served(open_all(), way)
    made = counts(cache)
    assert len(made) == 5
    for _ in range(3):
        age(cache, WEEK_AGO)
        for way in WAYS[::-1]:
            served(open_all(), way)
        assert all((cache / name).stat().st_mtime > WEEK_AGO + 1 for name in made)
    assert counts(cache) == made


def test_batches_are_served_when_the_disk_of_the_cache_fails(
    open_all: Callable[[], Catalog], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache, ways = tmp_path / "cache", [{"packing": "rows"}, *WAYS]
    before = [served(open_all(), way) for way in ways]
    shutil.rmtree(cache)
    running = open_all()
    served(running, {"split": "validation"})
    client = TestClient(create_app(running, InFlight(1 << 30)))
    shutil.rmtree(cache)
    cache.touch()

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(file: int | Path, *args: Any, **options: Any) -> Any:
            if isinstance(file, int) or file.is_relative_to(cache):
                raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
            return call(file, *args, **options)

        return called

    monkeypatch.setattr(Path, "stat", failing(Path.stat))
    monkeypatch.setattr(os, "pread", failing(os.pread))
    monkeypatch.setattr(maps_module, "_TOUCH_SECONDS", 0.0)
    for url in ("/v1/datasets", "/v1/datasets/d", "/v1/datasets/d/spec", "/v1/datasets/d/epochs/0/ranks/0/batches/0"):
        assert client.get(url).status_code == 200
    assert [served(running, way) for way in ways] == before
    assert caplog.text.count("the block cache cannot be written to") == 1


def test_counts_stay_while_a_server_runs_for_months(
    open_all: Callable[[], Catalog], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_module, "_MARK_SECONDS", 0)
    cache, running = tmp_path / "cache", open_all()
    for way in WAYS[::-1]:
        served(running, way)
    made = counts(cache)
    age(cache, MONTH_AGO)
    served(running, {"packing": "rows"})  # a job that needs none of them uses the snapshot that they are of
    drop_old_counts(cache, time.time())
    assert counts(cache) == made


def num_maps(cache: Path) -> int:
    """The files of row lengths that are mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(f"{cache}/" in line and ".lengths" in line for line in lines)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_snapshots_share_the_counts_of_their_shards_and_small_files_are_not_mapped(
    open_all: Callable[[], Catalog], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lengths_module, "_SMALL_BYTES", 4 * 99)
    catalog, snapshots = open_all(), []
    table = pq.read_table(tmp_path / "data" / "d" / "part-000.parquet")
    for number, rows in enumerate((99, 100, 100), start=3):
        catalog.refresh("d")
        snapshots.append(catalog["d"].latest)
        served(catalog, {"packing": "concat"})
        assert num_maps(tmp_path / "cache") == (3, 3, 4)[number - 3]
        pq.write_table(table.slice(0, rows), tmp_path / "data" / "d" / f"part-{number:03}.parquet")


def test_rows_after_the_filter_are_known_when_rows_or_tokens_are_counted(tmp_path: Path) -> None:
    folder = write_text(tmp_path / "data" / "d", ["fox", "dog", "fox"], row_group_size=1)
    (folder / "penstock.toml").write_text("filter = \"text = 'fox'\"")
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    for number, name in enumerate(("lengths", "rows")):
        cache = tmp_path / f"cache{number}"
        index = open_catalog(folder.parent, tokenizer, BlockStore(cache))["d"].latest.index
        assert (index.num_rows, index.num_counted) == (None, 0)
        index.lengths.num_done = 1
        assert index.num_counted == 1
        guessed = index.bytes_per_block().tolist()
        getattr(index, name).make(lambda _: None)
        assert (index.num_rows, index.num_counted) == (2, 3 if name == "lengths" else 1)
        started, other = (open_catalog(folder.parent, tokenizer, BlockStore(cache))["d"].latest.index for _ in range(2))
        assert (started.num_rows, started.num_counted) == (2, 3 if name == "lengths" else 0)
        assert other.bytes_per_block().tolist() == index.bytes_per_block().tolist()
        assert (other.bytes_per_block().tolist() != guessed) == (name == "lengths")


@pytest.mark.parametrize("way", [*WAYS, {"packing": "best_fit"}], ids=str)
@pytest.mark.parametrize("filter_", ["", "input_ids is not null"], ids=["unfiltered", "filtered"])
def test_row_group_is_tokenized_once_for_counts_and_batches(
    open_all: Callable[[], Catalog], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: dict[str, str], filter_: str
) -> None:
    if filter_:
        (tmp_path / "data" / "d" / "penstock.toml").write_text(f'validation = 0.3\nfilter = "{filter_}"')
    tokenized, tokenize = list[str](), encode.encode

    def counted(*args: Any) -> pa.RecordBatch:
        tokenized.append(threading.current_thread().name)  # a Mock may lose calls of several threads
        return tokenize(*args)

    monkeypatch.setattr(encode, "encode", counted)
    plan = plan_of(open_all(), "d", batch_size=1, seq_len=5, **way)
    for epoch in range(2):
        for chunk in chunks(plan, epoch, 0, range(plan.schedule.num_steps)):
            frames(chunk, load(chunk))
    assert len(tokenized) == 15  # row groups


def test_counts_that_cannot_be_stored_are_held_in_memory(
    open_all: Callable[[], Catalog], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [served(open_all(), way) for way in WAYS]
    for name in counts(tmp_path / "cache"):
        (tmp_path / "cache" / name).unlink()
    for module in (index_module, lengths_module):
        monkeypatch.setattr(module, "write_sealed", lambda *_: None)
    catalog = open_all()
    assert [served(catalog, way) for way in WAYS] == expected
    assert counts(tmp_path / "cache") == {}


@pytest.fixture
def expected(open_all: Callable[[], Catalog]) -> list[bytes]:
    """What is served in each way, by servers that make all counts."""
    return [served(open_all(), way) for way in WAYS[::-1]]


@pytest.fixture
def whole(expected: list[bytes], tmp_path: Path) -> dict[str, bytes]:
    """The files of counts."""
    return {name: (tmp_path / "cache" / name).read_bytes() for name in counts(tmp_path / "cache")}


@examples(15, suppress_health_check=[HealthCheck.function_scoped_fixture])  # each begins with whole files
@given(st.data())
def test_damaged_counts_are_made_again_and_batches_are_the_same(
    open_all: Callable[[], Catalog], tmp_path: Path, expected: list[bytes], whole: dict[str, bytes], data: st.DataObject
) -> None:
    cache, ways = tmp_path / "cache", WAYS[::-1]
    for name, content in whole.items():
        (cache / name).write_bytes(content)
    assert {name.partition("-")[2] for name in whole} == {"3.lengths", "bins-train-5-4.index", "rows-4.index"}
    running = open_all()
    for way in ways[: data.draw(st.integers(0, len(ways)), label="what the running server has read")]:
        served(running, way)
    names = data.draw(st.sets(st.sampled_from(sorted(whole)), min_size=1))
    for name in names:
        (cache / "copy").write_bytes(data.draw(damaged(whole[name])))
        (cache / "copy").replace(cache / name)
    with TestCase().assertLogs("penstock.sealed", "WARNING") as logs:
        for catalog in (running, open_all()):
            assert [served(catalog, way) for way in ways] == expected
    lines = [record.getMessage() for record in logs.records]
    assert sorted(lines) == sorted(f"{cache / name} is damaged and will be made again" for name in names)
    assert {name: (cache / name).read_bytes() for name in counts(cache)} == whole


LENGTHS = st.integers(0, 5) | st.integers(0, (1 << 31) - 1)
ROWS = st.lists(LENGTHS.flatmap(lambda row: st.tuples(st.just(row), st.integers(0, row))), max_size=40)


def test_sums_per_block_do_not_depend_on_portions() -> None:
    lengths = np.arange(100, dtype=np.uint32) % 7
    words = lengths | np.where(np.arange(100) % 3, 0, 1 << 31).astype(np.uint32)
    starts = np.array([0, 0, 1, 4, 50, 50, 50, 99, 100, 100])
    shard = ShardLengths(starts, np.ones(9, np.int64), words, np.zeros(0, np.uint32))
    for split, inside in (("all", lengths >= 0), ("train", np.arange(100) % 3 > 0), ("validation", np.arange(100) % 3 == 0)):
        for step in (1, 3, 49, 50, 51, 100, 1000):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(lengths_module, "_STEP", step)
                counts = RowLengths(np.arange(10), [shard], lambda split: [select_rows(split, "train", 0.3)]).per_block(split)
            of_blocks = [lengths[start:stop][inside[start:stop]] for start, stop in pairwise(starts.tolist())]
            assert counts.rows.tolist() == [len(own) for own in of_blocks]
            assert counts.tokens.tolist() == [own.sum() for own in of_blocks]
            assert counts.bad_rows.tolist() == [(own == 0).sum() for own in of_blocks]


@given(st.lists(ROWS, min_size=1, max_size=3), st.integers(1, 9), st.booleans())
def test_quantiles_and_histograms_are_those_of_the_usable_rows(
    shards: list[list[tuple[int, int]]], short: int, has_prompts: bool
) -> None:
    made = []
    for shard in shards:
        words = np.array([row | (at % 2 << 31) for at, (row, _) in enumerate(shard)], np.uint32)
        prompts = np.array([prompt for _, prompt in shard if has_prompts], np.uint32)
        made.append(ShardLengths(np.array([0, len(shard)]), np.array([1]), words, prompts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lengths_module, "_SHORT", short)
        patch.setattr(lengths_module, "_STEP", 3)
        row_lengths = RowLengths(np.arange(len(shards) + 1), made, lambda _: ["all"] * len(made))
        found, histograms = row_lengths.quantiles, row_lengths.histograms
    rows = [row for shard in shards for row in shard if row[0]]
    sides = {"row": [row for row, _ in rows]}
    if has_prompts and any(shards):
        sides |= {"prompt": [prompt for _, prompt in rows], "response": [row - prompt for row, prompt in rows]}

    def quantile(lengths: list[int], share: int) -> int:
        return next((n for n in lengths if bisect_right(lengths, n) * 1000 >= share * len(lengths)), 0)

    assert found == {
        side: {name: quantile(sorted(own), share) for name, share in QUANTILES.items()} for side, own in sides.items()
    }
    for side, own in sides.items():
        bins = zip(BIN_STARTS.tolist(), BIN_STARTS.tolist()[1:], strict=False)
        expected = [sum(low <= length < high for length in own) for low, high in bins]
        assert histograms[side].tolist() == [*expected, 0]
