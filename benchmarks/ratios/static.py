"""Bytes a second through RemoteDataset: from `penstock serve`, and from a static server that sends the same from memory."""

from __future__ import annotations

import sys
import urllib.request
from functools import partial
from pathlib import Path

import data
from corpus import BATCH_SIZE, BATCH_TOKENS, SEQ_LEN
from penstock import RemoteDataset
from processes import serving
from ratios import Ratio, Scale, in_turn, seconds
from servers import penstock

_REPLAY = Path(__file__).parents[1] / "replay.py"
_MAX_BATCHES = 8_192  # 512 MiB of ids, which the static server keeps
_MAX_PASSES = 5  # until the static server has them all
_TIMED_PASSES = 3  # of seconds in all: the start of one takes some hundredths
_BEHIND = 1 << 50  # any step of any epoch


def measure(scale: Scale) -> list[Ratio]:
    num_batches = min(_MAX_BATCHES, scale.num_samples // BATCH_SIZE)
    cache = data.warm_cache(scale)
    with (
        penstock(data.corpus(scale).parquet, cache) as server,
        serving([sys.executable, str(_REPLAY), server.address]) as static,
    ):
        for _ in range(_MAX_PASSES):
            before = _misses(static.address)
            _pull(_dataset(static.address, num_batches), 1)
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
    took = seconds(partial(_pull, _dataset(address, num_batches), _TIMED_PASSES))
    return 2 * BATCH_TOKENS * num_batches * _TIMED_PASSES / took


def _dataset(address: str, num_batches: int) -> RemoteDataset:
    """So many batches of the epoch; the others are skipped."""
    skip = f"{num_batches}-{_BEHIND}"
    return RemoteDataset(address, "tokens", batch_size=BATCH_SIZE, seq_len=SEQ_LEN, shuffle="global", skip=skip)


def _pull(dataset: RemoteDataset, num_passes: int) -> None:
    for _ in range(num_passes):
        dataset.set_epoch(0)
        for _ in dataset:
            pass


def _misses(address: str) -> int:
    with urllib.request.urlopen(f"{address}/misses") as answer:
        return int(answer.read())
