"""Trains a small GPT through torchdata's StatefulDataLoader, with loader workers.

    python examples/train_dataloader.py http://localhost:8000 stories --workers 2 --checkpoint gpt-workers.pt

Use workers only for your own work on batches: the dataset prefetches in a thread. The order is the same for any number of
workers. If the checkpoint exists, training continues with the next batch. The number of workers must be the same.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from penstock import RemoteDataset
from train_gpt import TinyGPT, save_checkpoint, vocab_size_of


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    data = RemoteDataset(args.server, args.dataset, batch_size=16, seq_len=128, seed=7)

    # batch_size=None: batches are complete. torch's DataLoader takes the same arguments, but does not know the positions of its
    # workers: with workers, only this loader can save a state.
    loader = StatefulDataLoader(data, batch_size=None, num_workers=args.workers, pin_memory=torch.cuda.is_available())

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = TinyGPT(vocab_size_of(data), seq_len=128).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        step = saved["step"]

    while step < args.steps:
        for batch in loader:
            loss = model(batch["input_ids"].to(device), batch["labels"].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0:
                print(f"step {step}, loss {loss.item():.3f}", flush=True)
            if step == args.steps:
                break
        else:
            data.set_epoch(data.epoch + 1)  # workers see it, too

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict(), "step": step}
    save_checkpoint(state, args.checkpoint)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", help="address of the server, http://host:port")
    parser.add_argument("dataset", help="name of the dataset on the server")
    parser.add_argument("--steps", type=int, default=300, help="train up to this step")
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("gpt-workers.pt"), help="load it if it exists; save to it at the end"
    )
    parser.add_argument("--workers", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
