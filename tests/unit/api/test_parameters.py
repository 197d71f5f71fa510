"""Routes parse the parameters of a URL themselves, in one way for good and for bad values."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import quote

import pytest
from fastapi import FastAPI, Path, Query, Request, Response
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from penstock_server.api.parameters import SPEC_PARAMETERS, ParsedRoute, spec_of
from penstock_server.problems import BadParameter

Format = Literal["msgpack", "json"]


def threaded(request: Request, name: Annotated[str, Path()], limit: Annotated[int, Query(ge=1, le=20)] = 7) -> Response:
    return Response(repr((name, limit)))


async def with_spec(
    request: Request,
    name: Annotated[str, Path()],
    epoch: Annotated[int, Path(ge=0, le=9_999)],
    stop: Annotated[int | None, Query(ge=0)] = None,
    format: Format = "msgpack",
) -> Response:
    return Response(repr((name, epoch, stop, format, spec_of(request).batch_size, spec_of(request).mix)))


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    app.router.add_api_route("/{name}", threaded, route_class_override=ParsedRoute)
    app.router.add_api_route("/{name}/{epoch}", with_spec, route_class_override=ParsedRoute, openapi_extra=SPEC_PARAMETERS)

    @app.exception_handler(ValueError)
    @app.exception_handler(BadParameter)
    async def refuse(request: Request, error: Exception) -> Response:
        return Response(str(error), 422)

    return TestClient(app)


@pytest.mark.parametrize(
    ("url", "values"),
    [
        ("/tokens", ("tokens", 7)),
        ("/a%20b?limit=20", ("a b", 20)),
        ("/tokens/3", ("tokens", 3, None, "msgpack", 8, None)),
        ("/tokens/007?stop=5&format=json&batch_size=3", ("tokens", 7, 5, "json", 3, None)),
        ("/tokens/9999?mix=a%3A1&%73top=0", ("tokens", 9999, 0, "msgpack", 8, "a:1")),
        ("/tokens/0?&stop=%31&", ("tokens", 0, 1, "msgpack", 8, None)),
    ],
)
def test_parameters_are_parsed(client: TestClient, url: str, values: tuple[object, ...]) -> None:
    assert client.get(url).text == repr(values)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("/tokens?limit=0", "limit must be a whole number from 1 to 20, not '0'"),
        ("/tokens?limit=3&limit=4", "limit is given twice"),
        ("/tokens?seed=3", "'seed' is not a parameter of this URL. Known: limit"),
        ("/tokens?limti=3", "Did you mean 'limit'?"),
        ("/tokens/3?format=xml", "format must be one of msgpack, json, not 'xml'"),
        ("/tokens/3?stop=", "stop must be a whole number"),
        ("/tokens/3?%73top=1&stop=2", "stop is given twice"),
        ("/tokens/3?stpo=1", "Did you mean 'stop'?"),
    ],
)
def test_wrong_parameter_is_named(client: TestClient, url: str, message: str) -> None:
    response = client.get(url)
    assert response.status_code == 422
    assert message in response.text


@given(st.one_of(st.integers(-2, 30).map(str), st.sampled_from(["x", "1_0", "+3", " 4", "2.0", "1e3", "²", "٣", "10000"])))
@example("9" * 5000)  # Python parses so many digits slowly
def test_integer_is_digits_within_its_bounds(client: TestClient, text: str) -> None:
    is_plain = text.isdecimal() and text.isascii() and 0 <= len(text) <= 4
    assert client.get(f"/tokens/{quote(text)}").status_code == (200 if is_plain else 422)


def test_other_method_is_not_allowed(client: TestClient) -> None:
    assert client.post("/tokens").status_code == 405


def test_declared_parameters_are_documented(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    names = {parameter["name"] for parameter in paths["/{name}/{epoch}"]["get"]["parameters"]}
    assert {"name", "epoch", "stop", "format", "batch_size", "seed"} <= names
