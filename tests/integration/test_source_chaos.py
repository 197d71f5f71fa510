"""Faults between the server and an object store: the same batches as without, or a clear error."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import RemoteDataset, SnapshotGone
from penstock_server.api.admission import InFlight
from penstock_server.app import create_app
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import Catalog, open_catalog
from penstock_server.problems import Problem, ShardUnreadable
from penstock_server.sources import objects, remote
from support.chaos import ChaosProxy, Kind
from support.corpora import write_numbered
from support.engine import rows_of
from support.recorded import contents
from support.servers import serving_app
from support.stores import Uploaded, object_store

NUM_ROWS, GROUP_ROWS = 600, 20
Through = Callable[..., AbstractContextManager[ChaosProxy]]
KINDS: tuple[Kind, ...] = ("delay", "cut", "truncate", "error", "garbage", "throttle")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards whose pages have checksums, as `penstock import` writes them."""
    folder = tmp_path_factory.mktemp("data")
    for path in write_numbered(folder / "numbers", NUM_ROWS, num_shards=6).iterdir():
        pq.write_table(pq.read_table(path), path, row_group_size=GROUP_ROWS, write_page_checksum=True)
    return folder


@pytest.fixture(scope="module")
def uploaded(folder: Path) -> Iterator[Uploaded]:
    with closing(Uploaded(folder)) as uploaded:
        yield uploaded


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the pauses of real stores a test would take minutes."""
    monkeypatch.setattr(remote, "_MIN_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(remote, "_MAX_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(objects, "_REQUEST_SECONDS", 0.5)


@pytest.fixture
def through(monkeypatch: pytest.MonkeyPatch) -> Through:
    """Lead the requests of new clients through a proxy."""
    object_store()
    address = os.environ["AWS_ENDPOINT_URL"]

    @contextmanager
    def run(seed: int, *kinds: Kind) -> Iterator[ChaosProxy]:
        with ChaosProxy(address, seed, kinds, longest=20_000) as proxy, monkeypatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", proxy.url)
            yield proxy

    return run


@contextmanager
def opened(place: Path | str, cache: Path, budget_bytes: int | None = None) -> Iterator[Catalog]:
    with closing(BlockStore(cache, budget_bytes)) as store:
        yield open_catalog([place], None, store)


@contextmanager
def served(catalog: Catalog) -> Iterator[str]:
    with serving_app(create_app(catalog, InFlight(1 << 30))) as url:
        yield url


def epoch(url: str, **spec: Any) -> list[Any]:
    data = RemoteDataset(url, "numbers", batch_size=4, seq_len=8, window=60, retry_seconds=120, **spec)
    return [*map(contents, data)]


def outcomes(catalog: Catalog) -> dict[str, float]:
    """The number of requests to the source by their outcome."""
    samples = (sample for metric in catalog.store.metrics.source_requests.collect() for sample in metric.samples)
    return {sample.labels["outcome"]: sample.value for sample in samples if sample.name.endswith("_total")}


def test_epoch_is_unchanged_by_faults_of_the_store(folder: Path, uploaded: Uploaded, through: Through, tmp_path: Path) -> None:
    with opened(folder, tmp_path / "near") as near, served(near) as url:
        expected = epoch(url)
    with through(0, *KINDS) as proxy, opened(uploaded.url, tmp_path / "far") as far, served(far) as url:
        assert epoch(url) == expected
        assert set(proxy.num_faults) == set(KINDS)
        assert outcomes(far)["failed"] > 1
        assert outcomes(far)["throttled"] > 1


def test_store_that_stops_responding_is_asked_again(folder: Path, uploaded: Uploaded, through: Through, tmp_path: Path) -> None:
    with opened(folder, tmp_path / "near") as near, served(near) as url:
        expected = epoch(url)
    with through(1, "hang", "cut", "cut", "cut") as proxy, opened(uploaded.url, tmp_path / "far") as far, served(far) as url:
        assert epoch(url) == expected
        assert proxy.num_faults["hang"] > 1


def test_object_that_is_replaced_ends_a_run_with_its_name(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "data" / "numbers"
    shutil.copytree(folder / "numbers", copy)
    seen, spec = list[Any](), dict[str, Any](shuffle="none", prefetch_bytes=1)
    with opened(folder, tmp_path / "near") as near, served(near) as url:
        expected = epoch(url, **spec)
    with (
        closing(Uploaded(tmp_path / "data")) as place,
        opened(place.url, tmp_path / "far", 12_000) as far,  # some six of the thirty blocks
        served(far) as url,
    ):

        def train() -> None:
            for batch in RemoteDataset(url, "numbers", batch_size=4, seq_len=8, window=60, **spec):
                seen.append(contents(batch))
                if len(seen) == 30:
                    pq.write_table(pa.table({"input_ids": [[1]] * 100}), copy / "part-004.parquet")
                    place.update()

        with pytest.raises(SnapshotGone, match=r"part-004\.parquet changed since the server read it"):
            train()
    assert 30 < len(seen) < len(expected)
    assert seen == expected[: len(seen)]


def test_flipped_bits_on_the_way_give_no_other_rows(folder: Path, uploaded: Uploaded, through: Through, tmp_path: Path) -> None:
    """Over plain HTTP. The checksums of the pages detect them."""
    with opened(folder, tmp_path / "near") as near:
        blocks = near["numbers"].latest.blocks.get(range(NUM_ROWS // GROUP_ROWS))
        expected = [rows_of(block) for block in blocks]
    failures = list[Problem]()
    for seed in range(4):
        with opened(uploaded.url, tmp_path / f"far-{seed}") as far, through(seed, "flip"):
            source = far.store.sources.folder(uploaded.url).source
            source._store = None  # type: ignore[attr-defined]  # as if it had not connected yet
            for index in range(len(expected)):
                try:
                    [block] = far["numbers"].latest.blocks.get([index])
                except Problem as problem:
                    failures.append(problem)
                else:
                    assert rows_of(block) == expected[index]
    assert any("could not verify page integrity" in str(failure) for failure in failures)


def test_damaged_page_is_named(folder: Path, tmp_path: Path) -> None:
    object_store()
    shard = (folder / "numbers" / "part-000.parquet").read_bytes()
    chunk = pq.ParquetFile(pa.BufferReader(shard)).metadata.row_group(2).column(0)
    place = chunk.dictionary_page_offset + chunk.total_compressed_size - 1  # in its last page
    damaged = shard[:place] + bytes([shard[place] ^ 1]) + shard[place + 1 :]
    obstore.put(object_store(), f"{tmp_path.name}-damaged/numbers/part-000.parquet", damaged)
    with opened(f"s3://penstock/{tmp_path.name}-damaged", tmp_path / "cache") as catalog:
        blocks = catalog["numbers"].latest.blocks
        with pytest.raises(ShardUnreadable, match="row group 2 of part-000.parquet cannot be read: could not verify page"):
            blocks.get([2])
        assert blocks.get([1])[0].num_rows == GROUP_ROWS
