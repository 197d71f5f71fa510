"""Headers of the gate: any bytes are a token, or none."""

from __future__ import annotations

from base64 import b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_server.api.gate import token_of

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
