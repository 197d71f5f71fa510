"""A rank that trains until the file `stop` beside its ledger names a last epoch, and writes where it is into a file."""

import json
import os
import sys
import time
from pathlib import Path

from penstock import RemoteDataset


def main(servers: str, folder: Path, rank: int, world_size: int, ca: str) -> None:
    data = RemoteDataset(
        servers.split(","), "numbers", batch_size=8, seq_len=8, rank=rank, world_size=world_size, seed=3, window=500,
        prefetch_bytes=1 << 14, retry_seconds=120, ca=ca, ledger=folder / "run.ledger", job="soak",
    )  # fmt: skip
    stop, place = folder / "stop", folder / f"rank-{rank}.json"
    epoch = 0
    while not stop.exists() or epoch <= int(stop.read_text()):
        data.set_epoch(epoch)
        for _ in data:
            time.sleep(0.002)
        epoch += 1
        stats = data.stats()
        place.with_suffix(".new").write_text(json.dumps({"epoch": epoch, "pid": os.getpid(), "retries": stats.num_retries}))
        place.with_suffix(".new").rename(place)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
