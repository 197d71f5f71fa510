"""Everything the server refuses on purpose; each becomes one RFC 9457 problem+json with a stable `type`.

Problem
├── BadParameter      422  a query or path parameter is unknown, of the wrong kind or out of bounds
├── UnknownDataset    404  no dataset of that name
├── StepOutOfRange    404  the epoch has fewer steps
├── RankOutOfRange    404  the spec has fewer ranks
├── RowOutOfRange     404  the dataset has fewer rows
├── SnapshotGone      409  the snapshot asked for is not, or no longer, on this server
├── DatasetInvalid    500  the dataset could not be opened; the message says why
├── DatasetUnavailable       503  the same, where a snapshot of it was asked for: it may be served again
├── ShardUnreadable   500  a shard cannot be decoded
├── ShardUnavailable  503  the storage fails; another time it may not
├── OutOfMemory       503  there is not the memory for it, or no thread; another time there may be
├── Busy              503  not now: responses in flight take all the memory that they may, or new data is looked at
├── NotReady          503  the server is at work on what was asked for
│   ├── IndexNotReady      token counts that the packing needs are still being made
│   └── BlocksNotReady     rows that the batches need are still being read or tokenized, and the client wants to hear how far
├── IndexFailed       500  token counts cannot be made
└── BadRow            500  a row cannot be used, and the recipe says on_bad_row = "fail"

What is wrong with stored data is a 5xx, never a 404: a client that took it for "not there" would train on a shorter epoch.
"""

from typing import ClassVar

from penstock.text import as_utf8


class Problem(Exception):
    """A refusal: what happened, what follows and what to do, in one text."""

    status: ClassVar[int]
    slug: ClassVar[str]
    title: ClassVar[str]

    def __init__(self, message: str) -> None:
        # A file's name that is not UTF-8, or what a transform says, may have in it what no answer can hold.
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
    """The snapshot asked for is not, or no longer, on this server."""

    status, slug, title = 409, "snapshot-gone", "The data changed"


class DatasetInvalid(Problem):
    """The dataset could not be opened."""

    status, slug, title = 500, "dataset-invalid", "The dataset cannot be served"


class DatasetUnavailable(Problem):
    """The dataset could not be opened, and may be another time: nobody knows whether it is the snapshot that was asked for."""

    status, slug, title = 503, "dataset-unavailable", "The dataset cannot be opened now"


class ShardUnreadable(Problem):
    """A shard cannot be decoded."""

    status, slug, title = 500, "shard-unreadable", "A shard cannot be decoded"


class ShardUnavailable(Problem):
    """The storage of a shard fails; another time it may not."""

    status, slug, title = 503, "shard-unavailable", "A shard cannot be read now"


class OutOfMemory(Problem):
    """There is not the memory for what was asked, or no more thread; another time there may be.

    `error` is Python's, `what` it was for, and `advice` what to do beside giving the server more memory.
    """

    status, slug, title = 503, "out-of-memory", "There is not the memory for it"

    def __init__(self, what: str, error: Exception, advice: str) -> None:
        super().__init__(
            f"there is not the memory {what}: {str(error) or 'it ran out'}. Whoever asks may try again; if it stays so, give "
            f"the server more memory, or {advice}."
        )


MORE_THREADS = "raise its limit of processes (ulimit -u, pids.max)"


def lacks_threads(error: Exception) -> bool:
    """Whether this is what Python raises where no thread can be started."""
    return isinstance(error, RuntimeError) and "start new thread" in str(error)


class Busy(Problem):
    """Not now: the responses in flight take all the memory that they may, or new data is being looked at."""

    status, slug, title = 503, "busy", "The server is busy"


class NotReady(Problem):
    """The server is at work on what was asked for; `num_done` of `total` parts of it are done.

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
    """Row groups that the batches need are still being read or tokenized. Only clients that send `Prefer: wait` are told."""

    slug, title = "blocks-not-ready", "Rows are being read or tokenized"


class IndexFailed(Problem):
    """Token counts that the packing needs cannot be made."""

    status, slug, title = 500, "index-failed", "Tokens cannot be counted"


class BadRow(Problem):
    """A row cannot be used, and the recipe does not allow to put another in its place."""

    status, slug, title = 500, "bad-row", "A row cannot be used"
