"""Measures the planning of an epoch of a million blocks, and the look-up of one batch in it, without reading data.

    python benchmarks/planning.py [--blocks 1000000]

The snapshot is synthetic, with 100 row groups per shard; the planning code is the server's. Times depend on the machine, so
each is also given as a multiple of a numpy sort of as many numbers. Memory is the peak of Python and numpy during planning,
minus their memory before.
"""

from __future__ import annotations

import argparse
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np

from penstock.spec import Spec
from penstock_server.batches.member import Member, OrderKey, PlannedEpochs
from penstock_server.batches.plan import make_plan
from penstock_server.blocks.loader import Blocks
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.shard import Shard, numbers
from penstock_server.catalog.snapshot import Snapshot
from penstock_server.index.index import Index
from penstock_server.recipes.fields import Field
from penstock_server.recipes.recipe import Recipe
from penstock_server.sources.stats import FileStat
from ratios import seconds

GROUPS, ROWS = 100, 1000
NUM_BATCHES = 300


def synthetic(num_blocks: int) -> Snapshot:
    """Return a snapshot of shards that do not exist, with about `ROWS` rows per row group."""
    sizes = np.random.default_rng(0).integers(ROWS // 2, ROWS * 3 // 2, (num_blocks // GROUPS, GROUPS))
    shards = [
        Shard(
            Path(f"part-{n:06}.parquet"),
            FileStat(1, 0, 0, 0),
            f"{n:032x}",
            numbers(rows),
            numbers([1 << 20] * GROUPS),
            numbers([0] * GROUPS),
            (0, 50_000),
        )
        for n, rows in enumerate(sizes.tolist())
    ]
    recipe = Recipe(kind="tokens", fields=(("tokens", Field("tokens", (("", ("tokens",)),))),))
    return Snapshot(Path("synthetic"), shards, recipe, name="synthetic")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--cache-dir", type=Path, default=Path("demo-out/planning-cache"))
    num_blocks = parser.parse_args().blocks // GROUPS * GROUPS
    store = BlockStore(parser.parse_args().cache_dir, 0)

    snapshot = synthetic(num_blocks)
    blocks = Blocks(snapshot, store)
    index = Index("synthetic", snapshot, blocks)
    numbers = np.random.default_rng(0).random(num_blocks)
    sort = min(seconds(lambda: np.sort(numbers)) for _ in range(3))
    print(
        f"{snapshot.num_blocks:,} blocks, {snapshot.num_rows:,} rows; a sort of as many numbers takes {sort * 1e3:.0f} ms here"
    )

    for shuffle in ("window", "global"):
        spec = Spec(shuffle=shuffle, batch_size=32, world_size=8, snapshot=snapshot.fingerprint)
        member = Member("synthetic", snapshot, blocks, index, PlannedEpochs(), OrderKey.of(spec))
        member.epoch(0)
        planning = seconds(partial(member.epoch, 1))
        tracemalloc.start()
        member.epoch(2)
        grown = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
        plan = make_plan("synthetic", (member,), spec)
        steps = np.random.default_rng(1).integers(0, plan.schedule.num_steps, NUM_BATCHES).tolist()
        times = [seconds(partial(plan.spans, 1, 3, [step])) for step in steps]
        print(
            f"shuffle={shuffle}: an epoch is planned in {planning:.2f} s ({planning / sort:.1f} sorts) and {grown:.0f} MiB; "
            f"a batch of 32 is addressed in {np.median(times) * 1e3:.2f} ms (99 %: {np.quantile(times, 0.99) * 1e3:.2f} ms)"
        )


if __name__ == "__main__":
    main()
