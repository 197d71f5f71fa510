"""How a loop starts on text with an empty cache: its first batch, and how long it waits at a steady pace.

The loop is paced at a fifth of what `tokenizers` alone does on the same cores: at its start, resumed in mid-epoch, with
shuffle=global, and as eight ranks together. HF datasets, streaming the same files, is the peer, where benchmarks/.venv has it.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import data
import hf_cold_start
import tokenizers_alone
from corpus import BATCH_SIZE
from penstock import RemoteDataset
from processes import ProcessFailed, run
from ratios import Ratio, Scale
from servers import penstock

_DATASET = "documents"
_SEQ_LEN = 512
_BATCHES = 500
_PACE = 5  # times slower than tokenizers alone
_RANKS = 8
_RESUMED_AT = 0.437
_SECONDS = 600
_PEER = Path(__file__).parents[1] / ".venv" / "bin" / "python"


def measure(scale: Scale) -> list[Ratio]:
    folder = data.documents(scale)
    alone = _told([sys.executable, tokenizers_alone.__file__, str(folder), _DATASET])
    batch_seconds = _PACE * BATCH_SIZE * alone["seconds"] / scale.num_documents
    loops: dict[str, dict[str, Any]] = {
        "at its start": {},
        "resumed at 44 % of the epoch": {"share": _RESUMED_AT},
        "shuffle=global": {"shuffle": "global"},
        f"{_RANKS} ranks, each at an eighth of the pace": {"world_size": _RANKS},
    }
    found, peer = [], _peer(folder)
    for what, parameters in loops.items():
        firsts, waited, lasted = _loop(scale, folder, batch_seconds, **parameters)
        found += [
            Ratio(
                what=f"first batch of text, cache empty, {what}",
                against="HF datasets, streaming, buffer of 10,000" if peer else "",
                ours=max(firsts),
                theirs=peer,
                unit="s",
            ),
            Ratio(what=f"waits of a paced loop, cache empty, {what}", against="its time", ours=waited, theirs=lasted, unit="s"),
        ]
    return found


def _loop(
    scale: Scale, folder: Path, batch_seconds: float, *, share: float = 0.0, world_size: int = 1, **parameters: Any
) -> tuple[list[float], float, float]:
    """Seconds until each rank's first batch; and over all ranks, how long they waited and how long their loops lasted."""
    cache = scale.work / "cold-cache"
    shutil.rmtree(cache, ignore_errors=True)
    num_batches = min(_BATCHES, int((1 - share) * scale.num_documents / BATCH_SIZE) - world_size) // world_size
    with penstock(folder, cache) as server, ThreadPoolExecutor(world_size) as threads:
        loop = partial(
            _rank, server.address, batch_seconds * world_size, num_batches, share=share, world_size=world_size, **parameters
        )
        ranks = list(threads.map(loop, range(world_size)))
    firsts, waits, times = zip(*ranks, strict=True)
    return list(firsts), sum(waits), sum(times)


def _rank(
    address: str, batch_seconds: float, num_batches: int, rank: int, *, share: float, **parameters: Any
) -> tuple[float, float, float]:
    began = time.perf_counter()
    dataset = RemoteDataset(address, _DATASET, batch_size=BATCH_SIZE, seq_len=_SEQ_LEN, rank=rank, **parameters)
    if share:
        dataset.load_state_dict({**dataset.state_dict(), "step": int(share * dataset.steps_per_epoch)})
    batches: Iterator[Any] = iter(dataset)
    waits, asked_at = list[float](), began
    with closing(batches):  # type: ignore[type-var]
        for _ in islice(batches, num_batches):
            waits.append(time.perf_counter() - asked_at)
            time.sleep(batch_seconds)
            asked_at = time.perf_counter()
    return waits[0], sum(waits), time.perf_counter() - began


def _peer(folder: Path) -> float | None:
    """Seconds until the peer's first batch; None where it is not installed."""
    if not _PEER.exists():
        return None
    try:
        told = _told([str(_PEER), hf_cold_start.__file__, str(folder), _DATASET, str(BATCH_SIZE), str(_SEQ_LEN)])
    except ProcessFailed:
        return None
    return float(told["first"])


def _told(command: list[str]) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(run(command, timeout_seconds=_SECONDS))
    return told
