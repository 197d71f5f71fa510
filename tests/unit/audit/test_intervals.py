"""Intervals against sets of numbers, and slicing against the server's schedule."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.audit.intervals import clip, covered, intervals, intervals_of, join, positions_of, size, without
from penstock.audit.reading import IntArray
from penstock.skip import parse_skip
from penstock.slicing import Slicing
from penstock_server.order.schedule import Schedule

pairs = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)


def numbers(found: IntArray) -> list[int]:
    return [number for start, stop in found.tolist() for number in range(start, stop)]


def is_tidy(found: IntArray) -> bool:
    """Sorted, disjoint, and as few as possible."""
    flat = found.reshape(-1).tolist()
    return flat == sorted(set(flat))


@given(pairs, pairs, st.integers(1, 3))
def test_intervals_are_sets(one: list[tuple[int, int]], two: list[tuple[int, int]], times: int) -> None:
    first, second = intervals(one), intervals(two)
    rest, overlapping = without(first, second), covered(first, times)
    assert numbers(rest) == sorted(set(numbers(first)) - set(numbers(second)))
    assert numbers(overlapping) == [n for n in range(31) if numbers(first).count(n) >= times]
    assert is_tidy(rest)
    assert is_tidy(overlapping)
    assert size(rest) == len(numbers(rest))
    assert sorted(numbers(join([first, second]))) == sorted(numbers(first) + numbers(second))
    assert numbers(clip(first, 5, 20)) == [number for number in numbers(first) if 5 <= number < 20]


@given(st.lists(st.integers(0, 20), max_size=20).map(sorted))
def test_runs_hold_their_numbers(found: list[int]) -> None:
    assert sorted(numbers(intervals_of(np.array(found, np.int64)))) == found


ranges = st.lists(st.tuples(st.integers(0, 120), st.integers(0, 30)), max_size=3)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    text = ",".join(f"{first}-{first + more}" for first, more in draw(ranges))
    num = draw(st.integers(1, 120))
    return Schedule(
        num_samples=num, batch_size=draw(st.integers(1, 4)), world_size=draw(st.integers(1, 4)),
        offset=draw(st.integers(0, num)), drop_last=draw(st.booleans()),
        skipped=parse_skip("samples:" + text, 1) if text else (),
    )  # fmt: skip


@given(schedules(), st.data())
def test_steps_of_ranks_are_the_samples_of_the_server(schedule: Schedule, data: st.DataObject) -> None:
    steps = {
        rank: sorted(data.draw(st.sets(st.integers(0, max(0, schedule.num_steps - 1)), max_size=schedule.num_steps)))
        for rank in range(schedule.world_size)
    }
    kept = [p for p in range(schedule.num_samples) if not any(start <= p < stop for start, stop in schedule.skipped)]
    behind = [position for position in kept if position >= schedule.offset]
    expected = []
    for rank, own in steps.items():
        for step in own:
            begin = (step * schedule.world_size + rank) * schedule.batch_size
            shown = schedule.positions([step], rank)[0].tolist()
            assert shown[: len(behind[begin:])] == behind[begin : begin + schedule.batch_size]
            expected += behind[begin : begin + schedule.batch_size]  # the rest fills the last step
            for position in behind[begin : begin + schedule.batch_size]:
                assert schedule.step_of(position) == (step, rank)
    found = positions_of(schedule, {rank: intervals_of(np.array(own, np.int64)) for rank, own in steps.items()})
    assert numbers(found) == sorted(expected)
    assert is_tidy(found)
    assert all(start < stop for start, stop in found.tolist())
    for position in range(schedule.num_samples):
        begun = {schedule.step_of(before)[0] for before in behind if before < position}
        assert schedule.num_steps_before(position) == len(begun)
    assert schedule.position(schedule.num_steps + 1) == schedule.num_samples
    for step in range(schedule.num_steps):
        assert schedule.num_steps_before(schedule.position(step)) == step
        first = step * schedule.samples_per_step
        assert [p for p in behind if p < schedule.position(step)] == behind[:first]


def test_million_steps_of_many_ranks_are_one_interval() -> None:
    slicing = Slicing(batch_size=4, world_size=512, offset=0, num_samples=4 * 512 * 1_000_000, drop_last=True)
    whole = intervals([(0, 1_000_000)])
    assert positions_of(slicing, dict.fromkeys(range(512), whole)).tolist() == [[0, slicing.num_samples]]
    found = positions_of(slicing, {rank: whole for rank in range(512) if rank != 7})
    assert size(found) == slicing.num_samples - 4_000_000
    assert len(found) == 1_000_001


def test_ranks_in_turns_are_intervals() -> None:
    slicing = Slicing(batch_size=4, world_size=2, offset=0, num_samples=8 * 200_000, drop_last=True)
    steps = np.arange(200_000)
    firsts = 8 * steps + 4 * (steps % 2)
    found = positions_of(slicing, {rank: intervals_of(steps[rank::2]) for rank in range(2)})
    assert found.tolist() == covered(np.stack([firsts, firsts + 4], axis=1)).tolist()
