"""Parameters of a URL: how routes parse and document them.

A route declares the parameters of its path and query for FastAPI, which documents them. `ParsedRoute` parses them: FastAPI's
checks take half the time of a batch. All other parameters of the query are those of a spec; see `spec_of`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Annotated, Any, get_args
from urllib.parse import parse_qsl, unquote_plus

from fastapi import Path, Query, Request
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from penstock.spec import MAX_COUNT, Spec, describe
from penstock.text import cut, did_you_mean
from penstock_server.api.service import catalog_of, service_of
from penstock_server.batches.plan import Plan
from penstock_server.problems import BadParameter
from penstock_server.schemas.monitoring import ProblemInfo

_REMEMBERED_QUERIES = 32
_MAX_DIGITS = 20  # Python takes seconds to parse a megabyte of digits

Name = Annotated[str, Path(description="The name of a dataset or mixture.")]
Epoch = Annotated[int, Path(ge=0, le=MAX_COUNT, description="The epoch, from 0. Each epoch has a different order.")]
EpochQuery = Annotated[int, Query(ge=0, le=MAX_COUNT, description="The epoch, from 0.")]
Rank = Annotated[int, Path(ge=0, le=MAX_COUNT, description="The rank, from 0, below `world_size`.")]
Row = Annotated[int, Path(ge=0, le=MAX_COUNT, description="The number of the row, from 0, counted over all shards.")]
Step = Annotated[int, Path(ge=0, le=MAX_COUNT, description="The step, from 0, below `num_steps` of the spec.")]

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
    401: "The token is missing, wrong or expired.",
    403: "The scope of the token does not allow the request, or another site sent it.",
    404: "The dataset, step, rank or row does not exist.",
    408: "The request did not arrive in time.",
    409: "The data changed.",
    413: "The body is too large.",
    421: "The request names a host that this server is not for.",
    422: "A parameter is wrong, or the request is too large for a limit.",
    429: "The caller sent too many wrong tokens, or has reached another limit. Retry later.",
    431: "The URL and the headers are too large.",
    500: "The data cannot be used. The detail names the place.",
    503: "The server is busy, is still preparing the data, or cannot reach it. Retry later.",
}
# One entry, since the page would show the schema five times. By hand, since FastAPI would declare application/json.
PROBLEMS: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "\n".join(f"- {status}: {text}" for status, text in _STATUSES.items()),
        "content": {"application/problem+json": {"schema": TypeAdapter(ProblemInfo).json_schema()}},
    }
}


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter of a route: an integer with bounds, one of several options, or any string."""

    name: str
    bounds: tuple[int, int] | None = None
    options: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, declared: FieldInfo) -> _Parameter:
        """Returns the parameter that FastAPI declares."""
        if declared.annotation in (int, int | None):
            low = next((bound.ge for bound in declared.metadata if hasattr(bound, "ge")), 0)
            high = next((bound.le for bound in declared.metadata if hasattr(bound, "le")), MAX_COUNT)
            return cls(name, bounds=(low, high))
        return cls(name, options=() if declared.annotation is str else get_args(declared.annotation))

    def parse(self, text: str) -> int | str:
        """Returns the value. Raises BadParameter: it is not an integer, out of bounds, or not one of the options."""
        if self.bounds:
            low, high = self.bounds
            if text.isdecimal() and text.isascii() and len(text) <= _MAX_DIGITS and low <= (number := int(text)) <= high:
                return number
            raise BadParameter(f"{self.name} must be a whole number from {low:,} to {high:,}, not {cut(text)!r}.")
        if self.options and text not in self.options:
            raise BadParameter(f"{self.name} must be one of {', '.join(self.options)}, not {cut(text)!r}.")
        return text


class ParsedRoute(APIRoute):
    """A route that parses its URL without FastAPI. Its endpoint takes the request and the parameters, and returns a response.

    An endpoint that is no coroutine runs in a thread.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)  # a 405
            return
        request, values = Request(scope, receive, send), self._parse(scope)
        if inspect.iscoroutinefunction(self.endpoint):
            response = await self.endpoint(request, **values)
        else:
            response = await run_in_threadpool(partial(self.endpoint, request, **values))
        await response(scope, receive, send)

    @cached_property
    def takes_spec(self) -> bool:
        """Whether the query may have the parameters of a spec."""
        return self.openapi_extra is SPEC_PARAMETERS

    @cached_property
    def in_query(self) -> dict[str, _Parameter]:
        """The parameters of the query, without those of a spec."""
        return {field.name: _Parameter.of(field.name, field.field_info) for field in self.dependant.query_params}

    @cached_property
    def _in_path(self) -> dict[str, _Parameter]:
        return {field.name: _Parameter.of(field.name, field.field_info) for field in self.dependant.path_params}

    def _parse(self, scope: Scope) -> dict[str, int | str]:
        """Returns the values of the parameters, and leaves the rest of the query to `spec_of`. Raises BadParameter."""
        values = {name: self._in_path[name].parse(text) for name, text in scope["path_params"].items()}
        of_spec = []
        for part in scope["query_string"].decode("latin-1").split("&"):
            name, _, text = part.partition("=")
            name = name if name.isidentifier() else unquote_plus(name)
            if parameter := self.in_query.get(name):
                if name in values:
                    raise BadParameter(f"{name} is given twice; give it once.")
                values[name] = parameter.parse(text if text.isalnum() else unquote_plus(text))
            elif not self.takes_spec and part:
                known = f"Known: {', '.join(self.in_query)}." if self.in_query else "It has none: remove it."
                raise BadParameter(f"{name!r} is not a parameter of this URL.{did_you_mean(name, self.in_query)} {known}")
            else:
                of_spec.append(part)
        scope["spec_query"] = "&".join(of_spec)
        return values


def spec_of(request: Request) -> Spec:
    """Parses the spec in the query of a request to a ParsedRoute. Raises SpecError."""
    return _spec_of(request.scope["spec_query"], tuple(request.scope["route"].in_query))


@lru_cache(maxsize=_REMEMBERED_QUERIES)  # all batches of a job have the same query
def _spec_of(query: str, others: tuple[str, ...]) -> Spec:
    return Spec.from_query(parse_qsl(query, keep_blank_values=True), others=others)


def plan_of(request: Request, dataset: str) -> Plan:
    """Returns the plan of the spec in the query. Raises LimitExceeded, SpecError, and the errors of CatalogView.plan."""
    spec = spec_of(request)
    service_of(request).check_new(dataset, spec)
    return catalog_of(request).plan(dataset, spec)
