"""Reads batches as several ranks from replicas, and proves by their ledgers that each sample came exactly once.

    python examples/audited_ranks.py http://data-{0..1}:8000 --seconds 60

A pause stands for the training step. Kill servers meanwhile: the ranks go on with the others.
"""

import argparse
import json
import subprocess
import sys
import time
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock import RemoteDataset
from penstock.access import Access
from penstock.servers import parse_servers
from train_gpt import first_dataset

processes = get_context("fork")


def main() -> None:
    args = parse_arguments()
    dataset = first_dataset(parse_servers(args.servers, Access())[0])
    end, is_over = processes.Value("d", 0.0), processes.Value("b", 0)

    def decide() -> None:  # all ranks end after the same epoch
        end.value = end.value or time.monotonic() + args.seconds
        is_over.value = time.monotonic() > end.value

    barrier = processes.Barrier(args.ranks, decide)
    with TemporaryDirectory() as folder:
        ledger = Path(folder) / "run.ledger"
        ranks = [
            processes.Process(target=read, args=(args, dataset, rank, ledger, barrier, is_over)) for rank in range(args.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit("a rank has failed: see its error above")
        sys.exit(subprocess.run(["penstock", "audit", ledger], check=False).returncode)


def read(
    args: argparse.Namespace, dataset: str, rank: int, ledger: Path, barrier: Barrier, is_over: "Synchronized[int]"
) -> None:
    """Read whole epochs until the time is over, and print a line of JSON. Time and waits count from the second epoch on."""
    try:
        data = RemoteDataset(
            args.servers, dataset, batch_size=32, seq_len=256, seed=7, rank=rank, world_size=args.ranks, ledger=ledger,
            prefetch_bytes=1 << 18,  # some seconds of batches
        )  # fmt: skip
        first = data.stats()
        while not is_over.value:
            for _ in data:
                time.sleep(args.pause)
            if not data.epoch:
                first = data.stats()
            data.set_epoch(data.epoch + 1)
            barrier.wait()
        stats = data.stats() - first
        line = {"rank": rank, "epochs": data.epoch, "batches": stats.num_batches, "retries": stats.num_retries}
        # One write, or lines of several ranks could mix.
        sys.stdout.write(json.dumps(line | {"wait_fraction": stats.wait_fraction, "stages": stats.wait_stages}) + "\n")
    except BaseException:
        barrier.abort()  # otherwise the other ranks would wait
        raise


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", help="addresses of replicas, such as http://data-{0..2}:8000")
    parser.add_argument("--seconds", type=float, default=60, help="time after the first epoch")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.2, help="seconds of a step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
