"""Frozen values of what decides which sample stands where, beside the order itself. A change breaks every run that resumes."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from penstock.mix import parse_mix
from penstock_server.catalog.shard import _file_digest
from penstock_server.order.arrays import IntArray
from penstock_server.order.best_fit import PackedPools, pack
from penstock_server.order.length_buckets import LengthOrder
from penstock_server.order.mixture import Mixture
from penstock_server.order.permutation import key
from penstock_server.order.shuffle import EpochOrder
from penstock_server.recipes.fields import Field
from penstock_server.recipes.recipe import Recipe
from penstock_server.recipes.split import Place, split_hashes
from support.corpora import write_numbered
from support.engine import open_snapshot, synthetic_plan

ENGINE = json.loads((Path(__file__).parent / "engine.json").read_text())


def dotted(first: IntArray, second: IntArray) -> str:
    return " ".join(f"{a}.{b}" for a, b in zip(first.tolist(), second.tolist(), strict=True))


@pytest.mark.parametrize(("mix", "samples"), ENGINE["mixture"].items())
def test_mixtures_are_frozen(mix: str, samples: str) -> None:
    assert dotted(*Mixture(parse_mix(mix)).locate(np.arange(30))) == samples


def test_bins_are_frozen() -> None:
    bins = pack(np.array(ENGINE["best_fit"]["lengths"]), 16)
    documents = [f"{row}[{first}:{last}]" for row, first, last in zip(bins.rows, bins.firsts, bins.lasts, strict=True)]
    assert [documents[start:stop] for start, stop in pairwise(bins.starts.tolist())] == ENGINE["best_fit"]["bins"]


def test_documents_in_bins_are_frozen() -> None:
    lengths = np.array([3, 5, 3, 8, 5, 3, 20, 4, 5, 8])
    packed = PackedPools.of([pack(lengths, 8), pack(lengths[::-1], 8)])
    pools = np.repeat([0, 1], packed.bins_per_pool)
    numbers = np.concatenate([np.arange(count) for count in packed.bins_per_pool])
    _, rows, firsts = packed.documents(pools, numbers, key(7, 1, "documents"))
    assert dotted(rows, firsts) == ENGINE["best_fit"]["epoch"]


def test_splits_are_frozen() -> None:
    rows = pa.record_batch({"v": pa.array(["a", "b", None, "ü"])})
    by_place = Recipe(kind="tokens", fields=())
    by_value = Recipe(kind="tokens", fields=(), split_by=Field.parse("v", rows.schema))
    numbers = np.arange(4)
    assert split_hashes(rows, by_place, Place("part-000.parquet", 1000), numbers).tolist() == ENGINE["split"]["by place"]
    assert split_hashes(rows, by_value, Place("any.parquet", 0), numbers).tolist() == ENGINE["split"]["by value"]


def test_inferred_recipes_are_frozen(tmp_path: Path) -> None:
    snapshot = open_snapshot(write_numbered(tmp_path / "d", 1))
    assert (snapshot.validation, snapshot.recipe.on_bad_row, snapshot.recipe.max_bad_share) == (0.005, "fail", 0.01)


def test_snapshot_names_are_frozen(tmp_path: Path) -> None:
    plan = synthetic_plan(tmp_path, {"a": [[5, 3], [4]], "b": [[7]]}, mix="a:1,b:1", batch_size=1)
    assert plan.snapshot == ENGINE["snapshot"]


@pytest.mark.parametrize(("sizes", "digest"), ENGINE["digest"].items())
def test_shard_digests_are_frozen(tmp_path: Path, sizes: str, digest: str) -> None:
    size, footer_bytes = map(int, sizes.split("/"))
    content = np.arange(size // 4, dtype="<u4").tobytes()[:-8] + footer_bytes.to_bytes(4, "little") + b"PAR1"
    (tmp_path / "shard").write_bytes(content)
    with pa.OSFile(str(tmp_path / "shard")) as file:
        assert _file_digest(file, size) == digest


@pytest.mark.parametrize(("window", "samples"), ENGINE["length_order"].items())
def test_length_orders_are_frozen(window: str, samples: str) -> None:
    counts = np.array([5, 0, 7, 3, 9, 4, 8, 2, 6])
    order = EpochOrder(counts, np.ones_like(counts), shuffle="window", window=int(window), seed=7, epoch=1)
    by_length = LengthOrder(order, lambda pools, indices: (pools * 7 + indices * 5) % 11, 4, 123456789)
    assert dotted(*by_length.samples(np.arange(by_length.num_samples))) == samples
