"""Trains a small GPT on several GPUs or CPU processes, with DistributedDataParallel under torchrun.

    torchrun --nproc-per-node=2 examples/train_ddp.py http://localhost:8000 stories --checkpoint gpt-ddp.pt

If the checkpoint exists, training continues with the next sample, also on another number of ranks.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from penstock import RemoteDataset
from train_gpt import TinyGPT, save_checkpoint, vocab_size_of


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # otherwise pinned memory would open a context on the first GPU in each rank
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    # Rank and world size come from the process group. The dataset has only this rank's batches: use no DistributedSampler.
    data = RemoteDataset(args.server, args.dataset, batch_size=16, seq_len=128, seed=7)

    torch.manual_seed(0)
    model = TinyGPT(vocab_size_of(data), seq_len=128).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        data.load_state_dict(saved["data"])  # the same for all ranks: a position in their common order of samples
        step = saved["step"]

    def save() -> None:
        if dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": data.state_dict(), "step": step}
            save_checkpoint(state, args.checkpoint)

    parallel = DistributedDataParallel(model)
    while step < args.steps:
        for batch in data:  # all ranks have the same number of batches, so none waits at the end
            loss = parallel(batch["input_ids"].to(device), batch["labels"].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if dist.get_rank() == 0 and step % 10 == 0:
                print(f"step {step}, loss {loss.item():.3f}", flush=True)
            if step == args.steps:
                break
            if step % args.save_every == 0:
                save()
        else:
            data.set_epoch(data.epoch + 1)  # without it every pass has the same order

    save()
    dist.destroy_process_group()


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", help="address of the server, http://host:port")
    parser.add_argument("dataset", help="name of the dataset on the server")
    parser.add_argument("--steps", type=int, default=300, help="train up to this step")
    parser.add_argument("--checkpoint", type=Path, default=Path("gpt-ddp.pt"), help="load it if it exists; save to it")
    parser.add_argument("--save-every", type=int, default=1000, help="steps between checkpoints; one is saved at the end, too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
