"""Skipped ranges: a schedule without them is the schedule with them, less what they hold."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import SpecError
from penstock.skip import Ranges, kept_runs, parse_skip, position_after, skips_more, spell_skip
from penstock_server.order.schedule import Schedule

ranges = st.lists(st.tuples(st.integers(0, 120), st.integers(0, 30)), min_size=1, max_size=4).map(
    lambda pairs: parse_skip("samples:" + ",".join(f"{first}-{first + more}" for first, more in pairs), 1)
)


def schedule(num: int, batch: int, world: int, offset: int, drop_last: bool, skipped: tuple[tuple[int, int], ...]) -> Schedule:
    return Schedule(
        num_samples=num, batch_size=batch, world_size=world, offset=min(offset, num), drop_last=drop_last, skipped=skipped
    )


schedules = st.builds(
    schedule,
    st.integers(1, 200),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 150),
    st.sampled_from(["drop", "wrap"]),
    ranges,
)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), min_size=1, max_size=5), st.integers(1, 3))
def test_parse_skip_merges_ranges(pairs: list[tuple[int, int]], per_step: int) -> None:
    skipped = parse_skip(",".join(f"{first}-{first + more}" for first, more in pairs), per_step)
    steps = {step for first, more in pairs for step in range(first, first + more + 1)}
    assert [p for start, stop in skipped for p in range(start, stop)] == [p for p in range(200) if p // per_step in steps]
    assert all(one[1] < two[0] for one, two in pairwise(skipped))


@given(ranges, ranges)
def test_skips_more_finds_an_unknown_position(some: Ranges, known: Ranges) -> None:
    positions, others = ({at for start, stop in each for at in range(start, stop)} for each in (some, known))
    assert skips_more(some, known) == bool(positions - others)


@given(schedules)
def test_schedule_is_the_epoch_without_skipped_samples(schedule: Schedule) -> None:
    skipped = {position for start, stop in schedule.skipped for position in range(start, stop)}
    kept = [position for position in range(schedule.num_samples) if position not in skipped]
    left = [position for position in kept if position >= schedule.offset]
    per_step = schedule.batch_size * schedule.world_size
    shown = [
        position
        for step in range(schedule.num_steps)
        for rank in range(schedule.world_size)
        for position in schedule.positions([step], rank)[0].tolist()
    ]
    assert schedule.num_repeated == max(0, len(shown) - len(left))
    if schedule.drop_last:
        assert shown == left[: len(left) // per_step * per_step]
    else:
        assert shown[: len(left)] == left
        assert len(shown) == -(-len(left) // per_step) * per_step
        assert all(position in kept for position in shown)
    for position in range(schedule.num_samples):
        assert len([*schedule.locate(position)]) == shown.count(position)
        for step, rank, index in schedule.locate(position):
            assert schedule.positions([step], rank)[0, index] == position


@given(ranges, st.integers(0, 100), st.integers(0, 100))
def test_position_after_counts_kept_samples(skipped: tuple[tuple[int, int], ...], offset: int, number: int) -> None:
    position = position_after(skipped, offset, number)
    inside = [p for p in range(offset, position) if not any(start <= p < stop for start, stop in skipped)]
    assert len(inside) == number
    assert position == (inside[-1] + 1 if inside else offset)


@given(ranges, st.integers(0, 150))
def test_kept_runs_lie_between_skipped_ranges(skipped: tuple[tuple[int, int], ...], number: int) -> None:
    runs = kept_runs(skipped, number)
    inside = [p for p in range(number) if not any(start <= p < stop for start, stop in skipped)]
    assert [p for start, stop in runs for p in range(start, stop)] == inside
    assert all(start < stop for start, stop in runs)


def test_parse_skip_multiplies_steps_by_the_global_batch() -> None:
    assert parse_skip("3-4,10-10", 8) == ((24, 40), (80, 88))
    assert parse_skip("5-9,0-4", 2) == ((0, 20),)
    assert parse_skip("0,20-29,22-23", 1) == ((0, 1), (20, 30))  # one of them in another
    assert spell_skip(parse_skip("3-4,10-10", 8)) == "samples:24-39,80-87"
    assert parse_skip("samples:24-39,80-87", 1000) == parse_skip("3-4,10-10", 8)
    assert parse_skip("7", 10) == parse_skip("7-7", 10) == ((70, 80),)
    assert spell_skip(()) is None


def test_ranges_past_the_epoch_are_spelled_readably() -> None:
    whole = parse_skip("7-999999999999999,1-2", 65_536)
    assert whole == ((65_536, 196_608), (458_752, 2**53))
    assert parse_skip(str(spell_skip(whole)), 1) == whole
    assert parse_skip("999999999999999-9999999999999999", 65_536) == ()


@pytest.mark.parametrize("text", ["", "9-3", "a-b", "1-2,", "-1-2", "samples:"])
def test_parse_skip_refuses_invalid_text(text: str) -> None:
    with pytest.raises(SpecError, match="is not a range FIRST-LAST"):
        parse_skip(text, 1)
