"""The datasets for the ratios, written when they are first needed."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import servers
from corpus import Corpus
from generate import random_ids, write_corpus, write_lists
from penstock_server.sample import write_sample
from ratios import Scale

LONGEST = 1_500
_SHORTEST = 20
_LENGTH_SHARDS = _TEXT_SHARDS = 8
_LOG_STORIES = 1.4  # median of a document


def corpus(scale: Scale) -> Corpus:
    """Return the corpus of equal samples."""
    found = Corpus(scale.work / f"corpus-{scale.num_samples}", scale.num_samples)
    write_corpus(found)
    return found


def warm_cache(scale: Scale) -> Path:
    """Return a cache folder with every block of the corpus. The comparison of loaders uses it, too."""
    found = corpus(scale)
    folder = found.folder / "penstock_http"
    servers.prepare(found.parquet, folder)
    return folder


def texts(scale: Scale) -> Path:
    """Return a folder with a tokenizer and the dataset `stories`: texts of about a hundred tokens."""
    folder = scale.work / f"text-{scale.text_rows}"
    if not (folder / "questions").exists():  # the file that is written last
        for _ in write_sample(folder, rows=scale.text_rows, seed=0):
            pass
    return folder


def documents(scale: Scale) -> Path:
    """Return a folder with a tokenizer and the dataset `documents`: texts of very different lengths, about 350 tokens."""
    stories = texts(scale)
    folder = scale.work / f"documents-{scale.num_documents}"
    if not folder.exists():
        unfinished = folder.with_suffix(".unfinished")
        (unfinished / "documents").mkdir(parents=True, exist_ok=True)
        shutil.copy(stories / "tokenizer.json", unfinished)
        (unfinished / "documents" / "penstock.toml").write_text('tokenizer = "../tokenizer.json"')
        told = [
            text for path in sorted((stories / "stories").glob("*.parquet")) for text in pq.read_table(path)["text"].to_pylist()
        ]
        for shard in range(_TEXT_SHARDS):
            draw = np.random.default_rng(shard)
            sizes = np.maximum(1, draw.lognormal(_LOG_STORIES, 0.65, scale.num_documents // _TEXT_SHARDS).astype(int))
            rows = [" ".join(told[i] for i in draw.integers(len(told), size=size)) for size in sizes]
            path = unfinished / "documents" / f"part-{shard:03}.parquet"
            pq.write_table(pa.table({"text": rows}), path, row_group_size=1_000, compression="zstd")
        unfinished.rename(folder)
    return folder


def lengths(scale: Scale) -> Path:
    """Return a folder with the dataset `tokens`: lists of 20 to 1,500 ids."""
    folder = scale.work / f"lengths-{scale.length_rows}"
    if not folder.exists():
        unfinished = folder.with_suffix(".unfinished")
        for shard in range(_LENGTH_SHARDS):
            sizes = np.random.default_rng(shard).integers(_SHORTEST, LONGEST + 1, scale.length_rows // _LENGTH_SHARDS)
            ids = random_ids(seed=shard, count=int(sizes.sum()))
            write_lists(unfinished / "tokens" / f"part-{shard:03}.parquet", ids, sizes)
        unfinished.rename(folder)
    return folder
