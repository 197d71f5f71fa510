"""A state is taken by every dataset whose samples stand in the same order, and by no other."""

from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Spec, StateMismatch
from penstock.spec import ORDER_PARAMETERS, Packing, Shuffle
from penstock.state import Cursor, read_state, write_state
from penstock_server.batches.member import OrderKey
from penstock_server.order.schedule import Schedule
from support.fuzz import HUGE, ODD, altered

HERE = Cursor(epoch=2, step=5)

read = partial(read_state, num_samples=100)


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ({"length_bucket_size": 16, "seq_len": 64}, {"seq_len": 128}),
        ({"length_bucket_size": 16, "seq_len": 64}, {"task": "seq2seq"}),
        ({"overflow": "split", "seq_len": 64}, {"seq_len": 128}),
        ({"packing": "best_fit", "seq_len": 64}, {"seq_len": 128}),
        ({"split": "train"}, {"split": "all"}),
        ({"mix": "a:1,b:1"}, {"mix": "a:1,b:2"}),
        ({}, {"mix": "a:1,b:2"}),
    ],
)
def test_state_is_refused_when_the_order_changed(then: dict[str, Any], now: dict[str, Any]) -> None:
    state = write_state("a", Spec(**then), HERE)
    with pytest.raises(StateMismatch, match=f"{next(iter(now))}: "):
        read(state, "a", Spec(**(then | now)))


@pytest.mark.parametrize(
    "now", [{"seq_len": 128}, {"pad": "longest"}, {"drop_last": False}, {"loss_on": "all"}, {"task": "seq2seq"}]
)
def test_state_is_taken_when_the_order_is_the_same(now: dict[str, Any]) -> None:
    assert read(write_state("a", Spec(seq_len=64), HERE), "a", Spec(**({"seq_len": 64} | now))) == HERE


def test_difference_that_follows_from_another_is_not_listed() -> None:
    state = write_state("a", Spec(packing="concat", seq_len=64), HERE)
    with pytest.raises(StateMismatch, match=r"\(packing: 'concat' then, 'rows' now\)"):
        read(state, "a", Spec(seq_len=64))


def test_state_of_another_order_counts_samples_when_not_strict() -> None:
    then = Spec(seed=1, batch_size=4, world_size=3, skip="1")
    state = write_state("a", then, Cursor(epoch=2, offset=10, step=5))
    now = Spec(seed=2, batch_size=2, world_size=3, skip="samples:12-23")
    expected = "seed: 1 then, 2 now.* Going on in epoch 2 after its first 82 of 100 samples.*not at all.$"  # 12 of them skipped
    with pytest.warns(UserWarning, match=expected):
        assert read(state, "b", now, strict=False) == Cursor(epoch=2, offset=82, step=0)
    assert read(state, "a", then, strict=False) == Cursor(epoch=2, offset=10, step=5)  # without a word


@pytest.mark.parametrize("shuffle", ["none", "global", "window"])
def test_window_matters_only_when_samples_are_shuffled_in_windows(shuffle: Shuffle) -> None:
    then, now = Spec(shuffle=shuffle, window=1000), Spec(shuffle=shuffle, window=2000)
    state = write_state("a", then, HERE)
    if shuffle == "window":
        with pytest.raises(StateMismatch, match="window: 1000 then, 2000 now"):
            read(state, "a", now)
    else:
        assert read(state, "a", now) == HERE


@pytest.mark.parametrize(
    "damage",
    [
        {"step": -1}, {"epoch": -1}, {"offset": "x"}, {"batch_size": 0}, {"world_size": None}, {"skip": "x"},
        {"skip": 3}, {"epoch": inf}, {"step": HUGE}, {"version": HUGE}, {"seed": HUGE},
    ],
)  # fmt: skip
def test_damaged_count_or_skip_is_refused(damage: dict[str, Any]) -> None:
    with pytest.raises(StateMismatch, match="damaged"):
        read(write_state("a", Spec(), HERE) | damage, "a", Spec())


