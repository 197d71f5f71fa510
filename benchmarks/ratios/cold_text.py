"""A first epoch from text, the cache empty, against `tokenizers` alone on the same texts and cores.

Where mimalloc is installed, also of a server that allocates with it, as the one in the image does.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from ctypes.util import find_library
from functools import partial
from itertools import product
from pathlib import Path

import pyarrow.parquet as pq
from tokenizers import Tokenizer

import data
from corpus import BATCH_SIZE
from penstock import RemoteDataset
from ratios import Ratio, Scale, in_turn, seconds
from servers import penstock

_SEQ_LEN = 256  # longer than any of the texts
_TEXTS = 1_000  # encoded in one call
_MIMALLOC = find_library("mimalloc")
_ALLOCATORS: dict[str, dict[str, str]] = {"": {}} | ({", with mimalloc": {"LD_PRELOAD": _MIMALLOC}} if _MIMALLOC else {})


def measure(scale: Scale) -> list[Ratio]:
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    folder = data.texts(scale)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [
        text for path in sorted((folder / "stories").glob("*.parquet")) for text in pq.read_table(path)["text"].to_pylist()
    ]
    tokens = sum(_encode(tokenizer, texts))
    cache = scale.work / "cold-cache"
    ways = list(product(("rows", "concat"), _ALLOCATORS))
    alone, *ours = in_turn(
        scale.num_repeats,
        partial(seconds, lambda: _encode(tokenizer, texts)),
        *(partial(_epoch, folder, cache, packing, _ALLOCATORS[allocator]) for packing, allocator in ways),
    )
    return [
        Ratio(
            what=f"first epoch from text, packing={packing}, cache empty{allocator}",
            against="tokenizers alone, same texts, same cores",
            ours=tokens / took,
            theirs=tokens / alone,
            unit="tokens/s",
        )
        for (packing, allocator), took in zip(ways, ours, strict=True)
    ]


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[int]:
    batches = (texts[start : start + _TEXTS] for start in range(0, len(texts), _TEXTS))
    return [len(found.ids) for batch in batches for found in tokenizer.encode_batch_fast(batch)]


def _epoch(folder: Path, cache: Path, packing: str, environment: Mapping[str, str]) -> float:
    shutil.rmtree(cache, ignore_errors=True)
    with penstock(folder, cache, environment=environment) as server:
        return seconds(partial(_consume, server.address, packing))


def _consume(address: str, packing: str) -> None:
    for _ in RemoteDataset(address, "stories", batch_size=BATCH_SIZE, seq_len=_SEQ_LEN, packing=packing, pad="longest"):
        pass
