import gc
import os
import signal
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from multiprocessing import current_process, get_context
from multiprocessing.process import BaseProcess
from weakref import ref

import pytest

import penstock.feeding.prefetch
from penstock import PenstockError
from penstock.feeding.prefetch import Prefetch

KIB = 1 << 10


def nbytes(group: Sequence[bytes]) -> int:
    return sum(map(len, group))


def prefetch(
    groups: Generator[list[bytes], None, None], budget_bytes: int, gate: threading.Event | None = None
) -> Prefetch[bytes]:
    return Prefetch(groups, nbytes=nbytes, budget_bytes=budget_bytes, interrupt=(gate or threading.Event()).set)


def item(number: int) -> bytes:
    return number.to_bytes(4, "big") + bytes(KIB - 4)


def groups_of(*sizes: int) -> Generator[list[bytes], None, None]:
    first = 0
    for size in sizes:
        yield [item(number) for number in range(first, first + size)]
        first += size


def test_items_come_in_order_whatever_their_groups_are() -> None:
    assert list(prefetch(groups_of(1, 2, 0, 40, 1), 8 * KIB)) == [item(number) for number in range(44)]
    assert list(prefetch(groups_of(), KIB)) == []


def test_it_works_ahead_within_the_budget_and_no_further() -> None:
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


def test_a_failure_arrives_after_what_was_made_before_it() -> None:
    def groups() -> Generator[list[bytes], None, None]:
        yield from groups_of(1, 6)
        raise ValueError("item 7 is cursed")

    ahead = prefetch(groups(), 64 * KIB)
    assert [next(ahead) for _ in range(7)] == [item(number) for number in range(7)]
    for _ in range(2):
        with pytest.raises(ValueError, match="cursed") as raised:
            next(ahead)
        assert raised.value.__context__ is None  # nothing that happened in here stands before it in a log


def test_whatever_ends_the_thread_does_not_pass_for_the_end_of_the_epoch() -> None:
    def groups() -> Generator[list[bytes], None, None]:
        yield from groups_of(1)
        raise SystemExit(3)

    ahead = prefetch(groups(), 64 * KIB)
    assert next(ahead) == item(0)
    with pytest.raises(SystemExit):
        next(ahead)


def test_what_is_made_while_it_is_closed_is_dropped() -> None:
    gate, entered = threading.Event(), threading.Event()

    def groups() -> Generator[list[bytes], None, None]:
        entered.set()
        assert gate.wait(30)
        yield from groups_of(1)

    ahead = prefetch(groups(), 64 * KIB, gate)
    assert entered.wait(30)
    ahead.close()
    assert (ahead.has_next, ahead.buffered_bytes) == (False, 0)


def test_closing_interrupts_what_the_thread_is_in_and_leaves_no_thread() -> None:
    gate, entered = threading.Event(), threading.Event()

    def groups() -> Generator[list[bytes], None, None]:
        entered.set()
        assert gate.wait(30)
        raise ConnectionError
        yield []

    before = threading.active_count()
    ahead = prefetch(groups(), KIB, gate)
    assert entered.wait(30)
    ahead.close()
    ahead.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("is_told", [True, False])
def test_what_failed_does_not_wait_for_the_garbage_collector_once_it_is_closed(is_told: bool) -> None:
    gate, entered = threading.Event(), threading.Event()

    def groups() -> Generator[list[bytes], None, None]:
        yield from groups_of(1)
        entered.set()
        assert is_told or gate.wait(30)
        raise ConnectionError

    gc.disable()
    try:
        ahead = prefetch(groups(), 8 * KIB, gate)
        assert next(ahead) == item(0)
        assert entered.wait(30)
        if is_told:
            with suppress(ConnectionError):
                next(ahead)
        ahead.close()
        kept = ref(ahead)
        del ahead
        assert kept() is None
    finally:
        gc.enable()


def test_closing_wakes_a_thread_that_waits_for_room_and_a_loop_that_waits_for_a_batch() -> None:
    before = threading.active_count()
    ahead = prefetch(groups_of(*[1] * 9), KIB)
    while ahead.buffered_bytes < KIB:
        time.sleep(0.01)
    time.sleep(0.1)
    ahead.close()
    assert threading.active_count() == before

    gate, ended = threading.Event(), threading.Event()

    def groups() -> Generator[list[bytes], None, None]:
        gate.wait(30)
        ended.wait(30)  # longer than closing waits for it
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


