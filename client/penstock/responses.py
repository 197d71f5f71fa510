"""Map a response other than 200 to an exception.

PenstockError         the server refuses, and says why. Final once every server has refused
TransientError        this attempt failed. The next server is asked at once, then all of them again for up to retry_seconds
├── IndexNotReady        the server counts tokens; it is asked again for as long as that takes
│   └── BlocksNotReady   the server reads or tokenizes the rows of the batch; the same server is asked again at once
├── Busy                 the server has no room for this request now; it is asked again, and retry_seconds does not run
├── Unavailable          the data cannot be opened now. At the start of a run this is a refusal, later a transient error
├── Denied               the server refuses the token. This is a refusal until it has accepted one: later, a token is replaced
└── UnexpectedServer     no penstock server responds. At the start of a run this is a refusal, later a transient error
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar

from penstock.errors import AccessDenied, DataError, OutOfRange, PenstockError, SnapshotGone, SpecError, UnknownDataset

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
_MAX_AFTER_SECONDS = 3600.0


class TransientError(Exception):
    """This attempt failed, and another may succeed.

    after_seconds  delay that the server requests before the next attempt
    share          share of the server's work that is done, from 0 to 1
    received       the bytes of the body that arrived
    refusal        the error where later attempts cannot succeed, as at the start of a run; None: they may
    """

    refusal: ClassVar[type[PenstockError] | None] = None

    def __init__(
        self, reason: str, *, after_seconds: float = 0.0, share: float = 0.0, received: bytes | memoryview = b""
    ) -> None:
        super().__init__(reason)
        self.after_seconds, self.share, self.received = after_seconds, share, received


class IndexNotReady(TransientError):
    """The server counts the tokens that the request needs."""


class BlocksNotReady(IndexNotReady):
    """The server reads or tokenizes the requested rows. Only this server holds that work."""


class Busy(TransientError):
    """The server has no memory for another response until clients have read others, or this client has asked too often."""


class Unavailable(TransientError):
    """The server cannot open the data now."""

    refusal = DataError


class Denied(TransientError):
    """The server refuses the token, or what it is used for."""

    refusal = AccessDenied


class UnexpectedServer(TransientError):
    """The response is not a penstock server's, but another program's or a load balancer's."""

    refusal = PenstockError


_TRANSIENT: Mapping[str, type[TransientError]] = {
    "index-not-ready": IndexNotReady,
    "blocks-not-ready": BlocksNotReady,
    "busy": Busy,
    "limit-exceeded": Busy,
    "dataset-unavailable": Unavailable,
    "unauthorized": Denied,
    "forbidden": Denied,
    "too-many-attempts": Denied,  # only wrong tokens get it
}


def failure_of(
    url: str, status: int, headers: Mapping[str, str], body: bytes, by_proxy: str = "", token_remedy: str = ""
) -> TransientError | PenstockError:
    """Return the exception for a response with a status other than 200.

    `by_proxy` follows the reason if the response has no problem type: a proxy may have sent it. `token_remedy` follows the
    reason for which a token is refused.
    """
    after_seconds = _seconds(headers.get("retry-after", ""))
    problem = _problem(body)
    slug = problem.get("type", "").rpartition(":")[2]
    detail = problem.get("detail") or f"HTTP status {status}"
    if status == 422 and slug == "limit-exceeded":  # with another status, a later attempt may succeed
        return SpecError(detail)
    if refusal := _REFUSALS.get(slug):
        return refusal(detail)
    if kind := _TRANSIENT.get(slug):
        detail = f"{detail} {token_remedy}".strip() if kind is Denied else detail
        return kind(detail, after_seconds=after_seconds, share=_share(problem))
    reason = detail if slug else detail.rstrip(".") + by_proxy
    if status in (408, 425, 429) or status >= 500:
        return TransientError(reason, after_seconds=after_seconds)
    location = headers.get("location")
    leads = f" and leads to {location}" if location else ""
    return UnexpectedServer(f"{url} answered {status}{leads}: {reason.rstrip('.')}. {remedy(status)}")


def remedy(status: int) -> str:
    """Return a hint for a user whose address leads to an unexpected server."""
    if status == 401:
        return "It requires a password: give it in the address, https://NAME:PASSWORD@HOST."
    if status == 407:
        return "The proxy requires a name and a password: give them in HTTP_PROXY or HTTPS_PROXY."
    return "Is there a penstock server at this address?"


def parse_json(body: bytes | memoryview) -> Any:
    """Parse JSON of a server. Raises ValueError: it is not JSON, or nested too deeply."""
    try:
        return json.loads(bytes(body))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _share(problem: Mapping[str, str]) -> float:
    """Return the share of the server's work that is done; 0 if the problem does not tell it."""
    try:
        share = float(problem["done"]) / float(problem["total"])
    except (KeyError, ValueError, ZeroDivisionError):
        return 0.0
    return share if 0 <= share <= 1 else 0.0  # nan is neither


def _problem(body: bytes) -> dict[str, str]:
    try:
        content = parse_json(body)
    except ValueError:
        return {}
    return {str(name): str(value) for name, value in content.items()} if isinstance(content, dict) else {}


def _seconds(retry_after: str) -> float:
    """Parse a Retry-After header, seconds or a date, to seconds from now: an hour at most, 0 if it is invalid."""
    try:
        number = retry_after.isascii() and retry_after.isdigit()
        seconds = float(retry_after) if number else parsedate_to_datetime(retry_after).timestamp() - time.time()
    except (ValueError, OverflowError):
        return 0.0
    return min(max(seconds, 0.0), _MAX_AFTER_SECONDS)
