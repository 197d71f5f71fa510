"""Shared code of routes: their parameters, parsing of a spec from a query, and documented problems."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any
from urllib.parse import parse_qsl, unquote

from fastapi import Path, Request
from pydantic import TypeAdapter

from penstock.errors import SpecError
from penstock.spec import MAX_COUNT, Spec, describe
from penstock_server.routes.plain import query_of
from penstock_server.schemas.service import ProblemAnswer

_REMEMBERED_QUERIES = 32

Name = Annotated[str, Path(description="a name from the list of datasets")]
Epoch = Annotated[int, Path(ge=0, le=MAX_COUNT, description="from 0; each has an order of its own, unless shuffle=none")]
Rank = Annotated[int, Path(ge=0, le=MAX_COUNT, description="from 0, below world_size")]
Row = Annotated[int, Path(ge=0, le=MAX_COUNT, description="from 0, below the number of rows")]
Step = Annotated[int, Path(ge=0, le=MAX_COUNT, description="from 0, below the spec's num_steps")]

SPEC_PARAMETERS = {
    "parameters": [
        {
            "name": p["name"],
            "in": "query",
            "description": p["doc"],
            "schema": {"type": p["kind"], "default": p["default"]}
            | ({"minimum": p["low"], "maximum": p["high"]} if "low" in p else {})
            | ({"enum": p["options"]} if "options" in p else {"minLength": 1} if p["kind"] == "string" else {}),
        }
        for p in describe()
    ]
}
BINARY = {"schema": {"type": "string", "format": "binary"}}  # documented schema of a binary response
_STATUSES = {
    404: "no such dataset, step, rank or row",
    409: "the data changed",
    422: "a parameter is wrong",
    500: "data that cannot be used; the detail says where it is",
    503: "not now; try again later",
}
# One entry, since the page would show the schema five times. By hand, since FastAPI would declare application/json.
PROBLEMS: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "\n".join(f"- {status}: {text}" for status, text in _STATUSES.items()),
        "content": {"application/problem+json": {"schema": TypeAdapter(ProblemAnswer).json_schema()}},
    }
}


def spec_of(request: Request, *own: str) -> Spec:
    """Parses the spec from a request's query, without the route's parameters `own`. Raises SpecError."""
    query = query_of(request.scope)
    check_once([unquote(name) for name, _ in query], own)
    return _spec_of("&".join("=".join(pair) for pair in query if pair[0] not in own), own)


def check_once(names: Sequence[str], own: tuple[str, ...]) -> None:
    """Raises SpecError: a route parameter appears more than once in the query's names."""
    given = [name for name in names if name in own]
    if len(given) > 1 and (twice := [name for name in own if given.count(name) > 1]):
        raise SpecError(f"{twice[0]} is given twice; give it once", (twice[0],))


@lru_cache(maxsize=_REMEMBERED_QUERIES)  # all batches of a job have the same query
def _spec_of(query: str, own: tuple[str, ...]) -> Spec:
    # A route parameter with an escaped name is still among them.
    pairs = [(name, value) for name, value in parse_qsl(query, keep_blank_values=True) if name not in own]
    return Spec.from_query(pairs, others=own)
