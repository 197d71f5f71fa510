"""Splits by the names of shards: which rows each split has, and what is told of it."""

import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient

from penstock import wire
from penstock.spec import Spec
from penstock_server.api.admission import InFlight
from penstock_server.app import create_app
from penstock_server.batches.assemble import chunks, load
from penstock_server.batches.writer import frames
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import Catalog, open_catalog
from penstock_server.catalog.warnings import advice_on_data, advice_on_run
from penstock_server.inspect import inspect
from penstock_server.prepare import prepare
from penstock_server.problems import BadParameter
from penstock_server.recipes.split import splits_of_shards
from support.corpora import write_numbered
from support.engine import plan_of
from support.servers import printed

ROWS = 400  # of each shard: by hash, some are held out
PAD = 60_000
HUB = ["test-00000-of-00001", "train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001"]
WAYS: list[dict[str, Any]] = [
    {"packing": "rows"},
    {"packing": "concat", "seq_len": 1},
    {"packing": "best_fit", "seq_len": 2},
    {"overflow": "split", "seq_len": 1},
    {"length_bucket_size": 8},
]


@pytest.fixture
def open_named(tmp_path: Path) -> Callable[..., Catalog]:
    """Opens dataset d, whose shards have these names; the rows of the first are 0 to 399, of the next 400 to 799."""

    def opened(names: Sequence[str], toml: str = "") -> Catalog:
        folder = tmp_path / "data" / "d"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for number, name in enumerate(names):
            rows = [[number * ROWS + row] for row in range(ROWS)]
            table = pa.table({"input_ids": pa.array(rows, pa.list_(pa.int32()))})
            pq.write_table(table, folder / f"{name}.parquet", row_group_size=64)
        (folder / "penstock.toml").write_text(f"pad = {PAD}\n{toml}")
        return open_catalog(folder.parent, None, BlockStore(tmp_path / "cache"))

    return opened


