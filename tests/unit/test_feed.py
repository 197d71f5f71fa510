"""A feed whose batches are pinned for a GPU. Where there is none, that is hidden from it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Container, Iterator
from contextlib import closing
from typing import Any, cast

import numpy as np
import pytest
import torch

import penstock.feeding.batch_iterator
from penstock import Spec, wire
from penstock.feeding.batch_iterator import BatchIterator
from penstock.feeding.device import Destination
from penstock.feeding.item import Item
from penstock.source import Source
from penstock.tensors import CPU, Batch, expand
from penstock.transport.transport import Transport

ADDRESS = wire.Address("d", "s", "p", 0, 0, 0)
PINNED = Destination(device=CPU, pin_memory=True)


class Asked:
    """A source of frames that say nothing but their step, and its transport."""

    num_bytes = num_retries = num_corrupted = 0

    def connect(self, _allocate: None) -> Transport:
        return cast(Transport, self)

    def frames(self, _transport: Transport, _spec: Spec, _epoch: int, steps: range, _then: range) -> list[wire.Frame]:
        return [
            wire.Frame(wire.FrameGroup(ADDRESS, [step], [""], 8, {"input_ids": np.full((1, 1, 4), step, np.uint16)}), 0)
            for step in steps
        ]

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def pinned(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """How many tensors of torch's are pinned, and how many not."""
    counted, empty = Counter[bool](), torch.empty

    def allocated(*shape: Any, pin_memory: bool = False, **settings: Any) -> torch.Tensor:
        counted[pin_memory] += 1
        return empty(*shape, **settings)

    monkeypatch.setattr(torch, "empty", allocated)
    return counted


def fail_at(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def expanded(frame: wire.Frame, *, pin_memory: bool, tensors: Container[str]) -> Batch:
        if frame.step == last:
            raise RuntimeError("CUDA error: out of memory")
        return expand(frame, pin_memory=pin_memory, tensors=tensors)

    monkeypatch.setattr(penstock.feeding.batch_iterator, "expand", expanded)


def feed(num_steps: int, replay: int | None = None, asked: Asked | None = None) -> BatchIterator:
    return BatchIterator(
        cast(Source, asked or Asked()), Spec(), 0, range(num_steps), prefetch_bytes=1 << 20, destination=PINNED, replay=replay,
        tensors=("input_ids",),
    )  # fmt: skip


def steps_of(items: Iterator[Item]) -> Iterator[int]:
    return (item.step for item in items)


def test_all_is_given_in_order_and_pinned(pinned: Counter[bool]) -> None:
    with closing(feed(3000)) as items:
        assert list(steps_of(iter(items))) == list(range(3000))
    assert pinned == {True: 3000}


def test_what_was_pinned_before_a_failure_is_given_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for last in (0, 1, 2, 50):
        fail_at(last, monkeypatch)
        found: list[int] = []
        with closing(feed(100)) as items, pytest.raises(RuntimeError, match="out of memory"):
            found.extend(steps_of(iter(items)))
        assert found == list(range(last))


class Held(Asked):
    """Answers once it is told to."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def frames(self, *asked: Any) -> list[wire.Frame]:
        assert self.over.wait(60)
        return super().frames(*asked)


def test_a_wait_is_counted_while_it_lasts() -> None:
    held = Held()
    with closing(feed(1, asked=held)) as items:
        loop = threading.Thread(target=lambda: list(items))
        loop.start()
        seen = [0.0]
        while len(seen) < 5:
            if (waited := items.stats().wait_seconds) > seen[-1]:
                seen.append(waited)
        held.over.set()
        loop.join(60)
        assert items.stats().num_batches == 1
        assert items.stats().wait_seconds == items.stats().wait_seconds > seen[-1]


def test_what_a_loop_takes_out_of_a_batch_is_there_again_in_a_replay() -> None:
    with closing(feed(9, replay=2)) as items:
        assert [item.batch.pop("input_ids")[0, 0].item() for item in items] == [0, 1] * 4 + [0]
