"""What is simulated: the costs of the server's work, a training job, replicas, a store, and failures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MIB = 1 << 20
BLOCK_BYTES = 8 * MIB
_RANGE_BYTES = 8 * MIB  # of the client: RANGE_BYTES in penstock.prefetch
_MIN_RANGES = 4  # likewise


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Core seconds of each piece of work, as calibrate.py measures them.

    request, batch, sample, byte    the server's, for a range of batches whose blocks are mapped
    client_request, client_byte     those of the light ranks that validate.py runs
    turnaround                      seconds from a request to its response over loopback, without the work of both
    stored_byte                     a block from the shared store into the cache, per byte
    decoded_byte                    a block of ids from zstd Parquet into the cache and the shared store, per byte
    token                           text from Parquet into the cache, per token
    """

    request: float
    batch: float
    sample: float
    byte: float
    client_request: float
    client_byte: float
    turnaround: float
    stored_byte: float
    decoded_byte: float
    token: float

    def serve(self, num_batches: int, num_samples: int, nbytes: int, num_requests: int = 1) -> float:
        """Return the core seconds of requests. Amounts are of all of them."""
        return self.request * num_requests + self.batch * num_batches + self.sample * num_samples + self.byte * nbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A training job. All ranks begin a step together, when the last one has its batch."""

    num_ranks: int
    batch_size: int
    seq_len: int
    step_seconds: float
    token_bytes: int = 4  # of ids above 65,535; others take 2
    prefetch_bytes: int = 64 * MIB
    window: int = 262_144  # samples

    @property
    def step_bytes(self) -> int:
        """Bytes of one batch of one rank."""
        return self.batch_size * self.seq_len * self.token_bytes

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks, without waits."""
        return self.num_ranks * self.batch_size * self.seq_len / self.step_seconds

    @property
    def range_steps(self) -> int:
        """Steps of the largest range that the client requests."""
        return max(1, min(_RANGE_BYTES, self.prefetch_bytes // _MIN_RANGES) // self.step_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """Equal replicas. With `shared_cores`, they and the ranks run on one machine of that many cores, as validate.py has it."""

    count: int
    cores: int
    processes: int
    network_bytes: float  # per second, each way
    shared_cores: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """An object store. Seconds to the first byte have a lognormal distribution."""

    median_seconds: float
    p99_seconds: float
    connection_bytes: float  # per second
    requests_per_second: float
    error_fraction: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """Where blocks are when the job begins.

    cached    on the disk of each replica
    stored    in the shared store; each replica copies each block once
    text      nowhere: one replica makes a block from text and stores it, and the others copy it
    """

    place: Literal["cached", "stored", "text"]
    nbytes: int = BLOCK_BYTES
    text_bytes_per_token: float = 2.0  # in Parquet, zstd
    connections_per_core: int = 5  # of a replica to the store: 4 threads that map blocks, and 1 that reads ahead


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """A replica dies at a time, without a word, and is back after `outage_seconds` with the disk that it had."""

    at: float
    replica: int
    outage_seconds: float = 120.0
    notice_seconds: float = 30.0  # the client's read timeout


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A job on replicas for `seconds`. Waits count after `warm_seconds`."""

    costs: Costs
    job: Job
    replicas: Replicas
    blocks: Blocks
    store: Store
    deaths: tuple[Death, ...] = ()
    seconds: float = 900.0
    warm_seconds: float = 300.0
    latency_seconds: float = 0.0005  # from a request to the first byte, without the server's work
    has_client_costs: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a simulation counted. Amounts are of all ranks or replicas until the end.

    wait_fraction         share of the time after `warm_seconds` in which the ranks wait for a batch
    served_per_second     bytes of batches after `warm_seconds`
    start_seconds         time until the first step begins
    start_wait_seconds    waits before `warm_seconds`
    served_bytes          bytes of batches that ranks received
    consumed_bytes        bytes of batches of the steps that began
    buffered_bytes        bytes that the ranks hold at the end
    network_fraction      busiest direction of the busiest link of a replica, share of the time after `warm_seconds`
    disk_bytes            blocks of one replica that a rank may still request, at most
    """

    wait_fraction: float
    served_per_second: float
    start_seconds: float
    start_wait_seconds: float
    num_steps: int
    num_requests: int
    num_failures: int
    served_bytes: int
    consumed_bytes: int
    buffered_bytes: int
    core_fraction: float
    network_fraction: float
    num_gets: int
    num_puts: int
    disk_bytes: int
