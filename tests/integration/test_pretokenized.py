"""Pre-tokenized rows, through a real server: the loop gets the labels that their columns say, in every packing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import DataError, RemoteDataset
from support.servers import Serve, Server

NUM_ROWS, PADDED = 150, 60
Spec = dict[str, Any]


def length(row: int) -> int:
    return 2 + row * row % 47


def is_in_loss(row: int, place: int) -> bool:
    """Turns of row % 4 + 1 ids; rows begin with either kind."""
    return (place // (row % 4 + 1) + row // 2) % 2 == 1 or place == 1


def labels_of(row: int) -> list[int]:
    return [100 * row + place if is_in_loss(row, place) else -100 for place in range(length(row))]


@pytest.fixture(scope="module")
def server(serve: Serve, shared: Path) -> Server:

    def write(name: str, columns: dict[str, Any], recipe: str = "") -> None:
        (shared / name).mkdir()
        (shared / name / "penstock.toml").write_text(recipe)
        for shard, rows in enumerate((slice(0, 70), slice(70, NUM_ROWS))):
            part = pa.table({column: values[rows] for column, values in columns.items()})
            pq.write_table(part, shared / name / f"part-{shard}.parquet", row_group_size=32)

    rows = range(NUM_ROWS)
    ids = [[100 * row + place for place in range(length(row))] for row in rows]  # each id tells where it is from
    labels = [labels_of(row) for row in rows]
    write("labelled", {"input_ids": ids, "labels": labels})
    padding = [[0] * (PADDED - length(row)) for row in rows]
    write(
        "padded",
        {
            "input_ids": [own + pad if row % 2 else pad + own for row, own, pad in zip(rows, ids, padding, strict=True)],
            "attention_mask": [
                [1] * len(own) + pad if row % 2 else pad + [1] * len(own)
                for row, own, pad in zip(rows, ids, padding, strict=True)
            ],
            "completion_mask": [
                [label != -100 for label in own] + pad if row % 2 else pad + [label != -100 for label in own]
                for row, own, pad in zip(rows, labels, [[True] * len(pad) for pad in padding], strict=True)
            ],
        },
    )
    write("plain", {"input_ids": ids})
    write("unmasked", {"input_ids": [own + pad for own, pad in zip(ids, padding, strict=True)]})
    write("shifted", {"input_ids": ids, "labels": [[*own[1:], 7] for own in ids]})
    write("floats", {"input_ids": ids, "loss_mask": [[1.0] * len(own) for own in ids]})
    beyond = [[2**32 + 5 if row % 20 == 4 else 5, row] for row in rows]
    write("beyond", {"input_ids": beyond}, 'on_bad_row = "replace"\nmax_bad_share = 0.1')
    answers = [[7, row, 9] for row in rows]
    write("unnamed", {"input_ids": ids, "labels": [[7, row, 9] if len(ids[row]) != 3 else [7] for row in rows]})
    write(
        "answered",
        {"input_ids": ids, "labels": answers},
        'prompt = "input_ids"\nresponse = "labels"\neos = 9999\nlabels = false',
    )
    return serve(shared)


def epoch_of(server: Server, name: str, **spec: Any) -> list[tuple[int, int, bool]]:
    """Of each token that is no padding: id, label, whether it is the first of a document."""
    settings: Spec = {"batch_size": 3, "drop_last": False, "window": 40} | spec
    data = RemoteDataset(server.url, name, rank=0, world_size=1, **settings)
    found = []
    for batch in data:
        firsts = {*batch["cu_seqlens"].tolist()} if "cu_seqlens" in batch else set()
        ids, labels, there = (batch[tensor].reshape(-1).tolist() for tensor in ("input_ids", "labels", "attention_mask"))
        found += [(ids[at], labels[at], at in firsts) for at in range(len(ids)) if there[at]]
        assert all(label == -100 for label, is_there in zip(labels, there, strict=True) if not is_there)
    return found


SPECS: list[Spec] = [
    {"packing": "rows", "seq_len": 50},
    {"packing": "rows", "seq_len": 16, "overflow": "split", "pad": "longest", "length_bucket_size": 6},
    {"packing": "concat", "seq_len": 64},
    {"packing": "concat", "seq_len": 64, "mark_documents": True},
    {"packing": "best_fit", "seq_len": 64, "shuffle": "global"},
]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", ["labelled", "padded"])
def test_labels_are_those_of_the_rows_in_every_packing(server: Server, name: str, spec: Spec) -> None:
    found = epoch_of(server, name, **spec)
    for token, label, begins in found:
        row, place = divmod(token, 100)
        assert label == (token if is_in_loss(row, place) and not begins else -100)
    seen = Counter(token for token, _, _ in found)
    every = {100 * row + place for row in range(NUM_ROWS) for place in range(length(row))}
    assert seen.keys() <= every
    if spec["packing"] != "concat":  # the last tokens, too few for a sample, are in no batch
        assert seen.keys() == every


def test_wrong_labels_are_refused_with_a_remedy(server: Server) -> None:
    with pytest.raises(DataError, match=r"labels has \d+ at id \d+; .*on_bad_row") as told:
        next(iter(dataset(server, "shifted")))
    assert "Correct the shard" in str(told.value)
    with pytest.raises(DataError, match=r"labels has \d+ values for"):
        next(iter(dataset(server, "unnamed")))


def test_unused_mask_is_warned_of(server: Server) -> None:
    with pytest.warns(UserWarning, match="floats: the recipe does not use loss_mask"):
        dataset(server, "floats")


def test_ids_beyond_32_bits_are_bad(server: Server) -> None:
    firsts = [batch["input_ids"][0].tolist() for batch in dataset(server, "beyond")]
    assert firsts == [[5, row + (row % 20 == 4)] for row in range(NUM_ROWS)]
    assert server.json("/v1/datasets/beyond/quarantine")["rows"][0]["reason"].endswith(
        "has token id 4294967301, outside 0 to 4294967295"
    )


@pytest.mark.parametrize("packing", ["rows", "concat", "best_fit"])
def test_padding_without_a_mask_is_warned_of(server: Server, packing: str) -> None:
    with pytest.warns(UserWarning, match=r"repeat one token, such as 0\. If the rows were padded"):
        for _ in dataset(server, "unmasked", packing=packing, pad="seq_len", batch_size=8):
            pass


def test_loss_on_all_gives_every_id_loss(server: Server) -> None:
    assert all(label == token for token, label, _ in epoch_of(server, "labelled", loss_on="all", seq_len=50))


def test_mixture_keeps_the_masks_of_each_dataset(server: Server) -> None:
    found = epoch_of(server, "labelled", mix={"labelled": 0.5, "plain": 0.5}, packing="rows", seq_len=50, batch_size=4)
    labels = Counter((token, label) for token, label, _ in found)
    for row in range(NUM_ROWS):
        for place, label in enumerate(labels_of(row)):
            token = 100 * row + place
            assert labels[token, token] >= 1  # by the plain one
            assert label == token or labels[token, -100] >= 1


def test_json_batch_shows_the_labels(server: Server) -> None:
    path = "/v1/datasets/labelled/epochs/0/ranks/0/batches/0?format=json&shuffle=none&batch_size=5&seq_len=50"
    samples = server.json(path)["samples"]
    assert [sample["labels"] for sample in samples] == [labels_of(row) for row in range(5)]
    about = server.json("/v1/datasets/padded")
    assert about["recipe"] == "input_ids, pre-tokenized, masked by completion_mask, attention_mask"
    assert about["columns"] == ["input_ids", "completion_mask", "attention_mask"]
    assert about["unused_columns"] == []


def dataset(server: Server, name: str, **spec: Any) -> RemoteDataset:
    settings: Spec = {"batch_size": 1, "seq_len": 60, "pad": "longest", "shuffle": "none"} | spec
    return RemoteDataset(server.url, name, rank=0, world_size=1, **settings)


def test_seq2seq_keeps_prompt_and_response_ids_apart(server: Server) -> None:
    for row, batch in enumerate(dataset(server, "answered", task="seq2seq")):
        assert batch["input_ids"].tolist() == [[100 * row + place for place in range(length(row))]]
        assert batch["labels"].tolist() == [[7, row, 9, 9999]]
