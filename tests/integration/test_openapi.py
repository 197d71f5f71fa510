"""Every response of a real server is one that its OpenAPI document describes, whatever the request and whoever sends it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case, openapi
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from penstock.wire.report import HEADER
from penstock_server.api.parameters import PROBLEMS
from penstock_server.problems import Problem
from penstock_server.security.tokens import create_token
from support.corpora import write_numbered, write_pairs, write_text, write_tokenizer
from support.servers import Serve

CHECKS = [
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
]
CALLERS = ("of a server without tokens", "nobody", "wrong", "reader", "admin")
# Parameters of requests for something that exists, which random values hardly ever are.
NEAR: dict[str, dict[str, Any]] = {
    "dataset": {"enum": ["numbers", "pairs", "texts", "both"]},
    "epoch": {"maximum": 3},
    "rank": {"maximum": 0},
    "step": {"maximum": 5},
    "row": {"maximum": 23},
    "start": {"maximum": 3},
    "stop": {"minimum": 4, "maximum": 5},
    "stride": {},
    "format": {},
    "limit": {},
    "history": {},
    "batch_size": {"maximum": 3},
    "seq_len": {"maximum": 64},
    "pad": {"enum": ["seq_len", "longest", "16"]},
    "world_size": {"maximum": 2},
    "seed": {},
    "shuffle": {},
    "packing": {},
}
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "If-None-Match": st.sampled_from(["*", '"x", W/"y"']),
        "Prefer": st.sampled_from(["wait=0", "wait=99999", "wait=x"]),
        "Accept": st.sampled_from(["text/html", "application/xml"]),
        "X-Request-ID": st.sampled_from(["a", "a b"]),
        HEADER: st.sampled_from(["{}", "[" * 4000]),
    },
)


def statuses(responses: dict[str, Any]) -> set[int]:
    """The statuses that a document tells of: those with a response, and those that the default response lists."""
    named = [status for status in responses if status != "default"]
    return {*map(int, named + re.findall(r"^- (\d+):", responses.get("default", {}).get("description", ""), re.MULTILINE))}


def test_document_lists_the_status_of_each_problem() -> None:
    def problems(of: type[Problem]) -> Iterator[type[Problem]]:
        for problem in of.__subclasses__():
            yield from (problem, *problems(problem))

    of_connections = {408, 413, 431}
    documented = statuses({str(status): response for status, response in PROBLEMS.items()})
    assert documented == {p.status for p in problems(Problem)} | of_connections


class Target(NamedTuple):
    """A server as one caller sees it: its cases, and the header of its token."""

    url: str
    cases: st.SearchStrategy[Case[Any]]
    headers: dict[str, str]


@pytest.fixture(scope="module")
def data(shared: Path) -> Path:
    write_tokenizer(shared / "tokenizer.json")
    write_numbered(shared / "numbers", 96)
    write_pairs(shared / "pairs", [(f"the {n} dogs ?", f" jumps over {n} foxes") for n in range(96)])
    write_text(shared / "texts", ["the quick fox", "a dog", "long gone"] * 8)
    (shared / "both").mkdir()
    (shared / "both" / "penstock.toml").write_text('mix = "texts:1,pairs:1"')
    return shared


@pytest.fixture(scope="module")
def targets(serve: Serve, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    file = tmp_path_factory.mktemp("tokens") / "tokens.json"
    tokens = {"nobody": "", "wrong": "pst_wrong", "reader": create_token(file, "reader", ("numbers", "texts"), "read", None)}
    tokens["admin"] = create_token(file, "admin", ("*",), "admin", None)
    flags = ("--tokenizer", str(data / "tokenizer.json"))
    open_server, server = serve(data, *flags), serve(data, *flags, "--tokens", str(file))
    headers = {caller: {"Authorization": f"Bearer {token}"} if token else {} for caller, token in tokens.items()}
    document = httpx.get(f"{server.url}/openapi.json", headers=headers["admin"], timeout=60).json()
    assert {name for names in document["security"] for name in names} == document["components"]["securitySchemes"].keys()
    assert document["paths"]["/healthz"]["get"]["security"] == document["paths"]["/readyz"]["get"]["security"] == []
    cases = cases_of(document)
    return {CALLERS[0]: Target(open_server.url, cases_of(open_server.json("/openapi.json")), {})} | {
        caller: Target(server.url, cases, headers[caller]) for caller in CALLERS[1:]
    }


def cases_of(document: dict[str, Any]) -> st.SearchStrategy[Case[Any]]:
    """Requests with any values, with values that are invalid, and with some of things that exist."""
    near = deepcopy(document)
    for path in near["paths"].values():
        for operation in path.values():
            operation["parameters"] = [
                parameter | {"schema": parameter["schema"] | NEAR[parameter["name"]]}
                for parameter in operation.get("parameters", ())
                if parameter["name"] in NEAR
            ]
    whole, near_alone = openapi.from_dict(document), openapi.from_dict(near)
    return near_alone.as_strategy() | whole.as_strategy() | whole.as_strategy(GenerationMode.NEGATIVE)


@pytest.mark.parametrize("caller", CALLERS)
@given(drawn=st.data(), headers=HEADERS)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_response_is_documented(targets: dict[str, Target], caller: str, drawn: st.DataObject, headers: dict[str, str]) -> None:
    target = targets[caller]
    case = drawn.draw(target.cases)
    response = case.call(target.url, headers=headers | target.headers, timeout=60)
    case.validate_response(response, CHECKS)
    assert response.status_code in statuses(case.operation.definition.raw["responses"])
    assert response.status_code < 500 or response.status_code == 503
