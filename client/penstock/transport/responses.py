"""Maps a response that is not a 200 to the exception it stands for.

PenstockError         the server refuses, and says why. Final once every server has refused
TransientError        this attempt failed. The next server is asked at once, then all of them again for up to retry_seconds
├── NotReady          the server is working on it, and is asked again for as long as that takes
│   └── Preparing     the server reads or tokenizes the rows of the batch. The same server is asked again at once
├── Busy              the server has no memory for another response. It is asked again; retry_seconds does not run
├── Unavailable       the data cannot be opened now. At the start of a run this is a refusal, later a transient error
└── UnexpectedServer  the response is not a penstock server's. At the start of a run this is a refusal, later a transient error
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from urllib.parse import urljoin

from penstock.errors import DataError, OutOfRange, PenstockError, SnapshotGone, SpecError, UnknownDataset
from penstock.urls import DATASETS

_REFUSALS: Mapping[str, type[PenstockError]] = {
    "bad-parameter": SpecError,
    "unknown-dataset": UnknownDataset,
    "step-out-of-range": OutOfRange,
    "rank-out-of-range": OutOfRange,
    "snapshot-gone": SnapshotGone,
    "dataset-invalid": DataError,
    "shard-unreadable": DataError,
    "bad-row": DataError,
    "index-failed": DataError,
}

_NOTHING = memoryview(b"")
_MAX_AFTER_SECONDS = 3600.0


class TransientError(Exception):
    """This attempt failed in a way that another may not.

    after_seconds  how long the server asks to be left alone
    received       the body as far as it came
    is_silence     no answer came at all
    """

    def __init__(
        self, reason: str, *, after_seconds: float = 0.0, received: memoryview = _NOTHING, is_silence: bool = False
    ) -> None:
        super().__init__(reason)
        self.is_silence = is_silence
        self.after_seconds = after_seconds
        self.received = received


class NotReady(TransientError):
    """The server is at work on what was asked for, and says how far it is: `share` of it, from 0 to 1, is done."""

    def __init__(self, reason: str, *, after_seconds: float, share: float) -> None:
        super().__init__(reason, after_seconds=after_seconds)
        self.share = share


class Preparing(NotReady):
    """The server reads or tokenizes the rows that were asked for. It alone has that work in memory, so no other is asked."""


class Busy(TransientError):
    """The server lives, and has no room for another response until others have been read."""


class Unavailable(TransientError):
    """The server cannot open the data, and may another time."""


class UnexpectedServer(TransientError):
    """Something answered that does not speak as a penstock server does: another program, or a load balancer in its place."""


def failure_of(
    url: str, status: int, headers: Mapping[str, str], body: bytes, by_proxy: str = ""
) -> TransientError | PenstockError:
    """What an answer with a status other than 200 stands for.

    `by_proxy` follows a reason that is not a penstock server's: a proxy may have answered instead.
    """
    after_seconds = _seconds(headers.get("retry-after", ""), headers.get("date", ""))
    problem = _problem(body)
    slug = problem.get("type", "").rpartition(":")[2]
    detail = problem.get("detail") or f"HTTP status {status}"
    if refusal := _REFUSALS.get(slug):
        return refusal(detail)
    if slug in ("index-not-ready", "blocks-not-ready"):
        return (NotReady if slug == "index-not-ready" else Preparing)(
            detail, after_seconds=after_seconds, share=_share(problem)
        )
    if slug == "dataset-unavailable":
        return Unavailable(detail, after_seconds=after_seconds)
    if slug == "busy":
        return Busy(detail, after_seconds=after_seconds)
    reason = detail if slug else detail.rstrip(".") + by_proxy
    if status in (408, 425, 429) or status >= 500:
        return TransientError(reason, after_seconds=after_seconds)
    return UnexpectedServer(f"{url} answered {status}: {reason.rstrip('.')}. {doubt(url, status, headers.get('location', ''))}")


def doubt(url: str, status: int, location: str) -> str:
    """What to ask who gave the address that a URL begins with."""
    given = url.rsplit(DATASETS, 1)[0]
    if location:
        root, api, _ = urljoin(url, location).partition(DATASETS)
        is_there = api and root != given and "?" not in root
        return f"It leads to {root}: give that address." if is_there else f"It sends elsewhere, to {location}: to a login page?"
    if status == 401:
        if "@" in given:
            return "It asks for a name and a password, and does not take those in the address."
        return "It asks for a name and a password: put NAME:PASSWORD@ before the host in the address."
    if status == 407:
        return "The proxy asks for a name and a password: give them in HTTP_PROXY or HTTPS_PROXY."
    scheme, _, rest = given.partition("://")
    host, _, path = rest.partition("/")
    if path:
        return f"The address has a path, /{path}: is {scheme}://{host} meant?"
    return "Is there a penstock server at this address?"


def _problem(body: bytes) -> dict[str, str]:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return {str(k): str(v) for k, v in content.items()} if isinstance(content, dict) else {}


def _share(problem: Mapping[str, str]) -> float:
    """How much of it is done, from 0 to 1; 0 where the server does not tell."""
    try:
        return min(max(int(problem["done"]) / int(problem["total"]), 0.0), 1.0)
    except (KeyError, ValueError, ZeroDivisionError):
        return 0.0


def _seconds(retry_after: str, date: str) -> float:
    """Parse a Retry-After header, seconds or a date, to seconds: an hour at most.

    A date is relative to the server's clock in the `date` header, or to the local clock without that header.
    """
    if retry_after.isascii() and retry_after.isdigit():
        return min(float(retry_after), _MAX_AFTER_SECONDS)
    then, now = _time_of(retry_after), _time_of(date)
    if then is None:
        return 0.0
    return min(max(0.0, then - (time.time() if now is None else now)), _MAX_AFTER_SECONDS)


def _time_of(date: str) -> float | None:
    with suppress(ValueError, OverflowError):
        return parsedate_to_datetime(date).timestamp()
    return None