@given(st.builds(write_state, st.just("a"), st.just(Spec(skip="3-4")), st.just(HERE)).flatmap(altered) | ODD, st.booleans())
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_any_state_has_a_place_or_is_refused(state: Any, strict: bool) -> None:
    with suppress(StateMismatch):
        at = read(state, "a", Spec(), strict=strict)
        assert min(at.epoch, at.step, at.offset) >= 0


def test_state_counts_up_to_the_largest_sample() -> None:
    most = 2**53
    state = write_state("a", Spec(), Cursor(step=most)) | {"batch_size": most}
    assert read(state, "a", Spec()) == Cursor(offset=most)


def test_other_object_is_refused_when_not_strict() -> None:
    with pytest.raises(StateMismatch, match="not a state of a RemoteDataset, but list"):
        read([1, 2], "a", Spec(), strict=False)  # type: ignore[arg-type]
    with pytest.raises(StateMismatch, match="damaged"):
        read(write_state("a", Spec(), HERE) | {"step": None}, "a", Spec(seed=1), strict=False)


@given(st.sampled_from(get_args(Packing)), st.sampled_from([0, 8]))
def test_state_has_the_same_keys_for_every_spec(packing: Packing, length_bucket_size: int) -> None:
    spec = Spec(packing=packing, length_bucket_size=0 if packing != "rows" else length_bucket_size)
    assert write_state("a", spec, HERE).keys() == write_state("a", Spec(), HERE).keys()


def test_order_key_of_a_dataset_has_the_marked_parameters() -> None:
    of_mixtures = {"snapshot", "mix", "stopping_strategy"}
    others = {"repeat", "seq_len", "labels", "task"}  # the plan repeats; the rest gives sample_len
    assert {*OrderKey._fields} - {"sample_len"} | of_mixtures == {*ORDER_PARAMETERS} - others
    assert write_state("a", Spec(), HERE).keys() >= {*ORDER_PARAMETERS}


def test_state_of_another_version_is_refused_with_its_version() -> None:
    with pytest.raises(StateMismatch, match=r"a state of version 2, and this penstock reads version 3"):
        read(write_state("a", Spec(), HERE) | {"version": 2}, "a", Spec())


@pytest.mark.parametrize(
    ("now", "is_taken"),
    [
        ({"mix": "a:3,b:1;a:1,b:1@84"}, True),
        ({"mix": "a:3,b:1;a:1,b:1@1000000"}, True),
        ({"mix": "a:3,b:1;a:1,b:1@83"}, False),  # among what was trained on
        ({"mix": "a:3,b:1;a:3,b:1@83"}, False),  # the same weights, but they begin anew there
        ({"mix": "a:3,b:2;a:1,b:1@84"}, False),
        ({"mix": "a:3,b:1;a:1,aa:1@84", "snapshot": "one+three+two"}, True),  # in the order of their names
        ({"mix": "a:3,b:1,c:0", "snapshot": "one+two+three"}, True),
        ({"mix": "a:3,b:1,c:1", "snapshot": "one+two+three"}, False),
        ({"mix": "a:3,b:1;a:1,b:1@84", "snapshot": "one+other"}, False),
        ({"mix": "a:3,b:1;a:1,b:1@84", "snapshot": "one"}, False),
        ({"stopping_strategy": "never", "mix": "a:3,b:1;a:1,b:1@84"}, False),
        ({"seed": 1, "mix": "a:3,b:1;a:1,b:1@84"}, False),
        ({"mix": None}, False),
    ],
)
def test_mix_may_change_after_the_consumed_samples(now: dict[str, Any], is_taken: bool) -> None:
    then = Spec(mix="a:3,b:1", stopping_strategy="first_exhausted", snapshot="one+two", batch_size=4, world_size=3, skip="2")
    state = write_state("a", then, Cursor(step=6))  # 72 samples, and the 12 that are skipped
    if is_taken:
        assert read(state, "a", replace(then, **now)) == Cursor(step=6)
    else:
        with pytest.raises(StateMismatch, match=f"{next(iter(now))}: "):
            read(state, "a", replace(then, **now))


