"""Look-ups of rows: their tokens, their text, and where they are scheduled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from support.corpora import write_numbered, write_pairs, write_shards, write_tokenizer
from support.servers import Serve, Server


@pytest.fixture(scope="module")
def server(serve: Serve, shared: Path) -> Server:
    write_numbered(shared / "numbers", 100)
    write_pairs(shared / "pairs", [("the dog", "jumps"), ("a fox", "runs")])
    rows = [[1], [], [3], [], []]
    holes = write_shards(shared / "holes", "tokens", [rows], type_=pa.list_(pa.int32()), row_group_size=9)
    (holes / "penstock.toml").write_text('on_bad_row = "replace"\nmax_bad_share = 0.9')
    return serve(shared, "--tokenizer", str(write_tokenizer(shared / "tokenizer.json")))


def test_row_shows_its_place_tokens_and_text(server: Server) -> None:
    row = server.json("/v1/datasets/numbers/rows/40")
    place = {"row": 40, "shard": "part-001.parquet", "row_group": 0, "row_in_group": 6, "split": "train"}
    assert row == {**place, "tokens": [40] + [1] * 5, "num_tokens": 6, "num_loss_tokens": 6}
    pair = server.json("/v1/datasets/pairs/rows/1")
    assert [(turn["in_loss"], turn["text"]) for turn in pair["turns"]] == [(False, "a fox"), (True, "runs<|endoftext|>")]
    assert sum(turn["num_tokens"] for turn in pair["turns"]) == len(pair["tokens"])
    assert pair["num_loss_tokens"] == pair["turns"][1]["num_tokens"]


def test_provenance_has_prompt_lengths(server: Server) -> None:
    def told(dataset: str, **spec: str | int) -> list[list[int]]:
        server.json_when_ready(f"/v1/datasets/{dataset}/spec", **spec)
        batch = server.json(f"/v1/datasets/{dataset}/epochs/0/ranks/0/batches/0/provenance", **spec)
        sources = [source for sample in batch["samples"] for source in sample["sources"]]
        return sorted([source[name] for name in ("dataset_row", "row_tokens", "prompt_tokens")] for source in sources)

    turns = [[turn["num_tokens"] for turn in server.json(f"/v1/datasets/pairs/rows/{row}")["turns"]] for row in (0, 1)]
    expected = [[row, prompt + response, prompt] for row, (prompt, response) in enumerate(turns)]
    whole: list[dict[str, str | int]] = [{}, {"task": "seq2seq", "seq_len": 1}, {"packing": "best_fit", "batch_size": 1}]
    for spec in whole:
        assert told("pairs", **{"batch_size": 2, **spec}) == expected
    assert {prompt for _, _, prompt in told("numbers", batch_size=9)} == {0}


def test_bad_row_is_replaced_by_a_neighbour(server: Server) -> None:
    assert server.json("/v1/datasets/holes/rows/3")["bad"] == "is empty"
    places = [
        len(server.json(f"/v1/datasets/holes/rows/{row}/schedule", batch_size=5)["occurrences"]) for row in range(5)
    ]  # fmt: skip
    assert places == [3, 0, 2, 0, 0]


def test_block_without_good_rows_has_no_schedule(serve: Serve, tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "void", "tokens", [[[], []]], type_=pa.list_(pa.int32()), row_group_size=9)
    (folder / "penstock.toml").write_text('on_bad_row = "replace"\nmax_bad_share = 0.9')
    with serve(tmp_path) as server:
        assert server.json("/v1/datasets/void/rows/1/schedule", batch_size=1) == {"occurrences": []}


def test_schedule_lists_the_first_of_many_places(server: Server) -> None:
    spec: dict[str, Any] = {"drop_last": False, "batch_size": 65_536, "world_size": 2**20}
    places = server.json("/v1/datasets/numbers/rows/5/schedule", **spec)["occurrences"]
    assert len(places) == 1000
    first = places[0]["index"]
    at = [(place["step"], place["rank"] * 65_536 + place["index"]) for place in places]
    assert at == [(0, number) for number in range(first, first + 100_000, 100)]


@pytest.mark.parametrize("path", ["rows/100", "rows/100/schedule"])
def test_row_out_of_range_names_the_bound(server: Server, path: str) -> None:
    problem = server.get(f"/v1/datasets/numbers/{path}").json()
    assert (problem["status"], problem["type"]) == (404, "urn:penstock:problem:row-out-of-range")
    assert "numbers has 100 rows, 0 to 99" in problem["detail"]
