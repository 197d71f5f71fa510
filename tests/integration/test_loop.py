"""What a training loop is told beside its batches: how many, how long it waited, and what they were."""

from __future__ import annotations

import copy
import itertools
import time
import warnings
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from penstock import PenstockError, RemoteDataset, ServerUnavailable, SpecError
from penstock.client import Client
from penstock.prefetch import OBJECT_BYTES
from penstock.stats import Stats
from penstock.wire import Layout
from support.corpora import write_numbered, write_pairs, write_shards, write_tokenizer
from support.servers import Serve, Server

NUM_ROWS, BATCH_SIZE = 120, 4


@pytest.fixture(scope="module")
def server(serve: Serve, shared: Path) -> Server:
    write_numbered(shared / "numbers", NUM_ROWS)
    write_pairs(shared / "pairs", [("the quick brown fox jumps over", " the lazy dog")] * NUM_ROWS)
    return serve(shared, "--tokenizer", str(write_tokenizer(shared / "tokenizer.json")))


def dataset(server: Server, **settings: Any) -> RemoteDataset:
    return RemoteDataset(server.url, "numbers", **({"batch_size": BATCH_SIZE, "seq_len": 8, "seed": 3} | settings))


def test_stats_count_batches_tokens_and_waits(server: Server) -> None:
    data = dataset(server)
    assert (data.stats(), data.stats().wait_fraction) == (Stats(), 0.0)
    num_tokens = 0
    for number, batch in enumerate(data, start=1):
        num_tokens += int(batch["attention_mask"].sum())
        time.sleep(0.001)
        stats = data.stats()
        assert (stats.num_batches, stats.num_tokens) == (number, num_tokens)
        if number == 20:
            break
    for batch in data:
        num_tokens += int(batch["attention_mask"].sum())
    stats = data.stats()
    assert (stats.num_batches, stats.num_tokens, stats.num_retries) == (20 + NUM_ROWS // BATCH_SIZE, num_tokens, 0)
    assert stats.wait_seconds > 0
    assert stats.compute_seconds > 0.019
    assert stats.wait_fraction == stats.wait_seconds / (stats.wait_seconds + stats.compute_seconds)
    assert stats.buffered_bytes == 0


def test_stats_count_buffered_bytes_until_the_loop_ends(server: Server) -> None:
    data = dataset(server)
    most = 0
    for _ in data:
        time.sleep(0.01)
        most = max(most, data.stats().buffered_bytes)
    assert most > 0
    waiting = Layout.of([("input_ids", "uint16", (BATCH_SIZE, 8)), ("lengths", "int32", (BATCH_SIZE,))]).nbytes
    assert most % (waiting + OBJECT_BYTES) == 0
    assert data.stats().buffered_bytes == 0


def test_batch_holds_only_the_requested_tensors(server: Server) -> None:
    assert all(list(batch) == ["labels"] for batch in dataset(server, tensors=["labels"]))
    assert next(iter(dataset(server))).keys() == {"input_ids", "attention_mask", "labels"}
    wrong: Any
    for wrong in ("labels", [], ["labels", "lables"], ["lengths"], 5, [["labels"]]):
        with pytest.raises(SpecError, match="a list of tensors of a batch .input_ids, attention_mask, labels., not "):
            dataset(server, tensors=wrong)


def test_loop_warns_when_all_labels_are_masked(server: Server) -> None:
    def first(**spec: Any) -> dict[str, Any]:
        return next(iter(RemoteDataset(server.url, "pairs", batch_size=BATCH_SIZE, **spec)))

    with pytest.warns(UserWarning, match=r"all of its labels are -100, .* Do the prompts fill seq_len=4\?"):
        assert (first(seq_len=4)["labels"] == -100).all()
    assert (first(seq_len=4, loss_on="all")["labels"] != -100).any()
    assert (first(seq_len=64)["labels"] != -100).any()
    first(seq_len=4, tensors=["input_ids"])


def test_stats_add_up_concurrent_loops(server: Server) -> None:
    data = dataset(server)
    with pytest.warns(UserWarning, match="a loop continues with batch 2 of its iteration"):
        for _ in zip(data, data, strict=True):
            pass
    assert data.stats().num_batches == 2 * NUM_ROWS // BATCH_SIZE
    assert data.stats().buffered_bytes == 0


def test_dataset_can_be_copied_in_mid_loop(server: Server) -> None:
    data = dataset(server)
    for _ in data:
        again = copy.deepcopy(data)
        break
    assert again.stats().num_batches == 1
    assert len(list(again)) == NUM_ROWS // BATCH_SIZE


def test_replay_repeats_batches_and_fetches_them_once(server: Server) -> None:
    expected = [batch["input_ids"].tolist() for batch in dataset(server)][:3]
    data = dataset(server, replay=3)
    seen = []
    for batch in data:
        seen.append(batch.pop("input_ids").tolist())
        fetched = data.stats().num_bytes
    assert len(seen) == len(data) == NUM_ROWS // BATCH_SIZE
    assert seen == (expected * len(seen))[: len(seen)]
    assert data.stats().num_bytes == fetched
    assert len(list(dataset(server, replay=1000, prefetch_bytes=0.1e6))) == NUM_ROWS // BATCH_SIZE


def test_replay_consumes_nothing_and_warns_of_it(server: Server) -> None:
    state = dataset(server).state_dict() | {"step": 9, "run": "1" * 16, "start": "2" * 16}
    data = dataset(server, replay=2)
    data.load_state_dict(state)
    assert len(list(data)) == NUM_ROWS // BATCH_SIZE - 9
    with pytest.warns(UserWarning, match="consumes nothing of the epoch"):
        assert {**data.state_dict(), "start": None} == {**state, "start": None}


@pytest.mark.parametrize(("name", "value"), [("replay", 0), ("prefetch_bytes", -1), ("retry_seconds", -1)])
def test_numbers_out_of_bounds_are_refused(server: Server, name: str, value: int) -> None:
    with pytest.raises(SpecError, match=f"{name} must be .*, not {value}"):
        dataset(server, **{name: value})


def test_parameters_may_be_numpy_integers(server: Server) -> None:
    data = dataset(server, rank=np.int64(0), world_size=np.int64(1), replay=np.int64(2), prefetch_bytes=np.int64(1 << 20))
    data.set_epoch(np.int64(1))  # type: ignore[arg-type]
    assert (data.rank, data.world_size, data.epoch) == (0, 1, 1)
    assert len(list(data)) == len(data)


def test_first_rank_warns_once_of_truncated_rows_and_padding(serve: Serve, tmp_path: Path) -> None:
    write_shards(
        tmp_path / "long", "input_ids", [[[*range(100)], [*range(10)]] * 8], type_=pa.list_(pa.int32()), row_group_size=16
    )
    with serve(tmp_path) as long:

        def warnings_of(**spec: Any) -> list[str]:
            settings: dict[str, Any] = {"batch_size": 8, "seq_len": 20, "shuffle": "none"} | spec
            data = RemoteDataset(long.url, "long", **settings)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                for _ in range(2):
                    list(data)
            return [str(warning.message) for warning in told]

        [said] = warnings_of()
        expected = "8 of 16 sampled rows are longer than seq_len=20, and 7"
        assert said.startswith(f"long: {expected}")
        assert warnings_of(split="train", batch_size=1)[0].startswith("long, split=train: ")  # it may not be the only dataset
        for spec in ({"overflow": "split"}, {"packing": "concat"}, {"rank": 1, "world_size": 2, "batch_size": 4}):
            assert warnings_of(**spec) == []
        [said] = warnings_of(seq_len=2000)
        assert said.startswith(
            "long: 97% of the tokens of a batch's rows are padding: the mean of 16 sampled rows is 55 tokens"
        )
        data = RemoteDataset(long.url, "long", batch_size=8, seq_len=20, retry_seconds=0.1)
        long.kill()
        assert Client(long.url, "long", rank=0, retry_seconds=0.1).sample_lengths(data.spec, 0) == []


def test_loop_warns_when_set_epoch_is_forgotten(server: Server) -> None:
    def is_told(data: RemoteDataset, num_batches: int | None = None) -> bool:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            list(itertools.islice(data, num_batches))
        assert all(Path(warning.filename).name == "test_loop.py" for warning in told)
        return any("set_epoch(n) before the loop" in str(warning.message) for warning in told)

    data = dataset(server)
    assert [is_told(data), is_told(data)] == [False, True]
    data.set_epoch(0)  # who says so means it
    assert not is_told(data)
    data.set_epoch(1)
    assert not is_told(data)
    data.set_epoch(2)
    next(iter(data))  # no more than a look
    data.set_epoch(2)  # which warns of a loop that was left, and warnings are errors here
    assert not is_told(data)
    data.set_epoch(3)
    assert not is_told(data, 5)
    assert is_told(data, 5)  # it was left, and begins anew
    data.load_state_dict(data.state_dict())
    assert not is_told(data, 1)
    assert is_told(data, 5)  # of a loop that went on in mid-epoch, to look at one batch is enough
    resumed = dataset(server, batch_size=2)
    resumed.load_state_dict(data.state_dict())
    assert [is_told(resumed, 1), is_told(resumed, 1), is_told(resumed)] == [False, True, False]
    whole = dataset(server, batch_size=NUM_ROWS)  # an epoch is one batch
    assert [is_told(whole), is_told(whole)] == [False, True]
    for spec in ({"shuffle": "none"}, {"replay": 2}):
        again = dataset(server, **spec)
        assert [is_told(again), is_told(again)] == [False, False]


def test_loop_warns_when_each_step_takes_the_first_batch(server: Server) -> None:
    def warned(batches: Iterable[Any], num_steps: int) -> list[bool]:
        found = []
        for _ in range(num_steps):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                next(iter(batches))
            found.append(any("next(iter(...)) in each step" in str(one.message) for one in caught))
        return found

    data = dataset(server)
    assert warned(data, 5) == [False, False, True, False, False]
    data.set_epoch(1)
    assert warned(DataLoader(data, batch_size=None), 4) == [False, False, True, False]
    for epoch in range(2, 6):  # each another batch
        data.set_epoch(epoch)
        assert warned(data, 1) == [False]
    for _ in range(4):
        data.load_state_dict(data.state_dict())
        assert warned(data, 1) == [False]
    for spec in ({"shuffle": "none"}, {"replay": 2}):
        assert not any(warned(dataset(server, **spec), 4))


@pytest.mark.parametrize(("second", "told"), [({}, []), ({"seed": 6}, ["rank 1 (seed=6, not 5)"]), ({"shuffle": "none"}, [])])
@pytest.mark.parametrize("is_named", [False, True])
def test_first_rank_warns_once_of_other_parameters(
    server: Server, second: dict[str, Any], told: list[str], is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who names the rank, as tensor-parallel peers do, may have other ranks in torch.distributed."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)  # type: ignore[attr-defined]
    monkeypatch.setattr("penstock.distributed.job_store", lambda: store)
    monkeypatch.setattr("penstock.distributed._TOLERANCE_SECONDS", 0.0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    datasets = []
    for rank, other in enumerate(({}, second)):
        monkeypatch.setenv("RANK", str(rank))
        named = {"rank": rank, "world_size": 2} if is_named else {}
        spec: dict[str, Any] = {"batch_size": 1, "seq_len": 8, "seed": 5}
        datasets.append(RemoteDataset(server.url, "numbers", **spec | named | other))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(zip(*datasets, strict=True))
    assert [str(warning.message).split(": ")[1].split(". ")[0] for warning in caught] == ([] if is_named else told)
    assert all(warning.filename == __file__ for warning in caught)


def test_loop_keeps_no_reference_to_the_last_epoch(server: Server) -> None:
    class Logits:
        pass

    data, refs = dataset(server), list[weakref.ref[Logits]]()
    for epoch in range(2):
        data.set_epoch(epoch)
        for _ in data:
            logits = Logits()
            refs.append(weakref.ref(logits))
            assert sum(ref() is not None for ref in refs) == 1


def test_iterator_keeps_raising_after_an_error(serve: Serve, tmp_path: Path) -> None:
    write_numbered(tmp_path / "numbers", NUM_ROWS)
    away = serve(tmp_path)
    data = dataset(away, retry_seconds=0.1, prefetch_bytes=1)
    expected = [batch["input_ids"].tolist() for batch in data]
    data.set_epoch(0)
    batches = iter(data)
    given = [next(batches)["input_ids"].tolist()]
    away.kill()
    with pytest.raises(ServerUnavailable):
        given.extend(batch["input_ids"].tolist() for batch in batches)
    for _ in range(2):
        with pytest.raises(PenstockError, match=r"ended by ServerUnavailable, and has no more batches\. To go on"):
            next(batches)
    away.start()
    data.load_state_dict(data.state_dict())
    assert given + [batch["input_ids"].tolist() for batch in data] == expected
    left = iter(data)
    next(left)
    left.close()  # type: ignore[attr-defined]
    with pytest.raises(PenstockError, match=r"ended by close\(\)"):
        next(left)


def test_cpu_batches_equal_those_without_a_device(server: Server) -> None:
    for found, expected in zip(dataset(server, device="cpu"), dataset(server), strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_gpu_batches_are_the_same_and_the_loop_never_waits(server: Server) -> None:
    expected = [{name: tensor.clone() for name, tensor in batch.items()} for batch in dataset(server)]
    data, seen = dataset(server, device="cuda"), []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number, batch in enumerate(data, start=1):
            torch.cuda._sleep(5_000_000)  # type: ignore[no-untyped-call]
            seen.append({name: tensor.clone() for name, tensor in batch.items()})
            assert data.state_dict()["step"] == number
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(tensor.is_cuda for batch in seen for tensor in batch.values())
    for found, wanted in zip(seen, expected, strict=True):
        assert all(torch.equal(found[name].cpu(), wanted[name]) for name in wanted)
    assert [b["input_ids"].tolist() for b in dataset(server, device="cuda", replay=2)][:2] == [
        b["input_ids"].tolist() for b in expected[:2]
    ]
    loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=1)
    with pytest.raises(PenstockError, match="workers cannot give batches on device='cuda'"):
        next(iter(loader))


def test_unknown_rank_is_refused(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for wrong in ("2", "-1", "first", "\N{SUPERSCRIPT ONE}"):
        monkeypatch.setenv("RANK", wrong)
        with pytest.raises(SpecError, match="0 <= RANK < WORLD_SIZE"):
            dataset(server)
    for rank in (-1, 2, True):
        with pytest.raises(SpecError, match="0 <= rank < world_size"):
            dataset(server, rank=rank, world_size=2)
    monkeypatch.setenv("RANK", "1")
    early, named = dataset(server), dataset(server, rank=1, world_size=2)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with pytest.raises(PenstockError, match="made for rank 1 of 2, before .* This is rank 0 of 1"):
            next(iter(early))
        assert len(list(named)) == len(named)
    finally:
        torch.distributed.destroy_process_group()
    assert len(list(early)) == NUM_ROWS // BATCH_SIZE // 2


def test_run_of_one_step_warns_of_its_split_dropped_samples_and_truncation(serve: Serve, tmp_path: Path) -> None:
    folder = tmp_path / "squad"
    folder.mkdir()
    for number, name in enumerate(("test", "train", "validation")):
        ids = pa.array([[number] * 100] * 60, pa.list_(pa.int32()))
        pq.write_table(pa.table({"input_ids": ids}), folder / f"{name}-00000-of-00001.parquet")
    with serve(tmp_path) as server:
        for split, rows in ((None, {1}), ("test", {0}), ("all", {0, 1, 2})):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                data = RemoteDataset(server.url, "squad", batch_size=32, seq_len=8, split=split, shuffle="none")  # type: ignore[arg-type]
                assert {int(row) for batch in data for row in batch["input_ids"].unique()} <= rows
            said = [str(warning.message) for warning in told]
            assert f"this run has split={split or 'train'}. " in "".join(said)
            assert len(data) == (5 if split == "all" else 1)
            assert ("drop_last=true leaves out 28 of the 60 samples" in "".join(said)) == (split != "all")
            assert "92.0% of the tokens of all are in no batch" in said[-1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pad_side": "top"}, 'pad_side must be "right" or "left"'),
        ({"pad_side": "left", "packing": "concat"}, "pad_side='left' needs packing='rows'"),
        ({"pad_side": "left", "flatten": True}, "pad_side='left' needs .* no flatten"),
        ({"flatten": 1}, "flatten must be true or false"),
        ({"flatten": True, "task": "seq2seq"}, "flatten needs task='causal'"),
        ({"labels": "shifted", "task": "seq2seq"}, "labels=shifted needs task=causal"),
        ({"overlap": 1}, "overlap needs packing=concat"),
        ({"overlap": 8, "packing": "concat"}, r"overlap=8 must be below the 8 token\(s\) of a sample"),
        ({"flatten": True, "tensors": ["attention_mask"]}, "tensors must be a list of tensors of a batch"),
    ],
    ids=str,
)
def test_form_that_batches_cannot_have_is_refused(server: Server, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        dataset(server, **settings)
