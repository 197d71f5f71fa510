"""Bytes a second through RemoteDataset: from `penstock serve`, and from a static server that sends the same from memory."""

from __future__ import annotations

import sys
import urllib.request
from functools import partial
from itertools import islice
from pathlib import Path

import data
from corpus import BATCH_SIZE, BATCH_TOKENS, SEQ_LEN
from penstock import RemoteDataset
from processes import serving
from ratios import Ratio, Scale, in_turn, seconds
from servers import penstock

_REPLAY = Path(__file__).parents[1] / "replay.py"
_MOST_BATCHES = 2_048  # 128 MiB of ids, which the static server keeps
_MOST_PASSES = 5


def measure(scale: Scale) -> list[Ratio]:
    num_batches = min(_MOST_BATCHES, scale.num_sequences // BATCH_SIZE)
    cache = data.warm_cache(scale)
    with (
        penstock(data.corpus(scale).parquet, cache) as server,
        serving([sys.executable, str(_REPLAY), server.address]) as static,
    ):
        for _ in range(_MOST_PASSES):
            before = _misses(static.address)
            _consume(static.address, num_batches)
            if _misses(static.address) == before:
                break
        ours, theirs = in_turn(
            scale.num_repeats, *(partial(_rate, server.address, num_batches), partial(_rate, static.address, num_batches))
        )
        missed = _misses(static.address) - before
    return [
        Ratio(
            what="bytes a second, served",
            against="a static body of the same size, through the same client",
            ours=ours,
            theirs=theirs,
            unit="B/s",
            note=f"{missed} answers were not static" if missed else "",
        )
    ]


def _rate(address: str, num_batches: int) -> float:
    """Bytes of token ids a second, as they travel: two a token."""
    return 2 * BATCH_TOKENS * num_batches / seconds(partial(_consume, address, num_batches))


def _consume(address: str, num_batches: int) -> None:
    batches = RemoteDataset(address, "tokens", batch_size=BATCH_SIZE, seq_len=SEQ_LEN, shuffle="global")
    for _ in islice(batches, num_batches):
        pass


def _misses(address: str) -> int:
    with urllib.request.urlopen(f"{address}/misses") as answer:
        return int(answer.read())
