"""A plan at its borders: the end of an epoch, the largest batch, the last epoch."""

from __future__ import annotations

import re
import shutil
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Spec
from penstock.spec import MAX_COUNT
from penstock_server.batches import plan as plan_module
from penstock_server.batches.plan import check_room
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import Catalog, open_catalog
from penstock_server.catalog.warnings import advice_on_run
from penstock_server.lru import LruCache
from penstock_server.problems import BadParameter
from support.corpora import write_numbered
from support.engine import synthetic_plan


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    """Two datasets of one content: 100 rows."""
    write_numbered(tmp_path / "data" / "a", 100)
    shutil.copytree(tmp_path / "data" / "a", tmp_path / "data" / "b")
    return open_catalog(tmp_path / "data", None, BlockStore(tmp_path / "cache"))


def test_plan_has_no_steps_when_offset_is_the_epoch(catalog: Catalog) -> None:
    for offset, num_steps in ((0, 10), (90, 1), (91, 0), (100, 0)):
        assert catalog.plan("a", Spec(batch_size=10, offset=offset)).schedule.num_steps == num_steps
    with pytest.raises(BadParameter, match="offset=101 is past the epoch's end"):
        catalog.plan("a", Spec(batch_size=10, offset=101))


def test_plan_refuses_a_skip_of_the_whole_epoch(catalog: Catalog) -> None:
    assert catalog.plan("a", Spec(batch_size=10, skip="0-8")).schedule.num_steps == 1
    with pytest.raises(BadParameter, match=r"^skip leaves out the whole epoch: all of its 100 samples\. Skip fewer\.$"):
        catalog.plan("a", Spec(batch_size=10, skip="0-99"))


def test_plan_identity_contains_the_dataset(catalog: Catalog) -> None:
    one, other = (catalog.plan(name, Spec(batch_size=10)) for name in "ab")
    assert one.snapshot == other.snapshot
    assert one.identity != other.identity


