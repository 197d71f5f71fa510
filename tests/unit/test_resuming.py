"""A run that is stopped and goes on, again and again, on other numbers of ranks: each sample once, and in its order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Spec
from penstock.state.state import Position, read_state, write_state
from penstock_server.order.schedule import Schedule

specs = st.builds(
    Spec,
    batch_size=st.integers(1, 6),
    world_size=st.integers(1, 5),
    drop_last=st.booleans(),
    skip=st.sampled_from([None, None, "samples:0-3", "samples:17-40,55-55"]),
)


def shown(spec: Spec, at: Position, num_samples: int) -> list[int]:
    """The samples of what is left of an epoch from a position on, over all ranks, in their order."""
    schedule = Schedule(
        num_positions=num_samples,
        batch_size=spec.batch_size,
        world_size=spec.world_size,
        offset=min(at.offset, num_samples),
        drop_last=spec.drop_last,
        skipped=spec.skipped(),
    )
    steps = range(at.step, schedule.num_steps)
    return [p for step in steps for rank in range(spec.world_size) for p in schedule.positions([step], rank)[0].tolist()]


def without(samples: list[int], spec: Spec) -> list[int]:
    """The samples that the spec does not skip."""
    return [sample for sample in samples if not any(start <= sample < stop for start, stop in spec.skipped())]


def check_rest(spec: Spec, at: Position, left: list[int], num_samples: int) -> None:
    per_step = spec.batch_size * spec.world_size
    found = shown(spec, at, num_samples)
    if spec.drop_last:
        assert found == left[: len(left) // per_step * per_step]
    else:
        assert found[: len(left)] == left
        assert len(found) == -(-len(left) // per_step) * per_step


@pytest.mark.filterwarnings("ignore:skip counts all steps of an epoch", "ignore:this state is past")  # of ranges that are added
@given(st.integers(1, 120), st.lists(st.tuples(specs, st.integers(0, 12)), min_size=1, max_size=4), specs)
def test_whatever_is_resumed_at_any_step_gives_the_rest_and_nothing_else(
    num_samples: int, legs: list[tuple[Spec, int]], last: Spec
) -> None:
    state, left = write_state("a", last, Position(epoch=3)), list(range(num_samples))
    for spec, num_steps in legs:
        at = read_state(state, "a", spec, num_samples=num_samples)
        kept = without(left, spec)
        check_rest(spec, at, kept, num_samples)
        per_step = spec.batch_size * spec.world_size
        behind = [left, *(left[left.index(kept[n - 1]) + 1 :] for n in range(per_step, len(kept) + 1, per_step))]
        states = [write_state("a", spec, replace(at, step=at.step + step)) for step in range(len(behind))]
        for then, rest in zip(states, behind, strict=True):
            for other in (last, replace(spec, world_size=spec.world_size + 3), replace(spec, skip=last.skip)):
                check_rest(other, read_state(then, "a", other, num_samples=num_samples), without(rest, other), num_samples)
        step = min(num_steps, len(behind) - 1)
        state, left = states[step], behind[step]
        assert state["epoch"] == 3
