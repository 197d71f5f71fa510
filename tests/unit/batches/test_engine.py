"""The engine, from shards to frames, in one process: data and specs of every kind, each held to what is promised of it."""

from __future__ import annotations

import gc
import json
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

from penstock import wire
from penstock_server import lookup as lookup_module
from penstock_server.batches import assemble as gather_module
from penstock_server.batches import member as member_module
from penstock_server.batches import writer as batch_module
from penstock_server.batches.assemble import chunks, gather, load
from penstock_server.batches.member import Member, PlannedEpochs
from penstock_server.batches.plan import Plan
from penstock_server.batches.text_view import as_json
from penstock_server.batches.writer import frames
from penstock_server.blocks.block import Block
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import Catalog, open_catalog
from penstock_server.inspect import inspect
from penstock_server.lookup import find_row, show_row
from penstock_server.problems import BadParameter, BadRow, DatasetInvalid
from support import examples
from support.engine import plan_of
from support.servers import printed

Sequence = tuple[int, ...]
Row = tuple[int, bool]  # its tokens, 0 for a bad row; whether the filter keeps it
Shards = list[list[list[Row]]]  # rows of row groups of shards

TOKENS_A_ROW, ROWS_A_DATASET = 100, 1000

rows = st.tuples(st.sampled_from([0, 1, 1, 2, 3, 5, 8, 13, 21]), st.sampled_from([True, True, False]))
datasets = st.lists(
    st.lists(st.lists(rows, min_size=1, max_size=7), min_size=1, max_size=4), min_size=1, max_size=3
)  # fmt: skip


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "seq_len": draw(st.sampled_from([1, 4, 9, 30])),
        "packing": draw(st.sampled_from(["rows", "concat", "best_fit"])),
        "shuffle": draw(st.sampled_from(["none", "window", "window", "global"])),
        "window": draw(st.sampled_from([1, 5, 1000])),
        "split": draw(st.sampled_from(["all", "train", "validation"])),
        "seed": draw(st.integers(0, 3)),
        "repeat": draw(st.sampled_from([1, 1, 3])),
    }
    if draw(st.booleans()):
        spec["labels"] = "shifted"
    if spec["packing"] == "concat" and (spec["seq_len"] > 2 or "labels" in spec):
        spec["overlap"] = draw(st.sampled_from([0, 1]))
    if spec["packing"] == "rows":
        spec["overflow"] = draw(st.sampled_from(["truncate", "split"]))
        if spec["shuffle"] == "window":
            spec["length_bucket_size"] = draw(st.sampled_from([0, 3]))
    if mix := draw(st.sampled_from([None, None, "a:1,b:2", "a:1,b:1;b:3,a:1@7;a:1@40"])):
        spec.pop("repeat")
        spec |= {"mix": mix, "stopping_strategy": draw(st.sampled_from(["first_exhausted", "all_exhausted"]))}
    return spec


runs = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 4),
        "world_size": st.integers(1, 3),
        "drop_last": st.booleans(),
        "offset": st.integers(0, 9),
        "skip": st.sampled_from([None, "samples:2-5", "0-0,3-4", "samples:0-0,4-6,9-1000000"]),
    }
)


def write(folder: Path, shards: Shards, number: int, *, is_filtered: bool) -> None:
    """A dataset whose row r has the tokens r * 100, r * 100 + 1, ...; those of dataset `number` begin behind the last one's."""
    folder.mkdir()
    row = number * ROWS_A_DATASET
    for shard, groups in enumerate(shards):
        schema = pa.schema([("tokens", pa.list_(pa.int32())), ("kept", pa.bool_()), ("n", pa.int64())])
        with pq.ParquetWriter(folder / f"part-{shard}.parquet", schema) as file:
            for group in groups:
                ids = [[TOKENS_A_ROW * (row + i) + t for t in range(length)] for i, (length, _) in enumerate(group)]
                numbers = range(row, row + len(group))
                file.write_table(pa.table([ids, [kept for _, kept in group], numbers], schema=schema))
                row += len(group)
    lines = ['columns = ["n"]', "validation = 0.4", 'on_bad_row = "replace"', "max_bad_share = 0.99", "vocab_size = 1000000"]
    (folder / "penstock.toml").write_text("\n".join(lines + ['filter = "kept"'] * is_filtered))


def open_server(data: Path, cache: Path, cache_bytes: int) -> Catalog:
    return open_catalog(data, None, BlockStore(cache, cache_bytes))


