"""What training loops are given: every batch that a RemoteDataset hands over in this process.

As a script it runs an example and adds a line a batch to OUT/<rank>.jsonl; under torchrun, unless the number of ranks is 0:

    python tests/support/recorded.py RANKS OUT examples/train_ddp.py ARGUMENTS...
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from penstock import RemoteDataset
from penstock.tensors import Batch
from support.processes import Fork, with_support

# That of the examples, but that lines are no longer than rows: all but a few of their 128 tokens would be padding.
SPEC: dict[str, Any] = {"batch_size": 16, "seq_len": 8, "seed": 7}
EXAMPLES = Path(__file__).parents[2] / "examples"
_EXAMPLES_SEQ_LEN = 128
TINIER = (16, 1, 4)  # dim, num_layers and num_heads of the examples' model, whose steps would take most of the time
_make, _iterate = RemoteDataset.__init__, RemoteDataset.__iter__
_destroy_process_group = torch.distributed.destroy_process_group


@dataclass(frozen=True)
class Given:
    """A batch that a loop was given; `rows` are the first tokens of its samples."""

    rank: int
    world_size: int
    epoch: int
    rows: list[int]


def contents(batch: Mapping[str, Any]) -> bytes:
    """The bytes of all tensors of a batch."""
    return b"".join(name.encode() + batch[name].numpy().tobytes() for name in sorted(batch))


def rows_of(batches: Iterable[Mapping[str, Any]]) -> list[list[int]]:
    """The first tokens of the samples of each batch, which are the numbers of the rows."""
    return [batch["input_ids"][:, 0].tolist() for batch in batches]


def with_short_lines(data: RemoteDataset, *args: Any, **settings: Any) -> None:
    """A RemoteDataset.__init__ that makes the examples' lines as short as SPEC's."""
    if settings.get("seq_len") == _EXAMPLES_SEQ_LEN:
        settings["seq_len"] = SPEC["seq_len"]
    _make(data, *args, **settings)


def recording(keep: Callable[[Given], object]) -> Callable[[RemoteDataset], Iterator[Batch]]:
    """A RemoteDataset.__iter__ that tells of every batch."""

    def recorded(data: RemoteDataset) -> Iterator[Batch]:
        with closing(_iterate(data)) as batches:  # type: ignore[type-var]
            for batch in batches:
                tokens = batch["chosen_input_ids" if "chosen_input_ids" in batch else "input_ids"]
                keep(Given(data.rank, data.world_size, data.epoch, tokens[:, 0].tolist()))
                yield batch

    return recorded


def whole_run(url: str, num_steps: int, *, num_ranks: int = 1) -> list[Given]:
    """What a run of so many steps over the dataset "numbers" must be given, one rank after the other."""
    given: list[Given] = []
    for rank in range(num_ranks):
        data = RemoteDataset(url, "numbers", rank=rank, world_size=num_ranks, **SPEC)
        for step in range(num_steps):
            if step % len(data) == 0:
                data.set_epoch(step // len(data))
                batches = _iterate(data)
            given.append(Given(rank, num_ranks, data.epoch, next(batches)["input_ids"][:, 0].tolist()))
    return given


def run_example(out: Path, name: str, *arguments: object, num_ranks: int = 0, on_cpu: bool = False) -> list[Given]:
    """Runs an example in processes of its own, under torchrun, and on the CPU, if the number of its ranks is given.

    What its ranks were given, in their order, one rank after the other.
    """
    out.mkdir()
    command: list[str | Path] = [str(num_ranks), out, EXAMPLES / name, *map(str, arguments)]
    environment = with_support()  # Lightning starts its other ranks as new processes of Python
    if num_ranks or on_cpu:  # a machine may have fewer GPUs than there are ranks, and forks may use none
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with closing(Fork(*command, script=Path(__file__), environment=environment)) as process:
        status, said, errors = process.communicate(timeout=240)
    assert status == 0, said + errors
    return [Given(**json.loads(line)) for path in sorted(out.glob("*.jsonl")) for line in path.read_text().splitlines()]


def main(out: Path, run: Callable[[Sequence[str]], object], arguments: Sequence[str]) -> None:
    def write(given: Given) -> None:
        with (out / f"{given.rank}.jsonl").open("a") as file:
            file.write(json.dumps(asdict(given)) + "\n")

    RemoteDataset.__init__ = with_short_lines  # type: ignore[assignment, method-assign]
    RemoteDataset.__iter__ = recording(write)  # type: ignore[method-assign]
    torch.set_num_threads(1)  # the machine of the tests has few cores, and one step counts as little as another
    torch.distributed.destroy_process_group = destroy_idle_process_group
    run(arguments)


def destroy_idle_process_group(group: torch.distributed.ProcessGroup | None = None) -> None:
    """Torch's gloo waits for its thread with the GIL held, and that thread wants it to let go of the last all-reduce."""
    time.sleep(0.2)
    _destroy_process_group(group)


def under_torchrun(num_ranks: int, out: Path, run: Callable[[Sequence[str]], object], arguments: Sequence[str]) -> None:
    """As `torchrun --standalone --nproc-per-node=NUM_RANKS` does it, but that the ranks are forks."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    import_module("torch._dynamo")  # else each rank imports it for its optimizer
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=num_ranks, start_method="fork",
        rdzv_backend="c10d", rdzv_endpoint="localhost:0",
    )  # fmt: skip
    elastic_launch(config, main)(out, run, arguments)


if __name__ == "__main__":
    ranks, folder, example, *rest = sys.argv[1:]
    sys.path.insert(0, str(EXAMPLES))
    from train_gpt import TinyGPT

    TinyGPT.__init__.__defaults__ = TINIER
    example_main = runpy.run_path(example)["main"]
    if int(ranks):
        under_torchrun(int(ranks), Path(folder), example_main, rest)
    else:
        main(Path(folder), example_main, rest)
    sys.stdout.flush()
    os._exit(0)  # torch's gloo now and then aborts while the interpreter goes down, after all is done