@pytest.mark.parametrize("values", [{"at": Cursor(epoch=1, step=5)}, {"by_worker": True}, {"drop_last": False}])
def test_mix_may_not_change_when_the_consumed_samples_are_uncertain(values: dict[str, Any]) -> None:
    """In a later epoch, in a loader's worker, and where the last step is filled."""
    options: dict[str, Any] = {"at": Cursor(step=5), "by_worker": False, "drop_last": True} | values
    then = Spec(
        mix="a:3,b:1", stopping_strategy="first_exhausted", snapshot="one+two", batch_size=4, drop_last=options["drop_last"]
    )
    state = write_state("a", then, options["at"])
    with pytest.raises(StateMismatch, match="mix: .* same values, or start"):
        read(state, "a", replace(then, mix="a:3,b:1;a:1,b:1@1000"), by_worker=options["by_worker"])
    assert read(state, "a", then, by_worker=options["by_worker"]) == options["at"]


def test_mix_that_changes_too_early_is_refused_with_the_earliest_sample() -> None:
    then = Spec(mix="a:3,b:1", stopping_strategy="first_exhausted", snapshot="one+two", batch_size=4)
    now = replace(then, mix="a:1,b:1")
    with pytest.raises(StateMismatch, match="values, or let the mix be another from sample 20 on, or start"):
        read(write_state("a", then, Cursor(step=5)), "a", now)
    going_on = replace(then, mix="a:3,b:1;a:1,b:1@20")
    assert read(write_state("a", then, Cursor(step=5)), "a", going_on) == Cursor(step=5)
    with pytest.raises(StateMismatch, match="mix: .* same values, or start"):
        read(write_state("a", then, Cursor()), "a", now)  # though nothing was trained on yet


def test_range_added_to_a_skip_is_warned_of() -> None:
    """Its numbers count the steps that the run left out, and steps of the present size."""
    then = Spec(batch_size=4, world_size=1, skip="samples:120-159")  # resolved, of skip="30-39"
    state = write_state("a", then, Cursor(step=50))
    for spec in (replace(then, skip="30-39,60-61"), Spec(batch_size=2, world_size=4, skip="30-39")):
        with pytest.warns(UserWarning, match="left out samples:120-159 when this state was taken. Check the ranges"):
            read(state, "a", spec)
    for skip in ("samples:120-159", "samples:120-130", None):
        read(state, "a", replace(then, skip=skip))  # nothing to tell


specs = st.builds(
    Spec,
    batch_size=st.integers(1, 6),
    world_size=st.integers(1, 5),
    drop_last=st.booleans(),
    skip=st.sampled_from([None, None, "samples:0-3", "samples:17-40,55-55"]),
)


def shown(spec: Spec, at: Cursor, num_samples: int) -> list[int]:
    """The samples of what is left of an epoch from a position on, over all ranks, in their order."""
    schedule = Schedule(
        num_samples=num_samples,
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


def check_rest(spec: Spec, at: Cursor, left: list[int], num_samples: int) -> None:
    per_step = spec.batch_size * spec.world_size
    found = shown(spec, at, num_samples)
    if spec.drop_last:
        assert found == left[: len(left) // per_step * per_step]
    else:
        assert found[: len(left)] == left
        assert len(found) == -(-len(left) // per_step) * per_step


@pytest.mark.filterwarnings("ignore:skip leaves out")  # of ranges that are added
@given(st.integers(1, 120), st.lists(st.tuples(specs, st.integers(0, 12)), min_size=1, max_size=4), specs)
def test_resumed_epoch_is_the_rest_of_it(num_samples: int, legs: list[tuple[Spec, int]], last: Spec) -> None:
    state, left = write_state("a", last, Cursor(epoch=3)), list(range(num_samples))
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