def bodies(plan: Plan, epoch: int) -> Iterator[tuple[int, int, bytes]]:
    for step in range(plan.schedule.num_steps):
        for rank in range(plan.spec.world_size):
            [chunk] = chunks(plan, epoch, rank, range(step, step + 1))
            yield step, rank, bytes(frames(chunk, load(chunk)))


def samples_of(body: bytes) -> list[Sequence]:
    [frame] = wire.decode(body)
    ids = frame.tensors["input_ids"]
    lengths = frame.tensors["lengths"].tolist() if "lengths" in frame.tensors else [ids.shape[1]] * len(ids)
    found = [tuple(line[:length]) for line, length in zip(ids.tolist(), lengths, strict=True)]
    if "n" in frame.tensors:
        assert frame.tensors["n"].tolist() == [sample[0] // TOKENS_A_ROW for sample in found]
    return found


def good_blocks(member: Member) -> list[Block]:
    blocks = member.blocks.get(range(member.snapshot.num_blocks), member.order_key.split)
    return [block for block in blocks if block.has_good]


def check_contents(order: list[Sequence], plan: Plan, shards: Shards, *, num_replaced: int, is_filtered: bool) -> None:
    """Whether the samples of an epoch of one dataset are all that its rows make, each once."""
    lengths = [row for groups in shards for group in groups for row in group]
    [member] = plan.members
    whole = member.blocks.get(range(member.snapshot.num_blocks), member.order_key.split)
    served = {member.snapshot.first_row_of(i) + row for i, block in enumerate(whole) for row in block.stored_rows.tolist()}
    assert not is_filtered or all(lengths[row][1] for row in served)
    tokens = {row: [TOKENS_A_ROW * row + t for t in range(lengths[row][0])] for row in served}
    stride = plan.spec.sample_len - plan.spec.overlap
    found = Counter(token for sample in order for token in sample[:stride])
    if plan.spec.packing == "rows" and plan.spec.overflow == "truncate":
        assert len(order) == len(served)
        starts = Counter(sample[0] // TOKENS_A_ROW for sample in order)
        good = {row for row in served if tokens[row]}
        assert set(starts) == good
        assert sum(starts.values()) - len(good) == len(served) - len(good)  # a neighbour for each bad row
        assert num_replaced == len(served) - len(good)
        assert all(list(s) == tokens[s[0] // TOKENS_A_ROW][: plan.spec.sample_len] for s in order)
        return
    assert num_replaced == 0
    expected = Counter(token for row in served for token in tokens[row])
    assert not found - expected
    assert sum((expected - found).values()) < (plan.spec.sample_len if plan.spec.packing == "concat" else 1)


@examples(20)
@given(datasets, datasets, st.booleans(), specs(), runs, st.integers(0, 2))
def test_engine_serves_every_sample_for_random_data_and_specs(
    first: Shards, second: Shards, is_filtered: bool, spec: dict[str, Any], run: dict[str, Any], epoch: int
) -> None:
    with TemporaryDirectory() as name:
        data = Path(name) / "data"
        data.mkdir()
        for number, (dataset, shards) in enumerate((("a", first), ("b", second))):
            write(data / dataset, shards, number, is_filtered=is_filtered)
        catalog = open_server(data, Path(name) / "cache", 1 << 30)
        try:
            whole = plan_of(catalog, "a", **spec, batch_size=1)
        except BadParameter:  # too little data
            event("refused")
            assume(False)
        try:
            made = [body for *_, body in bodies(whole, epoch)]
        except BadRow:
            assert any(not good_blocks(member) for member in whole.members)
            event("nothing to serve")
            assume(False)
        except DatasetInvalid:
            bad_of = [(m.blocks.quarantine.num_bad_rows, m.index.num_rows or m.snapshot.num_rows) for m in whole.members]
            assert any(num_bad > 0.99 * num_rows for num_bad, num_rows in bad_of)
            event("too much is bad")
            assume(False)
        try:
            plan = plan_of(catalog, "a", **spec, **run)
        except BadParameter:
            event("refused")
            assume(False)
        event(f"{spec['packing']}, {'mixture' if 'mix' in spec else spec['split']}")
        order = [sample for body in made for sample in samples_of(body)]
        assert len(order) == whole.schedule.num_samples
        if "mix" not in spec:
            repeat = spec["repeat"]
            assert order == [sample for sample in order[::repeat] for _ in range(repeat)]
            num_replaced = sum(frame.replaced for frame in wire.decode(b"".join(made))) // repeat
            check_contents(order[::repeat], whole, first, num_replaced=num_replaced, is_filtered=is_filtered)

        # A run is a slice of that order, whatever its batch size, its ranks, and what it skips.
        skipped = plan.spec.skipped()
        kept = [i for i in range(len(order)) if not any(start <= i < stop for start, stop in skipped)]
        expected = [order[i] for i in kept if i >= run["offset"]]
        everything = list(bodies(plan, epoch))
        shown = [sample for *_, body in everything for sample in samples_of(body)]
        per_step = run["batch_size"] * run["world_size"]
        if run["drop_last"]:
            assert shown == expected[: len(expected) // per_step * per_step]
        else:
            round_and_round = expected + [order[i] for i in kept] * per_step
            assert shown == round_and_round[: -(-len(expected) // per_step) * per_step]

        # Steps that are made together are the same bytes one after the other.
        for rank in range(run["world_size"]):
            for chunk in chunks(plan, epoch, rank, range(plan.schedule.num_steps)) if everything else ():
                assert len(chunk.steps) == plan.schedule.num_steps
                assert bytes(frames(chunk, load(chunk))) == b"".join(body for _, own, body in everything if own == rank)

        # Another server with another cache gives the same bytes.
        other = plan_of(open_server(data, Path(name) / "other", 2000), "a", **spec, **run)
        assert list(bodies(other, epoch)) == everything

        # Where provenance sees a row, its schedule says that it is.
        places: dict[tuple[str, int], set[tuple[int, int, int]]] = defaultdict(set)
        for step in range(plan.schedule.num_steps):
            for rank in range(run["world_size"]):
                [chunk] = chunks(plan, epoch, rank, range(step, step + 1))
                batch = gather(chunk, load(chunk))
                for index in range(batch.count):
                    for source in batch.sources(index):
                        snapshot = next(m.snapshot for m in plan.members if m.name == source.dataset)
                        names = [shard.path.name for shard in snapshot.shards]
                        first_rows = snapshot.first_block_of_shard
                        groups = snapshot.shards[names.index(source.shard)].rows_per_group
                        row = snapshot.first_row_of(int(first_rows[names.index(source.shard)]))
                        row += sum(groups[: source.row_group]) + source.row
                        places[source.dataset, row].add((step, rank, index))
        for number, member in enumerate(plan.members):
            is_told = len(list(islice(plan.own_epochs(number, epoch), 101))) <= 100  # of others but the first hundred passes
            for row in range(member.snapshot.num_rows):
                occurrences = [(o["step"], o["rank"], o["index"]) for o in find_row(plan, member.name, row, epoch)]
                assert occurrences == sorted(places[member.name, row])[: None if is_told else len(occurrences)]


def test_bad_rows_are_replaced_only_in_blocks_that_have_some(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    groups = [[(3, True), (0, True)], [(0, True)], [(4, True), (5, True)]]
    write(tmp_path / "data" / "a", [groups], 0, is_filtered=False)
    catalog = open_server(tmp_path / "data", tmp_path / "cache", 1 << 30)
    for batch_size, rows in ((5, [0, 0, 3, 3, 4]), (3, [0, 0, 3])):  # the other one lacks a block in which a row stands in
        [(_, _, body)] = bodies(plan_of(catalog, "a", batch_size=batch_size, shuffle="none", seq_len=9), 0)
        assert [sample[0] // TOKENS_A_ROW for sample in samples_of(body)] == rows
        assert [frame.replaced for frame in wire.decode(body)] == [2]


def test_json_batch_shows_passthrough_columns(tmp_path: Path) -> None:
    columns = {
        "tokens": pa.array([[1, 2], [3]], pa.list_(pa.int32())),
        "source": ["wiki", "code"],
        "index": [7, 8],
        "score": [1.5, None],
        "half": pa.array([[1.0, float("inf")], [float("nan"), 2.0]], pa.list_(pa.float16(), 2)),
        "yes": pa.array([[True, False], [False, True]], pa.list_(pa.bool_(), 2)),
        "image": [b"\xff\x00", b""],
    }
    (tmp_path / "data" / "a").mkdir(parents=True)
    pq.write_table(pa.table(columns), tmp_path / "data" / "a" / "part-0.parquet")
    (tmp_path / "data" / "a" / "penstock.toml").write_text(f"columns = {list(columns)[1:]}")
    catalog = open_server(tmp_path / "data", tmp_path / "cache", 1 << 30)
    plan = plan_of(catalog, "a", batch_size=2, shuffle="none", seq_len=4)
    [chunk] = chunks(plan, 0, 0, range(1))
    [page] = [json.loads(text, parse_constant=pytest.fail) for text in as_json(chunk, load(chunk))]
    assert [sample["index"] for sample in page["samples"]] == [0, 1]
    assert [sample["source"] for sample in page["samples"]] == [f"part-0.parquet, row group 0, row {n}" for n in (0, 1)]
    shown = [sample["columns"] for sample in page["samples"]]
    assert shown == [
        {"source": "wiki", "index": 7, "score": 1.5, "half": [1, "inf"], "yes": [True, False], "image": "2 bytes"},
        {"source": "code", "index": 8, "score": None, "half": [None, 2], "yes": [False, True], "image": "0 bytes"},
    ]
    row = show_row(catalog.datasets["a"], 1)
    assert (row["row"], row["columns"]) == (1, shown[1])
    [frame] = wire.decode(frames(chunk, load(chunk)))
    assert frame.texts == {"source": ["wiki", "code"], "image": [b"\xff\x00", b""]}
    assert frame.tensors["yes"].tolist() == columns["yes"].to_pylist()
    assert frame.tensors["half"].tolist()[0] == [1, float("inf")]


def test_chunks_are_short_when_passthrough_texts_are_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "a").mkdir(parents=True)
    ids = pa.array([[1]] * 60, pa.list_(pa.int32()))
    pages = [bytes([n]) * 500_000 for n in range(60)]
    pq.write_table(pa.table({"tokens": ids, "page": pages}), tmp_path / "data" / "a" / "part-0.parquet")
    (tmp_path / "data" / "a" / "penstock.toml").write_text('columns = ["page"]')
    plan = plan_of(open_server(tmp_path / "data", tmp_path / "cache", 1 << 30), "a", batch_size=2, seq_len=1)
    made = list(chunks(plan, 0, 0, range(30)))
    assert max(len(chunk.steps) for chunk in made) <= 9
    monkeypatch.setattr(batch_module, "MAX_BATCH_BYTES", 900_000)
    with pytest.raises(BadParameter, match="Lower batch_size"):
        frames(made[0], load(made[0]))


@pytest.mark.parametrize(
    ("spec", "spans_a_step"),
    [({"seq_len": 2}, 500), ({"packing": "concat", "seq_len": 8}, 2500), ({"packing": "best_fit", "seq_len": 8}, 2500)],
    ids=str,
)
def test_chunks_are_short_when_rows_have_few_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any], spans_a_step: int
) -> None:
    """A chunk takes far more memory for each of them than they have bytes."""
    (tmp_path / "data" / "a").mkdir(parents=True)
    ids = pa.array([[1, 2]] * 20_000, pa.list_(pa.int32()))
    pq.write_table(pa.table({"tokens": ids}), tmp_path / "data" / "a" / "part-0.parquet")
    plan = plan_of(open_server(tmp_path / "data", tmp_path / "cache", 1 << 30), "a", batch_size=500, **spec)
    assert plan.step_spans == spans_a_step
    num_steps = plan.schedule.num_steps
    assert [len(chunk.steps) for chunk in chunks(plan, 0, 0, range(num_steps))] == [num_steps]
    monkeypatch.setattr(gather_module, "_CHUNK_SPANS", 2 * spans_a_step + 1)
    made = list(chunks(plan, 0, 0, range(num_steps)))
    assert max(len(chunk.steps) for chunk in made) == 2
    assert [step for chunk in made for step in chunk.steps] == list(range(num_steps))
    monkeypatch.setattr(gather_module, "_CHUNK_BYTES", 1)
    assert [len(chunk.steps) for chunk in chunks(plan, 0, 0, range(num_steps))] == [1] * num_steps


@pytest.mark.parametrize("packing", ["rows", "concat", "best_fit"])
def test_body_leaves_nothing_for_the_garbage_collector(tmp_path: Path, packing: str) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "a", [[[(3, True), (4, False)] * 5] * 8], 0, is_filtered=False)
    plan = plan_of(open_server(tmp_path / "data", tmp_path / "cache", 1 << 30), "a", packing=packing, batch_size=2, seq_len=4)

    def make() -> None:
        for chunk in chunks(plan, 0, 0, range(2)):
            frames(chunk, load(chunk))

    make()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        make()
        gc.collect()
        assert [found for found in gc.garbage if type(found).__module__.startswith("penstock_server")] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize(
    "spec", [{}, {"packing": "concat"}, {"packing": "best_fit"}, {"overflow": "split"}, {"length_bucket_size": 4}]
)
def test_planned_epochs_are_dropped_with_their_snapshot(tmp_path: Path, spec: dict[str, Any]) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "a", [[[(3, True), (4, True)] * 5] * 8], 0, is_filtered=False)
    plan = plan_of(open_server(tmp_path / "data", tmp_path / "cache", 1 << 30), "a", batch_size=2, seq_len=4, **spec)
    gc.disable()
    try:
        member = replace(plan.members[0], planned=PlannedEpochs())
        member.epoch(1)[1].samples(np.arange(2))
        planned = weakref.ref(member.planned)
        del member
        assert planned() is None
    finally:
        gc.enable()


def test_row_lookup_truncates_very_long_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_module, "_MAX_TOKENS", 10)
    (tmp_path / "data" / "a").mkdir(parents=True)
    columns = {"tokens": [list(range(8)), list(range(30))], "loss_mask": [[0] * 4 + [1] * 4, [1] * 5 + [0] * 20 + [1] * 5]}
    pq.write_table(pa.table(columns), tmp_path / "data" / "a" / "part-0.parquet")
    served = open_server(tmp_path / "data", tmp_path / "cache", 1 << 30).datasets["a"]
    short, long = (show_row(served, row) for row in range(2))
    assert (short["num_tokens"], short["num_loss_tokens"], short["tokens"]) == (8, 4, list(range(8)))
    assert (long["num_tokens"], long["num_loss_tokens"], long["tokens"]) == (30, 10, list(range(10)))
    assert sum(turn["num_tokens"] for turn in long["turns"]) == 10
    shown = printed(lambda console: inspect(served, range(1, 2), console, 0))
    assert "30 tokens, 10 with loss" in shown
    assert "..." in shown


def test_endless_mixture_lists_occurrences_of_a_row(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number, name in enumerate("ab"):
        write(tmp_path / "data" / name, [[[(3, True)] * 5]], number, is_filtered=False)
    catalog = open_server(tmp_path / "data", tmp_path / "cache", 1 << 30)
    plan = plan_of(catalog, "a", mix="a:1,b:2", stopping_strategy="never", batch_size=1)
    found = find_row(plan, "a", 3, 0)
    assert len(found) == 100
    assert [occurrence["step"] // 15 for occurrence in found] == list(range(100))
    behind = find_row(plan_of(catalog, "a", mix="a:1,b:2", stopping_strategy="never", batch_size=1, offset=15_000), "a", 3, 0)
    assert [occurrence["step"] // 15 for occurrence in behind] == list(range(100))  # those that are shown, not those left out
    with pytest.raises(BadParameter, match="epoch 1 does not exist: with stopping_strategy=never epoch 0 does not end"):
        find_row(plan, "a", 3, 1)
    with pytest.raises(BadParameter, match="are counted up to epoch"):
        find_row(plan_of(catalog, "a", mix="a:1,b:2", batch_size=1), "a", 3, 2**53)


def test_mixture_plans_each_dataset_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    names = ["a", *(f"b{n}" for n in range(40))]
    for number, name in enumerate(names):
        write(tmp_path / "data" / name, [[[(3, True)] * 50]], number, is_filtered=False)
    catalog = open_server(tmp_path / "data", tmp_path / "cache", 1 << 30)
    plan = plan_of(catalog, "a", mix=",".join(f"{name}:1" for name in names), batch_size=len(names), seq_len=4)
    planned: list[str] = []
    monkeypatch.setattr(member_module, "_plan", lambda member, _: planned.append(member.name))
    for step in range(20):
        assert len(plan.spans(0, 0, [step])) == len(names)
    assert planned == []


def test_row_lengths_hold_no_file_descriptors(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "a", [[[(3, True)] * 2]] * 50, 0, is_filtered=False)
    catalog = open_server(tmp_path / "data", tmp_path / "cache", 1 << 30)
    assert plan_of(catalog, "a", packing="best_fit", batch_size=1, seq_len=4).schedule.num_samples == 100
    held = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [name for name in held if name.endswith((".lengths", ".index"))]
