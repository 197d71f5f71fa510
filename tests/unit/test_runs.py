from dataclasses import dataclass
from functools import partial
from typing import cast

from penstock.runs import fetch_runs
from penstock.wire import Frame

KIB = 1 << 10


@dataclass(frozen=True, slots=True)
class Step:
    """As much of a frame as runs look at."""

    number: int
    nbytes: int = KIB


def frames(steps: range, then: range = range(0), *, nbytes: int = KIB) -> list[Frame]:
    return [cast(Frame, Step(step, nbytes)) for step in steps]


def test_the_first_frame_comes_alone_and_runs_grow_to_a_few_bytes() -> None:
    steps = range(3, 500, 7)
    runs = list(fetch_runs(frames, steps, 16 * KIB))
    assert [len(run) for run in runs] == [1, 1, 2, 4, 8, 16, 16, 16, 7]
    assert [frame for run in runs for frame in run] == frames(steps)


def test_a_run_has_one_frame_at_least_however_large() -> None:
    large = partial(frames, nbytes=64 * KIB)
    assert [len(run) for run in fetch_runs(large, range(4), 16 * KIB)] == [1] * 4
    assert [len(run) for run in fetch_runs(frames, range(3), 0)] == [1] * 3
    assert list(fetch_runs(frames, range(0), KIB)) == []


def test_what_is_fetched_next_is_known_before() -> None:
    asked: list[tuple[range, range]] = []

    def fetch(steps: range, then: range) -> list[Frame]:
        asked.append((steps, then))
        return frames(steps)

    list(fetch_runs(fetch, range(3, 500, 7), 16 * KIB))
    assert [then for _, then in asked] == [*(steps for steps, _ in asked[1:]), range(500, 500, 7)]


def test_a_fetch_may_give_less_than_it_was_asked_for() -> None:
    asked: list[int] = []

    def fetch(steps: range, then: range) -> list[Frame]:
        asked.append(len(steps))
        return frames(steps[: 1 if len(asked) == 5 else None])

    runs = list(fetch_runs(fetch, range(40), 16 * KIB))
    assert [frame for run in runs for frame in run] == frames(range(40))
    assert asked[:8] == [1, 1, 2, 4, 8, 1, 1, 2]  # and it begins small again
