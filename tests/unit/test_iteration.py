"""An iteration is one thread's at a time."""

from __future__ import annotations

import threading
from collections.abc import Generator
from unittest.mock import MagicMock

import pytest

from penstock.errors import PenstockError
from penstock.iteration import NOT_GIVEN, Iteration
from penstock.tensors import Batch


def test_what_was_closed_does_not_pass_for_what_ended_and_what_ended_stays_so() -> None:
    def batches() -> Generator[Batch, object, None]:
        yield {"number": [1]}

    closed, ended = Iteration(batches()), Iteration(batches())
    assert next(closed) == {"number": [1]}
    assert list(ended) == [{"number": [1]}]
    for iteration in (closed, ended):
        iteration.close()
    with pytest.raises(PenstockError, match=r"was ended by close\(\)"):
        next(closed)
    assert list(ended) == []


def test_an_error_that_says_all_shows_the_loop_and_a_fault_where_it_is() -> None:
    def batches(error: Exception) -> Generator[Batch, object, None]:
        yield {"number": [1]}
        raise error

    shown = []
    for error in (PenstockError("the server is away"), ZeroDivisionError()):
        with pytest.raises(type(error)) as caught:
            list(Iteration(batches(error)))
        shown.append([frame.name for frame in caught.traceback])
    assert shown == [[shown[0][0], "__next__"], [shown[0][0], "__next__", "batches"]]


def test_a_second_thread_is_refused_and_ends_nothing() -> None:
    asked, may_go_on = threading.Event(), threading.Event()

    def batches() -> Generator[Batch, object, None]:
        asked.set()
        assert may_go_on.wait(60)
        yield {"number": [1]}
        yield {"number": [2]}

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


def test_a_thread_that_is_refused_just_before_the_epoch_ends_ends_nothing() -> None:
    batches = MagicMock()
    batches.__next__.side_effect = [ValueError("generator already executing"), StopIteration]
    iteration = Iteration(batches)
    with pytest.raises(PenstockError, match="another thread is taking a batch of this iteration"):
        next(iteration)
    assert list(iteration) == []


def test_of_a_batch_that_does_not_reach_the_loop_the_generator_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = list[int]()

    def batches() -> Generator[Batch, object, None]:
        for number in range(9):
            if (yield {"number": [number]}) is NOT_GIVEN:
                lost.append(number)
                return

    def interrupted(of: Generator[Batch, object, None]) -> Batch:
        if next(of) == {"number": [2]}:
            raise KeyboardInterrupt
        return {}

    monkeypatch.setattr("penstock.iteration.next", interrupted, raising=False)
    iteration = Iteration(batches())
    assert [next(iteration), next(iteration)] == [{}, {}]
    with pytest.raises(KeyboardInterrupt):
        next(iteration)
    assert lost == [2]
    with pytest.raises(PenstockError, match="was ended by KeyboardInterrupt"):
        next(iteration)
