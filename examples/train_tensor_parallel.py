"""Trains a small GPT with tensor parallelism within groups of ranks, and data parallelism between groups, under torchrun.

    torchrun --nproc-per-node=4 examples/train_tensor_parallel.py http://localhost:8000 stories --tensor-parallel 2

The ranks of one group work on the same batch, so they request the batches of one data-parallel rank. The same holds for
pipeline and context parallelism: `rank` and `world_size` are those of the data dimension.
"""

import argparse
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from penstock import RemoteDataset
from train_gpt import TinyGPT, vocab_size_of


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # otherwise pinned memory would open a context on the first GPU in each rank
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if dist.get_world_size() % args.tensor_parallel:
        raise SystemExit(f"{dist.get_world_size()} ranks cannot be split into groups of {args.tensor_parallel}.")
    shape = (dist.get_world_size() // args.tensor_parallel, args.tensor_parallel)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))

    # Without rank and world_size, the ranks of a group would get different batches, and a layer would mix them.
    data = RemoteDataset(
        args.server,
        args.dataset,
        batch_size=16,
        seq_len=128,
        seed=7,
        rank=mesh.get_local_rank("data"),
        world_size=mesh["data"].size(),
    )

    torch.manual_seed(0)
    model = TinyGPT(vocab_size_of(data), seq_len=128).to(device)
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    step = 0
    while step < args.steps:
        for batch in data:
            loss = model(batch["input_ids"].to(device), batch["labels"].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if dist.get_rank() == 0 and step % 10 == 0:
                print(f"step {step}, loss {loss.item():.3f}", flush=True)
            if step == args.steps:
                break
        else:
            data.set_epoch(data.epoch + 1)
    dist.destroy_process_group()


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", help="address of the server, http://host:port")
    parser.add_argument("dataset", help="name of the dataset on the server")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tensor-parallel", type=int, default=2, help="ranks that share a layer")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
