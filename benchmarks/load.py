"""Simulates many ranks in one process. Each requests batches from one server, one after the other, without a pause.

    python benchmarks/load.py http://127.0.0.1:8000 1000 --world-size 1000 --seconds 30

Prints the figures of all ranks as JSON. The first batch of each rank is checked: it must be that rank's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import time
import urllib.request
from dataclasses import dataclass, field
from itertools import count
from statistics import quantiles
from urllib.parse import urlencode, urlsplit

from corpus import BATCH_SIZE, SEQ_LEN
from penstock import wire
from penstock.spec import Spec


@dataclass(slots=True)
class Rank:
    """The batches of one rank."""

    num_batches: int = 0
    num_errors: int = 0
    seconds: list[float] = field(default_factory=list)  # wait for each batch


class Load:
    """Ranks of `spec` on one server, which start together and run for `seconds`."""

    def __init__(self, address: str, spec: Spec, seconds: float) -> None:
        self._address, self._seconds = address, seconds
        query = urlencode(spec.to_query())
        with urllib.request.urlopen(f"{address}/v1/datasets/tokens/spec?{query}") as answer:
            resolved = json.loads(answer.read())
        self._query = urlencode({**spec.to_query(), "snapshot": resolved["snapshot"]})
        self._num_steps = resolved["num_steps"]
        self._start = asyncio.Event()
        self._end = 0.0

    async def run(self, num_ranks: int) -> tuple[list[Rank], float]:
        """Return the result of each rank, and the seconds until the last batch of the last rank."""
        ready = asyncio.Semaphore(0)
        tasks = [asyncio.create_task(self._rank(number, ready)) for number in range(num_ranks)]
        for _ in range(num_ranks):
            await ready.acquire()
        began = time.perf_counter()
        self._end = began + self._seconds
        self._start.set()
        return await asyncio.gather(*tasks), time.perf_counter() - began

    async def _rank(self, number: int, ready: asyncio.Semaphore) -> Rank:
        place = urlsplit(self._address)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        ready.release()
        await self._start.wait()
        rank = Rank()
        for turn in count():
            if (began := time.perf_counter()) >= self._end:
                break
            epoch, step = divmod(turn, self._num_steps)
            path = f"/v1/datasets/tokens/epochs/{epoch}/ranks/{number}/batches/{step}?{self._query}"
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(_content_length(head))
            if not head.startswith(b"HTTP/1.1 200") or (turn == 0 and not _is_for(body, number)):
                rank.num_errors += 1
            rank.num_batches += 1
            rank.seconds.append(time.perf_counter() - began)
        writer.close()
        return rank


def _content_length(head: bytes) -> int:
    [length] = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return int(length.split(b":")[1])


def _is_for(body: bytes, rank: int) -> bool:
    [frame] = wire.decode(body)
    return frame.address.rank == rank and frame.tensors["input_ids"].shape == (BATCH_SIZE, SEQ_LEN)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.add_argument("num_ranks", type=int)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    asked = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one connection per rank
    spec = Spec(batch_size=BATCH_SIZE, seq_len=SEQ_LEN, world_size=asked.world_size, shuffle="global", drop_last=False)
    ranks, took = await Load(asked.address, spec, asked.seconds).run(asked.num_ranks)
    counts = [rank.num_batches for rank in ranks]
    waits = [seconds for rank in ranks for seconds in rank.seconds]
    told = {
        "num_batches": sum(counts),
        "seconds": took,
        "batches_per_second": sum(counts) / took,
        "fewest_batches": min(counts),
        "most_batches": max(counts),
        "p99_seconds": quantiles(waits, n=100)[98],
        "longest_seconds": max(waits),
        "num_errors": sum(rank.num_errors for rank in ranks),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    asyncio.run(main())
