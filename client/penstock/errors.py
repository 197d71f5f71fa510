"""Everything the client raises.

PenstockError
├── SpecError           a parameter is unknown, of the wrong kind or out of its bounds (also a ValueError)
├── UnknownDataset      the server has no dataset of that name
├── AccessDenied        the server does not accept the token, or the token may not do this
├── OutOfRange          the step or the rank does not exist in this epoch
├── SnapshotGone        the shards changed since this run began
├── DataError           the server found data it cannot use: an unreadable shard, a bad row
├── ServerUnavailable   no server answered within `retry_seconds`
├── WireError           bytes that are not a batch, or not the batch that was asked for
├── VersionMismatch     the server's version is one that this client does not understand
├── StateMismatch       a state_dict belongs to other data or another order
└── LedgerError         a ledger cannot be written or read
"""


class PenstockError(Exception):
    """The root: `except PenstockError` catches whatever this package raises on purpose."""


class SpecError(PenstockError, ValueError):
    """One or more parameters are unknown, of the wrong kind or out of bounds; `parameters` names them."""

    def __init__(self, message: str, parameters: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.parameters = parameters


class UnknownDataset(PenstockError):
    """The server has no dataset of that name."""


class AccessDenied(PenstockError):
    """The server does not accept the token, or the token may not do this."""


class OutOfRange(PenstockError):
    """The step or the rank does not exist in this epoch."""


class SnapshotGone(PenstockError):
    """The server no longer has the snapshot that this run began with."""


class DataError(PenstockError):
    """The server found data it cannot use; trying again would find the same."""


class ServerUnavailable(PenstockError):
    """No server answered within `retry_seconds`."""


class WireError(PenstockError):
    """Bytes that are not a batch, were damaged on the way, or are not the batch that was asked for."""


class VersionMismatch(PenstockError):
    """The server's version is one that this client does not understand."""


class StateMismatch(PenstockError, ValueError):
    """A state_dict belongs to other data or to another order."""


class LedgerError(PenstockError):
    """A ledger cannot be written or read."""
