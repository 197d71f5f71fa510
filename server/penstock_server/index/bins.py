"""Bins of a snapshot, packed by best_fit for one seq_len and split, in a sealed file beside the cached blocks.

A file holds, little-endian: the Bins.words of each pool, uint32; then bins and parts of each pool, int64 [2, num_pools].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from penstock_server.checksummed import read_sealed, write_sealed
from penstock_server.index.build_lock import turn
from penstock_server.order.best_fit import Bins, PackedPools


def keep_bins(path: Path, num_pools: int, pack: Callable[[], Iterable[Bins]]) -> PackedPools:
    """Returns the stored bins; otherwise stores those that `pack` yields per pool, or keeps them in memory if that fails."""
    load = partial(read_sealed, path, partial(_parse, num_pools))
    with turn(path) as get_further:
        if found := load():
            return found
        write_sealed(path, _pieces(pack(), get_further), "it is held in memory, and packed again after a restart")
        return load() or PackedPools.of(pack())


def _pieces(pools: Iterable[Bins], get_further: Callable[[], None]) -> Iterator[bytes]:
    # Pool by pool: all pools may exceed the memory.
    sizes = []
    for bins in pools:
        yield bins.words.astype("<u4").tobytes()
        sizes.append((bins.num_bins, len(bins.rows)))
        get_further()
    yield np.array(sizes, "<i8").reshape(-1, 2).T.tobytes()


def _parse(num_pools: int, body: memoryview) -> PackedPools | None:
    end = len(body) - 16 * num_pools
    if end < 0:
        return None
    sizes = np.frombuffer(body[end:], "<i8").astype(np.int64).reshape(2, num_pools)
    fits = end == 4 * PackedPools.num_words(sizes)
    return PackedPools(sizes, np.frombuffer(body[:end], "<u4")) if fits else None
