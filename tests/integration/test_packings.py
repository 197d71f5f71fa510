"""Every packing through a real server: no token lost, none repeated, whatever the order, the split and the number of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock import RemoteDataset
from support.corpora import write_pairs, write_shards, write_tokenizer
from support.servers import Serve, Server

NUM_ROWS, SEQ_LEN = 300, 32
Token = tuple[int, int]  # the row, and the place in it
Spec = dict[str, Any]

SPECS: list[Spec] = [
    {"packing": "rows", "seq_len": 200},
    {"packing": "rows", "seq_len": 200, "length_bucket_size": 12},
    {"packing": "rows", "overflow": "split"},
    {"packing": "rows", "overflow": "split", "length_bucket_size": 8},
    {"packing": "best_fit"},
]


def lengths() -> list[int]:
    return [1 + (row * row) % 97 for row in range(NUM_ROWS)]


@pytest.fixture(scope="module")
def data_dir(shared: Path) -> Path:
    # Of row r token t is 100 * r + t, so a token tells where it is from.
    rows = [[100 * row + token for token in range(length)] for row, length in enumerate(lengths())]
    folder = write_shards(shared / "docs", "tokens", [rows[:130], rows[130:]], type_=pa.list_(pa.int32()), row_group_size=40)
    (folder / "penstock.toml").write_text("validation = 0.2")
    write_pairs(shared / "pairs", [(f"the {n} dogs", f"jump over {n} foxes" * (n % 5 + 1)) for n in range(120)])
    write_tokenizer(shared / "tokenizer.json")
    return shared


@pytest.fixture(scope="module")
def server(serve: Serve, data_dir: Path) -> Server:
    return serve(data_dir, "--tokenizer", str(data_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def splits(server: Server) -> list[str]:
    """Of each row."""
    return [server.json(f"/v1/datasets/docs/rows/{row}")["split"] for row in range(NUM_ROWS)]


def dataset(server: Server, name: str = "docs", rank: int = 0, world_size: int = 1, **spec: Any) -> RemoteDataset:
    settings: Spec = {"batch_size": 4, "seq_len": SEQ_LEN, "window": 60, "drop_last": False} | spec
    return RemoteDataset(server.url, name, rank=rank, world_size=world_size, **settings)


def tokens_of(batch: dict[str, Any]) -> Iterator[list[Token]]:
    """The tokens of each sample."""
    for ids, mask in zip(batch["input_ids"].tolist(), batch["attention_mask"].tolist(), strict=True):
        yield [divmod(token, 100) for token, real in zip(ids, mask, strict=True) if real]


def epoch_of(server: Server, epoch: int, world_size: int, **spec: Any) -> list[list[Token]]:
    """The samples of an epoch in the order of step, rank and index."""
    ranks = [dataset(server, rank=rank, world_size=world_size, **spec) for rank in range(world_size)]
    for data in ranks:
        data.set_epoch(epoch)
    return [sample for batches in zip(*ranks, strict=True) for batch in batches for sample in tokens_of(batch)]


def every_token(rows: set[int]) -> Counter[Token]:
    return Counter((row, token) for row, length in enumerate(lengths()) if row in rows for token in range(length))


@pytest.mark.parametrize(
    ("spec", "split", "shuffle"),
    [
        *product(SPECS, ["all", "validation"], ["window"]),
        *product([spec for spec in SPECS if "length_bucket_size" not in spec], ["all"], ["none"]),
    ],
)
def test_packings_give_every_token_of_a_split_once(
    server: Server, splits: list[str], spec: Spec, split: str, shuffle: str
) -> None:
    settings = {**spec, "split": split, "shuffle": shuffle}
    num_samples = server.json_when_ready("/v1/datasets/docs/spec", batch_size=1, **({"seq_len": SEQ_LEN} | settings))[
        "num_samples"
    ]
    rows = {row for row, own in enumerate(splits) if split in ("all", own)}
    assert 0 < len(rows) <= NUM_ROWS
    orders = []
    for world_size in (1, 3):
        order = epoch_of(server, 2, world_size, **settings)
        assert order[num_samples:] == order[: len(order) - num_samples]
        assert Counter(token for sample in order[:num_samples] for token in sample) == every_token(rows)
        orders.append(order[:num_samples])
    assert orders[0] == orders[1]
    if shuffle == "window":
        other = epoch_of(server, 3, 1, **settings)[:num_samples]
        assert other != orders[0]
        assert Counter(token for sample in other for token in sample) == every_token(rows)
        if spec["packing"] != "best_fit":  # which puts other rows together
            assert sorted(other) == sorted(orders[0])


TAILS: list[Spec] = [{}, {"drop_last": False, "split": "validation"}, {"offset": 13}]


@pytest.mark.parametrize(("spec", "tail"), list(zip([*SPECS, {"packing": "concat"}], TAILS * 2, strict=True)), ids=str)
def test_schedule_agrees_with_provenance_for_every_packing(server: Server, spec: Spec, tail: Spec) -> None:
    settings = {"seq_len": SEQ_LEN, "batch_size": 4, "window": 60, "world_size": 2, "split": "all", **spec, **tail}
    num_steps = server.json_when_ready("/v1/datasets/docs/spec", **settings)["num_steps"]
    found: dict[int, set[tuple[int, int, int]]] = {row: set() for row in range(NUM_ROWS)}
    for rank, step in product(range(2), range(num_steps)):
        url = f"/v1/datasets/docs/epochs/1/ranks/{rank}/batches/{step}"
        answer = server.json(f"{url}/provenance", **settings)
        page = server.json(url, format="json", **settings)
        for sample, shown in zip(answer["samples"], page["samples"], strict=True):
            listed = []
            for source in sample["sources"]:
                row = (130 if source["shard"] == "part-001.parquet" else 0) + 40 * source["row_group"] + source["row"]
                assert source["dataset_row"] == row
                found[row].add((step, rank, sample["index"]))
                listed += [100 * row + token for token in range(source["start"], source["stop"])]
            assert listed == shown["input_ids"]
    for row in range(0, NUM_ROWS, 7):
        occurrences = server.json(f"/v1/datasets/docs/rows/{row}/schedule", epoch=1, **settings)["occurrences"]
        assert [(o["step"], o["rank"], o["index"]) for o in occurrences] == sorted(found[row])


def test_best_fit_keeps_documents_whole_and_apart(server: Server) -> None:
    for batch in dataset(server, packing="best_fit", seq_len=97):
        starts = batch["position_ids"] == 0
        assert batch["cu_seqlens"].tolist() == [*np.flatnonzero(starts.reshape(-1).numpy()).tolist(), starts.numel()]
        for ids, positions, mask, labels in zip(
            *(batch[name].tolist() for name in ("input_ids", "position_ids", "attention_mask", "labels")), strict=True
        ):
            for token, position, real, label in zip(ids, positions, mask, labels, strict=True):
                if real:
                    assert token % 100 == position
                    assert label == (-100 if position == 0 else token)
                else:
                    assert label == -100


@pytest.mark.parametrize("shuffle", ["none", "window", "global"])
def test_best_fit_keeps_the_same_rows_together_in_each_epoch_only_without_shuffle(server: Server, shuffle: str) -> None:
    def together(epoch: int) -> Counter[tuple[Token, ...]]:
        samples = epoch_of(server, epoch, 1, packing="best_fit", shuffle=shuffle, batch_size=1)
        return Counter(tuple(sample) for sample in samples if sample[0][0] != sample[-1][0])

    first, second = together(0), together(1)
    assert first.total() == second.total() > 40
    num_same = (first & second).total()
    assert num_same == first.total() if shuffle == "none" else num_same < 0.5 * first.total()
    assert together(0) == first


def test_best_fit_reports_its_padding(server: Server) -> None:
    answer = server.json_when_ready("/v1/datasets/docs/spec", packing="best_fit", seq_len=97)
    assert answer["padding"] == pytest.approx(1 - sum(lengths()) / (97 * answer["num_samples"]))
    assert answer["padding"] < 0.1


def test_concat_marks_documents_when_requested(server: Server) -> None:
    plain = list(dataset(server, packing="concat"))
    told = list(dataset(server, packing="concat", mark_documents=True))
    assert "position_ids" not in plain[0]
    for with_, without in zip(told, plain, strict=True):
        assert with_["input_ids"].equal(without["input_ids"])
        for ids, positions, labels in zip(
            *(with_[name].tolist() for name in ("input_ids", "position_ids", "labels")), strict=True
        ):
            expected = [0 if i == 0 or ids[i] // 100 != ids[i - 1] // 100 else 1 for i in range(SEQ_LEN)]
            assert [min(position, 1) for position in positions] == expected
            assert [label == -100 for label in labels] == [not inside for inside in expected]


def test_length_buckets_reduce_padding_and_stay_mixed(server: Server) -> None:
    def padding(**spec: Any) -> float:
        batches = list(dataset(server, seq_len=200, pad="longest", drop_last=True, window=300, **spec))
        real = sum(int(batch["attention_mask"].sum()) for batch in batches)
        return 1 - real / sum(int(batch["input_ids"].numel()) for batch in batches)

    assert padding(length_bucket_size=4) < 0.25 * padding()
    widths = [
        batch["input_ids"].shape[1] for batch in dataset(server, seq_len=200, pad="longest", length_bucket_size=4, window=300)
    ]
    assert widths != sorted(widths)
    assert widths != sorted(widths, reverse=True)


def test_pad_rounds_up_to_a_multiple(server: Server) -> None:
    widths = [batch["input_ids"].shape[1] for batch in dataset(server, seq_len=96, pad=8, batch_size=2)]
    exact = [batch["input_ids"].shape[1] for batch in dataset(server, seq_len=96, pad="longest", batch_size=2)]
    assert widths == [-(-width // 8) * 8 for width in exact]
    assert len(set(widths)) > 3


def test_prompts_are_masked_when_rows_are_split_or_packed(server: Server) -> None:
    whole = {
        tuple(ids): labels
        for batch in dataset(server, "pairs", seq_len=200, pad="longest", batch_size=1)
        for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
    }
    # Where documents are kept apart, the first token of each has no loss; whole ones begin with their prompt.
    for spec in ({"overflow": "split", "seq_len": 16}, {"packing": "best_fit", "seq_len": 200}):
        in_loss = Counter(
            label
            for batch in dataset(server, "pairs", batch_size=1, **spec)  # type: ignore[arg-type]
            for labels in batch["labels"].tolist()
            for label in labels
            if label != -100
        )
        assert in_loss == Counter(label for labels in whole.values() for label in labels if label != -100)
