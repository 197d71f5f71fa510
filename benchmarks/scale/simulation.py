"""A discrete-event simulation of ranks, replicas and an object store.

A rank requests ranges as penstock.prefetch does: one step, then twice as many each time, up to a few MiB, as long as its buffer
has room. All ranks begin a step when the last of them has its batch. A request waits until its replica has the blocks that it
touches, then for a process and a core, then for the link. The real client is faster in one way: it sends requests ahead.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any

from scale.model import Death, Outcome, Scenario

_SLICE_SECONDS = 0.5  # of background work, before a request may have the core
_RETRY_SECONDS = 1.0  # after an error of the store
_CLAIM_SECONDS = 20.0  # before another server makes the blocks of a dead one: _CLAIM_SECONDS in penstock_server.blocks.shared
_AHEAD, _STEPS_AHEAD, _MAX_AHEAD = 1 << 13, 4, 1 << 16  # samples read ahead: see penstock_server.batches.member
_LOOK_SECONDS = 20.0  # mean time between a rank's looks for a replica that was down: see penstock.servers

_Process = deque[tuple[float, Callable[..., None], tuple[Any, ...]]]  # jobs; the first runs, or waits for a core


def simulate(scenario: Scenario, seed: int = 0) -> Outcome:
    """Return what happens. The same scenario and seed have the same outcome."""
    return _Simulation(scenario, Random(seed)).run()


class _Clock:
    """Events in the order of their times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def after(self, seconds: float, function: Callable[..., None], *args: Any) -> None:
        self._count += 1  # events of one time keep their order
        heappush(self._events, (self.now + seconds, self._count, function, args))

    def run(self, until: float) -> None:
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, function, args = heappop(events)
            function(*args)
        self.now = until


