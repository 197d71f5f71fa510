"""Responses of a real server follow the schemas that the documentation page shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from pydantic import TypeAdapter

from penstock_server.catalog.dataset import Change
from penstock_server.schemas import batches, datasets, estimates, monitoring
from support.corpora import write_numbered, write_pairs, write_shards, write_text, write_tokenizer
from support.servers import Serve, Server

BATCH = "/v1/datasets/pairs/epochs/0/ranks/0/batches/1"
RESPONSES: list[tuple[str, Any]] = [
    ("/healthz", monitoring.HealthInfo),
    ("/readyz", monitoring.ReadyInfo),
    ("/v1/datasets", datasets.DatasetsInfo),
    ("/v1/datasets/pairs", datasets.DatasetInfo),
    ("/v1/datasets/both", datasets.MixtureInfo),
    ("/v1/datasets/pairs/spec?pad=longest", datasets.SpecInfo),
    ("/v1/datasets/both/spec", datasets.SpecInfo),
    ("/v1/datasets/pairs/plan?batch_size=4&tokens=100&target_tokens_per_second=100", estimates.PlanInfo),
    ("/v1/datasets/both/plan?world_size=2", estimates.PlanInfo),
    ("/v1/datasets/pairs/shuffle-report?batch_size=4", estimates.ShuffleReportInfo),
    ("/v1/datasets/both/shuffle-report?world_size=2", estimates.ShuffleReportInfo),
    ("/v1/datasets/pairs/rows/3", batches.RowInfo),
    ("/v1/datasets/holes/rows/1", batches.RowInfo),
    ("/v1/datasets/numbers/rows/0", batches.RowInfo),
    ("/v1/datasets/texts/rows/0", batches.RowInfo),
    ("/v1/datasets/pairs/rows/3/schedule", batches.RowScheduleInfo),
    ("/v1/datasets/holes/quarantine", batches.QuarantineInfo),
    (f"{BATCH}/provenance", batches.ProvenanceInfo),
    (f"{BATCH}?format=json", batches.BatchInfo),
    (f"{BATCH}?format=json&packing=concat&mark_documents=true&seq_len=32", batches.BatchInfo),
    (f"{BATCH}?format=json&packing=best_fit&seq_len=32&batch_size=2", batches.BatchInfo),
    (f"{BATCH}?format=json&task=seq2seq", batches.BatchInfo),
    (BATCH.replace("pairs", "both").replace("batches/1", "batches") + "?format=json&stop=2", list[batches.BatchInfo]),
]


@pytest.fixture(scope="module")
def server(serve: Serve, shared: Path) -> Server:
    write_tokenizer(shared / "tokenizer.json")
    write_numbered(shared / "numbers", 96)
    write_pairs(shared / "pairs", [(f"the {n} dogs ?", f" jumps over {n} foxes") for n in range(96)])
    write_shards(shared / "holes", "tokens", [[[1], [], [3, 4]]], type_=pa.list_(pa.int32()), row_group_size=9)
    write_text(shared / "texts", ["the quick fox", "a dog", "long gone"] * 8)
    (shared / "texts" / "penstock.toml").write_text("filter = \"text < 'm'\"\nvalidation = 0.1")
    (shared / "both").mkdir()
    (shared / "both" / "penstock.toml").write_text('mix = "texts:1,pairs:1"')
    (shared / "broken").mkdir()
    (shared / "broken" / "half.parquet").write_bytes(b"PAR1 and then nothing")
    return serve(shared, "--tokenizer", str(shared / "tokenizer.json"))


@pytest.mark.parametrize(("url", "schema"), RESPONSES)
def test_response_follows_its_schema(server: Server, url: str, schema: Any) -> None:
    if "holes" in url:
        server.get("/v1/datasets/holes/epochs/0/ranks/0/batches/0?batch_size=3")  # meets the bad row
    path, _, query = url.partition("?")
    content = server.get(path, **dict(pair.split("=") for pair in query.split("&") if pair)).content
    assert TypeAdapter(schema).validate_json(content, strict=True, extra="forbid")


def test_refresh_follows_its_schema(server: Server) -> None:
    content = httpx.post(f"{server.url}/v1/datasets/pairs/refresh", timeout=60).content
    change = TypeAdapter(Change).validate_json(content, strict=True, extra="forbid")
    assert change.changed is False


@pytest.mark.parametrize("path", ["nobody", "pairs/rows/999", "pairs/spec?seq_len=0", f"{BATCH.split('/', 3)[3]}?step=1"])
def test_problem_follows_its_schema(server: Server, path: str) -> None:
    response = httpx.get(f"{server.url}/v1/datasets/{path}", timeout=60)
    assert response.headers["Content-Type"] == "application/problem+json"
    assert TypeAdapter(monitoring.ProblemInfo).validate_json(response.content, strict=True, extra="forbid")


def nodes(node: Any) -> Iterator[dict[str, Any]]:
    """Every object in a document."""
    if isinstance(node, dict):
        yield node
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from nodes(child)


def test_document_is_openapi_3_0_and_describes_each_field(server: Server) -> None:
    document = server.json("/openapi.json")
    assert document["openapi"] == "3.0.3"
    assert not [node for node in nodes(document) if node.get("type") == "null" or isinstance(node.get("type"), list)]
    assert [node for node in nodes(document) if isinstance(node.get("title"), str)] == [document["info"]]
    schemas = document["components"]["schemas"]
    told = schemas["DatasetInfo"]["properties"]
    assert told["tokens"].items() >= {"type": "integer", "nullable": True}.items()
    assert told["cache"]["allOf"] == [{"$ref": "#/components/schemas/CacheInfo"}]
    assert schemas.keys() >= {"SpecInfo", "RowInfo", "BatchInfo", "ProvenanceInfo", "Quarantined", "MixtureInfo"}
    assert not [
        (node, field)
        for node in nodes(document)
        if isinstance(node.get("properties"), dict)
        for field, own in node["properties"].items()
        if not own.get("description")
    ]


def test_document_has_no_siblings_of_references(server: Server) -> None:
    document = server.json("/openapi.json")
    assert not [node for node in nodes(document) if "nullable" in node and "type" not in node]
    assert not [node for node in nodes(document) if isinstance(node.get("$ref"), str) and len(node) > 1]


def test_document_has_a_schema_for_every_body(server: Server) -> None:
    told = [
        (path, status, media)
        for path, methods in server.json("/openapi.json")["paths"].items()
        for method in methods.values()
        for status, response in method["responses"].items()
        for media, content in response.get("content", {}).items()
        if not content.get("schema")
    ]
    assert not told
