"""All batches that many ranks are given at once, against what one rank alone is; blocks cached. The ranks are load.py's."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import data
from corpus import BATCH_TOKENS
from processes import anonymous_bytes, run
from ratios import Ratio, Scale
from servers import penstock

_LOAD = Path(__file__).parents[1] / "load.py"


def measure(scale: Scale) -> list[Ratio]:
    cache = data.warm_cache(scale)
    processes = len(os.sched_getaffinity(0))  # one a core, as one would for so many ranks
    with penstock(data.corpus(scale).parquet, cache, "--processes", str(processes)) as server:
        _load(server.address, 8 * processes, scale, 2.0)  # each block is looked at once, by each process
        _load(server.address, 8 * processes, scale, 2.0)  # and by those that had not begun to serve the first time
        before = _load(server.address, 1, scale, scale.rank_seconds / 4)
        small = anonymous_bytes(server.pid)
        many = _load(server.address, scale.num_ranks, scale, scale.rank_seconds)
        crowded = anonymous_bytes(server.pid)
        after = _load(server.address, 1, scale, scale.rank_seconds / 4)
    alone = mean([before["batches_per_second"], after["batches_per_second"]])
    ranks = f"{scale.num_ranks:,} ranks at once"
    return [
        Ratio(
            what=f"{ranks}: tokens a second, all together",
            against="one rank",
            ours=many["batches_per_second"] * BATCH_TOKENS,
            theirs=alone * BATCH_TOKENS,
            unit="tokens/s",
            note=f"{many['num_batches']:,} batches in {many['seconds']:.0f} s, {many['num_errors']} errors; the slowest rank "
            f"got {many['fewest_batches']}, the fastest {many['most_batches']}; {processes} server processes, "
            f"of which the one rank meets one; these ranks ask for batch after batch, and not for runs as RemoteDataset does",
        ),
        *(
            Ratio(
                what=f"{ranks}: {what}",
                against="its turn, if each in turn got one",
                ours=many[f"{name}_seconds"],
                theirs=scale.num_ranks / many["batches_per_second"],
                unit="s",
            )
            for what, name in (("the longest wait for a batch but for 1 %", "p99"), ("the longest wait for a batch", "longest"))
        ),
        Ratio(
            what=f"{ranks}: the server's anonymous memory",
            against="one rank",
            ours=crowded,
            theirs=small,
            unit="B",
        ),
    ]


def _load(address: str, num_ranks: int, scale: Scale, seconds: float) -> dict[str, Any]:
    """What load.py tells. All ask for batches of the same world, so that one batch costs what another does."""
    command = [sys.executable, str(_LOAD), address, str(num_ranks), "--world-size", str(scale.num_ranks)]
    out = run([*command, "--seconds", str(seconds)], timeout_seconds=seconds + 300)
    told: dict[str, Any] = json.loads(out)
    return told