def test_a_budget_of_nothing_still_has_room_for_one_group() -> None:
    assert list(prefetch(groups_of(*[3] * 7), 0)) == [item(number) for number in range(21)]


def test_what_is_there_is_told_and_its_bytes_until_it_is_closed() -> None:
    gate = threading.Event()

    def groups() -> Generator[list[bytes], None, None]:
        first, rest = groups_of(1, 2)
        yield first
        assert gate.wait(30)
        yield rest

    ahead = prefetch(groups(), 64 * KIB, gate)
    assert next(ahead) == item(0)
    assert (ahead.has_next, ahead.buffered_bytes) == (False, 0)
    gate.set()
    assert next(ahead) == item(1)
    assert (ahead.has_next, ahead.buffered_bytes) == (True, KIB)
    ahead.close()
    assert (ahead.has_next, ahead.buffered_bytes) == (False, 0)


def test_an_iteration_that_was_closed_does_not_pass_for_one_that_ended() -> None:
    ahead = prefetch(groups_of(1, 1, 1), 64 * KIB)
    assert next(ahead) == item(0)
    ahead.close()
    with pytest.raises(PenstockError, match="was closed"):
        next(ahead)


@pytest.mark.filterwarnings("ignore:This process")  # is multi-threaded, says Python 3.12
def test_an_interrupt_at_the_lock_of_a_wait_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Condition.wait takes its lock again at its end; interrupted there, it leaves one to be released that nobody has."""

    def interrupted(self: threading.Condition, *_: object) -> None:
        self.release()
        raise KeyboardInterrupt

    with closing(prefetch(groups_of(1), 9 * KIB)) as ahead:
        ahead._thread.join(60)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Condition, "wait_for", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(ahead)
        assert list(ahead) == [item(0)]


def test_a_fork_is_refused_and_closes_nothing_even_if_the_lock_was_held_when_it_was_made() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def count(group: Sequence[bytes]) -> int:  # called with the lock held when a group is handed over
        if item(1) in group:
            entered.set()
            go_on.wait(30)
        return nbytes(group)

    interrupted = threading.Event()
    ahead = Prefetch(groups_of(1, 8), nbytes=count, budget_bytes=2 * KIB, interrupt=interrupted.set)
    assert entered.wait(30)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        ahead.close()
        try:
            next(ahead)
        except PenstockError as error:
            os._exit(7 if "was forked off it" in str(error) and not interrupted.is_set() else 8)
        os._exit(9)
    go_on.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert list(ahead) == [item(number) for number in range(9)]


def test_a_worker_whose_loader_was_killed_waits_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.feeding.prefetch, "_ORPHAN_SECONDS", 0.05)
    context = get_context("fork")
    heard, told = context.Pipe(duplex=False)

    def wait_for_ever(gate: threading.Event) -> Generator[list[bytes], None, None]:
        told.send(os.getpid())
        gate.wait()
        yield []

    def work() -> None:
        gate = threading.Event()
        try:
            next(prefetch(wait_for_ever(gate), KIB, gate))
        except PenstockError as error:
            told.send(str(error))

    def load() -> None:
        context.Process(target=work, daemon=True).start()
        signal.pause()

    loader = context.Process(target=load)
    loader.start()
    assert heard.poll(30)
    worker = heard.recv()
    assert not heard.poll(0.3)  # it waits as long as its loader lives
    loader.kill()
    loader.join()
    try:
        assert heard.poll(30)
        assert "has ended" in heard.recv()
    finally:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


def test_who_is_no_loader_worker_outlives_the_process_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a run does whose shell was closed."""
    monkeypatch.setattr(penstock.feeding.prefetch, "_ORPHAN_SECONDS", 0.01)
    gate = threading.Event()

    def groups() -> Generator[list[bytes], None, None]:
        assert gate.wait(30)
        yield from groups_of(1)

    def look() -> BaseProcess:
        gate.set()  # not before it has looked whether it is an orphan
        return current_process()

    ahead = prefetch(groups(), KIB)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    monkeypatch.setattr(penstock.feeding.prefetch, "current_process", look)
    assert list(ahead) == [item(0)]
