"""The folders that ratios are measured on, written when they are first asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import servers
from corpus import Corpus
from generate import random_ids, write_corpus, write_lists
from penstock_server.sample import write_sample
from ratios import Scale

LONGEST = 1_500
_SHORTEST = 20
_LENGTH_SHARDS = 8


def corpus(scale: Scale) -> Corpus:
    """The corpus of equal sequences."""
    found = Corpus(scale.work / f"corpus-{scale.num_sequences}", scale.num_sequences)
    write_corpus(found)
    return found


def warm_cache(scale: Scale) -> Path:
    """A cache with every block of the corpus, which the loaders' comparison uses, too."""
    found = corpus(scale)
    folder = found.folder / "penstock_http"
    servers.prepare(found.parquet, folder)
    return folder


def texts(scale: Scale) -> Path:
    """A folder with the dataset `stories`, texts of some hundred tokens, and their tokenizer."""
    folder = scale.work / f"text-{scale.text_rows}"
    if not (folder / "questions").exists():  # the last that is written
        for _ in write_sample(folder, rows=scale.text_rows, seed=0):
            pass
    return folder


def lengths(scale: Scale) -> Path:
    """A folder with the dataset `tokens`, lists of 20 to 1,500 ids."""
    folder = scale.work / f"lengths-{scale.length_rows}"
    if not folder.exists():
        unfinished = folder.with_suffix(".unfinished")
        for shard in range(_LENGTH_SHARDS):
            sizes = np.random.default_rng(shard).integers(_SHORTEST, LONGEST + 1, scale.length_rows // _LENGTH_SHARDS)
            ids = random_ids(seed=shard, count=int(sizes.sum()))
            write_lists(unfinished / "tokens" / f"part-{shard:03}.parquet", ids, sizes)
        unfinished.rename(folder)
    return folder
