"""A first epoch from zstd Parquet with lists of ids, the cache empty, against pyarrow that merely decodes them."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq

import data
from corpus import BATCH_SIZE, SEQ_LEN, warm
from penstock import RemoteDataset
from ratios import Ratio, Scale, in_turn, seconds
from servers import penstock


def measure(scale: Scale) -> list[Ratio]:
    folder = data.corpus(scale).parquet
    warm(folder)
    tokens = scale.num_samples * SEQ_LEN
    theirs, ours = in_turn(scale.num_repeats, partial(_decode, folder), partial(_epoch, folder, scale.work / "cold-cache"))
    return [
        Ratio(
            what="first epoch from zstd Parquet, window shuffle, cache empty",
            against="pyarrow that decodes the same files on the same cores",
            ours=tokens / ours,
            theirs=tokens / theirs,
            unit="tokens/s",
        )
    ]


def _epoch(folder: Path, cache: Path) -> float:
    shutil.rmtree(cache, ignore_errors=True)
    with penstock(folder, cache) as server:
        return seconds(partial(_consume, server.address))


def _consume(address: str) -> None:
    for _ in RemoteDataset(address, "tokens", batch_size=BATCH_SIZE, seq_len=SEQ_LEN):
        pass


def _decode(folder: Path) -> float:
    paths = sorted(folder.rglob("*.parquet"))
    groups = [(path, n) for path in paths for n in range(pq.ParquetFile(path).num_row_groups)]

    def decode(group: tuple[Path, int]) -> int:
        path, number = group
        return int(pq.ParquetFile(path).read_row_group(number, columns=["tokens"], use_threads=False).num_rows)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return seconds(lambda: sum(threads.map(decode, groups)))
