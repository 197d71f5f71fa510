"""`penstock bench` against a real server."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.bench import frames, tensors
from penstock.spec import Spec
from support.corpora import write_numbered, write_pairs, write_tokenizer
from support.servers import Serve, Server, penstock, penstock_in_terminal


@pytest.fixture(scope="module")
def server(serve: Serve, shared: Path) -> Server:
    write_numbered(shared / "numbers", 400)
    write_pairs(shared / "pairs", [(f"how many foxes, {n}?", " foxes" * (1 + n % 5)) for n in range(90)])
    write_tokenizer(shared / "tokenizer.json")
    return serve(shared, "--tokenizer", str(shared / "tokenizer.json"))


SPECS: list[tuple[str, dict[str, str]]] = [
    ("numbers", {"seq_len": "16", "seed": "3"}),
    ("numbers", {"packing": "concat", "seq_len": "16"}),
    ("numbers", {"packing": "best_fit", "seq_len": "16"}),
    ("pairs", {"pad": "longest"}),
    ("pairs", {"task": "seq2seq", "target_seq_len": "32", "seq_len": "64"}),
]


@pytest.mark.parametrize(("dataset", "spec"), SPECS, ids=str)
def test_bench_counts_the_same_tokens_with_and_without_tensors(server: Server, dataset: str, spec: dict[str, str]) -> None:
    query = {**spec, "batch_size": "4", "world_size": "2"}
    counts = []
    for make in (tensors, frames):
        supply = make(server.url, dataset, Spec.from_query(query.items()), 1, 5)
        num_steps = server.json(f"/v1/datasets/{dataset}/spec", **query)["num_steps"]
        assert supply.num_steps == num_steps
        counts.append([supply.count(batch) for batch in islice(supply.batches, num_steps + 3)])
        supply.batches.close()
        assert supply.spent()[0] > 0
        assert supply.spec.seq_len == int(spec.get("seq_len", 1024))
    assert counts[0] == counts[1]
    pages = [
        server.json(f"/v1/datasets/{dataset}/epochs/{epoch}/ranks/1/batches/{step}", **query, format="json")
        for epoch, step in [(5, step) for step in range(num_steps)] + [(6, step) for step in range(3)]
    ]
    assert [num_tokens for num_tokens, _ in counts[0]] == [sum(s["num_tokens"] for s in page["samples"]) for page in pages]


def run_json(*arguments: str) -> dict[str, Any]:
    done = penstock("bench", *arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_bench_prints_consistent_figures_as_json(server: Server) -> None:
    found = run_json(
        f"{server.url}/numbers?seq_len=16", "--seconds", "0.5", "--target-tokens-per-second", "20k", "--batch-size", "4"
    )
    assert (found["dataset"], found["spec"]["seq_len"], found["spec"]["batch_size"]) == ("numbers", 16, 4)
    assert found["spec"]["snapshot"] == server.json("/v1/datasets/numbers")["snapshot"]
    assert found["num_positions"] == found["num_batches"] * 64
    assert 0 < found["num_tokens"] < found["num_positions"]
    assert found["tokens_per_second"] == pytest.approx(found["num_tokens"] / found["seconds"])
    assert 0 <= found["waits"]["p50"] <= found["waits"]["p99"] <= found["waits"]["longest"]
    assert found["at_training_rate"]["tokens_per_second"] <= 21_000
    assert found["num_bytes"] > 0


def test_bench_prints_rates_waits_and_a_verdict(server: Server) -> None:
    arguments = ("bench", f"{server.url}/numbers", "--seconds", "0.6", "--no-tensors")
    done = penstock(*arguments, "--target-tokens-per-second", "1k")
    assert (done.returncode, done.stderr) == (0, "")
    for shown in (
        r"^numbers from http://127.0.0.1:\d+$",
        r"^tokens +[\d.]+k? tokens/s +[\d.]+[kM] positions/s with the \d+% padding *$",
        r"^wire +[\d,.]+ MB/s +[\d,]+ batches in \d.\d s *$",
        r"^CPU +[\d.]+ s +per million tokens; \d.\d\d cores busy *$",
        r"^wait, p50 +[\d.]+ ms +p99 [\d.]+ ms, longest [\d.]+ ms *$",
        r"^at 1k/s +[\d.]+ ms +p99 [\d.]+ ms, longest [\d.]+ ms *$",
        r"^first batch +[\d.]+ s *$",
    ):
        assert re.search(shown, done.stdout, re.MULTILINE), shown
    sentence = r"This client could feed \S+ tokens/s. At 1k tokens/s of training the loop waited [\d.]+% of the time."
    assert re.search(sentence, " ".join(done.stdout.split()))
    status, screen = penstock_in_terminal(100, *arguments)
    assert status == 0
    assert "measuring for 0.6 s" in screen
    assert "\x1b[1mnumbers\x1b[0m from" in screen


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{url}/numbers?offset=8"], "leave offset out"),
        (["{url}/numbers", "--batch-size", "9000"], "no step fits"),
    ],
)
def test_bench_fails_with_one_line_and_status_2(server: Server, arguments: list[str], message: str) -> None:
    done = penstock("bench", "--no-tensors", *(argument.format(url=server.url) for argument in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_warning_is_one_line_without_its_source(server: Server) -> None:
    done = penstock("bench", f"{server.url}/numbers", "--seconds", "0.3", "--seq-len", "1", "--batch-size", "1")
    assert (done.returncode, len(done.stderr.splitlines())) == (0, 1), done.stderr
    assert re.match(r"penstock bench: \w+: \d+ of \d+ sampled rows are longer than seq_len=1, and ", done.stderr)


@pytest.mark.parametrize("value", ["0", "1kM", "nan"])
def test_amounts_must_be_positive(value: str) -> None:
    done = penstock("bench", "http://host/numbers", f"--seconds={value}")
    assert done.returncode == 2
    assert f"{value!r} is not a number > 0" in done.stderr
