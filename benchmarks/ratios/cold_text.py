"""A first epoch from text, the cache empty, against `tokenizers` alone on the same texts and cores.

Where mimalloc is installed, also with it as the allocator of both, as the server in the image has it.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from ctypes.util import find_library
from functools import partial
from pathlib import Path
from typing import Any

import data
import tokenizers_alone
from corpus import BATCH_SIZE
from penstock import RemoteDataset
from penstock.spec import Packing
from processes import run
from ratios import Ratio, Scale, in_turn, seconds
from servers import penstock

_DATASET = "stories"
_SEQ_LEN = 256  # longer than any of the texts
_PACKINGS: tuple[Packing, ...] = ("rows", "concat")
_ALONE_SECONDS = 600
_MIMALLOC = find_library("mimalloc")
_ALLOCATORS: dict[str, dict[str, str]] = {"": {}} | ({", with mimalloc": {"LD_PRELOAD": _MIMALLOC}} if _MIMALLOC else {})


def measure(scale: Scale) -> list[Ratio]:
    return [ratio for name, environment in _ALLOCATORS.items() for ratio in _with_allocator(scale, name, environment)]


def _with_allocator(scale: Scale, name: str, environment: Mapping[str, str]) -> list[Ratio]:
    folder, cache = data.texts(scale), scale.work / "cold-cache"
    tokens = _alone(folder, environment)["tokens"]
    alone, *ours = in_turn(
        scale.num_repeats,
        lambda: _alone(folder, environment)["seconds"],
        *(partial(_epoch, folder, cache, packing, environment) for packing in _PACKINGS),
    )
    return [
        Ratio(
            what=f"first epoch from text, packing={packing}, cache empty{name}",
            against=f"tokenizers alone, same texts, same cores{name}",
            ours=tokens / took,
            theirs=tokens / alone,
            unit="tokens/s",
        )
        for packing, took in zip(_PACKINGS, ours, strict=True)
    ]


def _alone(folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """What tokenizers_alone.py prints."""
    command = [sys.executable, tokenizers_alone.__file__, str(folder), _DATASET]
    told: dict[str, Any] = json.loads(run(command, timeout_seconds=_ALONE_SECONDS, environment=environment))
    return told


def _epoch(folder: Path, cache: Path, packing: Packing, environment: Mapping[str, str]) -> float:
    shutil.rmtree(cache, ignore_errors=True)
    with penstock(folder, cache, environment=environment) as server:
        return seconds(partial(_consume, server.address, packing))


def _consume(address: str, packing: Packing) -> None:
    for _ in RemoteDataset(address, _DATASET, batch_size=BATCH_SIZE, seq_len=_SEQ_LEN, packing=packing, pad="longest"):
        pass
