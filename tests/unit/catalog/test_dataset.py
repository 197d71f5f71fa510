"""Snapshots of a dataset: served while their shards are present, and only then."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from penstock_server.api.admission import InFlight
from penstock_server.app import create_app
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog import history as history_module
from penstock_server.catalog.catalog import open_catalog
from penstock_server.catalog.describe import describe_dataset
from penstock_server.catalog.footers import FolderContents, FolderReader
from penstock_server.problems import DatasetInvalid
from support import examples
from support.corpora import write_shard
from support.engine import Opener

ACTIONS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 2), st.integers(0, 1)),
    st.tuples(st.just("remove"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("restart"), st.just(0), st.just(0)),
)


@examples(25)
@given(st.lists(ACTIONS, min_size=1, max_size=9))
def test_snapshot_is_served_while_its_shards_are_present(
    actions: list[tuple[str, int, int]],
) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder, cache = Path(temporary) / "data" / "d", Path(temporary) / "cache"
        folder.mkdir(parents=True)
        there = {9: 0}
        write_shard(folder, 9, 0)
        client = TestClient(create_app(open_catalog(folder.parent, None, BlockStore(cache)), InFlight(1 << 30)))
        known: dict[str, tuple[dict[int, int], bytes]] = {}
        for what, number, variant in [("write", 9, 0), *actions]:
            if what == "write":
                write_shard(folder, number, variant)
                there[number] = variant
            elif what == "remove":
                (folder / f"part-{number}.parquet").unlink(missing_ok=True)
                there.pop(number, None)
            else:
                client = TestClient(create_app(open_catalog(folder.parent, None, BlockStore(cache)), InFlight(1 << 30)))
            latest = client.post("/v1/datasets/d/refresh").json()["snapshot"]
            epoch = "/v1/datasets/d/epochs/0/ranks/0/batches?batch_size=1&seq_len=4&shuffle=none&snapshot="
            answer = client.get(epoch + latest)
            assert answer.status_code == 200
            known.setdefault(latest, (dict(there), answer.content))
            for snapshot, (shards, content) in known.items():
                answer = client.get(epoch + snapshot)
                if shards.items() <= there.items():
                    assert (answer.status_code, answer.content) == (200, content)
                else:
                    changed = min(n for n, variant in shards.items() if there.get(n) != variant)
                    assert answer.status_code == 409
                    assert f"part-{changed}.parquet was" in answer.json()["detail"]
            held = [entry["snapshot"] for entry in client.get("/v1/datasets/d").json()["snapshots"]]
            assert held[0] == latest
            assert sorted(held) == sorted(s for s, (shards, _) in known.items() if shards.items() <= there.items())


def test_unchanged_snapshot_keeps_its_index(folder: Path, open_all: Opener) -> None:
    catalog = open_all()
    before = catalog["d"].latest
    catalog.refresh("d")
    assert catalog["d"].latest is before
    write_shard(folder, 1, 0)
    catalog.refresh("d")
    assert catalog["d"].find(before.snapshot.fingerprint).index is before.index
    write_shard(folder, 9, 0)  # the same content, but blocks of it are named by its date, too
    catalog.refresh("d")
    again = catalog["d"].find(before.snapshot.fingerprint)
    assert again.index is not before.index
    assert catalog["d"].find(before.snapshot.fingerprint) is again


@pytest.mark.parametrize("recipes", [("", ""), ("vocab_size = 10", "vocab_size = 11")])
def test_refresh_fails_when_a_file_changes_meanwhile(
    folder: Path, open_all: Opener, monkeypatch: pytest.MonkeyPatch, recipes: tuple[str, str]
) -> None:
    versions = [folder.parent / "_old", folder.parent / "_new"]  # no datasets, by their names
    for version, recipe in zip(versions, recipes, strict=True):
        version.mkdir()
        if recipe:  # the shards are the same files
            (version / "part-9.parquet").hardlink_to(folder / "part-9.parquet")
            (version / "penstock.toml").write_text(recipe)
        else:
            write_shard(version, 9, versions.index(version))
    link = folder.parent / "link"

    def lead_to(version: Path) -> None:
        link.unlink(missing_ok=True)
        link.symlink_to(version)

    read = FolderReader.read

    def late(*args: Any, **options: Any) -> FolderContents:
        lead_to(versions[0])
        return read(*args, **options)

    lead_to(versions[0])
    catalog = open_all()
    lead_to(versions[1])
    with monkeypatch.context() as patch:
        patch.setattr(FolderReader, "read", late)
        with pytest.raises(DatasetInvalid, match="is being written to: it changed while it was read"):
            catalog.refresh("link")
    lead_to(versions[1])
    assert catalog.refresh("link").changed


def test_on_bad_row_takes_effect_without_a_new_snapshot(folder: Path, open_all: Opener) -> None:
    catalog = open_all()
    before = catalog["d"].latest.snapshot
    (folder / "penstock.toml").write_text('on_bad_row = "replace"')
    assert not catalog.refresh("d").changed
    after = catalog["d"].latest.snapshot
    assert (before.recipe.on_bad_row, after.recipe.on_bad_row) == ("fail", "replace")


def test_older_snapshot_keeps_its_recipe(folder: Path, open_all: Opener) -> None:
    catalog = open_all()
    before = catalog["d"].latest.snapshot
    write_shard(folder, 1, 0)
    catalog.refresh("d")
    for toml in ('on_bad_row = "replace"', "eos = 77"):
        assert catalog["d"].find(before.fingerprint).snapshot.fingerprint == before.fingerprint
        (folder / "penstock.toml").write_text(toml)
        catalog.refresh("d")
    older = catalog["d"].find(before.fingerprint).snapshot
    assert (older.fingerprint, older.recipe.eos_id, older.recipe.on_bad_row) == (before.fingerprint, None, "replace")
    held = open_all()["d"]  # of a server that never knew that recipe
    assert before.fingerprint not in [record.fingerprint for record in held.snapshots]


def test_opened_snapshots_without_a_record_are_dropped(folder: Path, open_all: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "_MAX_OLDER", 2)
    catalog = open_all()
    for number in range(5):
        write_shard(folder, number, 0)
        catalog.refresh("d")
    held = catalog["d"]
    assert len(held.records) == 3
    assert held.older.keys() <= held.records.keys()


def test_unknown_fingerprint_is_gone(folder: Path, open_all: Opener) -> None:
    client = TestClient(create_app(open_all(), InFlight(1 << 30)))
    for name in ("../footers", "x" * 5000, "\x00", "0123456789abcdef"):
        answer = client.get("/v1/datasets/d/spec", params={"snapshot": name})
        assert answer.json()["type"] == "urn:penstock:problem:snapshot-gone"


def test_mask_is_found_when_the_recipe_wants_it_again(folder: Path, open_all: Opener) -> None:
    masked = pa.table({"input_ids": [[1, 2, 3]], "labels": [[-100, 2, 3]]})
    pq.write_table(masked, folder / "part-99.parquet")
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))  # old enough for what is read of it to be remembered
    recipe = folder / "penstock.toml"
    recipe.write_text("labels = false")
    assert open_all()["d"].latest.snapshot.num_rows == 4
    recipe.unlink()
    with pytest.raises(DatasetInvalid, match="labels"):
        open_all()


def test_description_follows_the_recipe_within_a_snapshot(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "turns"
    folder.mkdir(parents=True)
    columns = {"input_ids": [[1, 2, 3]], "attention_mask": [[1.0, 1.0, 1.0]]}
    pq.write_table(pa.table(columns), folder / "part-0.parquet")
    catalog = open_catalog(tmp_path / "data", None, BlockStore(tmp_path / "cache"))
    before = catalog["turns"].latest
    assert describe_dataset(before)["unused_columns"] == ["attention_mask"]
    (folder / "penstock.toml").write_text("attention_mask = false")
    catalog.refresh("turns")
    after = catalog["turns"].latest
    assert after.snapshot.fingerprint == before.snapshot.fingerprint
    assert after.index is before.index
    assert describe_dataset(after)["unused_columns"] == []


@pytest.mark.parametrize("name", ["tokenizer.json", "gpt2.model"])
def test_folder_state_includes_the_default_tokenizer(folder: Path, tmp_path: Path, name: str) -> None:
    tokenizer = tmp_path / name
    tokenizer.write_text("{}")
    reader = FolderReader(folder, tokenizer)
    before = reader.state({})
    assert reader.state({}) == before
    tokenizer.write_text('{"version": "1.0"}')
    assert (changed := reader.state({})) != before
    (tmp_path / "chat_template.jinja").write_text("")
    assert reader.state({}) != changed
