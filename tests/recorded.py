"""What training loops are given: every batch that a RemoteDataset hands over in this process.

As a script it runs an example and adds a line a batch to OUT/<rank>.jsonl:

    python tests/recorded.py OUT examples/train_ddp.py ARGUMENTS...
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock import RemoteDataset
from penstock.tensors import Batch

SPEC: dict[str, Any] = {"batch_size": 16, "seq_len": 128, "seed": 7}  # that of the examples
EXAMPLES = Path(__file__).parents[1] / "examples"
_iterate = RemoteDataset.__iter__
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


@dataclass(frozen=True)
class Given:
    """A batch that a loop was given; `rows` are the first tokens of its sequences."""

    rank: int
    world_size: int
    epoch: int
    rows: list[int]


def recording(keep: Callable[[Given], object]) -> Callable[[RemoteDataset], Iterator[Batch]]:
    """A RemoteDataset.__iter__ that tells of every batch."""

    def recorded(data: RemoteDataset) -> Iterator[Batch]:
        with closing(_iterate(data)) as batches:  # type: ignore[type-var]
            for batch in batches:
                keep(Given(data.rank, data.world_size, data.epoch, batch["input_ids"][:, 0].tolist()))
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


def run_example(out: Path, name: str, *arguments: object, launcher: Sequence[str] = (sys.executable,)) -> list[Given]:
    """Runs an example in processes of its own; what its ranks were given, in their order, one rank after the other."""
    out.mkdir()
    command = [*launcher, __file__, str(out), str(EXAMPLES / name), *map(str, arguments)]
    # One thread a rank: the machine of the tests has few cores. One step counts as little as another.
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [Given(**json.loads(line)) for path in sorted(out.glob("*.jsonl")) for line in path.read_text().splitlines()]


def main(out: Path, example: str, arguments: Sequence[str]) -> None:
    def write(given: Given) -> None:
        with (out / f"{given.rank}.jsonl").open("a") as file:
            file.write(json.dumps(asdict(given)) + "\n")

    RemoteDataset.__iter__ = recording(write)  # type: ignore[method-assign]
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(example)["main"](arguments)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
    sys.stdout.flush()
    os._exit(0)  # torch's gloo now and then aborts while the interpreter goes down, after all is done
