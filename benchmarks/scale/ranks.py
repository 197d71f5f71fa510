"""Light ranks: they request ranges from real servers as simulation.py has it, in one process, and discard the batches.

    python benchmarks/scaling.py ranks ADDRESS,ADDRESS DATASET JOB

A rank here is a connection and a few integers, so one core drives a thousand. All begin a step when the last one has its batch.
"""

from __future__ import annotations

import asyncio
import json
import math
import resource
import time
import urllib.request
from collections import defaultdict
from dataclasses import dataclass
from urllib.parse import urlencode, urlsplit

import uvloop

from penstock.spec import Spec
from penstock.wire.names import batches_path, dataset_path
from processes import cpu_seconds
from scale.model import Job

_SINK = memoryview(bytearray(1 << 18))
_AHEAD_SECONDS = 0.002  # how early a step may begin: timers are not precise enough for shorter steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What ranks measured after the warm-up. `first_seconds` is the time from the first request to the first step."""

    seconds: float
    wait_fraction: float
    first_seconds: float
    num_steps: int
    num_requests: int
    served_bytes: int
    client_seconds: float
    server_seconds: float


class _Connection(asyncio.BufferedProtocol):
    """Sends one request after the other, and counts the bytes of the bodies."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._head, self._left = bytearray(), 0
        self._done: asyncio.Future[None] | None = None

    def connection_lost(self, error: Exception | None) -> None:
        if self._done and not self._done.done():
            self._done.set_exception(error or ConnectionError("the server closed a connection in a response"))

    async def get(self, request: bytes) -> None:
        """Request a range, and wait until its body has arrived. Raises ValueError: the response is an error."""
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        await self._done

    def get_buffer(self, _: int) -> memoryview:
        return _SINK

    def buffer_updated(self, nbytes: int) -> None:
        if not self._left:
            self._head += _SINK[:nbytes]
            end = self._head.find(b"\r\n\r\n") + 4
            if end < 4:
                return
            nbytes = len(self._head) - end
            self._left = _body_bytes(bytes(self._head[:end]), self._done)
            self._head.clear()
        self._left -= nbytes
        if not self._left and self._done and not self._done.done():
            self._done.set_result(None)


def _body_bytes(head: bytes, done: asyncio.Future[None] | None) -> int:
    status, *lines = head.lower().split(b"\r\n")
    if b" 200 " not in status and done:
        done.set_exception(ValueError(f"a server responds with {status.decode()}"))
    return next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))


class Ranks:
    """All ranks of `job` on the servers at some addresses; rank r has the address r modulo their number.

    With `range_steps`, all ranges have that many steps, from the first on.
    """

    def __init__(self, addresses: list[str], dataset: str, job: Job, range_steps: int | None = None) -> None:
        self._addresses, self._dataset, self._job = addresses, dataset, job
        spec = Spec(batch_size=job.batch_size, seq_len=job.seq_len, world_size=job.num_ranks, shuffle="global", drop_last=False)
        with urllib.request.urlopen(f"{addresses[0]}{dataset_path(dataset)}/spec?{urlencode(spec.to_query())}") as response:
            resolved = json.loads(response.read())
        self._query = urlencode({**spec.to_query(), "snapshot": resolved["snapshot"]})
        self._num_steps = resolved["num_steps"]
        self._first_steps, self._range_steps = range_steps or 1, range_steps or job.range_steps
        self._full_steps = math.ceil(job.prefetch_bytes / job.step_bytes)
        self._received = [0] * job.num_ranks
        self._at = defaultdict[int, int](int, {0: job.num_ranks})
        self._parked = defaultdict[int, list[asyncio.Event]](list)
        self._num_begun = self._num_requests = 0
        self._free_at = 0.0  # when the step that was begun last ends
        self._arrived = asyncio.Event()

    async def run(self, warm_seconds: float, seconds: float, server_pids: list[int]) -> Run:
        connections = [await self._connect(rank) for rank in range(self._job.num_ranks)]
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:  # a failed rank ends all
            tasks = [group.create_task(self._fetch(*each)) for each in enumerate(connections)]
            await self._wait()
            first = time.perf_counter() - began
            await self._step(began + warm_seconds)
            at, steps, requests, received = time.perf_counter(), self._num_begun, self._num_requests, sum(self._received)
            client, server = time.process_time(), sum(map(cpu_seconds, server_pids))
            waited = await self._step(at + seconds)
            took = time.perf_counter() - at
            for task, connection in zip(tasks, connections, strict=True):
                task.cancel()
                connection.transport.abort()
        return Run(
            seconds=took,
            wait_fraction=waited / took,
            first_seconds=first,
            num_steps=self._num_begun - steps,
            num_requests=self._num_requests - requests,
            served_bytes=(sum(self._received) - received) * self._job.step_bytes,
            client_seconds=time.process_time() - client,
            server_seconds=sum(map(cpu_seconds, server_pids)) - server,
        )

    async def _connect(self, rank: int) -> _Connection:
        place = urlsplit(self._addresses[rank % len(self._addresses)])
        assert place.hostname
        assert place.port
        connect = asyncio.get_running_loop().create_connection
        transport, connection = await connect(_Connection, place.hostname, place.port)
        connection.transport = transport
        return connection

    async def _step(self, until: float) -> float:
        """Train until a time; return the seconds of waits."""
        waited = 0.0
        while (now := time.perf_counter()) < until:
            await self._wait()
            waited += max(0.0, time.perf_counter() - max(now, self._free_at))
            self._num_begun += 1
            for room in self._parked.pop(self._num_begun, ()):
                room.set()
            self._free_at = max(time.perf_counter(), self._free_at) + self._job.step_seconds
            await asyncio.sleep(max(0.0, self._free_at - time.perf_counter() - _AHEAD_SECONDS))
        return waited

    async def _wait(self) -> None:
        while self._num_begun in self._at:
            self._arrived.clear()
            await self._arrived.wait()

    async def _fetch(self, rank: int, connection: _Connection) -> None:
        size = self._first_steps
        host = urlsplit(self._addresses[0]).netloc
        while True:
            epoch, start = divmod(self._received[rank], self._num_steps)
            stop = min(start + size, self._num_steps)
            path = f"{batches_path(self._dataset, epoch, rank)}?start={start}&stop={stop}&stride=1&{self._query}"
            self._num_requests += 1
            await connection.get(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            size = min(2 * size, self._range_steps)
            self._keep(rank, stop - start)
            room_at = self._received[rank] - self._full_steps + 1
            if self._num_begun < room_at:
                room = asyncio.Event()
                self._parked[room_at].append(room)
                await room.wait()

    def _keep(self, rank: int, steps: int) -> None:
        before = self._received[rank]
        self._received[rank] = before + steps
        self._at[before + steps] += 1
        self._at[before] -= 1
        if not self._at[before]:
            del self._at[before]
            self._arrived.set()


def measure(
    addresses: list[str],
    dataset: str,
    job: Job,
    *,
    warm_seconds: float,
    seconds: float,
    range_steps: int | None,
    server_pids: list[int],
) -> Run:
    """Run all ranks in this process."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one connection per rank
    return uvloop.run(Ranks(addresses, dataset, job, range_steps).run(warm_seconds, seconds, server_pids))
