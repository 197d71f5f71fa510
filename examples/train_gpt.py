"""Trains a small GPT on batches from a Penstock server: a plain loop with checkpoints, on a CPU or a GPU.

    python examples/train_gpt.py http://localhost:8000 --steps 300 --checkpoint gpt.pt

If the checkpoint exists, training continues with the next batch, also within an epoch. Ctrl-C or SIGTERM saves and stops.
"""

import argparse
import hashlib
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from penstock import PenstockError, RemoteDataset
from penstock.cli.connection import connected, get_json
from penstock.wire.names import DATASETS


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv: torch.Tensor = self.qkv(self.norm1(x))
        q, k, v = (t.view(*t.shape[:2], self.num_heads, -1).transpose(1, 2) for t in qkv.chunk(3, dim=-1))
        # Padding is at the end of a sample, so the causal mask already hides it from every token.
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        mixed: torch.Tensor = x + self.mlp(self.norm2(x))
        return mixed


class TinyGPT(nn.Module):
    def __init__(self, vocab_size: int, seq_len: int, dim: int = 128, num_layers: int = 2, num_heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, dim), nn.Embedding(seq_len, dim)
        self.blocks = nn.Sequential(*(Block(dim, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(dim)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids) + self.positions.weight[: input_ids.shape[1]]
        x = self.norm(self.blocks(x))
        # The target of a position is the next token. Padding and prompts have the label -100, which the loss ignores.
        logits = x[:, :-1] @ self.tokens.weight.T * x.shape[-1] ** -0.5
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.checkpoint and not args.checkpoint.parent.is_dir():
        raise SystemExit(f"--checkpoint: the folder {args.checkpoint.parent} does not exist")
    dataset = args.dataset or first_dataset(args.server)
    data = RemoteDataset(
        args.server, dataset, batch_size=args.batch_size, seq_len=args.seq_len, seed=7, prefetch_bytes=args.prefetch_bytes
    )
    model = TinyGPT(vocab_size_of(data), args.seq_len).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    if args.checkpoint and args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        data.load_state_dict(saved["data"])
        step = saved["step"]
        say(f"resumed at step {step:,}: {len(data):,} batches are left of epoch {data.epoch}")
        if step >= args.steps:
            say(f"the checkpoint has reached --steps {args.steps:,} already")
            return

    def save() -> None:
        if args.checkpoint:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": data.state_dict(), "step": step}
            save_checkpoint(state, args.checkpoint)
            say(f"saved {args.checkpoint} at step {step:,}")

    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        if stopping:  # the second signal: the loop may be waiting for a server that is down
            raise KeyboardInterrupt
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    log = args.log.open("a", buffering=1) if args.log else None
    bar = tqdm(total=args.steps, initial=step, desc=dataset, unit="step", dynamic_ncols=True, mininterval=0.5)
    began, num_tokens = time.perf_counter(), 0
    while step < args.steps and not stopping:
        for batch in data:
            loss = model(batch["input_ids"].to(device), batch["labels"].to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            step += 1
            num_tokens += int(batch["attention_mask"].sum())
            seconds, waited = time.perf_counter() - began, data.stats().wait_seconds
            bar.update()
            bar.set_postfix_str(
                f"loss {loss.item():.3f}, {num_tokens / seconds:,.0f} tokens/s, data wait {waited / seconds:.1%}", refresh=False
            )
            if log:
                line = {"step": step, "epoch": data.epoch, "batch": data.state_dict()["step"] - 1, "loss": loss.item()}
                line |= {"seconds": seconds, "wait_seconds": waited, "tokens": num_tokens, "digest": fingerprint(batch)}
                log.write(json.dumps(line) + "\n")
            if step >= args.steps or stopping:
                break
            if step % args.save_every == 0:
                save()
        else:
            data.set_epoch(data.epoch + 1)
    bar.close()
    save()


def first_dataset(server: str) -> str:
    address = (server if "://" in server else f"http://{server}").rstrip("/")
    try:
        with connected(address) as transport:  # which sends the token of PENSTOCK_TOKEN or PENSTOCK_TOKEN_FILE
            return str(get_json(transport, DATASETS)["datasets"][0]["name"])
    except (PenstockError, KeyError, IndexError) as error:
        raise SystemExit(f"{server} does not list its datasets: {error}") from error


def vocab_size_of(data: RemoteDataset) -> int:
    if data.vocab_size is None:
        raise SystemExit(f"{data.dataset_name} has no known vocabulary size: set vocab_size in its penstock.toml")
    return data.vocab_size


def save_checkpoint(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint and rename it, so that a kill while it is written leaves the old one intact."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.new")
    torch.save(state, written)
    written.replace(path)


def say(text: str) -> None:
    tqdm.write(text, file=sys.stderr)


def fingerprint(batch: dict[str, torch.Tensor]) -> str:
    """Return a hash of a batch as 16 hex digits, to compare it with the same batch fetched again."""
    content = b"".join(batch[name].numpy().tobytes() for name in ("input_ids", "labels"))
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", help="address of the server, http://host:port")
    parser.add_argument("dataset", nargs="?", help="name of the dataset (default: the first one on the server)")
    parser.add_argument("--steps", type=int, default=300, help="train up to this step")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--checkpoint", type=Path, help="load it if it exists; save to it at the end, and as --save-every says")
    parser.add_argument("--save-every", type=int, default=1000, help="steps between checkpoints")
    parser.add_argument("--log", type=Path, help="append one line of JSON per step")
    parser.add_argument("--prefetch-bytes", type=int, default=64 << 20)
    return parser.parse_args()


if __name__ == "__main__":
    main()
