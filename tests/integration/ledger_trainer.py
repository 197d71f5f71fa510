"""A rank that trains and saves its state now and then, until it is killed or its steps are done."""

import json
import sys
from pathlib import Path

from penstock import RemoteDataset


def main(server: str, folder: Path, rank: int, world_size: int, batch_size: int, num_steps: int) -> None:
    data = RemoteDataset(
        server, "numbers", batch_size=batch_size, seq_len=8, rank=rank, world_size=world_size, seed=3,
        prefetch_bytes=1 << 16, ledger=folder / "run.ledger",
    )  # fmt: skip
    checkpoint = folder / "state.json"
    if checkpoint.exists():
        data.load_state_dict(json.loads(checkpoint.read_text()))
    step = 0
    for epoch in range(data.epoch, 3):
        data.set_epoch(epoch)
        for _ in data:
            step += 1
            if step % 7 == 0 and rank == 0:
                checkpoint.with_suffix(".new").write_text(json.dumps(data.state_dict()))
                checkpoint.with_suffix(".new").rename(checkpoint)
            print(step, flush=True)
            sys.stdin.readline()  # the ranks go step by step, as they do in a collective
            if step == num_steps:
                return


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
