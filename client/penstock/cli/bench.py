"""`penstock bench`: how fast this machine can pull batches from a server, as a training loop gets them."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from typing import Any

from rich.table import Table
from rich.text import Text

from penstock.cli.arguments import add_access_options, add_batch_options, amount
from penstock.cli.connection import connected, dataset_of, describe_dataset, parse_address
from penstock.cli.output import set_run, stdout_console
from penstock.client import Client, Steps
from penstock.errors import PenstockError, SpecError
from penstock.logs import StatusLine
from penstock.prefetch import PREFETCH_BYTES, fetch_ahead
from penstock.spec import Spec
from penstock.text import printable, short, size
from penstock.transport import Transport
from penstock.wire import Frame
from penstock.wire.names import IGNORED, SIDES

_FEW_EPOCHS = 3
_RETRY_SECONDS = 10.0


def configure(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    command.description = (
        "Pulls batches as a training loop does, and reports how many tokens per second this client could feed, and how long "
        "a loop would wait for them."
    )
    add_batch_options(command, without=("offset",))
    command.add_argument("--seconds", type=amount, metavar="N", default=10.0, help="how long to measure (default: 10)")
    command.add_argument(
        "--target-tokens-per-second",
        type=amount,
        metavar="N",
        help="tokens per second that the model takes, such as 250k: measures once more, at that pace",
    )
    command.add_argument(
        "--no-tensors", action="store_true", help="only fetch and check, without torch: measures network and server alone"
    )
    command.add_argument("--json", action="store_true", help="print the figures as JSON")
    add_access_options(command)
    set_run(command, run)


@dataclass(frozen=True, kw_only=True, slots=True)
class Supply:
    """Endless supply of batches.

    spec       with every parameter resolved, the snapshot included
    num_steps  steps of an epoch
    memory     location of batches, as a text
    count      returns the tokens and the positions (tokens and padding) of a batch
    spent      returns the bytes received and the requests retried so far
    """

    spec: Spec
    num_steps: int
    memory: str
    batches: Generator[Any, None, None]
    count: Callable[[Any], tuple[int, int]]
    spent: Callable[[], tuple[int, int]]


def tensors(server: str, dataset: str, spec: Spec, rank: int, epoch: int) -> Supply:
    """Supply RemoteDataset's batches. Raises PenstockError: torch is missing; and what RemoteDataset raises."""
    try:
        import torch

        from penstock.dataset import RemoteDataset
    except ImportError as error:
        raise PenstockError(
            f"RemoteDataset needs torch ({error}): pip install 'penstock[torch]', or measure without it by --no-tensors."
        ) from error
    parameters: dict[str, Any] = {name: value for name, value in spec.to_dict().items() if name != "offset"}
    data = RemoteDataset(server, dataset, rank=rank, retry_seconds=_RETRY_SECONDS, **parameters)

    def batches() -> Generator[Any, None, None]:
        for number in count(epoch):
            data.set_epoch(number)
            yield from data

    def spent() -> tuple[int, int]:
        stats = data.stats()
        return stats.num_bytes, stats.num_retries

    return Supply(
        spec=data.spec,
        num_steps=data.steps_per_epoch,
        memory="tensors in pinned memory" if torch.cuda.is_available() else "tensors in ordinary memory (no GPU)",
        batches=batches(),
        count=partial(_count_tensors, data.spec.task == "seq2seq"),
        spent=spent,
    )


