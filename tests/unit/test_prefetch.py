"""The thread that fetches ahead: order, budget, failures, ends; and the ranges that it fetches."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import current_process, get_context
from multiprocessing.process import BaseProcess
from typing import cast
from weakref import ref

import pytest

import penstock.prefetch
from penstock import PenstockError, Spec
from penstock.client import Client, Steps
from penstock.prefetch import OBJECT_BYTES, Prefetch, fetch_ahead, fetch_ranges
from penstock.transport import Transport
from penstock.wire import Frame

KIB = 1 << 10
TARGET = 16 * (KIB + OBJECT_BYTES)


def prefetch(
    groups: Generator[list[bytes], None, None], budget_bytes: int, gate: threading.Event | None = None
) -> Prefetch[bytes]:
    return Prefetch(
        groups, nbytes=lambda group: sum(map(len, group)), budget_bytes=budget_bytes, interrupt=(gate or threading.Event()).set
    )


def item(number: int) -> bytes:
    return number.to_bytes(4, "big") + bytes(KIB - 4)


def groups_of(*sizes: int) -> Generator[list[bytes], None, None]:
    first = 0
    for size in sizes:
        yield [item(number) for number in range(first, first + size)]
        first += size


def test_items_come_in_order_for_any_groups() -> None:
    assert list(prefetch(groups_of(1, 2, 0, 40, 1), 8 * KIB)) == [item(number) for number in range(44)]
    assert list(prefetch(groups_of(), KIB)) == []
    assert list(prefetch(groups_of(*[3] * 7), 0)) == [item(number) for number in range(21)]


def test_thread_works_ahead_within_the_budget() -> None:
    made = 0

    def groups() -> Generator[list[bytes], None, None]:
        nonlocal made
        for group in groups_of(*[16] * 100):
            made += len(group)
            yield group

    ahead = prefetch(groups(), 64 * KIB)
    next(ahead)
    before = -1
    while before != made:
        before = made
        time.sleep(0.2)
    assert 64 <= made <= 64 + 16 + 1
    assert ahead.buffered_bytes == (made - 1) * KIB
    ahead.close()


@pytest.mark.parametrize("failure", [ValueError("item 7 is cursed"), SystemExit(3)])
def test_failure_arrives_after_the_items_before_it(failure: BaseException) -> None:
    def groups() -> Generator[list[bytes], None, None]:
        yield from groups_of(1, 6)
        raise failure

    ahead = prefetch(groups(), 64 * KIB)
    assert [next(ahead) for _ in range(7)] == [item(number) for number in range(7)]
    for _ in range(2):
        with pytest.raises(type(failure)) as raised:
            next(ahead)
        assert raised.value.__context__ is None


def test_close_interrupts_the_thread_and_drops_what_it_still_makes() -> None:
    gate, entered = threading.Event(), threading.Event()

    def groups() -> Generator[list[bytes], None, None]:
        entered.set()
        assert gate.wait(30)
        yield from groups_of(1)

    before = threading.active_count()
    ahead = prefetch(groups(), 64 * KIB, gate)
    assert entered.wait(30)
    ahead.close()
    ahead.close()
    assert threading.active_count() == before
    assert ahead.buffered_bytes == 0
    with pytest.raises(PenstockError, match="was closed"):
        next(ahead)


def test_close_wakes_a_thread_that_waits_for_room() -> None:
    before = threading.active_count()
    ahead = prefetch(groups_of(*[1] * 9), KIB)
    while ahead.buffered_bytes < KIB:
        time.sleep(0.01)
    time.sleep(0.1)
    ahead.close()
    assert threading.active_count() == before


def test_close_wakes_a_loop_that_waits_for_a_batch() -> None:
    gate, ended = threading.Event(), threading.Event()

    def groups() -> Generator[list[bytes], None, None]:
        gate.wait(30)
        ended.wait(2)
        yield []

    def loop() -> None:
        with pytest.raises(PenstockError, match="was closed"):
            next(ahead)
        ended.set()

    ahead = prefetch(groups(), KIB, gate)
    waiting = threading.Thread(target=loop)
    waiting.start()
    time.sleep(0.1)
    ahead.close()
    waiting.join(30)
    assert ended.is_set()


def test_closed_failure_leaves_nothing_to_the_garbage_collector() -> None:
    def groups() -> Generator[list[bytes], None, None]:
        yield from groups_of(1)
        raise ConnectionError

    gc.disable()
    try:
        ahead = prefetch(groups(), 8 * KIB)
        assert next(ahead) == item(0)
        with suppress(ConnectionError):
            next(ahead)
        ahead.close()
        kept = ref(ahead)
        del ahead
        assert kept() is None
    finally:
        gc.enable()


def test_groups_are_closed_by_the_thread_that_made_them() -> None:
    closed_by: list[str] = []

    def groups() -> Generator[list[bytes], None, None]:
        try:
            yield from groups_of(*[1] * 9)
        finally:
            closed_by.append(threading.current_thread().name)

    ahead = prefetch(groups(), KIB)
    next(ahead)
    ahead.close()
    assert closed_by == ["penstock-fetch"]


def test_next_item_and_its_bytes_are_reported() -> None:
    gate = threading.Event()

    def groups() -> Generator[list[bytes], None, None]:
        first, rest = groups_of(1, 2)
        yield first
        assert gate.wait(30)
        yield rest

    with closing(prefetch(groups(), 64 * KIB, gate)) as ahead:
        assert next(ahead) == item(0)
        assert (ahead.has_next, ahead.buffered_bytes) == (False, 0)
        gate.set()
        assert next(ahead) == item(1)
        assert (ahead.has_next, ahead.buffered_bytes) == (True, KIB)


@pytest.mark.filterwarnings("ignore:This process")  # is multi-threaded, says Python 3.12
def test_fork_is_refused_and_closes_nothing() -> None:
    interrupted = threading.Event()
    ahead = prefetch(groups_of(1, 8), 2 * KIB, interrupted)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        ahead.close()
        try:
            next(ahead)
        except PenstockError as error:
            os._exit(7 if "was forked off it" in str(error) and not interrupted.is_set() else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert list(ahead) == [item(number) for number in range(9)]


def test_worker_ends_when_its_loader_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.prefetch, "_ORPHAN_SECONDS", 0.05)
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def wait_for_ever(gate: threading.Event) -> Generator[list[bytes], None, None]:
        sender.send(os.getpid())
        gate.wait()
        yield []

    def work() -> None:
        gate = threading.Event()
        try:
            next(prefetch(wait_for_ever(gate), KIB, gate))
        except PenstockError as error:
            sender.send(str(error))

    def load() -> None:
        context.Process(target=work, daemon=True).start()
        signal.pause()

    loader = context.Process(target=load)
    loader.start()
    assert receiver.poll(30)
    worker = receiver.recv()
    assert not receiver.poll(0.3)  # it waits as long as its loader lives
    loader.kill()
    loader.join()
    try:
        assert receiver.poll(30)
        assert "has ended" in receiver.recv()
    finally:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


def test_run_outlives_the_shell_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.prefetch, "_ORPHAN_SECONDS", 0.01)
    gate = threading.Event()

    def groups() -> Generator[list[bytes], None, None]:
        assert gate.wait(30)
        yield from groups_of(1)

    def look() -> BaseProcess:
        gate.set()  # not before it has looked whether it is an orphan
        return current_process()

    ahead = prefetch(groups(), KIB)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    monkeypatch.setattr(penstock.prefetch, "current_process", look)
    assert list(ahead) == [item(0)]


@dataclass(frozen=True, slots=True)
class Step:
    """The part of a frame that ranges depend on."""

    number: int
    nbytes: int = KIB


def frames(steps: Steps, then: Steps | None = None, *, nbytes: int = KIB) -> list[Frame]:
    return [cast(Frame, Step(step, nbytes)) for step in steps.numbers]


def epoch(numbers: range, number: int = 0) -> Steps:
    return Steps(Spec(), number, numbers)


def test_ranges_grow_from_one_frame_to_the_target() -> None:
    steps = epoch(range(3, 500, 7))
    ranges = list(fetch_ranges(frames, [steps], TARGET))
    assert [len(each) for each in ranges] == [1, 1, 2, 4, 8, 16, 16, 16, 7]
    assert [frame for each in ranges for frame in each] == frames(steps)


@pytest.mark.parametrize("stride", [1, 3])
def test_jobs_request_the_same_ranges_wherever_they_resume(stride: int) -> None:
    def asked(first: int, target: int) -> list[range]:
        found: list[range] = []

        def fetch(steps: Steps, then: Steps | None) -> list[Frame]:
            found.append(steps.numbers)
            return frames(steps)

        steps = epoch(range(2 % stride + first * stride, 1000, stride))
        assert sum(map(len, fetch_ranges(fetch, [steps], target))) == sum(map(len, found)) == len(steps)
        return found

    target = TARGET * 27 // 16
    whole = asked(0, target)
    assert max(map(len, whole)) == 26
    assert asked(0, target + TARGET // 32) == whole  # as if the frames were a little smaller
    for first in range(100):
        again = asked(first, target)
        assert len(again[0]) == 1  # the loop starts at once
        later = [numbers for numbers in again if numbers[0] // stride >= first + 2 * 26]
        assert later
        assert {*later} <= {*whole}


def test_range_has_at_least_one_frame() -> None:
    large = partial(frames, nbytes=64 * KIB)
    assert [len(each) for each in fetch_ranges(large, [epoch(range(4))], TARGET)] == [1] * 4
    assert [len(each) for each in fetch_ranges(frames, [epoch(range(3))], 0)] == [1] * 3
    assert list(fetch_ranges(frames, [epoch(range(0))], KIB)) == []


def test_next_range_is_announced_across_epochs() -> None:
    asked: list[tuple[Steps, Steps | None]] = []

    def fetch(steps: Steps, then: Steps | None) -> list[Frame]:
        asked.append((steps, then))
        return frames(steps)

    epochs = [epoch(range(3, 150, 7)), epoch(range(0), 1), epoch(range(2, 100, 7), 2), epoch(range(5), 3)]
    given = [frame for each in fetch_ranges(fetch, epochs, TARGET) for frame in each]
    assert given == [frame for each in epochs for frame in frames(each)]
    assert [then for _, then in asked] == [*(steps for steps, _ in asked[1:]), None]
    assert [(steps.epoch, len(steps)) for steps, _ in asked] == [(0, n) for n in (1, 1, 2, 4, 8, 5)] + [(2, 14), (3, 5)]


def test_ranges_begin_small_again_after_an_incomplete_one() -> None:
    asked: list[int] = []

    def fetch(steps: Steps, then: Steps | None) -> list[Frame]:
        asked.append(len(steps))
        return frames(steps[: 1 if len(asked) == 5 else None])

    ranges = list(fetch_ranges(fetch, [epoch(range(40))], TARGET))
    assert [frame for each in ranges for frame in each] == frames(epoch(range(40)))
    assert asked[:8] == [1, 1, 2, 4, 8, 1, 1, 2]


class Recorded:
    """A client and a transport that record the requested steps."""

    def __init__(self, nbytes: int = KIB) -> None:
        self.steps: list[tuple[Steps, Steps | None]] = []
        self.is_interrupted = False
        self._nbytes = nbytes

    def frames(self, _transport: Transport, steps: Steps, then: Steps | None) -> list[Frame]:
        time.sleep(0.002)  # as any response takes
        self.steps.append((steps, then))
        return frames(steps, nbytes=self._nbytes)

    def interrupt(self) -> None:
        self.is_interrupted = True

    def ahead(self, num_steps: int, budget_bytes: int) -> closing[Prefetch[Frame]]:
        return closing(fetch_ahead(cast(Client, self), cast(Transport, self), [epoch(range(num_steps))], budget_bytes))


def test_next_range_is_requested_ahead_while_the_buffer_is_low() -> None:
    recorded = Recorded()
    with recorded.ahead(10_000, 4 * TARGET) as ahead:
        for turn in range(2):
            while ahead.buffered_bytes < 4 * TARGET:
                time.sleep(0.001)
            assert turn == 0 or not recorded.steps[-1][1]  # the buffer is full
            begun = len(recorded.steps)
            assert [cast(Step, next(ahead)).number for _ in range(500)] == list(range(500 * turn, 500 * turn + 500))
            assert any(then for _, then in recorded.steps[begun:])
        assert recorded.steps[0] == (epoch(range(1)), epoch(range(1, 2)))
        assert not recorded.is_interrupted
    assert recorded.is_interrupted


def test_range_is_a_few_mib_however_large_the_budget() -> None:
    recorded = Recorded(1 << 20)
    with recorded.ahead(64, 1 << 40) as ahead:
        assert len(list(ahead)) == 64
    assert max(len(steps) for steps, _ in recorded.steps) == 7
