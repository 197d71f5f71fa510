"""Writes the data of the benchmarks: the corpus of equal samples, and lists of ids of other lengths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from corpus import SEQ_LEN, Corpus, Tokens

_VOCAB_SIZE = 50_257
_GROUP_ROWS = 2_048  # samples in a row group: 4 MiB of ids
_BLOCK = 4_096


def write_corpus(corpus: Corpus) -> None:
    """Write the corpus, unless it exists."""
    if corpus.parquet.exists():
        return
    corpus.folder.mkdir(parents=True, exist_ok=True)
    with (corpus.folder / "tokens.bin").open("wb") as file:
        for start in range(0, corpus.num_samples, _BLOCK):
            numbers = np.arange(start, min(start + _BLOCK, corpus.num_samples))
            tokens = random_ids(seed=start, count=len(numbers) * SEQ_LEN).reshape(-1, SEQ_LEN)
            tokens[:, 0], tokens[:, 1] = numbers & 0xFFFF, numbers >> 16
            file.write(tokens.tobytes())
    unfinished = corpus.folder / "parquet.unfinished"
    for number, rows in enumerate(corpus.shards()):
        write_lists(unfinished / "tokens" / f"part-{number:03}.parquet", rows.reshape(-1), np.full(len(rows), SEQ_LEN))
    unfinished.rename(corpus.parquet)


def random_ids(*, seed: int, count: int) -> Tokens:
    """Return ids with the frequencies of words: the nth is 1/n times as frequent as the first. They compress like text."""
    random = np.random.default_rng(seed).random(count, np.float32)
    ids: Tokens = np.exp(random * np.float32(np.log(_VOCAB_SIZE))).astype(np.uint16) - np.uint16(1)
    return ids


def write_lists(path: Path, tokens: Tokens, lengths: npt.NDArray[np.int64]) -> None:
    """Write a zstd Parquet file with the column `tokens`: lists of uint16, which follow each other in `tokens`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens))
    pq.write_table(pa.table({"tokens": lists}), path, compression="zstd", row_group_size=_GROUP_ROWS)
