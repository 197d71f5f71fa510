"""Routes that read plain numbers themselves: they answer what FastAPI's own do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.routing import APIRoute
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from corpora import write_numbered
from in_thread import serving
from penstock import RemoteDataset
from penstock_server.admission import InFlight
from penstock_server.routes.plain import PlainRoute


async def _endpoint(
    request: Request,
    name: Annotated[str, Path()],
    epoch: Annotated[int, Path(ge=0, le=9_999)],
    stop: Annotated[int | None, Query(ge=0)] = None,
    stride: Annotated[int, Query(ge=1, le=20)] = 1,
    format: Literal["msgpack", "json"] = "msgpack",
) -> Response:
    return Response(repr((request.url.path, name, epoch, stop, stride, format)))


def _app(route_class: type[APIRoute]) -> FastAPI:
    app = FastAPI()
    app.router.add_api_route("/{name}/{epoch}", _endpoint, route_class_override=route_class)
    return app


def _get(app: FastAPI, url: str) -> tuple[int, str]:
    async def get() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.get(url)

    answer = asyncio.run(get())
    return answer.status_code, answer.text


PLAIN, FASTAPI = _app(PlainRoute), _app(APIRoute)
_NUMBERS = st.one_of(
    st.integers(-2, 30).map(str),
    st.sampled_from(["", "x", "007", "1_0", "+3", " 4", "2.0", "1e3", "²", "٣", "9999", "10000", "9" * 18, "9" * 19, "9" * 60]),
)
_NAMES = st.sampled_from(["stop", "stride", "format", "%73top", "st%6Fp", "other", "", "a b", "stop ", "Stop", "x.y"])
_VALUES = st.one_of(_NUMBERS, st.sampled_from(["json", "msgpack", "xml"]))


@given(
    name=st.sampled_from(["tokens", "a b", "ä", "0"]), epoch=_NUMBERS, query=st.lists(st.tuples(_NAMES, _VALUES), max_size=4)
)
@example(name="tokens", epoch="9" * 5000, query=[])  # Python makes no number of so many digits
def test_any_request_is_answered_as_by_fastapi(name: str, epoch: str, query: list[tuple[str, str]]) -> None:
    parameters = "&".join(f"{key.replace(' ', '+')}={quote(value)}" for key, value in query)
    url = f"/{quote(name)}/{quote(epoch, safe='')}?{parameters}"
    assert _get(PLAIN, url) == _get(FASTAPI, url)


@pytest.mark.parametrize("url", ["/tokens/3", "/a%20b/0?stop=5", "/tokens/9999?seed=1&stride=20&stop=999999999999&mix=a%3A1"])
def test_plain_requests_are_not_read_by_fastapi(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    def no_handler(_: APIRoute) -> Callable[[Request], Any]:
        async def fail(request: Request) -> Response:
            raise AssertionError(request.url)

        return fail

    monkeypatch.setattr(APIRoute, "get_route_handler", no_handler)
    assert _get(_app(PlainRoute), url) == _get(FASTAPI, url)


def test_what_a_loop_asks_for_is_not_read_by_fastapi(monkeypatch: pytest.MonkeyPatch, tmp_path: FilePath) -> None:
    read_by_fastapi = []
    handle = APIRoute.handle

    async def noted(route: APIRoute, scope: Scope, receive: Receive, send: Send) -> None:
        read_by_fastapi.append(route.path.rpartition("/")[-1])
        await handle(route, scope, receive, send)

    monkeypatch.setattr(APIRoute, "handle", noted)
    write_numbered(tmp_path / "data" / "numbers", 64)
    with serving(tmp_path / "data", tmp_path / "cache", InFlight(1 << 30)) as url:
        assert len(list(RemoteDataset(url, "numbers", batch_size=4, seq_len=8))) == 16
    assert set(read_by_fastapi) == {"spec"}
