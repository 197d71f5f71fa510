"""Problems: the errors that the server raises on purpose, each an RFC 9457 problem+json with a stable `type`.

Problem
├── 404  UnknownDataset, StepOutOfRange, RankOutOfRange, RowOutOfRange
├── 409  SnapshotGone
├── 422  BadParameter
├── 500  DatasetInvalid, ShardUnreadable, IndexFailed, BadRow
└── 503  DatasetUnavailable, ShardUnavailable, OutOfMemory, Busy, NotReady (IndexNotReady, BlocksNotReady)

Faults of stored data are a 5xx, never a 404: a client that took them for "does not exist" would train on a shorter epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from penstock.text import as_utf8

MORE_THREADS = "raise its limit of processes (ulimit -u, pids.max)"


class Problem(Exception):
    """An error with one message: what happened, what follows and what to do."""

    status: ClassVar[int]
    slug: ClassVar[str]
    title: ClassVar[str]

    def __init__(self, message: str) -> None:
        # A file name that is not UTF-8, or a message of a transform, may have characters that JSON cannot encode.
        super().__init__(as_utf8(message))

    @property
    def type(self) -> str:
        """The stable name that clients map to an exception."""
        return f"urn:penstock:problem:{self.slug}"


class BadParameter(Problem):
    """A query or path parameter is unknown, of the wrong kind or out of bounds."""

    status, slug, title = 422, "bad-parameter", "A parameter is wrong"


class UnknownDataset(Problem):
    """No dataset of that name."""

    status, slug, title = 404, "unknown-dataset", "No such dataset"


class StepOutOfRange(Problem):
    """The epoch has fewer steps."""

    status, slug, title = 404, "step-out-of-range", "No such step"


class RankOutOfRange(Problem):
    """The spec has fewer ranks."""

    status, slug, title = 404, "rank-out-of-range", "No such rank"


class RowOutOfRange(Problem):
    """The dataset has fewer rows."""

    status, slug, title = 404, "row-out-of-range", "No such row"


class SnapshotGone(Problem):
    """The requested snapshot is not, or no longer, on this server."""

    status, slug, title = 409, "snapshot-gone", "The data changed"


class DatasetInvalid(Problem):
    """The dataset could not be opened."""

    status, slug, title = 500, "dataset-invalid", "The dataset cannot be served"


class DatasetUnavailable(Problem):
    """The dataset could not be opened now; whether it still is the requested snapshot is unknown."""

    status, slug, title = 503, "dataset-unavailable", "The dataset cannot be opened now"


class ShardUnreadable(Problem):
    """A shard cannot be decoded."""

    status, slug, title = 500, "shard-unreadable", "A shard cannot be decoded"


class ShardUnavailable(Problem):
    """The storage of a shard fails; a retry may succeed."""

    status, slug, title = 503, "shard-unavailable", "A shard cannot be read now"


class OutOfMemory(Problem):
    """The server is out of memory or of threads; a retry may succeed.

    `purpose` begins with "for" or "to", `error` is Python's error, and `remedy` another remedy than more memory.
    """

    status, slug, title = 503, "out-of-memory", "Out of memory"

    def __init__(self, purpose: str, error: Exception, remedy: str) -> None:
        reason = str(error) or "an allocation failed"
        super().__init__(f"Out of memory {purpose}: {reason}. Retry; if it persists, give the server more memory, or {remedy}.")


def lacks_threads(error: Exception) -> bool:
    """Returns whether this is Python's error for a thread that cannot be started."""
    return isinstance(error, RuntimeError) and "start new thread" in str(error)


class Busy(Problem):
    """The responses in flight use their whole budget, or new data is being checked."""

    status, slug, title = 503, "busy", "The server is busy"


class NotReady(Problem):
    """The server is still making the result; `num_done` of `total` parts are done.

    `seconds_left` is an estimate by the rate so far; None before the first part is done.
    """

    status = 503

    def __init__(self, message: str, num_done: int, total: int, seconds_left: int | None) -> None:
        super().__init__(message)
        self.num_done, self.total, self.seconds_left = num_done, total, seconds_left


class IndexNotReady(NotReady):
    """Token counts that the packing needs are still being made."""

    slug, title = "index-not-ready", "Tokens are being counted"


class BlocksNotReady(NotReady):
    """Row groups for the batches are still being read or tokenized. Sent only to clients with `Prefer: wait`."""

    slug, title = "blocks-not-ready", "Rows are being read or tokenized"


class IndexFailed(Problem):
    """Token counts that the packing needs cannot be made."""

    status, slug, title = 500, "index-failed", "Tokens cannot be counted"


class BadRow(Problem):
    """A row cannot be used, and the recipe does not allow to replace it."""

    status, slug, title = 500, "bad-row", "A row cannot be used"


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
