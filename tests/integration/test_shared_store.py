"""Servers with a shared store: what one has made, another does not make again."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from random import Random

import numpy as np
import obstore
import pytest
from obstore.store import LocalStore

from penstock.spec import Spec
from penstock_server.blocks import shared
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import Catalog, open_catalog
from penstock_server.problems import DatasetInvalid
from support.corpora import write_numbered, write_text, write_tokenizer
from support.engine import rows_of
from support.processes import until
from support.servers import penstock
from support.stores import Uploaded, object_store

TEXTS = [f"the quick brown fox {n} jumps over {n * n}" for n in range(400)]


class Servers:
    """Catalogs with separate caches and one store, each of which reads a copy of the data elsewhere."""

    def __init__(self, folder: Path, place: Path | str) -> None:
        self._folder, self._place = folder, place
        self._stores = list[BlockStore]()

    def start(self) -> Catalog:
        """Start one on an empty disk."""
        number = len(self._stores)
        data, cache = self._folder / f"data-{number}", self._folder / f"cache-{number}"
        write_text(data / "texts", TEXTS, row_group_size=50)
        self._stores.append(BlockStore(cache, shared=self._place))
        return open_catalog(data, write_tokenizer(data / "tokenizer.json", TEXTS), self._stores[-1])

    def close(self) -> None:
        for store in self._stores:
            store.close()


@pytest.fixture(params=["folder", "s3"])
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Servers]:
    if request.param == "s3":
        object_store()
    place = tmp_path / "store" if request.param == "folder" else f"s3://penstock/{tmp_path.name}-{Random().random()}"
    servers = Servers(tmp_path, place)
    yield servers
    servers.close()


def outcomes(catalog: Catalog) -> dict[str, float]:
    """The number of requests to the store by their outcome."""
    samples = (sample for metric in catalog.store.metrics.store_requests.collect() for sample in metric.samples)
    return {sample.labels["outcome"]: sample.value for sample in samples if sample.name.endswith("_total")}


def decoded(catalog: Catalog) -> float:
    samples = (sample for metric in catalog.store.metrics.decode_seconds.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name.endswith("_count"))


def num_decoded(catalog: Catalog) -> int:
    """The number of row groups, of one block each, that it has decoded: it writes each, or finds it written."""
    flush(catalog)
    return int(outcomes(catalog).get("written", 0) + outcomes(catalog).get("known", 0))


def rows(catalog: Catalog) -> list[list[int]]:
    opened = catalog["texts"].latest
    return [row for block in opened.blocks.get(range(opened.snapshot.num_blocks)) for row in rows_of(block)]


def flush(catalog: Catalog) -> None:
    assert catalog.store.shared
    catalog.store.shared.flush()


def test_second_server_decodes_nothing(servers: Servers) -> None:
    first = servers.start()
    expected = rows(first)
    lengths = first["texts"].latest.index.lengths.make(lambda _: None).per_block("all").sums()
    flush(first)
    second = servers.start()
    assert second["texts"].latest.index.lengths.make(lambda _: None).per_block("all").sums() == lengths
    assert rows(second) == expected
    assert decoded(first) > 0
    assert decoded(second) == 0
    assert outcomes(second).keys() == {"hit"}


def test_batches_of_cold_text_come_from_the_store(servers: Servers) -> None:
    first = servers.start()
    rows(first)
    flush(first)
    second = servers.start()
    blocks = second["texts"].latest.blocks
    asked = blocks.request_rows([3], np.array([3, 3]), np.array([0, 7]), "all")
    block = asked[0] if not hasattr(asked[0], "result") else asked[0].result(30)
    assert rows_of(block)[7] == rows_of(first["texts"].latest.blocks.get([3])[0])[7]
    assert decoded(second) == 0


def test_second_server_reads_no_footer_of_a_source(tmp_path: Path) -> None:
    write_numbered(tmp_path / "data" / "numbers", 90, num_shards=9)
    place, read = Uploaded(tmp_path / "data"), []
    for number in range(3):
        with closing(BlockStore(tmp_path / f"cache-{number}", shared=tmp_path / "store")) as store:
            opened = open_catalog([place.url], None, store)["numbers"].latest
            assert opened.snapshot.num_rows == 90 + 10 * (number > 1)
            assert store.shared
            store.shared.flush()
            [metric] = store.metrics.source_requests.collect()
            read.append(sum(sample.value for sample in metric.samples if sample.name.endswith("_total")))
        if number == 1:
            write_numbered(tmp_path / "data" / "numbers", 100, num_shards=10)
            place.update()
    place.close()
    assert read[0] - read[1] == 9
    assert read[2] <= read[1] + 10  # the shards were written anew


def test_two_servers_decode_each_row_group_once(servers: Servers) -> None:
    catalogs = [servers.start() for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        [first, second] = threads.map(rows, catalogs)
    assert first == second
    assert sum(map(num_decoded, catalogs)) == len(TEXTS) // 50


def test_claim_of_a_dead_server_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(shared, "_CLAIM_SECONDS", 0.2)
    monkeypatch.setattr(shared, "_POLL_SECONDS", 0.05)
    servers = Servers(tmp_path, tmp_path / "store")
    catalog = servers.start()
    opened = catalog["texts"].latest
    name = opened.blocks.names.of_group(opened.snapshot.block(0))
    obstore.put(LocalStore(tmp_path / "store", mkdir=True), f"{name}.claim", b"of a dead server")
    assert len(rows(catalog)) == len(TEXTS)
    assert "does not respond; its work is taken over" in caplog.text
    servers.close()
    until(lambda: not list((tmp_path / "store").glob("*.claim")))


def test_bins_are_shared(servers: Servers) -> None:
    spec = Spec(batch_size=2, seq_len=64, packing="best_fit")
    plans = []
    for _ in range(2):
        catalog = servers.start()
        catalog["texts"].latest.index.lengths.make(lambda _: None)
        catalog["texts"].latest.index.counting_bins("all", 64).make(lambda _: None)
        plans.append(catalog.plan("texts", spec).schedule.num_steps)
        flush(catalog)
    assert plans[0] == plans[1]
    assert "written" not in outcomes(catalog)


def test_objects_that_no_snapshot_needs_are_removed(tmp_path: Path) -> None:
    servers = Servers(tmp_path, tmp_path / "store")
    catalog = servers.start()
    expected = rows(catalog)
    catalog["texts"].latest.index.lengths.make(lambda _: None)
    flush(catalog)
    needed = {path.name for path in (tmp_path / "store").iterdir()}
    for name in (f"{'0' * 32}-0.block", f"{'0' * 32}-7.lengths", "README"):
        (tmp_path / "store" / name).write_bytes(b"x" * 1000)
    data, store = tmp_path / "data-0", str(tmp_path / "store")
    used = penstock("store", "usage", "--store", store)
    assert "blocks: 9, " in used.stdout
    assert "other objects: 1, 1,000 bytes" in used.stdout
    arguments: list[str | Path] = [
        "store",
        "gc",
        data,
        "--store",
        store,
        "--tokenizer",
        data / "tokenizer.json",
        "--cache-dir",
        tmp_path / "other",
    ]
    assert "0 objects of 0 bytes would be removed" in penstock(*arguments).stdout
    assert "2 objects of 2,000 bytes would be removed" in penstock(*arguments, "--older-than", "0").stdout
    assert "2 objects of 2,000 bytes removed" in penstock(*arguments, "--older-than", "0", "--delete").stdout
    assert {path.name for path in (tmp_path / "store").iterdir()} == {*needed, "README"}
    assert rows(servers.start()) == expected
    servers.close()


def test_garbage_is_kept_if_a_dataset_cannot_be_opened(tmp_path: Path) -> None:
    write_text(tmp_path / "data" / "texts", TEXTS)
    (tmp_path / "data" / "broken").mkdir()
    (tmp_path / "data" / "broken" / "a.parquet").write_bytes(b"no")
    (tmp_path / "store").mkdir()
    write_tokenizer(tmp_path / "tokenizer.json", TEXTS)
    arguments: list[str | Path] = [
        "--store",
        tmp_path / "store",
        "--tokenizer",
        tmp_path / "tokenizer.json",
        "--cache-dir",
        tmp_path / "cache",
    ]
    done = penstock("store", "gc", tmp_path / "data", *arguments, "--delete")
    assert done.returncode == 2
    assert "a dataset cannot be opened, so it is unknown what it needs. Nothing was removed." in done.stderr


def test_damaged_object_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    servers = Servers(tmp_path, tmp_path / "store")
    first = servers.start()
    expected = rows(first)
    flush(first)
    store = LocalStore(tmp_path / "store")
    [damaged, foreign, *_] = sorted(path for path in (tmp_path / "store").iterdir() if path.suffix == ".block")
    obstore.put(store, damaged.name, damaged.read_bytes()[:-20] + bytes(20))
    obstore.put(store, foreign.name, (tmp_path / "store" / damaged.name).read_bytes())
    second = servers.start()
    assert rows(second) == expected
    flush(second)
    assert outcomes(second)["corrupt"] == 2
    assert caplog.text.count("is damaged and will be made again") == 2
    third = servers.start()
    assert rows(third) == expected
    assert outcomes(third).keys() == {"hit"}
    servers.close()


def test_store_without_a_way_to_write_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetInvalid, match="the store https://host/x is not supported. Supported: s3://, gs://, az://, and"):
        BlockStore(tmp_path, shared="https://host/x")


def test_store_that_fails_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    servers = Servers(tmp_path, "s3://nowhere/x")
    catalog = servers.start()
    assert len(rows(catalog)) == len(TEXTS)
    assert "the store s3://nowhere/x fails: no connection; blocks are made without it meanwhile" in caplog.text
    assert outcomes(catalog).keys() == {"failed"}  # no request is made for a while, so none is a miss
    servers.close()
