"""One of two ranks. It makes its dataset when it is told to, before or after torch.distributed is initialized, and iterates."""

import os
import sys

import torch.distributed

from penstock import PenstockError, RemoteDataset


def main(server: str, store: str, when: str) -> None:
    if when == "after":
        meet(store)
    data = make(server)
    if when == "before":
        meet(store)
    try:
        print("ids", sorted(int(row) for batch in data for row in batch["input_ids"][:, 0]), flush=True)
    except PenstockError as error:
        print("refused", error, flush=True)
    again = make(server)
    print("ids", sorted(int(row) for batch in again for row in batch["input_ids"][:, 0]), flush=True)
    torch.distributed.destroy_process_group()
    os._exit(0)  # what is left of torch's gloo now and then hangs or aborts when it is taken apart


def make(server: str) -> RemoteDataset:
    sys.stdin.readline()
    data = RemoteDataset(server, "numbers", batch_size=4, seq_len=8)
    print("snapshot", data.snapshot, flush=True)
    return data


def meet(store: str) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world_size)


if __name__ == "__main__":
    main(*sys.argv[1:])
