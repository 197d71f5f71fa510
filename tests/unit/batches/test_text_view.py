"""Batches for people: what they are shown is what a trainer gets."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock_server.batches.text_view
from penstock import wire
from penstock.tensors import expand
from penstock_server.batches.assemble import chunks, load
from penstock_server.batches.text_view import as_json, provenance, shown_columns
from penstock_server.batches.writer import frames
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import Catalog, open_catalog
from penstock_server.problems import BadParameter
from support.corpora import write_tokenizer
from support.engine import plan_of

WORDS = "the quick brown fox jumps over the lazy dog".split()
TEMPLATE = """{% for m in messages %}
{% if m.role == "user" %}? {{ m.content }}{% else %}! {% generation %}{{ m.content }}{% endgeneration %}{% endif %}
{% endfor %}"""


def words(number: int) -> str:
    return " ".join(WORDS[: 1 + number % 9])


def turns(number: int) -> list[dict[str, str]]:
    return [{"role": role, "content": words(number)} for _ in range(1 + number % 2) for role in ("user", "assistant")]


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    tables = {
        "text": {"text": [words(n) for n in range(40)]},
        "pairs": {"prompt": [words(n) for n in range(40)], "response": [words(3 * n) for n in range(40)]},
        "chats": {"messages": [turns(n) for n in range(40)]},
        "packed": {"input_ids": [[*range(1 + n % 9)] for n in range(40)], "seq_lengths": [[1, n % 9] for n in range(40)]},
        "preferences": {name: [words(n + len(name)) for n in range(40)] for name in ("prompt", "chosen", "rejected")},
    }
    for name, columns in tables.items():
        (tmp_path / "data" / name).mkdir(parents=True)
        pq.write_table(pa.table(columns), tmp_path / "data" / name / "part-0.parquet")
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    return open_catalog(tmp_path / "data", tokenizer, BlockStore(tmp_path / "cache"))


@pytest.mark.parametrize("loss", ["response", "all"])
@pytest.mark.parametrize(
    ("dataset", "way"),
    [
        *((name, {"packing": "rows"}) for name in ("text", "pairs", "chats", "preferences")),
        *((name, {"packing": "best_fit"}) for name in ("text", "pairs", "chats", "packed")),
        *((name, {"packing": "concat", "mark_documents": True}) for name in ("text", "pairs", "packed")),
        ("pairs", {"packing": "concat"}),
        ("pairs", {"overflow": "split", "seq_len": 8}),
        ("pairs", {"task": "seq2seq", "loss_on": "response"}),
    ],
)
def test_json_batch_has_the_labels_and_positions_of_a_trainer(
    catalog: Catalog, dataset: str, way: dict[str, Any], loss: str
) -> None:
    spec = {"batch_size": 4, "seq_len": 30, "loss_on": loss} | way
    plan = plan_of(catalog, dataset, **spec)
    [chunk] = chunks(plan, 0, 0, range(1))
    blocks = load(chunk)
    [page] = map(json.loads, as_json(chunk, blocks))
    [frame] = wire.decode(frames(chunk, blocks))
    batch = expand(frame, pin_memory=False)
    assert sum(sample["num_tokens"] for sample in page["samples"]) == frame.num_tokens
    names = {name for name in batch if name.endswith(("input_ids", "labels", "position_ids"))}
    for index, sample in enumerate(page["samples"]):
        assert {name for name in sample if name.endswith(("input_ids", "labels", "position_ids"))} == names
        for name in names:
            shown, line = sample[name], batch[name][index].tolist()
            assert shown == line[: len(shown)]
            if name.endswith("labels"):
                assert set(line[len(shown) :]) <= {-100}
            else:
                side = name.removesuffix("input_ids").removesuffix("position_ids")
                assert len(shown) == batch[f"{side}attention_mask"][index].sum()
        if starts := sample.get("document_starts"):
            bits = np.unpackbits(frame.tensors["document_starts"][index], bitorder="little")
            assert starts == np.flatnonzero(bits).tolist()


def test_json_batch_describes_values_that_json_lacks() -> None:
    values = {"nan": math.nan, "inf": -math.inf, "vector": [0.5, math.nan], "bytes": b"abc", "half": np.float16(math.nan)}
    block: Any = SimpleNamespace(columns={name: pa.array([value]) for name, value in values.items()})
    assert shown_columns(block, 0) == {"nan": None, "inf": "-inf", "vector": [0.5, None], "bytes": "3 bytes", "half": None}


def test_json_batch_refuses_too_many_tokens(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(catalog, "text", packing="concat", batch_size=4, seq_len=10)
    [chunk] = chunks(plan, 0, 0, range(2))
    monkeypatch.setattr(penstock_server.batches.text_view, "_MAX_TOKENS", 40)
    assert len(as_json(chunk, load(chunk))) == 2
    monkeypatch.setattr(penstock_server.batches.text_view, "_MAX_TOKENS", 39)
    with pytest.raises(BadParameter, match="a batch of 40 tokens is too large"):
        as_json(chunk, load(chunk))
    num_parts = sum(len(sample["sources"]) for sample in provenance(plan, 0, 0, 0)["samples"])
    monkeypatch.setattr(penstock_server.batches.text_view, "_MAX_PARTS", num_parts)
    provenance(plan, 0, 0, 0)
    monkeypatch.setattr(penstock_server.batches.text_view, "_MAX_PARTS", num_parts - 1)
    with pytest.raises(BadParameter, match=f"a batch of {num_parts} rows"):
        provenance(plan, 0, 0, 0)


def test_json_batch_stops_when_before_each_raises(catalog: Catalog) -> None:
    plan = plan_of(catalog, "text", batch_size=4, seq_len=10)
    [chunk] = chunks(plan, 0, 0, range(2))
    left = iter([True] * 5)

    def check() -> None:
        if not next(left, False):
            raise ConnectionError

    with pytest.raises(ConnectionError):
        as_json(chunk, load(chunk), check)
    left = iter([True] * 8)
    assert len(as_json(chunk, load(chunk), check)) == 2


def test_json_batch_refuses_too_many_samples(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(catalog, "text", batch_size=4, seq_len=10)
    [chunk] = chunks(plan, 0, 0, range(2))
    monkeypatch.setattr(penstock_server.batches.text_view, "_MAX_SAMPLES", 8)
    assert len(as_json(chunk, load(chunk))) == 2
    monkeypatch.setattr(penstock_server.batches.text_view, "_MAX_SAMPLES", 7)
    with pytest.raises(BadParameter, match="8 samples in 2 batches"):
        as_json(chunk, load(chunk))