def rows_in(catalog: Catalog, **spec: Any) -> dict[int, int]:
    """The shards that an epoch has rows of, by their numbers, each with how many."""
    plan = plan_of(catalog, "d", **{"batch_size": 1, "seq_len": 4, **spec})
    found = set[int]()
    for chunk in chunks(plan, 0, 0, range(plan.schedule.num_steps)):
        for frame in wire.decode(bytes(frames(chunk, load(chunk)))):
            found |= {int(row) for row in np.unique(frame.tensors["input_ids"])}
    found.discard(PAD)
    return dict(sorted(Counter(row // ROWS for row in found).items()))


@pytest.mark.parametrize(
    ("names", "rule", "splits"),
    [
        (HUB, None, "test train train validation"),
        (["train-00000-of-00001", "test-00000-of-00001"], None, "train test"),
        (
            ["Training_1", "a.valid", "b-dev", "val", "my_eval", "evaluation.1", "testing2"],
            None,
            "train validation validation validation test test test",
        ),
        (["train_sft-0", "test_sft-0"], None, "train test"),
        (["train-dev", "train"], None, "validation train"),
        (["part-000", "test"], None, "train test"),
        (["train-0", "unsupervised-0", "test-0"], None, "train none test"),
        (["validation-0", "test-0"], None, "validation test"),
        (["train-0", "train-1"], None, None),
        (["test-0", "test-1"], None, None),
        (["train-0", "part-000"], None, None),
        (["contest-0", "latest", "developer", "trainer", "evaluate", "invalid"], None, None),
        (["train-0", "test-0"], "hash", None),
        (["train-0", "train-1"], "files", "train train"),
        (["part-0"], "files", "train"),
    ],
)
def test_splits_of_shards_follow_their_names(names: list[str], rule: Any, splits: str | None) -> None:
    found = splits_of_shards([f"{name}.parquet" for name in names], rule)
    assert found == (tuple(splits.split()) if splits else None)


@pytest.mark.parametrize("way", WAYS)
def test_split_has_the_rows_of_its_shards(open_named: Callable[..., Catalog], way: dict[str, Any]) -> None:
    catalog = open_named(HUB)
    expected = {"train": [1, 2], "validation": [3], "test": [0], "all": [0, 1, 2, 3]}
    for split, shards in expected.items():
        assert rows_in(catalog, split=split, **way) == dict.fromkeys(shards, ROWS)


def test_default_split_is_train_only_when_shard_names_give_splits(
    open_named: Callable[..., Catalog],
) -> None:
    catalog = open_named(HUB)
    assert catalog.plan("d", Spec(batch_size=1)).spec.split == "train"
    assert rows_in(catalog) == {1: ROWS, 2: ROWS}
    for names, toml in ((HUB[1:3], ""), (HUB, 'splits = "hash"')):
        catalog = open_named(names, toml)
        assert catalog.plan("d", Spec(batch_size=1)).spec.split == "all"
        assert rows_in(catalog) == dict.fromkeys(range(len(names)), ROWS)


def test_filter_applies_to_every_split(open_named: Callable[..., Catalog]) -> None:
    catalog = open_named(HUB, "filter = 'length(input_ids) > 1'")
    for split in ("train", "validation", "test", "all"):
        with pytest.raises(BadParameter, match="no row"):
            plan_of(catalog, "d", split=split)
    catalog = open_named(HUB, "filter = 'length(input_ids) = 1'")
    assert [sum(rows_in(catalog, split=split).values()) for split in ("train", "test", "all")] == [2 * ROWS, ROWS, 4 * ROWS]


def test_share_is_held_out_by_hash_only_when_the_recipe_sets_one(open_named: Callable[..., Catalog]) -> None:
    catalog = open_named(HUB, "validation = 0.25")
    train, validation = (rows_in(catalog, split=split) for split in ("train", "validation"))
    assert ([*train], [*validation]) == ([1, 2], [1, 2, 3])
    assert [train[shard] + validation[shard] for shard in (1, 2)] == [ROWS, ROWS]
    assert validation[3] == ROWS
    assert 0.15 < validation[1] / ROWS < 0.35
    catalog = open_named(HUB, 'splits = "hash"\nvalidation = 0.25')
    assert [*rows_in(catalog, split="train")] == [*rows_in(catalog, split="validation")] == [0, 1, 2, 3]


def test_unknown_split_is_refused_with_the_known_ones(open_named: Callable[..., Catalog]) -> None:
    catalog = open_named(HUB[:2])
    with pytest.raises(
        BadParameter, match=r"^d has no row in split=validation .* its splits \(all, train, test\), name shards"
    ):
        plan_of(catalog, "d", split="validation")
    with pytest.raises(BadParameter, match=r"^d has no row in split=test .* its splits \(all, train, validation\)"):
        plan_of(open_named(["a"]), "d", split="test")


def test_fingerprint_covers_the_rule_of_the_splits(open_named: Callable[..., Catalog]) -> None:
    tomls = ("", 'splits = "hash"', "validation = 0.25", 'splits = "hash"\nvalidation = 0.25')
    assert len({open_named(HUB, toml)["d"].latest.snapshot.fingerprint for toml in tomls}) == len(tomls)
    named, by_default = (open_named(HUB, toml)["d"].latest.snapshot for toml in ('splits = "files"', ""))
    assert named.fingerprint == by_default.fingerprint
    plain = [open_named(["a"], toml)["d"].latest.snapshot.fingerprint for toml in ("", 'splits = "hash"', "validation = 0.005")]
    assert plain == plain[:1] * 3


def test_run_is_warned_of_splits_by_names_unless_the_recipe_sets_splits(open_named: Callable[..., Catalog]) -> None:
    catalog = open_named([*HUB, "more"])
    expected = r"^d: the names of its shards give its splits \(train 2, validation 1, test 1, no split 1\), and "
    [told] = advice_on_run(catalog.plan("d", Spec(batch_size=1)))
    assert re.match(f"{expected}this run has split=train\\. ", told)
    [told] = advice_on_run(catalog.plan("d", Spec(batch_size=1, split="all")))
    assert re.match(f"{expected}this run has split=all\\. ", told)
    [told] = advice_on_data([catalog["d"].latest])
    assert re.match(f"{expected}split=train is the default\\. ", told)
    for rule in ("files", "hash"):
        assert [*advice_on_run(open_named(HUB, f'splits = "{rule}"').plan("d", Spec(batch_size=1)))] == []


def test_responses_name_the_rule_and_the_splits(open_named: Callable[..., Catalog], tmp_path: Path) -> None:
    catalog = open_named(HUB)
    served = catalog["d"].latest
    told = [*prepare(served, [8])]
    assert told[0].endswith(f"{ROWS} rows in split=validation, {ROWS} rows in split=test")
    assert [line.count("of split=") for line in told[-4:]] == [0, 1, 1, 1]
    client = TestClient(create_app(catalog, InFlight(1 << 30)))
    facts = client.get("/v1/datasets/d").json()
    assert facts["split_rule"] == "files"
    assert {split: counts["rows"] for split, counts in facts["splits"].items()} == {
        "train": 2 * ROWS,
        "validation": ROWS,
        "test": ROWS,
    }
    answer = client.get("/v1/datasets/d/spec", params={"batch_size": 1}).json()
    assert (answer["split_rules"], answer["spec"]["split"]) == ({"d": "files"}, "train")
    assert [client.get(f"/v1/datasets/d/rows/{ROWS * shard}").json()["split"] for shard in range(4)] == [
        "test",
        "train",
        "train",
        "validation",
    ]
    shown = printed(lambda console: inspect(served, range(1), console, 1))
    assert "  splits: by the names of the shards: train 2, validation 1, test 1\n" in shown
    plain = printed(lambda console: inspect(open_named(["a"])["d"].latest, range(1), console, 1))
    assert "  splits: 0.005 of the rows held out for validation by hash\n" in plain


def test_mixture_uses_the_train_rows_of_its_datasets(open_named: Callable[..., Catalog], tmp_path: Path) -> None:
    write_numbered(tmp_path / "data" / "e", 100)
    spec = open_named(HUB).plan("d", Spec(batch_size=1, mix="d:1,e:1")).spec
    assert spec.split == "train"


def test_bad_row_is_replaced_by_a_row_of_its_split(open_named: Callable[..., Catalog], tmp_path: Path) -> None:
    catalog = open_named(HUB[:2], 'on_bad_row = "replace"\nmax_bad_share = 0.9')
    rows = [[number] if number % 64 > 60 and number < 64 else [] for number in range(ROWS)]
    pq.write_table(pa.table({"input_ids": pa.array(rows, pa.list_(pa.int32()))}), tmp_path / "data" / "d" / "test-1.parquet")
    catalog.refresh("d")
    assert rows_in(catalog, split="train") == {1: ROWS}
    assert rows_in(catalog, split="test") == {0: ROWS}


def test_new_test_shard_is_not_in_the_train_split(open_named: Callable[..., Catalog], tmp_path: Path) -> None:
    catalog = open_named(["train-0", "train-1"])
    before = plan_of(catalog, "d", batch_size=1, split="train")
    pq.write_table(pa.table({"input_ids": pa.array([[7]], pa.list_(pa.int32()))}), tmp_path / "data" / "d" / "test-0.parquet")
    catalog.refresh("d")
    assert rows_in(catalog, split="train") == {0: ROWS, 1: ROWS}
    assert rows_in(catalog, snapshot=before.snapshot, split="train")[0] < ROWS  # a running job keeps its rule
