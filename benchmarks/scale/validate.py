"""Runs light ranks against one, two and three real servers on this machine, and simulates the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median

from penstock_server.machine import num_cores
from ratios import Scale
from scale import figures
from scale.calibrate import TOKEN_BYTES, light_ranks, server_on
from scale.model import MIB, Blocks, Costs, Job, Outcome, Replicas, Scenario
from scale.simulation import simulate

NUM_RANKS = (1, 8, 64, 256, 1_000)
NUM_REPLICAS = (1, 2, 3)
_JOB = Job(num_ranks=1, batch_size=4, seq_len=1024, step_seconds=0.0, token_bytes=TOKEN_BYTES, prefetch_bytes=MIB // 2)
_PACES = (0.6, 1.2)  # of the simulated throughput: the ranks should not wait, or wait for a sixth of the time
_SECONDS, _WARM_SECONDS, _WARM_SECONDS_PER_RANK = 3.0, 1.0, 0.005  # until ranges have their full size
_LOOPBACK_BYTES = 1e12  # a second: its time is in the costs


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Ranks on replicas of one process, measured and simulated on the cores of one machine.

    `pace` is the demand over the simulated throughput; 0 if a step takes no time. `own_cores_bytes` is simulated with a core
    for each replica, and other machines for the ranks.
    """

    num_ranks: int
    num_replicas: int
    pace: float
    measured_bytes: float  # per second
    simulated_bytes: float
    own_cores_bytes: float
    measured_waits: float  # share of the time
    simulated_waits: float


def validate(scale: Scale, costs: Costs, tell: Callable[[str], None]) -> Iterator[Point]:
    """Yield the points, with the medians of `scale.num_repeats` runs of each."""
    for num_replicas in NUM_REPLICAS:
        with ExitStack() as stack:
            servers = [stack.enter_context(server_on("", scale)) for _ in range(num_replicas)]
            for server in servers:
                light_ranks([server], replace(_JOB, num_ranks=8))  # maps all blocks
            for num_ranks in NUM_RANKS:
                job = replace(_JOB, num_ranks=num_ranks)
                throughput = _on_this_machine(costs, job, num_replicas).served_per_second
                for pace in (0.0, *_PACES):
                    tell(f"{num_ranks} ranks on {num_replicas} replicas, pace {pace:g}")
                    step = num_ranks * job.step_bytes / throughput / pace if pace else 0.0
                    paced = replace(job, step_seconds=step)
                    runs = [
                        light_ranks(servers, paced, seconds=_SECONDS, warm_seconds=_warm_seconds(job))
                        for _ in range(scale.num_repeats)
                    ]
                    simulated = _on_this_machine(costs, paced, num_replicas)
                    yield Point(
                        num_ranks=num_ranks,
                        num_replicas=num_replicas,
                        pace=pace,
                        measured_bytes=median(run.served_bytes / run.seconds for run in runs),
                        simulated_bytes=simulated.served_per_second,
                        own_cores_bytes=_with_own_cores(costs, paced, num_replicas).served_per_second,
                        measured_waits=median(run.wait_fraction for run in runs),
                        simulated_waits=simulated.wait_fraction,
                    )


def _on_this_machine(costs: Costs, job: Job, num_replicas: int) -> Outcome:
    replicas = Replicas(count=num_replicas, cores=1, processes=1, network_bytes=_LOOPBACK_BYTES, shared_cores=num_cores())
    return _simulate(costs, job, replicas)


def _with_own_cores(costs: Costs, job: Job, num_replicas: int) -> Outcome:
    return _simulate(costs, job, Replicas(count=num_replicas, cores=1, processes=1, network_bytes=_LOOPBACK_BYTES))


def _warm_seconds(job: Job) -> float:
    return _WARM_SECONDS + _WARM_SECONDS_PER_RANK * job.num_ranks


def _simulate(costs: Costs, job: Job, replicas: Replicas) -> Outcome:
    scenario = Scenario(
        costs=costs,
        job=job,
        replicas=replicas,
        blocks=Blocks(place="cached"),
        store=figures.S3,
        seconds=_warm_seconds(job) + _SECONDS,
        warm_seconds=_warm_seconds(job),
        latency_seconds=costs.turnaround,
        has_client_costs=bool(replicas.shared_cores),
    )
    return simulate(scenario)