def frames(server: str, dataset: str, spec: Spec, rank: int, epoch: int) -> Supply:
    """Supply frames that are fetched ahead and checked, without tensors. Raises what Client raises."""
    client = Client(server, dataset, rank=rank, world_size=spec.world_size, retry_seconds=_RETRY_SECONDS)
    resolved = client.resolve(spec)
    transports: list[Transport] = []

    def batches() -> Generator[Frame, None, None]:
        epochs = (Steps(resolved.spec, number, range(resolved.num_steps)) for number in count(epoch))
        transports.append(transport := client.connect())
        with closing(transport), closing(fetch_ahead(client, transport, epochs, PREFETCH_BYTES)) as ahead:
            yield from ahead

    return Supply(
        spec=resolved.spec,
        num_steps=resolved.num_steps,
        memory="frames as they came, without tensors",
        batches=batches(),
        count=_count_frame,
        spent=lambda: (sum(t.num_bytes for t in transports), sum(t.num_retries for t in transports)),
    )


def _count_tensors(is_seq2seq: bool, batch: Mapping[str, Any]) -> tuple[int, int]:
    masks = [batch[f"{side}attention_mask"] for side in SIDES if f"{side}attention_mask" in batch]
    if is_seq2seq:  # labels hold the response's tokens
        masks.append(batch["labels"] != IGNORED)
    return sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks)