class _Cores:
    """Cores of a machine. A process runs one job at a time; background work has the cores that no process needs."""

    def __init__(self, clock: _Clock, count: int) -> None:
        self._clock, self._free = clock, count
        self._ready = deque[_Process]()
        self._background = deque[tuple[float, Callable[..., None], tuple[Any, ...]]]()
        self.busy_seconds = 0.0

    def submit(self, process: _Process, seconds: float, done: Callable[..., None], *args: Any) -> None:
        process.append((seconds, done, args))
        if len(process) == 1:
            self._ready.append(process)
            self._start()

    def in_background(self, seconds: float, done: Callable[..., None], *args: Any) -> None:
        self._background.append((seconds, done, args))
        self._start()

    def _start(self) -> None:
        while self._free:
            if self._ready:
                process = self._ready.popleft()
                self._run(process[0][0], self._end_job, process)
            elif self._background:
                seconds, done, args = self._background.popleft()
                part = min(seconds, _SLICE_SECONDS)
                self._run(part, self._end_slice, seconds - part, done, args)
            else:
                return

    def _run(self, seconds: float, end: Callable[..., None], *args: Any) -> None:
        self._free -= 1
        self.busy_seconds += seconds
        self._clock.after(seconds, end, *args)

    def _end_job(self, process: _Process) -> None:
        self._free += 1
        _, done, args = process.popleft()
        if process:
            self._ready.append(process)
        self._start()
        done(*args)

    def _end_slice(self, left: float, done: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._free += 1
        if left > 0:
            self.in_background(left, done, *args)
        else:
            self._start()
            done(*args)


class _Link:
    """One direction of a network link, which sends one transfer after the other."""

    def __init__(self, clock: _Clock, bytes_per_second: float) -> None:
        self._clock, self._bytes_per_second = clock, bytes_per_second
        self._free_at = self.busy_seconds = 0.0

    def send(self, nbytes: float, least_seconds: float, done: Callable[..., None], *args: Any) -> None:
        """Call `done` when the bytes have arrived: when the link has sent them, and not before `least_seconds`."""
        seconds = nbytes / self._bytes_per_second
        self._free_at = max(self._clock.now, self._free_at) + seconds
        self.busy_seconds += seconds
        self._clock.after(max(self._free_at - self._clock.now, least_seconds), done, *args)


class _Replica:
    """A replica: its processes, links and blocks, and the requests that wait for blocks.

    life            number of its deaths; work of an earlier life is lost
    ranks           ranks that wait for a response
    waiting         (blocks needed, rank, steps) of requests that wait for blocks, the fewest first
    num_ready       blocks from the start of the epoch that are all in the cache; `ready` has those after the first missing one
    num_wanted      blocks from the start of the epoch that requests or read-ahead have asked for
    to_copy         blocks in the store that it may copy now; `copied` and `made` are under way
    """

    def __init__(self, clock: _Clock, scenario: Scenario, cores: _Cores) -> None:
        shape = scenario.replicas
        self.cores = cores
        self.processes = [_Process() for _ in range(shape.processes)]
        self.sent, self.received = _Link(clock, shape.network_bytes), _Link(clock, shape.network_bytes)
        self.is_up, self.life = True, 0
        self.ranks = set[int]()
        self.waiting: list[tuple[int, int, int]] = []
        self.num_ready = self.num_wanted = 0
        self.ready = set[int]()
        self.to_copy: list[int] = []
        self.copied, self.made = set[int](), set[int]()


class _BlockFlow:
    """Blocks on their way from the text or the store into the caches of the replicas; `release(replica)` follows each."""

    def __init__(
        self,
        clock: _Clock,
        random: Random,
        scenario: Scenario,
        replicas: list[_Replica],
        release: Callable[[_Replica], None],
    ) -> None:
        self._clock, self._random, self._scenario, self._release = clock, random, scenario, release
        self._blocks, self._store, self._replicas = scenario.blocks, scenario.store, replicas
        job = scenario.job
        self._step_samples, self._window = job.num_ranks * job.batch_size, job.window
        self._sample_bytes = job.seq_len * job.token_bytes
        self._ahead = min(max(_AHEAD, _STEPS_AHEAD * self._step_samples), _MAX_AHEAD)
        self._block_tokens = self._blocks.nbytes / job.token_bytes
        self._mu = math.log(self._store.median_seconds)
        self._sigma = math.log(self._store.p99_seconds / self._store.median_seconds) / 2.326  # the normal quantile of 99 %
        self._connections = scenario.replicas.cores * self._blocks.connections_per_core
        self._unclaimed: list[int] = []  # blocks that no replica makes yet
        self._num_listed = 0  # blocks that were ever unclaimed
        self._store_free_at = 0.0
        self.num_gets = self.num_puts = 0

    def needed(self, steps: int) -> int:
        """Return the number of blocks that the first `steps` steps touch."""
        return self._touched(steps * self._step_samples)

    def left_behind(self, steps: int) -> int:
        """Return the number of blocks that no step touches from `steps` on: those of the windows before."""
        return self._touched(steps * self._step_samples // self._window * self._window)

    def want(self, replica: _Replica, steps: int) -> None:
        """Get the blocks of the first `steps` steps, and of those that are read ahead, into the cache of a replica."""
        if self._blocks.place == "cached":
            return
        wanted = self._touched(steps * self._step_samples + self._ahead)
        if self._blocks.place == "stored":
            for block in range(replica.num_wanted, wanted):
                heappush(replica.to_copy, block)
            replica.num_wanted = max(replica.num_wanted, wanted)
            self._continue(replica)
        elif wanted > self._num_listed:
            for block in range(self._num_listed, wanted):
                heappush(self._unclaimed, block)
            self._num_listed = wanted
            for each in self._replicas:
                self._continue(each)

    def lose(self, replica: _Replica) -> None:
        """Drop what a replica that died was copying or making."""
        for block in replica.copied:
            heappush(replica.to_copy, block)
        if replica.made:
            self._clock.after(_CLAIM_SECONDS, self._take_over, sorted(replica.made))
        replica.copied, replica.made = set(), set()

    def resume(self, replica: _Replica) -> None:
        """Go on after a start."""
        self._continue(replica)

    def _touched(self, num_samples: int) -> int:
        """Return the number of blocks with the first samples of the epoch. In a window, a sample may be in any block."""
        if self._blocks.place == "cached":
            return 0
        per_window = self._window * self._sample_bytes / self._blocks.nbytes
        windows = num_samples / self._window
        if self._blocks.place == "text":  # the server tokenizes the requested rows first, then the others of their blocks
            return math.ceil(windows * per_window)
        full = math.floor(windows)
        samples = num_samples - full * self._window
        return math.ceil(full * per_window + per_window * -math.expm1(-samples / per_window))

    def _take_over(self, blocks: list[int]) -> None:
        for block in blocks:
            heappush(self._unclaimed, block)
        for replica in self._replicas:
            self._continue(replica)

    def _continue(self, replica: _Replica) -> None:
        if not replica.is_up:
            return
        while replica.to_copy and len(replica.copied) < self._connections:
            block = heappop(replica.to_copy)
            replica.copied.add(block)
            seconds = self._scenario.costs.stored_byte * self._blocks.nbytes
            self._get(replica, replica.life, self._blocks.nbytes, seconds, self._copied, block)
        while self._unclaimed and len(replica.made) < self._scenario.replicas.cores:
            block = heappop(self._unclaimed)
            replica.made.add(block)
            nbytes = self._block_tokens * self._blocks.text_bytes_per_token
            self._get(replica, replica.life, nbytes, self._block_tokens * self._scenario.costs.token, self._made, block)

    def _get(self, replica: _Replica, life: int, nbytes: float, seconds: float, done: Callable[..., None], block: int) -> None:
        """Read from the store, then work on what was read for `seconds` of a core."""
        now = self._clock.now
        self.num_gets += 1
        self._store_free_at = max(now, self._store_free_at) + 1 / self._store.requests_per_second
        first_byte = self._store_free_at - now + self._random.lognormvariate(self._mu, self._sigma)
        if self._random.random() < self._store.error_fraction:
            again = (replica, life, nbytes, seconds, done, block)
            self._clock.after(first_byte + _RETRY_SECONDS, lambda: self._get(*again) if life == replica.life else None)
            return
        work = replica.cores.in_background
        transfer = first_byte + nbytes / self._store.connection_bytes
        replica.received.send(nbytes, transfer, work, seconds, done, replica, life, block)

    def _copied(self, replica: _Replica, life: int, block: int) -> None:
        if life == replica.life:
            replica.copied.discard(block)
            self._continue(replica)
            self._add(replica, block)

    def _made(self, replica: _Replica, life: int, block: int) -> None:
        if life != replica.life:
            return
        replica.made.discard(block)
        self._continue(replica)
        self._add(replica, block)
        self.num_puts += 1
        stored_after = self._random.lognormvariate(self._mu, self._sigma) + self._blocks.nbytes / self._store.connection_bytes
        replica.sent.send(self._blocks.nbytes, stored_after, self._stored, replica, block)

    def _stored(self, maker: _Replica, block: int) -> None:
        for replica in self._replicas:
            if replica is not maker:
                heappush(replica.to_copy, block)
                self._continue(replica)

    def _add(self, replica: _Replica, block: int) -> None:
        replica.ready.add(block)
        while replica.num_ready in replica.ready:
            replica.ready.remove(replica.num_ready)
            replica.num_ready += 1
        self._release(replica)


class _Simulation:
    """Ranks that request ranges from replicas.

    _received   steps that each rank has received; `_at` has the number of ranks for each such number
    _parked     ranks with a full buffer, by the number of steps after which it has room
    _server     replica of each rank now
    _look_at    of ranks that are not at the replica that they prefer: when they see whether it is back
    """

    def __init__(self, scenario: Scenario, random: Random) -> None:
        self._scenario, self._random = scenario, random
        self._job, shape = scenario.job, scenario.replicas
        self._clock = clock = _Clock()
        shared = [_Cores(clock, shape.shared_cores)] if shape.shared_cores else []
        self._cores = shared or [_Cores(clock, shape.cores) for _ in range(shape.count)]
        self._replicas = [_Replica(clock, scenario, self._cores[n % len(self._cores)]) for n in range(shape.count)]
        self._blocks = _BlockFlow(clock, random, scenario, self._replicas, self._release)
        self._client = _Process()
        num_ranks = self._job.num_ranks
        self._full_steps = math.ceil(self._job.prefetch_bytes / self._job.step_bytes)
        self._received, self._size = [0] * num_ranks, [1] * num_ranks
        self._at = defaultdict[int, int](int, {0: num_ranks})
        self._parked = defaultdict[int, list[int]](list)
        self._server = [rank % shape.count for rank in range(num_ranks)]
        self._process = [random.randrange(shape.processes) for _ in range(num_ranks)]
        self._look_at = dict[int, float]()
        self._num_begun = self._num_requests = self._num_failures = self._most_blocks = 0
        self._waits_since: float | None = 0.0
        self._wait_seconds = 0.0
        self._began_at = math.inf

    def run(self) -> Outcome:
        scenario, clock, job = self._scenario, self._clock, self._job
        for death in scenario.deaths:
            clock.after(death.at, self._die, death)
        for rank in range(job.num_ranks):
            self._request(rank)
        clock.run(scenario.warm_seconds)
        start_wait, links = self._waited(), [link for each in self._replicas for link in (each.sent, each.received)]
        received = sum(self._received)
        sent, busy = [link.busy_seconds for link in links], sum(each.busy_seconds for each in self._cores)
        clock.run(scenario.seconds)
        measured = scenario.seconds - scenario.warm_seconds
        num_cores = scenario.replicas.shared_cores or scenario.replicas.cores * scenario.replicas.count
        served = sum(self._received)
        return Outcome(
            wait_fraction=(self._waited() - start_wait) / measured,
            served_per_second=(served - received) * job.step_bytes / measured,
            start_seconds=self._began_at,
            start_wait_seconds=start_wait,
            num_steps=self._num_begun,
            num_requests=self._num_requests,
            num_failures=self._num_failures,
            served_bytes=served * job.step_bytes,
            consumed_bytes=self._num_begun * job.num_ranks * job.step_bytes,
            buffered_bytes=sum(received - self._num_begun for received in self._received) * job.step_bytes,
            core_fraction=(sum(each.busy_seconds for each in self._cores) - busy) / num_cores / measured,
            network_fraction=max(link.busy_seconds - was for link, was in zip(links, sent, strict=True)) / measured,
            num_gets=self._blocks.num_gets,
            num_puts=self._blocks.num_puts,
            disk_bytes=self._most_blocks * scenario.blocks.nbytes,
        )

    def _waited(self) -> float:
        """Return the seconds that the ranks have waited until now."""
        return self._wait_seconds + (self._clock.now - self._waits_since if self._waits_since is not None else 0.0)

    def _begin_step(self) -> None:
        """Begin a step if all ranks have its batch."""
        if self._waits_since is None or self._num_begun in self._at:
            return
        now = self._clock.now
        self._wait_seconds += now - self._waits_since
        self._waits_since = None
        self._began_at = min(self._began_at, now)
        self._num_begun += 1
        for rank in self._parked.pop(self._num_begun, ()):
            self._request(rank)
        self._note_disk()
        self._clock.after(self._job.step_seconds, self._end_step)

    def _end_step(self) -> None:
        self._waits_since = self._clock.now
        self._begin_step()

    def _note_disk(self) -> None:
        left_behind = self._blocks.left_behind(min(self._at))
        for replica in self._replicas:
            self._most_blocks = max(self._most_blocks, replica.num_ready + len(replica.ready) - left_behind)

    def _request(self, rank: int) -> None:
        """Send the next request of a rank."""
        self._num_requests += 1
        replica = self._replicas[self._server_of(rank)]
        replica.ranks.add(rank)
        if not replica.is_up:
            notice = max(death.notice_seconds for death in self._scenario.deaths)
            self._clock.after(notice, self._fail, rank, replica)
            return
        steps = min(self._size[rank], self._job.range_steps)
        end = self._received[rank] + steps
        needed = self._blocks.needed(end)
        if replica.num_ready >= needed:
            self._serve(replica, rank, steps)
        else:
            heappush(replica.waiting, (needed, rank, steps))
        self._blocks.want(replica, end)

    def _release(self, replica: _Replica) -> None:
        """Serve the requests that wait for no more blocks."""
        while replica.waiting and replica.waiting[0][0] <= replica.num_ready:
            _, rank, steps = heappop(replica.waiting)
            self._serve(replica, rank, steps)

    def _serve(self, replica: _Replica, rank: int, steps: int) -> None:
        job = self._job
        seconds = self._scenario.costs.serve(steps, steps * job.batch_size, steps * job.step_bytes)
        process = replica.processes[self._process[rank]]
        replica.cores.submit(process, seconds, self._send, replica, replica.life, rank, steps)

    def _send(self, replica: _Replica, life: int, rank: int, steps: int) -> None:
        nbytes = steps * self._job.step_bytes
        if life == replica.life:
            replica.sent.send(nbytes, self._scenario.latency_seconds, self._receive, replica, life, rank, steps)

    def _receive(self, replica: _Replica, life: int, rank: int, steps: int) -> None:
        if life != replica.life:
            return
        replica.ranks.remove(rank)
        if self._scenario.has_client_costs:
            costs = self._scenario.costs
            seconds = costs.client_request + costs.client_byte * steps * self._job.step_bytes
            replica.cores.submit(self._client, seconds, self._keep, rank, steps)
        else:
            self._keep(rank, steps)

    def _keep(self, rank: int, steps: int) -> None:
        """Put batches into the buffer of a rank."""
        before = self._received[rank]
        self._received[rank] = before + steps
        self._at[before + steps] += 1
        self._at[before] -= 1
        if not self._at[before]:
            del self._at[before]
        self._size[rank] = min(2 * self._size[rank], self._job.range_steps)
        room_at = before + steps - self._full_steps + 1  # steps after which the buffer has room
        if self._num_begun >= room_at:
            self._request(rank)
        else:
            self._parked[room_at].append(rank)
        self._begin_step()

    def _server_of(self, rank: int) -> int:
        """Return the number of a rank's replica. All replicas have even shares of the ranks."""
        home, now = rank % len(self._replicas), self._clock.now
        if rank in self._look_at and now >= self._look_at[rank]:
            if self._replicas[home].is_up:
                self._server[rank] = home
                del self._look_at[rank]
            else:
                self._look_at[rank] = now + self._seconds_to_look()
        return self._server[rank]

    def _seconds_to_look(self) -> float:
        return _LOOK_SECONDS * self._random.uniform(0.5, 1.5)

    def _fail(self, rank: int, replica: _Replica) -> None:
        """Go on with another replica, and with small ranges again."""
        self._num_failures += 1
        replica.ranks.discard(rank)
        count, home = len(self._replicas), rank % len(self._replicas)
        if count == 1:
            self._clock.after(_RETRY_SECONDS, self._request, rank)
            return
        # The ranks of a lost replica spread evenly over the others.
        at_home = self._server[rank] == home
        self._server[rank] = ((home + 1 + rank // count % (count - 1)) if at_home else self._server[rank] + 1) % count
        self._look_at[rank] = self._clock.now + self._seconds_to_look()
        self._size[rank] = 1
        self._request(rank)

    def _die(self, death: Death) -> None:
        replica = self._replicas[death.replica]
        replica.is_up, replica.life, replica.waiting = False, replica.life + 1, []
        for rank in sorted(replica.ranks):
            self._clock.after(death.notice_seconds, self._fail, rank, replica)
        replica.ranks.clear()
        self._blocks.lose(replica)
        self._clock.after(death.outage_seconds, self._start_again, replica)

    def _start_again(self, replica: _Replica) -> None:
        replica.is_up = True
        self._blocks.resume(replica)
