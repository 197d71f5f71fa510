"""A training step on a GPU: with batches from a server, and with one batch that stays on the GPU. Nothing in it may wait."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, islice, repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import data
from corpus import SEQ_LEN
from penstock import RemoteDataset
from ratios import Ratio, Scale, in_turn, seconds
from servers import penstock

# So little is fetched ahead that the server is asked all the while, as in the long run.
_PREFETCH_BYTES = 4 << 20

Step = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Of the model, of its batches, and of what is measured."""

    dim: int
    num_layers: int
    batch_size: int
    num_steps: int
    num_profiled: int
    num_repeats: int


def measure(scale: Scale) -> list[Ratio]:
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here; GPU.md tells what was measured on one")
    size = Size(dim=1024, num_layers=12, batch_size=8, num_steps=200, num_profiled=20, num_repeats=scale.num_repeats)
    with penstock(data.corpus(scale).parquet, data.warm_cache(scale)) as server:
        return [compare(server.address, torch.device("cuda"), size)]


def compare(address: str, device: torch.device, size: Size) -> Ratio:
    """The seconds of a step, from a server and from memory, and the calls in it that wait for the GPU."""
    dataset = RemoteDataset(
        address, "tokens", batch_size=size.batch_size, seq_len=SEQ_LEN, device=device, prefetch_bytes=_PREFETCH_BYTES
    )
    assert dataset.vocab_size
    step = _training_step(Model(dataset.vocab_size, size).to(device), device)
    served = _epochs(dataset)
    resident = repeat({name: value.clone() for name, value in next(served).items()})
    sources = (served, resident)
    for batches in sources:
        _train(step, batches, size.num_steps, device)  # allocates, chooses kernels
    waits = [_num_waits(step, batches, size.num_profiled, device) for batches in sources]
    ours, theirs = in_turn(
        size.num_repeats, *(partial(_seconds_a_step, step, batches, size.num_steps, device) for batches in sources)
    )
    served.close()
    return Ratio(
        what="a training step, batches from a server",
        against="the same batch again and again, on the GPU",
        ours=ours,
        theirs=theirs,
        unit="s",
        note=f"{ours / theirs - 1:+.2%}; calls that wait for the GPU in {size.num_profiled} steps: {waits[0]} and {waits[1]}",
    )


class Model(nn.Module):
    """A decoder, as small as is still worth a GPU."""

    def __init__(self, vocab_size: int, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, size.dim)
        layer = nn.TransformerEncoderLayer(size.dim, size.dim // 64, 4 * size.dim, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, size.num_layers, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(SEQ_LEN))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss."""
        x = self.layers(self.tokens(ids), mask=self.mask, is_causal=True)
        logits = x[:, :-1] @ self.tokens.weight.T * x.shape[-1] ** -0.5
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def _training_step(model: Model, device: torch.device) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(batch: dict[str, Any]) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):  # processors may have to emulate it
            loss = model(batch["input_ids"], batch["labels"])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def _epochs(dataset: RemoteDataset) -> Generator[dict[str, Any], None, None]:
    for epoch in count():
        dataset.set_epoch(epoch)
        yield from dataset


def _train(step: Step, batches: Iterator[dict[str, Any]], num_steps: int, device: torch.device) -> None:
    for batch in islice(batches, num_steps):
        step(batch)
    getattr(torch, device.type).synchronize()


def _seconds_a_step(step: Step, batches: Iterator[dict[str, Any]], num_steps: int, device: torch.device) -> float:
    return seconds(partial(_train, step, batches, num_steps, device)) / num_steps


def _num_waits(step: Step, batches: Iterator[dict[str, Any]], num_steps: int, device: torch.device) -> int:
    """Calls for which the host waits until the GPU has done what it was given."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        for batch in islice(batches, num_steps):
            step(batch)
    return sum(event.name.endswith("Synchronize") for event in profiler.events() or ())
