"""The JSON that the page alone reads: each figure beside what whole epochs of batches hold."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from support.corpora import write, write_numbered, write_pairs, write_shards, write_text, write_tokenizer
from support.processes import until
from support.servers import Serve, Server

TEXTS = ["the quick brown fox", "the dog \N{SNOWMAN}", "jumps", "over the lazy dog " * 5] * 10
HOSTILE = [
    "caf\N{LATIN SMALL LETTER E WITH ACUTE} \U0001f389",
    "<img src=x onerror=alert(1)>",
    "a\x00b \u202eright",
    "the \ufffd",
]


@pytest.fixture(scope="module")
def server(serve: Serve, shared: Path) -> Server:
    write_text(shared / "text", TEXTS, row_group_size=8)
    write_text(shared / "hostile", HOSTILE)
    write_numbered(shared / "numbers", 90)
    write_pairs(shared / "pairs", [("the dog", "jumps")] * 30)
    write(shared / "blend", 'mix = "numbers:1,text:3"\nstopping_strategy = "all_exhausted"')
    server = serve(shared, "--tokenizer", str(write_tokenizer(shared / "tokenizer.json")))
    for name in ("text", "numbers", "pairs"):
        server.json_when_ready(f"/v1/datasets/{name}/spec", packing="concat", seq_len=8, batch_size=1)
    return server


def batches(server: Server, dataset: str, num_steps: int, **spec: str | int) -> list[dict[str, Any]]:
    """All batches of epoch 0 of rank 0."""
    return [
        server.json(f"/v1/datasets/{dataset}/epochs/0/ranks/0/batches/{n}", format="json", **spec) for n in range(num_steps)
    ]


@pytest.mark.parametrize(
    "spec",
    [
        {"seq_len": 8},
        {"seq_len": 8, "overflow": "split"},
        {"seq_len": 32, "packing": "best_fit"},
        {"seq_len": 8, "packing": "concat"},
        {"seq_len": 8, "split": "train"},
    ],
)
def test_estimate_counts_what_an_epoch_holds(server: Server, spec: dict[str, str | int]) -> None:
    spec = {"batch_size": 1, "shuffle": "none", **spec}
    server.json_when_ready("/v1/datasets/text/estimate", **spec)
    found = server.json("/v1/datasets/text/estimate", **spec)
    epoch = batches(server, "text", found["num_steps"], **spec)

    lengths = [sample["num_tokens"] for batch in epoch for sample in batch["samples"]]
    assert found["num_samples"] == len(lengths)
    assert found["tokens"] == sum(lengths)
    assert found["padding"] == pytest.approx(1 - sum(lengths) / (len(lengths) * int(spec["seq_len"])))
    if "packing" in spec or "overflow" in spec:
        assert (found["cut_rows"], found["cut_tokens"]) == (0, 0)
    else:
        sources = [source for n in range(found["num_steps"]) for source in provenance(server, n, **spec)]
        cut = [source["row_tokens"] - source["stop"] for source in sources]
        assert found["cut_rows"] == pytest.approx(sum(map(bool, cut)) / len(cut))
        assert found["cut_tokens"] == pytest.approx(sum(cut) / sum(source["row_tokens"] for source in sources))


def provenance(server: Server, step: int, **spec: str | int) -> list[dict[str, Any]]:
    batch = server.json(f"/v1/datasets/text/epochs/0/ranks/0/batches/{step}/provenance", **spec)
    return [source for sample in batch["samples"] for source in sample["sources"]]


def test_estimate_knows_no_tokens_before_they_are_counted(server: Server) -> None:
    found = server.json("/v1/datasets/hostile/estimate", batch_size=1)
    assert (found["num_steps"], found["tokens"], found["padding"], found["cut_rows"]) == (4, None, None, None)
    assert found["cache_bytes"] <= found["blocks_bytes"] <= found["cache_room_bytes"]
    assert found["cache_advice"] is None
    assert server.json("/v1/datasets/hostile/lengths") == {"starts": [], "rows": {}}
    assert server.json("/v1/datasets/hostile")["index"] == {"blocks_done": 0, "blocks": 1, "seconds_left": None}


def test_estimate_says_that_a_cache_is_too_small(serve: Serve, tmp_path: Path) -> None:
    write_shards(tmp_path / "data" / "wide", "tokens", [[[7] * 9_000] * 200], type_=pa.list_(pa.int32()), row_group_size=20)
    server = serve(tmp_path / "data", "--cache-bytes", "1000000")
    server.json_when_ready("/v1/datasets/wide/spec", packing="concat")  # so that bytes are counted
    found = server.json("/v1/datasets/wide/estimate")
    assert found["cache_bytes"] > found["cache_room_bytes"]
    assert "which has room for 1,000,000" in found["cache_advice"]


def test_shares_count_the_samples_before_a_step(server: Server) -> None:
    spec: dict[str, str | int] = {"batch_size": 3, "world_size": 2, "dataset_index": 1, "seq_len": 8}
    num_steps = server.json("/v1/datasets/blend/spec", **spec)["num_steps"]
    for step in (0, 1, 7, num_steps):
        urls = [f"/v1/datasets/blend/epochs/0/ranks/{rank}/batches" for rank in (0, 1)]
        frames = [frame for url in urls if step for frame in server.frames(url, stop=step, **spec)]
        counts = Counter(number for frame in frames for number in frame.tensors["dataset_index"].tolist())
        found = server.json("/v1/datasets/blend/shares", step=step, **spec)["datasets"]
        assert [(each["dataset"], each["samples"]) for each in found] == [("numbers", counts[0]), ("text", counts[1])]
    assert [each["share"] for each in found] == pytest.approx([0.25, 0.75], abs=0.01)
    assert [each["passes"] for each in found] == [counts[0] / 90, counts[1] / 40]
    assert server.json("/v1/datasets/blend/estimate", **spec)["shares"] == found


def test_lengths_are_a_histogram_of_rows(server: Server) -> None:
    found = server.json("/v1/datasets/numbers/lengths")
    assert found == {"starts": [1, 2, 3, 4, 5, 6, 7, 8], "rows": {"row": [13, 13, 13, 13, 13, 13, 12]}}
    assert server.json("/v1/datasets/pairs/lengths")["rows"].keys() == {"row", "prompt", "response"}


def test_scatter_of_the_shuffle_report_is_where_samples_are(server: Server) -> None:
    spec: dict[str, str | int] = {"batch_size": 5, "seq_len": 8}
    report = server.json("/v1/datasets/numbers/shuffle-report", **spec)
    [scatter] = report["scatter"]
    assert (scatter["dataset"], scatter["source_samples"], len(scatter["numbers"])) == ("numbers", 90, 90)
    shown = [s["input_ids"][0] for batch in batches(server, "numbers", 18, **spec) for s in batch["samples"]]
    assert [shown[number] for number in scatter["numbers"]] == scatter["places"]


def test_token_texts_join_to_the_text(server: Server) -> None:
    url = "/v1/datasets/hostile/epochs/0/ranks/0/batches/0"
    page = server.json(url, format="tokens", batch_size=4)
    for sample in page["samples"]:
        assert "".join(sample.pop("token_texts")) == sample["text"]
    assert page == server.json(url, format="json", batch_size=4)
    assert {sample["text"].removesuffix("<|endoftext|>") for sample in page["samples"]} == set(HOSTILE)
    [pair] = server.json("/v1/datasets/pairs/epochs/0/ranks/0/batches/0", format="tokens", batch_size=1, task="seq2seq")[
        "samples"
    ]
    assert (len(pair["token_texts"]), len(pair["label_texts"])) == (pair["lengths"], pair["label_lengths"])
    ids = server.json("/v1/datasets/numbers/epochs/0/ranks/0/batches/0", format="tokens", batch_size=1)["samples"][0]
    assert "token_texts" not in ids


def test_index_progress_counts_shards_that_another_process_counted(serve: Serve, tmp_path: Path) -> None:
    write_numbered(tmp_path / "data" / "numbers", 90)
    first = serve(tmp_path / "data", cache_dir=tmp_path / "cache")
    first.json_when_ready("/v1/datasets/numbers/spec", packing="concat", seq_len=8)
    until(lambda: len(list((tmp_path / "cache").rglob("*.lengths"))) == 3)
    second, found = serve(tmp_path / "data", cache_dir=tmp_path / "cache"), []
    for path in list((tmp_path / "cache").rglob("*.lengths")):
        aside = path.rename(path.with_suffix(".aside"))
        found.append(second.json("/v1/datasets/numbers")["index"]["blocks_done"])
        aside.rename(path)
    assert sorted(found) == [0, 1, 2]  # up to the missing one
    assert second.json("/v1/datasets/numbers")["index"] == {"blocks_done": 3, "blocks": 3, "seconds_left": None}
