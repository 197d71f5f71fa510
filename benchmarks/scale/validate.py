"""Runs light ranks against one, two and three real servers on this machine, and simulates the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from statistics import median

from penstock_server.machine import num_cores
from processes import Server
from ratios import Scale
from scale import figures
from scale.calibrate import TOKEN_BYTES, light_ranks, server_on
from scale.model import MIB, Blocks, Costs, Job, Outcome, Replicas, Scenario
from scale.simulation import simulate

NUM_RANKS = (1, 8, 64, 256, 1_000)
NUM_REPLICAS = (1, 2, 3)
_JOB = Job(num_ranks=1, batch_size=4, seq_len=1024, step_seconds=0.0, token_bytes=TOKEN_BYTES, prefetch_bytes=MIB // 2)
_PACES = (0.0, 0.6, 1.2)  # of the simulated throughput: without pause, without waits, and with waits for a sixth of the time
_SECONDS = 3.0
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
            for num_ranks, pace in product(NUM_RANKS, _PACES):
                point = _median([_point(servers, costs, num_ranks, pace) for _ in range(scale.num_repeats)])
                rates = f"{point.measured_bytes / 1e6:.1f} MB/s, simulated {point.simulated_bytes / 1e6:.1f}"
                tell(f"{num_ranks:,} ranks on {num_replicas} replicas, pace {pace:g}: {rates}")
                yield point


def _median(points: list[Point]) -> Point:
    return Point(**{field.name: median(getattr(point, field.name) for point in points) for field in fields(Point)})


def _point(servers: list[Server], nominal: Costs, num_ranks: int, pace: float) -> Point:
    costs = _costs_now(servers[0], nominal)
    job = replace(_JOB, num_ranks=num_ranks)
    warm_seconds = _warm_seconds(costs, job, len(servers))
    if pace:
        throughput = _on_this_machine(costs, job, len(servers), warm_seconds).served_per_second
        job = replace(job, step_seconds=num_ranks * job.step_bytes / throughput / pace)
    run = light_ranks(servers, job, seconds=_seconds(job), warm_seconds=warm_seconds)
    simulated = _on_this_machine(costs, job, len(servers), warm_seconds)
    return Point(
        num_ranks=num_ranks,
        num_replicas=len(servers),
        pace=pace,
        measured_bytes=run.served_bytes / run.seconds,
        simulated_bytes=simulated.served_per_second,
        own_cores_bytes=_with_own_cores(nominal, job, len(servers), warm_seconds).served_per_second,
        measured_waits=run.wait_fraction,
        simulated_waits=simulated.wait_fraction,
    )


def _costs_now(server: Server, costs: Costs) -> Costs:
    """Return the costs at the speed that the machine has now: that of a virtual one changes by half within minutes."""
    run = light_ranks([server], replace(_JOB, num_ranks=16))
    batches = run.served_bytes // _JOB.step_bytes
    slowness = run.server_seconds / costs.serve(batches, batches * _JOB.batch_size, run.served_bytes, run.num_requests)
    return Costs(**{name: value * slowness for name, value in asdict(costs).items()})


def _on_this_machine(costs: Costs, job: Job, num_replicas: int, warm_seconds: float) -> Outcome:
    replicas = Replicas(count=num_replicas, cores=1, processes=1, network_bytes=_LOOPBACK_BYTES, shared_cores=num_cores())
    return _simulate(costs, job, replicas, warm_seconds)


def _with_own_cores(costs: Costs, job: Job, num_replicas: int, warm_seconds: float) -> Outcome:
    replicas = Replicas(count=num_replicas, cores=1, processes=1, network_bytes=_LOOPBACK_BYTES)
    return _simulate(costs, job, replicas, warm_seconds)


def _warm_seconds(costs: Costs, job: Job, num_replicas: int) -> float:
    """Return the time after which ranges have their full size, and buffers are full."""
    steps = job.prefetch_bytes // job.step_bytes
    num_requests = job.range_steps.bit_length() + steps // job.range_steps
    seconds = costs.serve(steps, steps * job.batch_size, job.prefetch_bytes, num_requests)
    return 1.0 + 1.3 * job.num_ranks * seconds / min(num_replicas, num_cores())


def _seconds(job: Job) -> float:
    """Return the time to measure: that of four ranges at least, since ranks fill their buffers at the same time."""
    return max(_SECONDS, 4 * job.range_steps * job.step_seconds)


def _simulate(costs: Costs, job: Job, replicas: Replicas, warm_seconds: float) -> Outcome:
    scenario = Scenario(
        costs=costs,
        job=job,
        replicas=replicas,
        blocks=Blocks(place="cached"),
        store=figures.S3,
        seconds=warm_seconds + _seconds(job),
        warm_seconds=warm_seconds,
        latency_seconds=costs.turnaround,
        has_client_costs=bool(replicas.shared_cores),
    )
    return simulate(scenario)
