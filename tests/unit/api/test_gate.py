"""Headers of the gate: any bytes are a token, or none; requests of other sites are refused; responses restrict browsers."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from penstock_server.api.gate import Gate, token_of
from penstock_server.security.tokens import Tokens, create_token

HEADERS = st.tuples(st.sampled_from([b"authorization", b"cookie", b"accept"]), st.binary())
AUTHORIZATIONS = st.tuples(st.sampled_from([b"Bearer ", b"basic ", b"Basic", b"Digest "]), st.binary()).map(b"".join)
COOKIES = st.lists(st.sampled_from([b"penstock_token", b"=", b";", b'"', b"\\", b" ", b"a", b"\0", b"\xff"])).map(b"".join)


def token(**headers: bytes) -> str | None:
    return token_of({"headers": [(name.encode(), value) for name, value in headers.items()]})


@given(st.lists(HEADERS, max_size=4))
def test_any_headers_have_a_token_or_none(headers: list[tuple[bytes, bytes]]) -> None:
    assert isinstance(token_of({"headers": headers}), str | None)


@given(AUTHORIZATIONS, COOKIES)
def test_authorization_takes_the_place_of_the_cookie(authorization: bytes, cookie: bytes) -> None:
    assert token(authorization=authorization, cookie=cookie) == token(authorization=authorization) is not None
    assert isinstance(token(cookie=cookie), str | None)


@pytest.mark.parametrize(
    ("cookie", "expected"),
    [(b"penstock_token=pst_a", "pst_a"), (b"a=b;penstock_token=pst_a ; c", "pst_a"), (b"xpenstock_token=a", None), (b"", None)],
)
def test_cookie_is_found_among_others(cookie: bytes, expected: str | None) -> None:
    assert token(cookie=cookie) == expected


def test_password_of_basic_is_the_token() -> None:
    assert token(authorization=b"Basic " + b64encode(b"anyone:pst_a:b")) == "pst_a:b"
    assert token(authorization=b"Basic !") == ""


def test_cookie_of_backslashes_is_read_as_it_is() -> None:
    # http.cookies of Python 3.11.7 takes 15 seconds for this header, and nobody needs a token to send it.
    value = b'"' + b"\\" * 64_000 + b'"'
    assert token(cookie=b"penstock_token=" + value) == value.decode()


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "LOCALHOST:8000", "127.0.0.1:8000", "10.0.0.5", "[::1]:8000"])
def test_server_of_this_machine_is_reached_at_an_address(host: str) -> None:
    assert TestClient(Gate(PlainTextResponse("in"), None, for_this_machine=True)).get("/", headers={"Host": host}).text == "in"


@pytest.mark.parametrize("host", ["evil.example:8000", "127.0.0.1.evil.example", "localhost.evil", "", "[", "[::1", "a@b"])
def test_server_of_this_machine_has_no_other_name(host: str) -> None:
    """By DNS rebinding, a page of evil.example makes its own name an address of this machine, and reads all."""
    refused = TestClient(Gate(PlainTextResponse("in"), None, for_this_machine=True)).get("/", headers={"Host": host})
    assert (refused.status_code, refused.json()["type"]) == (421, "urn:penstock:problem:misdirected")
    assert "Use http://localhost" in refused.json()["detail"]
    assert TestClient(Gate(PlainTextResponse("in"), None)).get("/", headers={"Host": host}).text == "in"


@pytest.mark.parametrize("path", ["/v1/datasets/numbers/refresh", "/login", "/logout"])
@pytest.mark.parametrize(
    ("headers", "is_foreign"),
    [
        ({"Sec-Fetch-Site": "cross-site"}, True),
        ({"Sec-Fetch-Site": "same-site"}, True),  # another port of this host
        ({"Sec-Fetch-Site": "same-origin", "Origin": "https://behind-a-proxy"}, False),
        ({"Sec-Fetch-Site": "none"}, False),
        ({"Origin": "http://evil.example"}, True),
        ({"Origin": "http://data:3000"}, True),
        ({"Origin": "null"}, True),
        ({"Origin": "http://data:8000"}, False),
        ({"Origin": "https://public.example", "X-Forwarded-Host": "public.example"}, False),
        ({}, False),
    ],
)
def test_post_of_another_site_is_refused(tmp_path: Path, path: str, headers: dict[str, str], is_foreign: bool) -> None:
    token = create_token(tmp_path / "tokens.json", "admin", ("*",), "admin", None)
    tokens = Tokens(tmp_path / "tokens.json")
    tokens.load()
    for known in (None, tokens):
        client = TestClient(Gate(PlainTextResponse("in"), known), base_url="http://data:8000", follow_redirects=False)
        answer = client.post(path, headers={"Authorization": f"Bearer {token}"} | headers, data={"token": token})
        assert (answer.status_code == 403) == is_foreign
        assert ("another site" in answer.text) == is_foreign
        assert ("Set-Cookie" in answer.headers) == (known is not None and not is_foreign and "/log" in path)
    assert client.get("/", headers={"Authorization": f"Bearer {token}"} | headers).status_code == 200  # it cannot read that


def test_responses_restrict_browsers_and_caches() -> None:
    def headers(**given: str) -> dict[str, str]:
        sent = TestClient(Gate(PlainTextResponse("in", headers=given), None)).get("/").headers
        names = ("X-Content-Type-Options", "Content-Security-Policy", "Cache-Control")
        return {name: sent[name] for name in names if name in sent}

    restricted = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "frame-ancestors 'none'"}
    assert headers() == restricted | {"Cache-Control": "no-store"}
    assert headers(ETag="x") == restricted
    own = {"Content-Security-Policy": "default-src 'none'", "Cache-Control": "max-age=9"}
    assert headers(**own) == restricted | own
