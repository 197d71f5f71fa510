"""Problems: the errors that the server raises on purpose, each an RFC 9457 problem+json with a stable `type`.

Problem
├── 401  Unauthorized
├── 403  Forbidden
├── 404  UnknownDataset, StepOutOfRange, RankOutOfRange, RowOutOfRange
├── 409  SnapshotGone
├── 421  Misdirected
├── 422  BadParameter
├── 429  TooManyAttempts, LimitExceeded
├── 500  DatasetInvalid, ShardUnreadable, IndexFailed, BadRow
└── 503  DatasetUnavailable, ShardUnavailable, OutOfMemory, Busy, NotServing, NotReady (IndexNotReady, BlocksNotReady)

Faults of stored data are a 5xx, never a 404: a client that took them for "does not exist" would train on a shorter epoch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from penstock.text import as_utf8

MORE_THREADS = "raise its limit of processes (ulimit -u, pids.max)"


class Problem(Exception):
    """An error with one message: what happened, what follows and what to do."""

    status: ClassVar[int]
    title: ClassVar[str]
    slug: ClassVar[str]
    """The class name in the stable `type`, as bad-row."""

    def __init_subclass__(cls, status: int, title: str = "") -> None:
        cls.status, cls.title = status, title
        cls.slug = re.sub(r"\B([A-Z])", r"-\1", cls.__name__).lower()

    def __init__(self, message: str) -> None:
        # A file name that is not UTF-8, or a message of a transform, may have characters that JSON cannot encode.
        super().__init__(as_utf8(message))

    @property
    def type(self) -> str:
        """The stable name that clients map to an exception."""
        return f"urn:penstock:problem:{self.slug}"


class BadParameter(Problem, status=422, title="A parameter is wrong"):
    """A query or path parameter is unknown, of the wrong kind or out of bounds."""


class Unauthorized(Problem, status=401, title="No valid token"):
    """The request has no token, or one that is wrong, expired or revoked."""


class Forbidden(Problem, status=403, title="Not allowed"):
    """The scope of the token does not allow the request, or another site sent it."""


class Misdirected(Problem, status=421, title="Wrong host name"):
    """The request names a host that this server is not for."""


class TooManyAttempts(Problem, status=429, title="Too many wrong tokens"):
    """An address sent too many wrong tokens; a retry after `after_seconds` may succeed. Right ones are always accepted."""

    def __init__(self, message: str, after_seconds: int) -> None:
        super().__init__(message)
        self.after_seconds = after_seconds


class LimitExceeded(Problem, status=429, title="A limit is reached"):
    """The caller has reached a limit; a retry after `after_seconds` may succeed."""

    def __init__(self, message: str, after_seconds: int) -> None:
        super().__init__(message)
        self.after_seconds = after_seconds


class UnknownDataset(Problem, status=404, title="No such dataset"):
    """No dataset of that name."""


class StepOutOfRange(Problem, status=404, title="No such step"):
    """The epoch has fewer steps."""


class RankOutOfRange(Problem, status=404, title="No such rank"):
    """The spec has fewer ranks."""


class RowOutOfRange(Problem, status=404, title="No such row"):
    """The dataset has fewer rows."""


class SnapshotGone(Problem, status=409, title="The data changed"):
    """The requested snapshot is not, or no longer, on this server."""


class DatasetInvalid(Problem, status=500, title="The dataset cannot be served"):
    """The dataset could not be opened."""


class DatasetUnavailable(Problem, status=503, title="The dataset cannot be opened now"):
    """The dataset could not be opened now; whether it still is the requested snapshot is unknown."""


class ShardUnreadable(Problem, status=500, title="A shard cannot be decoded"):
    """A shard cannot be decoded."""


class ShardUnavailable(Problem, status=503, title="A shard cannot be read now"):
    """The storage of a shard fails; a retry may succeed."""


class OutOfMemory(Problem, status=503, title="Out of memory"):
    """The server is out of memory or of threads; a retry may succeed.

    `purpose` begins with "for" or "to", `error` is Python's error, and `remedy` another remedy than more memory.
    """

    def __init__(self, purpose: str, error: Exception, remedy: str) -> None:
        reason = str(error) or "an allocation failed"
        super().__init__(f"Out of memory {purpose}: {reason}. Retry; if it persists, give the server more memory, or {remedy}.")


def lacks_threads(error: Exception) -> bool:
    """Returns whether this is Python's error for a thread that cannot be started."""
    return isinstance(error, RuntimeError) and "start new thread" in str(error)


class Busy(Problem, status=503, title="The server is busy"):
    """The responses in flight use their whole budget, or new data is being checked."""


class NotServing(Problem, status=503, title="Not ready"):
    """No dataset can be served, or the server is about to stop. Only probes get it: requests are served while they can be."""


class NotReady(Problem, status=503):
    """The server is still making the result; `num_done` of `total` parts are done.

    `seconds_left` is an estimate by the rate so far; None before the first part is done.
    """

    def __init__(self, message: str, num_done: int, total: int, seconds_left: int | None) -> None:
        super().__init__(message)
        self.num_done, self.total, self.seconds_left = num_done, total, seconds_left


class IndexNotReady(NotReady, status=503, title="Tokens are being counted"):
    """Token counts that the packing needs are still being made."""


class BlocksNotReady(NotReady, status=503, title="Rows are being read or tokenized"):
    """Row groups for the batches are still being read or tokenized. Sent only to clients with `Prefer: wait`."""


class IndexFailed(Problem, status=500, title="Tokens cannot be counted"):
    """Token counts that the packing needs cannot be made."""


class BadRow(Problem, status=500, title="A row cannot be used"):
    """A row cannot be used, and the recipe does not allow to replace it."""


class LibraryError(Exception):
    """A failure of a library; `cause` is its exception."""

    def __init__(self, cause: BaseException, message: str) -> None:
        super().__init__(message)
        self.cause = cause


@contextmanager
def library_errors() -> Iterator[None]:
    """Convert exceptions, panics and exits inside to LibraryError, but not MemoryError or Ctrl-C."""
    try:
        yield
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        raise LibraryError(error, str(error)) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the type cannot be imported from any module
            raise
        raise LibraryError(error, f"the library panics: {error}") from error
