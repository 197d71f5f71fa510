"""Exceptions for responses other than 200."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock import DataError, OutOfRange, PenstockError, SnapshotGone, SpecError, UnknownDataset, WireError
from penstock.client import decode_object
from penstock.responses import (
    BlocksNotReady,
    Busy,
    Denied,
    IndexNotReady,
    TransientError,
    Unavailable,
    UnexpectedServer,
    failure_of,
)
from support.fuzz import NESTED, ODD, altered


@pytest.mark.parametrize(
    ("slug", "status", "kind"),
    [
        ("bad-parameter", 422, SpecError),
        ("unknown-dataset", 404, UnknownDataset),
        ("step-out-of-range", 404, OutOfRange),
        ("rank-out-of-range", 404, OutOfRange),
        ("snapshot-gone", 409, SnapshotGone),
        ("shard-unreadable", 500, DataError),
        ("bad-row", 500, DataError),
        ("dataset-invalid", 500, DataError),
        ("index-failed", 500, DataError),
        ("index-not-ready", 503, IndexNotReady),
        ("blocks-not-ready", 503, BlocksNotReady),
        ("dataset-unavailable", 503, Unavailable),
        ("busy", 503, Busy),
        ("limit-exceeded", 503, Busy),
        ("limit-exceeded", 429, Busy),
        ("limit-exceeded", 422, SpecError),
        ("too-many-attempts", 429, Denied),
        ("unauthorized", 401, Denied),
        ("forbidden", 403, Denied),
        ("internal-error", 500, TransientError),
    ],
)
def test_problem_type_decides_the_exception(slug: str, status: int, kind: type[Exception]) -> None:
    body = json.dumps({"type": f"urn:penstock:problem:{slug}", "detail": f"this is {slug}"}).encode()
    failure = failure_of("http://host", status, {}, body)
    assert type(failure) is kind
    assert str(failure) == f"this is {slug}"


@pytest.mark.parametrize("body", [b"", b"[]", b"7", b"\xff", b'{"detail": ""}'])
def test_status_decides_when_the_body_is_no_problem(body: bytes) -> None:
    kinds = {status: type(failure_of("http://host", status, {}, body)) for status in (302, 400, 404, 408, 425, 429, 500, 503)}
    assert [status for status, kind in kinds.items() if kind is UnexpectedServer] == [302, 400, 404]
    assert {kinds[status] for status in (408, 425, 429, 500, 503)} == {TransientError}
    assert str(failure_of("http://host", 503, {}, body)) == "HTTP status 503"


def after_seconds(retry_after: str) -> float:
    failure = failure_of("http://host", 503, {"retry-after": retry_after}, b"")
    assert isinstance(failure, TransientError)
    return failure.after_seconds


@pytest.mark.parametrize("retry_after", ["9" * 400, "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_retry_after_is_an_hour_at_most(retry_after: str) -> None:
    assert after_seconds(retry_after) == 3600


def test_retry_after_may_be_a_date() -> None:
    assert 1700 < after_seconds(format_datetime(datetime.now(UTC) + timedelta(minutes=30), usegmt=True)) <= 1800


@pytest.mark.parametrize(
    "retry_after", ["", "-1", "\u00b2", "soon", "Thu, 01 Jan 1970 00:00:00 GMT", "Thu, 01 Jan 99999 00:00:00 GMT"]
)
def test_invalid_retry_after_is_no_delay(retry_after: str) -> None:
    assert after_seconds(retry_after) == 0


@pytest.mark.parametrize(
    ("progress", "share"),
    [
        ({"done": 3, "total": 4}, 0.75), ({"done": 0, "total": 0}, 0), ({}, 0),
        ({"done": "x", "total": 2}, 0), ({"done": 5, "total": 4}, 0), ({"done": 1}, 0),
    ],
)  # fmt: skip
def test_progress_is_between_0_and_1(progress: dict[str, object], share: float) -> None:
    body = json.dumps({"type": "urn:penstock:problem:index-not-ready"} | progress).encode()
    failure = failure_of("http://host", 503, {"retry-after": "2"}, body)
    assert isinstance(failure, IndexNotReady)
    assert (failure.share, failure.after_seconds) == (share, 2)


@pytest.mark.parametrize(
    ("url", "status", "location", "remedy"),
    [
        ("http://a", 302, "/login", "answered 302 and leads to /login: "),
        ("http://a", 407, "", "give them in HTTP_PROXY"),
        ("http://a", 401, "", "requires a password"),
        ("http://a", 404, "", "Is there a penstock server at this address"),
    ],
)
def test_unexpected_server_comes_with_a_remedy(url: str, status: int, location: str, remedy: str) -> None:
    failure = failure_of(f"{url}/v1/datasets/docs/spec", status, {"location": location}, b"<html>")
    assert isinstance(failure, PenstockError | UnexpectedServer)
    assert remedy in str(failure)


PROBLEM = {
    "type": "urn:penstock:problem:busy",
    "title": "",
    "status": 503,
    "detail": "",
    "done": 1,
    "total": 2,
    "seconds_left": 1,
}
BODIES = altered(PROBLEM).map(lambda problem: json.dumps(problem).encode()) | st.binary()
TIMES = st.text() | st.integers().map(str) | st.datetimes(timezones=st.timezones()).map(format_datetime)


@given(BODIES, st.sampled_from([302, 401, 404, 429, 503]), TIMES)
@example(NESTED.encode(), 503, "")
def test_any_body_is_a_failure(body: bytes, status: int, retry_after: str) -> None:
    failure = failure_of("http://host", status, {"retry-after": retry_after}, body)
    assert isinstance(failure, PenstockError | TransientError)
    assert isinstance(failure, PenstockError) or (0 <= failure.share <= 1 and 0 <= failure.after_seconds <= 3600)


@given(st.binary() | ODD.map(lambda value: json.dumps(value).encode()))
@example(NESTED.encode())
def test_any_body_is_an_object_or_refused(body: bytes) -> None:
    with suppress(WireError):
        assert isinstance(decode_object(memoryview(body)), dict)
