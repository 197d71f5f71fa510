"""Iterations of a loop: their batches, their statistics and their end."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any, cast
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

import penstock.iteration
from penstock import Spec, wire
from penstock.client import Client, Steps
from penstock.cuda import Destination
from penstock.errors import PenstockError
from penstock.iteration import NOT_GIVEN, BatchIterator, Iteration
from penstock.tensors import CPU, Batch, Item, expand
from penstock.transport import Transport
from penstock.waits import NOTHING, Reporter

ADDRESS = wire.Address("d", "s", "p", 0, 0, 0)
PINNED = Destination(device=CPU, pin_memory=True)


class StepClient:
    """A client of frames that hold only their step, and its transport."""

    num_bytes = num_retries = num_corrupted = 0
    unreported = NOTHING

    def connect(self, _allocate: None, _reporter: Reporter) -> Transport:
        return cast(Transport, self)

    def frames(self, _transport: Transport, steps: Steps, _then: Steps | None) -> list[wire.Frame]:
        return [
            wire.Frame(wire.FrameGroup(ADDRESS, [step], [""], 8, {"input_ids": np.full((1, 1, 4), step, np.uint16)}), 0)
            for step in steps.numbers
        ]

    def interrupt(self) -> None: ...

    def close(self) -> None: ...

    def trim(self) -> None: ...


@pytest.fixture(autouse=True)
def pinned(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """Number of pinned tensors, and of others."""
    counted, empty = Counter[bool](), torch.empty

    def allocated(*shape: Any, pin_memory: bool = False, **settings: Any) -> torch.Tensor:
        counted[pin_memory] += 1
        return empty(*shape, **settings)

    monkeypatch.setattr(torch, "empty", allocated)
    return counted


def fail_at(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def expanded(frame: wire.Frame, **settings: Any) -> dict[str, Any]:
        if frame.step == last:
            raise RuntimeError("CUDA error: out of memory")
        return expand(frame, **settings)

    monkeypatch.setattr(penstock.iteration, "expand", expanded)


def iterator(num_steps: int, replay: int | None = None, client: StepClient | None = None) -> BatchIterator:
    return BatchIterator(
        cast(Client, client or StepClient()),
        [Steps(Spec(), 0, range(num_steps))],
        num_steps,
        prefetch_bytes=1 << 20,
        destination=PINNED,
        replay=replay,
        tensors=("input_ids",),
    )


def steps_of(items: Iterator[Item]) -> Iterator[int]:
    return (item.step for item in items)


def test_batches_come_in_order_and_pinned(pinned: Counter[bool]) -> None:
    with closing(iterator(3000)) as items:
        assert list(steps_of(iter(items))) == list(range(3000))
    assert pinned == {True: 3000}


def test_failure_comes_after_the_batches_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for last in (0, 1, 2, 50):
        fail_at(last, monkeypatch)
        found: list[int] = []
        with closing(iterator(100)) as items, pytest.raises(RuntimeError, match="out of memory"):
            found.extend(steps_of(iter(items)))
        assert found == list(range(last))


class HeldClient(StepClient):
    """Answers after the event `over`."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def frames(self, *asked: Any) -> list[wire.Frame]:
        assert self.over.wait(60)
        return super().frames(*asked)


def test_wait_is_counted_while_it_lasts() -> None:
    held = HeldClient()
    with closing(iterator(1, client=held)) as items:
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


def test_replay_repeats_tensors_that_the_loop_removed() -> None:
    with closing(iterator(9, replay=2)) as items:
        assert [item.batch.pop("input_ids")[0, 0].item() for item in items] == [0, 1] * 4 + [0]


def test_closed_iteration_raises_and_an_ended_one_stays_ended() -> None:
    def batches() -> Generator[Batch, object, None]:
        yield Batch({"number": [1]})

    closed, ended = Iteration(batches()), Iteration(batches())
    assert next(closed) == {"number": [1]}
    assert list(ended) == [{"number": [1]}]
    for iteration in (closed, ended):
        iteration.close()
    with pytest.raises(PenstockError, match=r"was ended by close\(\)"):
        next(closed)
    assert list(ended) == []


def test_penstock_error_hides_inner_frames_and_a_fault_shows_them() -> None:
    def batches(error: Exception) -> Generator[Batch, object, None]:
        yield Batch({"number": [1]})
        raise error

    shown = []
    for error in (PenstockError("the server is away"), ZeroDivisionError()):
        with pytest.raises(type(error)) as caught:
            list(Iteration(batches(error)))
        shown.append(caught.traceback[-1].name)
    assert shown == ["__next__", "batches"]


def test_second_thread_is_refused_and_ends_nothing() -> None:
    asked, may_go_on = threading.Event(), threading.Event()

    def batches() -> Generator[Batch, object, None]:
        asked.set()
        assert may_go_on.wait(60)
        yield Batch({"number": [1]})
        yield Batch({"number": [2]})

    iteration, given = Iteration(batches()), list[Batch]()
    thread = threading.Thread(target=lambda: given.append(next(iteration)))
    thread.start()
    assert asked.wait(60)
    with pytest.raises(PenstockError, match="another thread is taking a batch of this iteration"):
        next(iteration)
    with pytest.raises(PenstockError, match="another thread is taking a batch of this iteration"):
        iteration.close()
    may_go_on.set()
    thread.join()
    assert [*given, *iteration] == [{"number": [1]}, {"number": [2]}]


def test_refused_thread_does_not_hide_the_end_of_the_epoch() -> None:
    batches = MagicMock()
    batches.__next__.side_effect = [ValueError("generator already executing"), StopIteration]
    iteration = Iteration(batches)
    with pytest.raises(PenstockError, match="another thread is taking a batch of this iteration"):
        next(iteration)
    assert list(iteration) == []


def test_generator_learns_of_a_batch_that_did_not_reach_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = list[int]()

    def batches() -> Generator[Batch, object, None]:
        for number in range(9):
            if (yield Batch({"number": [number]})) is NOT_GIVEN:
                lost.append(number)
                return

    def interrupted(of: Generator[Batch, object, None]) -> Batch:
        if next(of) == {"number": [2]}:
            raise KeyboardInterrupt
        return Batch()

    monkeypatch.setattr("penstock.iteration.next", interrupted, raising=False)
    iteration = Iteration(batches())
    assert [next(iteration), next(iteration)] == [{}, {}]
    with pytest.raises(KeyboardInterrupt):
        next(iteration)
    assert lost == [2]
    with pytest.raises(PenstockError, match="was ended by KeyboardInterrupt"):
        next(iteration)
