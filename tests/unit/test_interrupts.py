"""What a signal's handler raises, at whatever step it comes, leaves no lock taken and no thread behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from types import FrameType

import pytest

from penstock.ledger.file import open_ledger
from penstock.prefetch import Prefetch
from support.ledgers import begin_of

pytestmark = [
    pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer sends signals here"),
    # Where Python ignores it, as in what is called when the garbage collector runs.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def interrupted() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Does something over and over until Ctrl-C, which comes within a millisecond or two."""
    random, is_armed = Random(7), False

    def interrupt(_: int, __: FrameType | None) -> None:
        nonlocal is_armed
        if is_armed:
            is_armed = False
            raise KeyboardInterrupt

    def until_interrupted(act: Callable[[], object]) -> None:
        with suppress(KeyboardInterrupt):
            go_on(act)  # of a loop in this very block Python 3.13 lets some through

    def go_on(act: Callable[[], object]) -> None:
        nonlocal is_armed
        is_armed = True
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0002, 0.002))
        while is_armed:  # it may come where Python ignores it, as while an object is collected
            act()

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield until_interrupted
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def in_another_thread(act: Callable[[], bool]) -> bool:
    """What another thread finds, which nothing may keep waiting."""
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(act()), daemon=True)
    thread.start()
    thread.join(20)
    return bool(found) and found[0]


def test_interrupt_leaves_no_lock_of_a_ledger(tmp_path: Path, interrupted: Callable[[Callable[[], object]], None]) -> None:
    file = open_ledger(tmp_path / "run.ledger")
    begin, line = begin_of().to_text(), "0 " + "0" * 64

    def can_append() -> bool:
        file.append(begin, line)
        return True

    for _ in range(300):
        interrupted(lambda: file.append(begin, line))
        assert in_another_thread(can_append)


def test_interrupt_leaves_no_fetch_thread_waiting(interrupted: Callable[[Callable[[], object]], None]) -> None:
    for _ in range(300):
        made = iter(range(10**9))
        items = Prefetch(([number] for number in made), nbytes=lambda _: 1, budget_bytes=3, interrupt=lambda: None)
        interrupted(lambda items=items: next(items))  # type: ignore[misc]
        items.close()
        assert not items._thread.is_alive()
