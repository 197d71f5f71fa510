"""Loops that are no library: as nanoGPT and Megatron have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from penstock import RemoteDataset
from support.recorded import SPEC

NUM_ROWS = 320


def nanogpt(url: str, num_steps: int, checkpoint: dict[str, Any]) -> list[float]:
    """The losses of a loop that fetches the next batch before it trains on this one, and that saves in each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(NUM_ROWS, 16), nn.Linear(16, NUM_ROWS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
    losses: list[float] = []
    # --8<-- [start:nanogpt]
    data = RemoteDataset(
        url, "numbers", batch_size=4, seq_len=12, packing="concat", labels="shifted", overlap=1, epochs="endless"
    )
    if checkpoint:
        data.load_state_dict(checkpoint["data"])
    batches = iter(data)
    batch = next(batches)
    for _ in range(num_steps):
        x, y = batch["input_ids"], batch["labels"]
        state = data.state_after(batch)  # of this batch; data.state_dict() counts the next one, too
        batch = next(batches)  # while the GPU works on x and y
        # --8<-- [end:nanogpt]
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        checkpoint |= {"model": {name: value.clone() for name, value in model.state_dict().items()}, "data": state}
    return losses


def test_loop_that_fetches_ahead_resumes_with_the_same_losses(url: str) -> None:
    whole = nanogpt(url, 30, {})
    checkpoint: dict[str, Any] = {}
    assert [loss for num_steps in (1, 12, 17) for loss in nanogpt(url, num_steps, checkpoint)] == whole


@pytest.mark.parametrize("num_consumed", [0, 8, 24, 400])
def test_loop_that_counts_samples_goes_on_with_larger_batches(url: str, num_consumed: int) -> None:
    """A ramp of batch sizes, as Megatron's: the samples come in one order, whatever the batches that they come in."""
    order = [
        row
        for batch in RemoteDataset(url, "numbers", epochs=2, **SPEC | {"batch_size": 1})
        for row in batch["input_ids"].tolist()
    ]
    given = list[list[int]]()
    consumed_samples = num_consumed
    for micro_batch_size in (4, 8, 16):
        # --8<-- [start:megatron]
        data = RemoteDataset(url, "numbers", batch_size=micro_batch_size, seq_len=8, seed=7, epochs="endless")
        data.seek(samples=consumed_samples)  # over all ranks
        batches = iter(data)
        # --8<-- [end:megatron]
        for _ in range(2):
            given += next(batches)["input_ids"].tolist()
            consumed_samples += micro_batch_size * data.world_size
    assert given == (order + order)[num_consumed : num_consumed + len(given)]
