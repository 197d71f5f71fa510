"""`penstock bench`: how fast this machine can pull batches from a server, as a training loop gets them."""

from __future__ import annotations

import argparse
import json
import time
from array import array
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from penstock.batch import IGNORED, SIDES
from penstock.cli.arguments import ADDRESS, add_spec_options, amount, whole_number
from penstock.cli.connection import connected, dataset_of, describe_dataset, first_given, parse_address, set_run, spec_query
from penstock.cli.output import stdout_console
from penstock.client import Client, Resolved
from penstock.errors import PenstockError, SpecError
from penstock.prefetch import PREFETCH_BYTES, fetch_ahead
from penstock.spec import Spec
from penstock.text import printable, size
from penstock.transport import Transport
from penstock.wire import Frame

Tick = Callable[[float, int, int], None]  # takes the seconds, tokens and bytes so far

_FEW_EPOCHS = 3
_RETRY_SECONDS = 10.0
_TICK_SECONDS = 0.25


def configure(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    command.description = (
        "Pulls batches as a training loop does, and reports how many tokens per second this client could feed, and how long "
        "a loop would wait for them."
    )
    command.add_argument("address", metavar="ADDRESS", help=ADDRESS)
    command.add_argument("--seconds", type=amount, metavar="N", default=10.0, help="how long to measure (default: 10)")
    command.add_argument(
        "--target-tokens-per-second",
        type=amount,
        metavar="N",
        help="tokens per second that the model takes, such as 250k: measures once more, at that pace",
    )
    command.add_argument("--epoch", type=whole_number, metavar="N", help="the first epoch to pull (default: 0)")
    command.add_argument("--rank", type=whole_number, metavar="N", help="which rank, from 0 (default: 0)")
    command.add_argument(
        "--no-tensors", action="store_true", help="only fetch and check, without torch: measures network and server alone"
    )
    command.add_argument("--json", action="store_true", help="print the figures as JSON")
    add_spec_options(command, without=("offset",))
    set_run(command, "bench", run)


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """Contents of one batch: tokens, and positions, which are tokens and padding."""

    num_tokens: int
    num_positions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Supply:
    """Endless supply of batches; `num_bytes` and `num_retries` count the cost so far.

    spec           with every parameter resolved, the snapshot included
    num_steps      steps of an epoch
    memory         location of batches, as a text
    makes_tensors  builds tensors as for a loop, which costs some of the loop's time per batch
    """

    spec: Spec
    num_steps: int
    memory: str
    makes_tensors: bool
    batches: Generator[Any, None, None]
    count: Callable[[Any], Count]
    num_bytes: Callable[[], int]
    num_retries: Callable[[], int]


def tensors(server: str, dataset: str, query: Mapping[str, str], rank: int, epoch: int) -> Supply:
    """Supply RemoteDataset's batches. Raises PenstockError: torch is missing; and what RemoteDataset raises."""
    try:
        import torch

        from penstock.dataset import RemoteDataset
    except ImportError as error:
        raise PenstockError(
            f"RemoteDataset needs torch, which is not installed ({error}): pip install 'penstock[torch]'. Or measure "
            f"network and server alone, with --no-tensors."
        ) from error
    parameters: dict[str, Any] = {name: value for name, value in _spec(query).to_dict().items() if name != "offset"}
    data = RemoteDataset(server, dataset, rank=rank, retry_seconds=_RETRY_SECONDS, **parameters)
    _check_steps(data.steps_per_epoch, data.spec)

    def batches() -> Generator[Any, None, None]:
        for number in count(epoch):
            data.set_epoch(number)
            yield from data

    return Supply(
        spec=data.spec,
        num_steps=data.steps_per_epoch,
        memory="tensors in pinned memory" if torch.cuda.is_available() else "tensors in ordinary memory (no GPU)",
        makes_tensors=True,
        batches=batches(),
        count=partial(_count_tensors, data.spec.task == "seq2seq"),
        num_bytes=lambda: data.stats().num_bytes,
        num_retries=lambda: data.stats().num_retries,
    )


def frames(server: str, dataset: str, query: Mapping[str, str], rank: int, epoch: int) -> Supply:
    """Supply frames that are fetched ahead and checked, without tensors. Raises what Client raises."""
    client = Client(server, dataset, rank=rank, retry_seconds=_RETRY_SECONDS)
    resolved = client.resolve(_spec(query))
    _check_steps(resolved.num_steps, resolved.spec)
    transports: list[Transport] = []

    def batches() -> Generator[Frame, None, None]:
        for number in count(epoch):
            transports.append(client.connect())
            yield from _epoch(client, transports[-1], resolved, number)

    return Supply(
        spec=resolved.spec,
        num_steps=resolved.num_steps,
        memory="frames as they came, without tensors",
        makes_tensors=False,
        batches=batches(),
        count=_count_frame,
        num_bytes=lambda: sum(transport.num_bytes for transport in transports),
        num_retries=lambda: sum(transport.num_retries for transport in transports),
    )


def _epoch(client: Client, transport: Transport, resolved: Resolved, epoch: int) -> Iterator[Frame]:
    ahead = fetch_ahead(client, transport, resolved.spec, epoch, range(resolved.num_steps), PREFETCH_BYTES)
    with closing(transport), closing(ahead):
        yield from ahead


def _spec(query: Mapping[str, str]) -> Spec:
    spec = Spec.from_query(query.items())
    if spec.offset:
        raise SpecError("bench starts at an epoch's first sample: leave offset out", ("offset",))
    return spec


def _check_steps(num_steps: int, spec: Spec) -> None:
    if not num_steps:
        raise SpecError(
            f"an epoch has no step: it has fewer samples than batch_size={spec.batch_size} times "
            f"world_size={spec.world_size}. Lower them, or give --drop-last false.",
            ("batch_size",),
        )


def _count_tensors(is_seq2seq: bool, batch: Mapping[str, Any]) -> Count:
    masks = [batch[f"{side}attention_mask"] for side in SIDES if f"{side}attention_mask" in batch]
    if is_seq2seq:  # labels hold the response's tokens
        masks.append(batch["labels"] != IGNORED)
    return Count(num_tokens=sum(int(mask.sum()) for mask in masks), num_positions=sum(mask.numel() for mask in masks))


def _count_frame(frame: Frame) -> Count:
    names = (*(f"{side}input_ids" for side in SIDES), "labels")
    num_positions = sum(frame.tensors[name].size for name in names if name in frame.tensors)
    return Count(num_tokens=frame.num_tokens, num_positions=num_positions)


@dataclass(frozen=True, kw_only=True, slots=True)
class Waits:
    """The loop's waits for a batch: percentiles and the longest, in seconds; `share` is their fraction of the time."""

    p50: float
    p99: float
    longest: float
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Measurement over `seconds`; `cpu_seconds` counts all threads of this process."""

    seconds: float
    cpu_seconds: float
    num_batches: int
    num_tokens: int
    num_positions: int
    num_bytes: int
    num_retries: int
    waits: Waits

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, without padding."""
        return self.num_tokens / self.seconds

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second over the wire."""
        return self.num_bytes / self.seconds

    @property
    def cpu_seconds_per_million_tokens(self) -> float:
        """CPU time that a million tokens cost this machine."""
        return self.cpu_seconds / max(self.num_tokens, 1) * 1e6


def measure(supply: Supply, seconds: float, tick: Tick, *, tokens_per_second: float | None = None) -> Figures:
    """Pull batches for `seconds`, at least one.

    With `tokens_per_second` the loop spends time on each batch, as a model of that speed does; otherwise it requests the next
    one at once. Raises what the supply raises.
    """
    waits = array("d")
    num_tokens = num_positions = 0
    bytes_before, retries_before, cpu_before = supply.num_bytes(), supply.num_retries(), time.process_time()
    began = asked = busy_until = ticked = time.perf_counter()
    while asked < began + seconds:
        batch = next(supply.batches)
        got = time.perf_counter()
        waits.append(got - asked)
        counts = supply.count(batch)
        num_tokens += counts.num_tokens
        num_positions += counts.num_positions
        if tokens_per_second:
            # Counted from the end of the last batch: a sleep that takes too long must not make the model look slower.
            busy_until += got - asked + counts.num_tokens / tokens_per_second
            time.sleep(max(0.0, busy_until - time.perf_counter()))
        asked = time.perf_counter()
        if asked - ticked >= _TICK_SECONDS:
            ticked = asked
            tick(asked - began, num_tokens, supply.num_bytes() - bytes_before)
    return Figures(
        seconds=asked - began,
        cpu_seconds=time.process_time() - cpu_before,
        num_batches=len(waits),
        num_tokens=num_tokens,
        num_positions=num_positions,
        num_bytes=supply.num_bytes() - bytes_before,
        num_retries=supply.num_retries() - retries_before,
        waits=_summarize(waits, asked - began),
    )


def _summarize(waits: array[float], seconds: float) -> Waits:
    ordered = sorted(waits) or [0.0]
    p50, p99 = (ordered[min(len(ordered) * percent // 100, len(ordered) - 1)] for percent in (50, 99))
    return Waits(p50=p50, p99=p99, longest=ordered[-1], share=sum(ordered) / max(seconds, 1e-9))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Result:
    """Result of a benchmark.

    first_batch_seconds  from the first request to the first batch
    paced                the same figures at the target rate
    newly_cached_bytes   growth of the server's cache meanwhile; None if it does not report its cache
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
    """Measure and print. Raises the PenstockError that says why there is nothing to measure."""
    address = parse_address(arguments.address)
    query = spec_query(arguments, address)
    epoch, rank = first_given(arguments.epoch, address.epoch), first_given(arguments.rank, address.rank)
    target = arguments.target_tokens_per_second
    with connected(address.server) as transport:
        dataset = dataset_of(address, transport)
        cached_before = _cached_bytes(transport, dataset)
        supply = (frames if arguments.no_tensors else tensors)(address.server, dataset, query, rank, epoch)
        with closing(supply.batches):
            began = time.perf_counter()
            next(supply.batches)
            first_batch_seconds = time.perf_counter() - began
            free = _measure_with_progress(supply, arguments.seconds)
            paced = _measure_with_progress(supply, arguments.seconds, target) if target else None
        cached = _cached_bytes(transport, dataset)
    result = _Result(
        server=address.server,
        dataset=dataset,
        supply=supply,
        first_batch_seconds=first_batch_seconds,
        free=free,
        target_tokens_per_second=target,
        paced=paced,
        newly_cached_bytes=None if cached is None or cached_before is None else max(0, cached - cached_before),
    )
    if arguments.json:
        print(json.dumps(_as_json(result), indent=2))
    else:
        _show(result, stdout_console())
    return 0


def _measure_with_progress(supply: Supply, seconds: float, tokens_per_second: float | None = None) -> Figures:
    console = Console(stderr=True)
    columns = ("{task.description}", BarColumn(), TimeRemainingColumn())
    # A refresh from a thread would take time from the measurement.
    with Progress(*columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal) as progress:
        task = progress.add_task("measuring", total=seconds)

        def tick(elapsed: float, num_tokens: int, num_bytes: int) -> None:
            rates = f"{_short(num_tokens / elapsed)} tokens/s  {num_bytes / elapsed / 1e6:,.1f} MB/s"
            progress.update(task, completed=elapsed, description=rates, refresh=True)

        return measure(supply, seconds, tick, tokens_per_second=tokens_per_second)


def _cached_bytes(transport: Transport, dataset: str) -> int | None:
    cache = describe_dataset(transport, dataset).get("cache")
    return cache["used_bytes"] if cache else None


def _show(result: _Result, console: Console) -> None:
    spec, free, paced = result.supply.spec, result.free, result.paced
    console.print(Text.assemble((printable(result.dataset), "bold"), f" from {printable(result.server)}"), soft_wrap=True)
    shape = f"batches of {spec.batch_size} x {spec.seq_len:,}, packing {spec.packing}, snapshot {spec.snapshot}"
    console.print(Text(f"{shape}; {result.supply.memory}", "dim"))
    console.print()
    padding = 1 - free.num_tokens / max(free.num_positions, 1)
    with_padding = f"{_short(free.num_positions / free.seconds)} positions/s with the {padding:.0%} padding" if padding else ""
    cores = f"per million tokens; {free.cpu_seconds / free.seconds:.2f} cores busy"
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    table.add_row("tokens", f"{_short(free.tokens_per_second)} tokens/s", with_padding)
    table.add_row("wire", f"{free.bytes_per_second / 1e6:,.1f} MB/s", f"{free.num_batches:,} batches in {free.seconds:.1f} s")
    table.add_row("CPU", f"{free.cpu_seconds_per_million_tokens:.3f} s", cores)
    table.add_row("wait, p50", *_waits(free.waits))
    if paced:
        table.add_row(f"at {_short(result.target_tokens_per_second or 0)}/s", *_waits(paced.waits))
    table.add_row("first batch", f"{result.first_batch_seconds:.2f} s")
    console.print(table)
    console.print()
    for warning in _warnings(result):
        console.print(Text(warning, "yellow"))
    console.print(Text(_verdict(result)))


def _waits(waits: Waits) -> tuple[str, str]:
    return f"{1000 * waits.p50:.2f} ms", f"p99 {1000 * waits.p99:.2f} ms, longest {1000 * waits.longest:.2f} ms"


def _warnings(result: _Result) -> Iterator[str]:
    if result.supply.num_steps * _FEW_EPOCHS < result.free.num_batches:
        yield (
            f"An epoch has only {result.supply.num_steps:,} steps, and every epoch starts with a wait: a larger dataset shows "
            f"better figures."
        )
    if result.newly_cached_bytes:
        yield (
            f"The server decoded blocks meanwhile (its cache grew by {size(result.newly_cached_bytes)}): these are the "
            f"figures of a cold cache. Measure again to see those of a warm one."
        )
    if retries := result.free.num_retries + (result.paced.num_retries if result.paced else 0):
        yield f"{retries:,} requests failed and were retried; penstock doctor may show why."


def _verdict(result: _Result) -> str:
    text = f"This client could feed {_short(result.free.tokens_per_second)} tokens/s."
    if not result.paced or not result.target_tokens_per_second:
        return f"{text} Measure with --target-tokens-per-second how long a model of your speed would wait."
    pace, share = _short(result.target_tokens_per_second), result.paced.waits.share
    return f"{text} At {pace} tokens/s of training the loop waited {share:.1%} of the time."


def _as_json(result: _Result) -> dict[str, Any]:
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
    """Format a number with three digits, such as 1.23M or 456k."""
    for letter, unit in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= unit:
            return f"{number / unit:.3g}{letter}"
    return f"{number:.3g}"
