"""`penstock bench`: what this trainer can pull from a server, as a training loop gets it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from penstock.commands.address import parse_address
from penstock.commands.arguments import first_of, spec_query
from penstock.commands.measure import Figures, measure
from penstock.commands.remote import connected, dataset_of, describe_dataset
from penstock.commands.supply import Supply, frames, tensors
from penstock.display.status_line import StatusLine
from penstock.display.terminal import BOLD, DIM, YELLOW, Terminal
from penstock.printable import printable
from penstock.text import size, without_passwords
from penstock.transport.transport import Transport

_FEW_EPOCHS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """All that a run of the benchmark found.

    first_batch_seconds  from the first request to the first batch
    paced                the same at `target_tokens_per_second` tokens a second
    newly_cached_bytes   what the server decoded meanwhile; None where it does not tell
    """

    server: str
    dataset: str
    supply: Supply
    first_batch_seconds: float
    free: Figures
    target_tokens_per_second: float | None
    paced: Figures | None
    newly_cached_bytes: int | None


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints. Raises the PenstockError that says why there is nothing to measure."""
    address = parse_address(arguments.address)
    query = spec_query(arguments, address)
    epoch, rank = first_of(arguments.epoch, address.epoch), first_of(arguments.rank, address.rank)
    with connected(address.server) as transport:
        dataset = dataset_of(address, transport)
        cached_before = _cached_bytes(transport, dataset)
        supply = (frames if arguments.no_tensors else tensors)(address.server, dataset, query, rank, epoch)
        status = StatusLine()

        def tick(seconds: float, num_tokens: int, num_bytes: int) -> None:
            rates = f"{_short(num_tokens / seconds)} tokens/s  {num_bytes / seconds / 1e6:,.1f} MB/s"
            status.draw(f"{seconds:5.1f} s  {rates}")

        with closing(supply.batches), status:
            began = time.perf_counter()
            next(supply.batches)
            first_batch_seconds = time.perf_counter() - began
            free = measure(supply, arguments.seconds, tick)
            rate = arguments.target_tokens_per_second
            paced = measure(supply, arguments.seconds, tick, tokens_per_second=rate) if rate else None
        cached = _cached_bytes(transport, dataset)
    result = Result(
        server=without_passwords(address.server),
        dataset=dataset,
        supply=supply,
        first_batch_seconds=first_batch_seconds,
        free=free,
        target_tokens_per_second=rate,
        paced=paced,
        newly_cached_bytes=None if cached is None or cached_before is None else max(0, cached - cached_before),
    )
    lines = [json.dumps(_as_json(result), indent=2)] if arguments.json else _as_text(result, Terminal.of(sys.stdout))
    for line in lines:
        print(line)
    return 0


def _cached_bytes(transport: Transport, dataset: str) -> int | None:
    cache = describe_dataset(transport, dataset).get("cache")
    return cache["used_bytes"] if cache else None


def _as_text(result: Result, terminal: Terminal) -> Iterator[str]:
    spec, free = result.supply.spec, result.free
    shape = f"batches of {spec.batch_size} x {spec.seq_len:,}, packing {spec.packing}, snapshot {spec.snapshot}"
    yield f"{terminal.paint(printable(result.dataset), BOLD)} from {printable(result.server)}"
    yield from terminal.paragraph(f"{shape}; {result.supply.memory}", DIM)
    yield ""
    padding = 1 - free.num_tokens / max(free.num_positions, 1)
    padded = f"{_short(free.num_positions / free.seconds)} positions/s with the {padding:.0%} padding" if padding else ""
    yield _row("tokens", f"{_short(free.tokens_per_second)} tokens/s", padded)
    yield _row("wire", f"{free.bytes_per_second / 1e6:,.1f} MB/s", f"{free.num_batches:,} batches in {free.seconds:.1f} s")
    cores = f"per million tokens; {free.cpu_seconds / free.seconds:.2f} cores busy"
    yield _row("CPU", f"{free.cpu_seconds_per_million_tokens:.3f} s", cores)
    yield _row("wait, p50", *_waits(free))
    if result.paced:
        yield _row(f"at {_short(result.target_tokens_per_second or 0)}/s", *_waits(result.paced))
    yield _row("first batch", f"{result.first_batch_seconds:.2f} s", "")
    yield ""
    for warning in _warnings(result):
        yield from terminal.paragraph(warning, YELLOW)
    yield from terminal.paragraph(_verdict(result))


def _row(name: str, value: str, more: str) -> str:
    return f"  {name:<12}{value:>16}   {more}".rstrip()


def _waits(figures: Figures) -> tuple[str, str]:
    p50, p99, longest = (
        f"{1000 * seconds:.2f} ms" for seconds in (figures.waits.p50, figures.waits.p99, figures.waits.longest)
    )
    return p50, f"p99 {p99}, longest {longest}"


def _warnings(result: Result) -> Iterator[str]:
    if result.supply.num_steps * _FEW_EPOCHS < result.free.num_batches:
        yield (
            f"An epoch has only {result.supply.num_steps:,} steps, and every epoch begins with a wait: a larger dataset shows "
            f"better figures."
        )
    if result.newly_cached_bytes:
        yield (
            f"The server decoded blocks meanwhile (its cache grew by {size(result.newly_cached_bytes)}): these are the "
            f"figures of a cold cache. Measure again to see those of a warm one."
        )
    if retries := result.free.num_retries + (result.paced.num_retries if result.paced else 0):
        yield f"{retries:,} requests failed and were made again; penstock doctor may tell why."


def _verdict(result: Result) -> str:
    could = f"This client could feed {_short(result.free.tokens_per_second)} tokens/s."
    if not result.paced or not result.target_tokens_per_second:
        waits = (
            f"some {_waits(result.free)[0]} a batch; --target-tokens-per-second measures it"
            if result.supply.makes_tensors
            else "hardly"
        )
        return f"{could} A model that takes fewer waits {waits}; one that takes twice as many would wait half of its time."
    share = f"{result.paced.waits.share:.1%}"
    return f"{could} At {_short(result.target_tokens_per_second)} tokens/s of training the loop waited {share} of the time."


def _as_json(result: Result) -> dict[str, Any]:
    return {
        "server": result.server,
        "dataset": result.dataset,
        "memory": result.supply.memory,
        "spec": result.supply.spec.to_dict(),
        "first_batch_seconds": result.first_batch_seconds,
        **_figures(result.free),
        "target_tokens_per_second": result.target_tokens_per_second,
        "at_training_rate": _figures(result.paced) if result.paced else None,
        "newly_cached_bytes": result.newly_cached_bytes,
    }


def _figures(figures: Figures) -> dict[str, Any]:
    rates = ("tokens_per_second", "bytes_per_second", "cpu_seconds_per_million_tokens")
    return asdict(figures) | {name: getattr(figures, name) for name in rates}


def _short(number: float) -> str:
    """Three digits, as 1.23M or 456k."""
    for letter, unit in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= unit:
            return f"{number / unit:.3g}{letter}"
    return f"{number:.3g}"
