"""Trains a small GPT with Hugging Face Accelerate, on one device or several; `accelerate launch` starts it as well.

    torchrun --nproc-per-node=2 examples/train_accelerate.py http://localhost:8000 stories --checkpoint gpt-accelerate

Started again with the same checkpoint it goes on at the very next sample, also on another number of ranks.
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
    # Before the dataset, which takes its rank from the process group; with CPUs alone there is none unless `cpu` is said.
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    data = RemoteDataset(args.server, args.dataset, batch_size=16, seq_len=128, seed=7)

    torch.manual_seed(0)
    model = TinyGPT(vocab_size_of(data), seq_len=128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)

    # The data is not prepared: these are the batches of this rank, and prepare() would give each rank a part of its part.
    model, optimizer = accelerator.prepare(model, optimizer)

    # Saved and loaded with the rest: a few integers. Nor is the schedule prepared: it would go on by a step for each rank.
    accelerator.register_for_checkpointing(data, schedule)
    if args.checkpoint.is_dir():
        accelerator.load_state(str(args.checkpoint))

    step = schedule.last_epoch  # not the place in the data: on another number of ranks it is another number of steps
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
    parser.add_argument("dataset", help="its name on the server")
    parser.add_argument("--steps", type=int, default=300, help="train up to this step")
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("gpt-accelerate"), help="a folder; load it if it exists; save to it"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
