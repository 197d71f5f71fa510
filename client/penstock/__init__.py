"""Penstock's client: an `IterableDataset` that pulls ready-made training batches from a Penstock server.

    from penstock import RemoteDataset

Importing this package imports neither torch nor the server; `RemoteDataset` brings torch in when it is first touched.
"""

from typing import TYPE_CHECKING, Any

from penstock.errors import (
    AccessDenied,
    DataError,
    LedgerError,
    OutOfRange,
    PenstockError,
    ServerUnavailable,
    SnapshotGone,
    SpecError,
    StateMismatch,
    UnknownDataset,
    VersionMismatch,
    WireError,
)

if TYPE_CHECKING:
    from penstock.dataset import RemoteDataset as RemoteDataset
    from penstock.spec import Spec as Spec

__version__ = "0.1.0"

__all__ = [
    "AccessDenied",
    "DataError",
    "LedgerError",
    "OutOfRange",
    "PenstockError",
    "RemoteDataset",
    "ServerUnavailable",
    "SnapshotGone",
    "Spec",
    "SpecError",
    "StateMismatch",
    "UnknownDataset",
    "VersionMismatch",
    "WireError",
]


def __getattr__(name: str) -> Any:
    if name == "RemoteDataset":
        from penstock.dataset import RemoteDataset

        return RemoteDataset
    if name == "Spec":
        from penstock.spec import Spec

        return Spec
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What completions offer, the classes of `__getattr__` among them."""
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING"})
