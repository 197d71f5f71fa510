"""Trains a small GPT with Hugging Face Accelerate, on one device or several; `accelerate launch` can start it, too.

    torchrun --nproc-per-node=2 examples/train_accelerate.py http://localhost:8000 stories --checkpoint gpt-accelerate

If the checkpoint exists, training continues with the next sample, also on another number of ranks.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator

from penstock import RemoteDataset
from train_gpt import TinyGPT, vocab_size_of


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    # Create this before the dataset, which takes its rank from the process group. On CPUs, only `cpu=True` creates the group.
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    data = RemoteDataset(args.server, args.dataset, batch_size=16, seq_len=128, seed=7)

    torch.manual_seed(0)
    model = TinyGPT(vocab_size_of(data), seq_len=128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)

    # Do not prepare the data: it has this rank's batches already, and prepare() would shard them again.
    model, optimizer = accelerator.prepare(model, optimizer)

    # The position in the data is saved with the rest. The schedule is not prepared either: it would advance once for each rank.
    accelerator.register_for_checkpointing(data, schedule)
    if args.checkpoint.is_dir():
        accelerator.load_state(str(args.checkpoint))

    step = schedule.last_epoch  # not the position in the data, which is another number of steps on other ranks
    while step < args.steps:
        for batch in data:
            loss = model(batch["input_ids"].to(accelerator.device), batch["labels"].to(accelerator.device))
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            step += 1
            if step % 10 == 0:
                accelerator.print(f"step {step}, loss {loss.item():.3f}", flush=True)
            if step == args.steps:
                break
        else:
            data.set_epoch(data.epoch + 1)  # without it every pass has the same order

    accelerator.save_state(str(args.checkpoint))
    accelerator.end_training()


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", help="address of the server, http://host:port")
    parser.add_argument("dataset", help="name of the dataset on the server")
    parser.add_argument("--steps", type=int, default=300, help="train up to this step")
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("gpt-accelerate"), help="a folder; load it if it exists; save to it"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
