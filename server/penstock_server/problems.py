"""Problems: the errors that the server raises on purpose, each an RFC 9457 problem+json with a stable `type`.

Problem
├── BadParameter      422  a query or path parameter is unknown, of the wrong kind or out of bounds
├── UnknownDataset    404  no dataset of that name
├── StepOutOfRange    404  the epoch has fewer steps
├── RankOutOfRange    404  the spec has fewer ranks
├── RowOutOfRange     404  the dataset has fewer rows
├── SnapshotGone      409  the requested snapshot is not, or no longer, on this server
├── DatasetInvalid    500  the dataset could not be opened; the message says why
├── DatasetUnavailable       503  the same, for a request with a snapshot: it may be served again
├── ShardUnreadable   500  a shard cannot be decoded
├── ShardUnavailable  503  the storage fails; a retry may succeed
├── OutOfMemory       503  out of memory or of threads; a retry may succeed
├── Busy              503  responses in flight use their whole budget, or new data is being checked
├── NotReady          503  the server is still making the result
│   ├── IndexNotReady      token counts that the packing needs are still being made
│   └── BlocksNotReady     rows that the batches need are still being read or tokenized; sent to clients with `Prefer: wait`
├── IndexFailed       500  token counts cannot be made
└── BadRow            500  a row cannot be used, and the recipe says on_bad_row = "fail"

Faults of stored data are a 5xx, never a 404: a client that took them for "does not exist" would train on a shorter epoch.
"""

from typing import ClassVar

from penstock.text import as_utf8


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

    `what` names the purpose, `error` is Python's error, and `advice` a remedy other than more memory.
    """

    status, slug, title = 503, "out-of-memory", "There is not the memory for it"

    def __init__(self, what: str, error: Exception, advice: str) -> None:
        super().__init__(
            f"there is not the memory {what}: {str(error) or 'it ran out'}. Whoever asks may try again; if it stays so, give "
            f"the server more memory, or {advice}."
        )


MORE_THREADS = "raise its limit of processes (ulimit -u, pids.max)"


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