def _count_frame(frame: Frame) -> tuple[int, int]:
    names = (*(f"{side}input_ids" for side in SIDES), "labels")
    return frame.num_tokens, sum(frame.tensors[name].size for name in names if name in frame.tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Measurement over `seconds`. CPU time is that of all threads of this process; rates count tokens without padding.

    waits  for a batch: percentiles and the longest, in seconds; `share` is their fraction of the time
    """

    seconds: float
    cpu_seconds: float
    num_batches: int
    num_tokens: int
    num_positions: int
    num_bytes: int
    num_retries: int
    waits: Mapping[str, float]
    tokens_per_second: float
    bytes_per_second: float
    cpu_seconds_per_million_tokens: float


def measure(supply: Supply, seconds: float, *, tokens_per_second: float | None = None) -> Figures:
    """Pull batches for `seconds`, at least one.

    With `tokens_per_second` the loop spends time on each batch, as a model of that speed does; otherwise it requests the next
    one at once. Raises what the supply raises.
    """
    waits = list[float]()
    num_tokens = num_positions = 0
    bytes_before, retries_before = supply.spent()
    cpu_before = time.process_time()
    began = asked = busy_until = time.perf_counter()
    while asked < began + seconds:
        batch = next(supply.batches)
        got = time.perf_counter()
        waits.append(got - asked)
        tokens, positions = supply.count(batch)
        num_tokens += tokens
        num_positions += positions
        if tokens_per_second:
            # Counted from the end of the last batch: a sleep that takes too long must not make the model look slower.
            busy_until += got - asked + tokens / tokens_per_second
            time.sleep(max(0.0, busy_until - time.perf_counter()))
        asked = time.perf_counter()
    elapsed, cpu_seconds = asked - began, time.process_time() - cpu_before
    num_bytes, num_retries = supply.spent()
    num_bytes -= bytes_before
    share = sum(waits) / elapsed
    waits.sort()
    return Figures(
        seconds=elapsed,
        cpu_seconds=cpu_seconds,
        num_batches=len(waits),
        num_tokens=num_tokens,
        num_positions=num_positions,
        num_bytes=num_bytes,
        num_retries=num_retries - retries_before,
        waits={"p50": waits[len(waits) // 2], "p99": waits[len(waits) * 99 // 100], "longest": waits[-1], "share": share},
        tokens_per_second=num_tokens / elapsed,
        bytes_per_second=num_bytes / elapsed,
        cpu_seconds_per_million_tokens=cpu_seconds / max(num_tokens, 1) * 1e6,
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Raises the PenstockError that says why there is nothing to measure."""
    address = parse_address(arguments.address).with_options(arguments)
    spec = Spec.from_query(address.query)
    if spec.offset:
        raise SpecError("bench starts at an epoch's first sample: leave offset out", ("offset",))
    target, status = arguments.target_tokens_per_second, StatusLine()
    with connected(address.server) as transport:
        dataset = dataset_of(address, transport)
        cached_before = _cached_bytes(transport, dataset)
        supply = (frames if arguments.no_tensors else tensors)(address.server, dataset, spec, address.rank, address.epoch)
        with closing(supply.batches):
            began = time.perf_counter()
            next(supply.batches)
            first_batch_seconds = time.perf_counter() - began
            status.draw(f"measuring for {arguments.seconds * (2 if target else 1):g} s")
            free = measure(supply, arguments.seconds)
            paced = measure(supply, arguments.seconds, tokens_per_second=target) if target else None
            status.clear()
        grown = max(0, _cached_bytes(transport, dataset) - cached_before)
    if arguments.json:
        figures = {
            "server": address.server,
            "dataset": dataset,
            "memory": supply.memory,
            "spec": supply.spec.to_dict(),
            "first_batch_seconds": first_batch_seconds,
            **asdict(free),
            "target_tokens_per_second": target,
            "at_training_rate": asdict(paced) if paced else None,
            "newly_cached_bytes": grown,
        }
        print(json.dumps(figures, indent=2))
        return 0
    console, spec = stdout_console(), supply.spec
    console.print(Text.assemble((printable(dataset), "bold"), f" from {printable(address.server)}"), soft_wrap=True)
    shape = f"batches of {spec.batch_size} x {spec.seq_len:,}, packing {spec.packing}, snapshot {spec.snapshot}"
    console.print(Text(f"{shape}; {supply.memory}\n", "dim"))
    console.print(_table(free, first_batch_seconds, target, paced))
    console.print()
    for warning in _warnings(supply, free.num_batches, free.num_retries + (paced.num_retries if paced else 0), grown):
        console.print(Text(warning, "yellow"))
    advice = "Measure with --target-tokens-per-second how long a model of your speed would wait."
    if paced:
        advice = f"At {short(target)} tokens/s of training the loop waited {paced.waits['share']:.1%} of the time."
    console.print(Text(f"This client could feed {short(free.tokens_per_second)} tokens/s. {advice}"))
    return 0


def _cached_bytes(transport: Transport, dataset: str) -> int:
    cache = describe_dataset(transport, dataset).get("cache")  # a mixture has none
    return cache["used_bytes"] if cache else 0


def _table(free: Figures, first_batch_seconds: float, target: float | None, paced: Figures | None) -> Table:
    padding = 1 - free.num_tokens / max(free.num_positions, 1)
    with_padding = f"{short(free.num_positions / free.seconds)} positions/s with the {padding:.0%} padding" if padding else ""
    cores = f"per million tokens; {free.cpu_seconds / free.seconds:.2f} cores busy"
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    table.add_row("tokens", f"{short(free.tokens_per_second)} tokens/s", with_padding)
    table.add_row("wire", f"{free.bytes_per_second / 1e6:,.1f} MB/s", f"{free.num_batches:,} batches in {free.seconds:.1f} s")
    table.add_row("CPU", f"{free.cpu_seconds_per_million_tokens:.3f} s", cores)
    table.add_row("wait, p50", *_waits(free))
    if target and paced:
        table.add_row(f"at {short(target)}/s", *_waits(paced))
    table.add_row("first batch", f"{first_batch_seconds:.2f} s")
    return table


def _waits(figures: Figures) -> tuple[str, str]:
    p50, p99, longest, _ = (f"{1000 * seconds:.2f} ms" for seconds in figures.waits.values())
    return p50, f"p99 {p99}, longest {longest}"


def _warnings(supply: Supply, num_batches: int, num_retries: int, grown: int) -> Iterator[str]:
    if supply.num_steps * _FEW_EPOCHS < num_batches:
        yield f"An epoch has only {supply.num_steps:,} steps, and starts with a wait: measure a larger dataset."
    if grown:
        yield f"The server's cache grew by {size(grown)} meanwhile, so it was cold. Measure again to see a warm one's figures."
    if num_retries:
        yield f"{num_retries:,} requests failed and were retried; penstock doctor may show why."