def test_plan_refuses_a_batch_above_the_byte_limit(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = catalog.plan("a", Spec(batch_size=10)).largest_layout.nbytes
    monkeypatch.setattr(plan_module, "MAX_BATCH_BYTES", nbytes)
    catalog.plan("a", Spec(batch_size=10, seed=1))
    monkeypatch.setattr(plan_module, "MAX_BATCH_BYTES", nbytes - 1)
    with pytest.raises(BadParameter, match=f"would be up to {nbytes:,} bytes"):
        catalog.plan("a", Spec(batch_size=10, seed=2))


def test_plan_refuses_mixture_epochs_above_the_count_limit(catalog: Catalog) -> None:
    plan = catalog.plan("a", Spec(batch_size=10, mix="a:1,b:1"))
    last = MAX_COUNT // plan.schedule.num_samples - 1
    plan.check_epoch(last)
    with pytest.raises(BadParameter, match=f"epoch {last + 1:,} does not exist: .* are counted up to epoch {last:,}"):
        plan.check_epoch(last + 1)


def test_plan_finds_each_position_of_a_mixture(catalog: Catalog) -> None:
    plan = catalog.plan("a", Spec(batch_size=10, mix="a:1,b:3", stopping_strategy="all_exhausted", offset=250, drop_last=False))
    assert plan.mixture
    for epoch in range(2):
        samples = epoch * plan.schedule.num_samples + np.arange(plan.schedule.num_samples)
        members, numbers = plan.mixture.locate(samples)
        for position, (member, number) in enumerate(zip(members.tolist(), numbers.tolist(), strict=True)):
            own_epoch, own = divmod(number, plan.sizes[member])
            assert own_epoch in plan.own_epochs(member, epoch)
            assert plan.positions_of(member, epoch, np.array([own]), own_epoch, 9).tolist() == [position]


@given(
    st.sampled_from(["", "2-4", "0-0,3-3"]),
    st.integers(0, 100),
    st.sampled_from([None, "a:1,b:3"]),
    st.lists(st.integers(0, 39), min_size=1, unique=True),
    st.integers(1, 45),
)
def test_plan_returns_the_earliest_positions(skip: str, offset: int, mix: str | None, own: list[int], most: int) -> None:
    spec: dict[str, Any] = {"skip": skip or None, "offset": offset % 30, "drop_last": False} | ({"mix": mix} if mix else {})
    with TemporaryDirectory() as name:
        plan = synthetic_plan(Path(name), {"a": [[40]]} | ({"b": [[120]]} if mix else {}), batch_size=4, **spec)
    shown = []
    for number in own:
        for position in plan.positions_of(0, 0, np.array([number]), 0, 1).tolist():
            shown += [(place, position) for place in islice(plan.schedule.locate(position), 1)]
    found = plan.positions_of(0, 0, np.array(own), 0, most).tolist()
    assert [position for position in found if any(plan.schedule.locate(position))] == [p for _, p in sorted(shown)][:most]


def test_plan_finds_positions_that_a_wrapped_step_repeats(tmp_path: Path) -> None:
    mix: dict[str, Any] = {"mix": "a:0.9,b:0.1", "drop_last": False, "offset": 2500, "batch_size": 8}
    plan = synthetic_plan(tmp_path, {"a": [[3000]], "b": [[3000]]}, **mix)
    for epoch in range(12):
        for own_epoch in plan.own_epochs(0, epoch):
            every = plan.positions_of(0, epoch, np.arange(3000), own_epoch, 3000).tolist()
            for most in (1, 10, 1000):
                assert plan.positions_of(0, epoch, np.arange(3000), own_epoch, most).tolist() == every[:most]


def test_plan_refuses_a_mixture_epoch_above_the_count_limit(tmp_path: Path) -> None:
    few = {"a": [[10**11]], "b": [[1000]]}
    with pytest.raises(BadParameter, match=r"would have 9,999,999,999,9.* samples; the limit"):
        synthetic_plan(tmp_path, few, mix="a:0.00001,b:0.99999", stopping_strategy="all_exhausted")
    for stop in ("first_exhausted", "never"):
        synthetic_plan(tmp_path, few, mix="a:0.00001,b:0.99999", stopping_strategy=stop).check_epoch(0)


def test_plan_refuses_a_batch_of_too_many_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = synthetic_plan(tmp_path, {"a": [[40]]}, batch_size=4)
    assert plan.step_spans == 4
    monkeypatch.setattr(plan_module, "_MAX_BATCH_SPANS", 3)
    monkeypatch.setattr(plan_module, "_plans", LruCache(0, lambda _: 0, most=0))
    with pytest.raises(BadParameter, match="would be made of some 4 rows; the limit is 3. Lower batch_size or seq_len"):
        synthetic_plan(tmp_path, {"a": [[40]]}, batch_size=4)


def test_global_shuffle_needs_room_for_all_datasets_of_a_mixture(catalog: Catalog) -> None:
    plan = catalog.plan("a", Spec(batch_size=10, shuffle="global", mix="a:1,b:1"))
    cache = plan.members[0].blocks.cache
    for member in plan.members:
        member.index.lengths.make(lambda _: None)
    needed = sum(int(member.index.bytes_per_block().sum()) for member in plan.members)
    cache.budget_bytes = needed
    check_room(plan)
    cache.budget_bytes = needed - 1
    with pytest.raises(BadParameter, match=f"takes about {needed:,} bytes there, and the budget is {needed - 1:,}"):
        check_room(plan)
    check_room(catalog.plan("a", Spec(batch_size=10, mix="a:1,b:1")))


@pytest.mark.parametrize(
    ("rows", "spec", "told"),
    [
        (60, {"batch_size": 32}, "28 of the 60 samples"),
        (60, {"batch_size": 16, "world_size": 2}, "28 of the 60 samples"),
        (60, {"batch_size": 32, "drop_last": False}, None),
        (60, {"batch_size": 32, "offset": 20}, None),  # a run that goes on was told when it began
        (100, {"batch_size": 45}, None),
        (101, {"batch_size": 45}, "11 of the 101 samples"),
        (64, {"batch_size": 32}, None),
    ],
)
def test_advice_names_a_large_dropped_step(tmp_path: Path, rows: int, spec: dict[str, Any], told: str | None) -> None:
    plan = synthetic_plan(tmp_path, {"a": [[rows]]}, **spec)
    found = [text.partition("drop_last=true leaves out ")[2].partition(" of each")[0] for text in advice_on_run(plan)]
    assert [text for text in found if text] == ([told] if told else [])


@pytest.mark.parametrize(
    ("rows_per_group", "budget_mib", "told"),
    [
        (20_000, 19, []),
        (20_000, 11, ["Raise --cache-bytes, or use smaller windows: window=78847."]),
        (20_000, 10, ["Raise --cache-bytes."]),  # too few blocks for windows of whole ones
        (100, 21, ["Raise --cache-bytes, or use smaller windows: window=1047."]),
        (100, 20, ["Raise --cache-bytes."]),
    ],
)
def test_advice_names_a_smaller_window_when_it_fits(
    tmp_path: Path, rows_per_group: int, budget_mib: int, told: list[str]
) -> None:
    plan = synthetic_plan(tmp_path, {"a": [[rows_per_group] * 100]})
    cache = plan.members[0].blocks.cache
    cache.budget_bytes = budget_mib << 20
    assert [sentence.partition("for nearly every batch. ")[2] for sentence in advice_on_run(plan)] == told


@pytest.mark.parametrize("shuffle", ["none", "window", "global"])
def test_advice_names_a_full_or_failing_cache_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle: str) -> None:
    plan = synthetic_plan(tmp_path, {"a": [[1000] * 10]}, shuffle=shuffle)
    cache = plan.members[0].blocks.cache
    cache.budget_bytes = 1 << 30
    assert [*advice_on_run(plan)] == []
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: Mock(free=0))
        [told] = advice_on_run(plan)
        assert re.search(r"which has room for 0: blocks are decoded .* for nearly every batch\. Free disk space\.$", told)
    cache.failure = "Read-only file system"
    [told] = advice_on_run(plan)
    assert f"the server cannot store blocks in {tmp_path}: Read-only file system. Blocks are decoded" in told
