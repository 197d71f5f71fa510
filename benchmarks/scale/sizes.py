"""Searches for the cheapest replicas that keep waits under a thousandth of the time, although one of them dies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from scale import figures
from scale.model import BLOCK_BYTES, MIB, Blocks, Costs, Death, Job, Outcome, Replicas, Scenario
from scale.simulation import simulate

NUM_RANKS = (8, 64, 256, 1_000, 4_096, 8_192, 100_000)
MAX_WAITS = 0.001
SEQ_LEN = 8_192
PREFETCH_BYTES = 16 * MIB  # eight minutes of a rank
_PROCESSES = 8  # of a replica, or a quarter of its cores if that is more; the other cores make blocks
_SECONDS = 600.0
_MAX_REPLICAS = 16  # of a size that is not the largest: each copies all blocks
_TRIES = 3  # numbers of replicas of each size, from the smallest that can do the work
_HEADROOM = 1.35  # of the cores that tokenize: for the share of a dead replica, and until text has arrived; less never suffices

Place = Literal["stored", "text"]
PLACES: tuple[Place, ...] = ("stored", "text")


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The cheapest replicas for a run, and what it then costs. Amounts are of the whole run."""

    num_ranks: int
    place: Place
    num_replicas: int
    cores: int  # of each replica
    disk_bytes: float  # of each
    run_hours: float
    num_gets: float
    num_puts: float
    outcome: Outcome

    @property
    def num_cores(self) -> int:
        return self.num_replicas * self.cores

    @property
    def compute_dollars(self) -> float:
        return self.num_cores * self.run_hours * figures.CORE_DOLLARS

    @property
    def store_dollars(self) -> float:
        """Requests, and the room of all blocks during the run."""
        stored = figures.RUN_TOKENS * 4 / 1e9 * figures.STORED_DOLLARS * self.run_hours / figures.MONTH_HOURS
        return self.num_gets * figures.GET_DOLLARS + self.num_puts * figures.PUT_DOLLARS + stored


def job(num_ranks: int) -> Job:
    """Return a job whose ranks take one sample a step."""
    return Job(
        num_ranks=num_ranks,
        batch_size=1,
        seq_len=SEQ_LEN,
        step_seconds=SEQ_LEN / figures.TOKENS_PER_SECOND,
        prefetch_bytes=PREFETCH_BYTES,
    )


def smallest(num_ranks: int, place: Place, costs: Costs, tell: Callable[[str], None]) -> Size:
    """Return the cheapest replicas for a run. Raises ValueError: no size that figures.SIZES has suffices."""
    best: tuple[int, Replicas, Outcome] | None = None
    training = job(num_ranks)
    bytes_per_second = training.tokens_per_second * training.token_bytes
    for cores in figures.SIZES:
        network = cores * figures.CORE_NETWORK_BYTES
        work = training.tokens_per_second * costs.token * _HEADROOM if place == "text" else 0.0
        least = max(2, math.ceil(work / cores), math.ceil(bytes_per_second / network))
        if least > _MAX_REPLICAS and cores < figures.SIZES[-1]:
            continue
        # Each replica copies all blocks.
        if bytes_per_second > network or least * bytes_per_second / BLOCK_BYTES > figures.S3.requests_per_second:
            continue
        for count in range(least, least + _TRIES):
            if best and count * cores > best[0]:
                break
            replicas = Replicas(
                count=count, cores=cores, processes=max(min(cores, _PROCESSES), cores // 4), network_bytes=network
            )
            outcome = simulate(_scenario(costs, training, replicas, place))
            tell(f"{num_ranks:,} ranks, {place}, {count} replicas of {cores} cores: waits {outcome.wait_fraction:.2%}")
            if outcome.wait_fraction <= MAX_WAITS:
                best = count * cores, replicas, outcome
                break
    if not best:
        raise ValueError(
            f"no replicas of at most {figures.SIZES[-1]} cores feed {num_ranks:,} ranks from {place}: each copies all blocks"
        )
    _, replicas, outcome = best
    hours = figures.RUN_TOKENS / training.tokens_per_second / 3600
    blocks = figures.RUN_TOKENS * training.token_bytes / BLOCK_BYTES
    return Size(
        num_ranks=num_ranks,
        place=place,
        num_replicas=replicas.count,
        cores=replicas.cores,
        disk_bytes=outcome.disk_bytes,
        run_hours=hours,
        num_gets=blocks * replicas.count,
        num_puts=blocks,
        outcome=outcome,
    )


def _scenario(costs: Costs, training: Job, replicas: Replicas, place: Place) -> Scenario:
    return Scenario(
        costs=costs,
        job=training,
        replicas=replicas,
        blocks=Blocks(place=place),
        store=figures.S3,
        deaths=(Death(at=_SECONDS / 2, replica=0),),
        seconds=_SECONDS,
        warm_seconds=_SECONDS / 3,
    )
