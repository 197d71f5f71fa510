"""The loaders that are measured, a module each with a constant PEER; Penstock is one of them.

A module imports its library where it uses it: the table of peers is read in the product's environment, which has none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from corpus import Corpus

if TYPE_CHECKING:
    from torch import Tensor

OURS = "penstock_http"
NAMES = (
    OURS,
    "penstock_full",
    "penstock_processes",
    "numpy_memmap",
    "numpy_samples",
    "litdata_tokens",
    "hf_arrow",
    "hf_streaming",
    "tfdata_service",
    "grain_map",
    "ray_data",
    "parquet_generator",
    "webdataset_tar",
    "mosaicml_mds",
)
QUICK = (OURS, "numpy_memmap", "numpy_samples", "parquet_generator")  # those that need nothing but the product's environment

SHUFFLE_BUFFER = 10_000  # sequences, where a peer shuffles in a buffer and its documentation names no other size
SEED = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """How a loader is to be made.

    folder       what `prepare` wrote
    url          where an object store has the same, for a loader that must read from there; "" otherwise
    num_workers  its processes beside the trainer
    address      of its server, if it has one
    """

    folder: Path
    url: str
    corpus: Corpus
    num_workers: int
    address: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A loader, set up as its own documentation advises.

    environment  which one it runs in: "product", "peers" or "mosaicml"
    packages     whose versions are told
    reads        what the data lies in
    shuffle      how it shuffles
    workers      numbers of loader processes that are tried
    ahead        why it may be ahead of Penstock, and what it costs to have it so; of Penstock itself ""
    prepare      writes the corpus into a folder as the loader reads it
    batches      int64 [BATCH_SIZE, SEQ_LEN] on the CPU, epoch after epoch without end
    serve        for those with a server: serves the folder, having printed its address, until it is ended
    """

    name: str
    environment: str
    packages: tuple[str, ...]
    reads: str
    shuffle: str
    ahead: str
    prepare: Callable[[Corpus, Path], None]
    batches: Callable[[Setup], Iterator[Tensor]]
    workers: tuple[int, ...] = (0, 2)
    serve: Callable[[Corpus, Path], None] | None = None


def load(name: str) -> Peer:
    """The peer of a module's name."""
    peer = import_module(f"peers.{name}").PEER
    assert isinstance(peer, Peer)
    return peer
