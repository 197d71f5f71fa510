"""A state is taken by every dataset whose samples stand in the same order, and by no other."""

import re
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Spec, StateMismatch
from penstock.spec import Packing, Shuffle, describe
from penstock.state.state import Position, read_state, write_state

HERE = Position(epoch=2, step=5)

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
def test_what_changes_the_order_is_refused(then: dict[str, Any], now: dict[str, Any]) -> None:
    state = write_state("a", Spec(**then), HERE)
    with pytest.raises(StateMismatch, match=f"{next(iter(now))}: "):
        read(state, "a", Spec(**(then | now)))


@pytest.mark.parametrize(
    "now", [{"seq_len": 128}, {"pad": "longest"}, {"drop_last": False}, {"loss_on": "all"}, {"task": "seq2seq"}]
)
def test_what_leaves_the_order_as_it_is_does_not_matter(now: dict[str, Any]) -> None:
    assert read(write_state("a", Spec(seq_len=64), HERE), "a", Spec(**({"seq_len": 64} | now))) == HERE


def test_of_other_data_the_way_back_is_told() -> None:
    state = write_state("a", Spec(snapshot="0123456789abcdef"), HERE)
    with pytest.raises(
        StateMismatch, match=r"with the same values \(snapshot='0123456789abcdef': the data as it was\), or start"
    ):
        read(state, "a", Spec(snapshot="fedcba9876543210"))
    with pytest.raises(StateMismatch, match=r"with the same values, or start"):
        read(state, "a", Spec(snapshot="0123456789abcdef", seed=1))
    with pytest.raises(StateMismatch, match=r"with the same values, or start"):
        read(state | {"snapshot": None}, "a", Spec(snapshot="0123456789abcdef"))
    with pytest.raises(StateMismatch, match=r"with the same values, or start"):
        read(state, "another", Spec(snapshot="fedcba9876543210"))


def test_what_follows_from_other_differences_is_not_listed() -> None:
    state = write_state("a", Spec(packing="concat", seq_len=64), HERE)
    with pytest.raises(StateMismatch, match=r"\(packing: 'concat' then, 'rows' now\)"):
        read(state, "a", Spec(seq_len=64))


def test_another_order_goes_on_behind_as_many_samples_where_that_is_asked_for() -> None:
    then = Spec(seed=1, batch_size=4, world_size=3, skip="1")
    state = write_state("a", then, Position(epoch=2, offset=10, step=5))
    now = Spec(seed=2, batch_size=2, world_size=3, skip="1")
    expected = "seed: 1 then, 2 now.* Going on in epoch 2 after its first 82 of 100 samples.*not at all.$"  # 12 of them skipped
    with pytest.warns(UserWarning, match=expected):
        assert read(state, "b", now, strict=False) == Position(epoch=2, offset=82, step=0)
    with pytest.warns(UserWarning, match="its first 94 of 90 samples.* not at all; nothing is left of this epoch.$"):
        read_state(write_state("a", then, Position(epoch=2, offset=10, step=6)), "b", now, num_samples=90, strict=False)
    assert read(state, "a", then, strict=False) == Position(epoch=2, offset=10, step=5)  # without a word


@pytest.mark.parametrize("shuffle", ["none", "global", "window"])
def test_the_size_of_windows_matters_only_where_there_are_windows(shuffle: Shuffle) -> None:
    then, now = Spec(shuffle=shuffle, window=1000), Spec(shuffle=shuffle, window=2000)
    of_old = write_state("a", then, HERE) | {"window": 1000}  # states once held it whatever the shuffle
    for state in (write_state("a", then, HERE), of_old):
        if shuffle == "window":
            with pytest.raises(StateMismatch, match="window: 1000 then, 2000 now"):
                read(state, "a", now)
        else:
            assert read(state, "a", now) == HERE


@pytest.mark.parametrize(
    "damage",
    [
        {"step": True}, {"step": -1}, {"epoch": 2**53 + 1}, {"epoch": -1}, {"offset": 1.5}, {"offset": -1}, {"batch_size": 0},
        {"world_size": 0}, {"skip": 5}, {"skip": "x"},
    ],
)  # fmt: skip
def test_what_no_count_and_no_skip_can_be_is_damage(damage: dict[str, Any]) -> None:
    with pytest.raises(StateMismatch, match=f"damaged: {next(iter(damage))}="):
        read(write_state("a", Spec(), HERE) | damage, "a", Spec())


def test_a_state_that_begins_behind_the_epoch_is_damaged_unless_its_data_is_other() -> None:
    spec = Spec(snapshot="0123456789abcdef")
    state = write_state("a", spec, Position(offset=101))
    with pytest.raises(StateMismatch, match="damaged: it begins after sample 101 of 100"):
        read(state, "a", spec)
    assert read(state, "a", spec, strict=False) == Position(offset=101)
    with pytest.raises(StateMismatch, match="another order of samples .snapshot: "):
        read(state, "a", Spec(snapshot="fedcba9876543210"))


def test_a_state_counts_as_far_as_samples_are_counted() -> None:
    most = 2**53
    state = write_state("a", Spec(), Position(step=most)) | {"batch_size": most}
    assert read(state, "a", Spec()) == Position(offset=most)


def test_what_is_no_state_is_refused_whatever_is_asked_for() -> None:
    with pytest.raises(StateMismatch, match="not a state of a RemoteDataset, version 2: it is a list"):
        read([1, 2], "a", Spec(), strict=False)  # type: ignore[arg-type]
    with pytest.raises(StateMismatch, match="damaged"):
        read(write_state("a", Spec(), HERE) | {"step": None}, "a", Spec(seed=1), strict=False)


@given(st.sampled_from(get_args(Packing)), st.sampled_from([0, 8]))
def test_states_have_the_same_keys_whatever_the_spec(packing: Packing, length_bucket_size: int) -> None:
    spec = Spec(packing=packing, length_bucket_size=0 if packing != "rows" else length_bucket_size)
    assert write_state("a", spec, HERE).keys() == write_state("a", Spec(), HERE).keys()


def test_of_every_parameter_it_is_said_whether_states_depend_on_it() -> None:
    """Whoever adds one says it here, and in `_ORDER` if samples stand elsewhere with another value."""
    only_shapes = {"pad", "mark_documents", "target_seq_len", "loss_on", "drop_last", "dataset_index"}
    named = write_state("a", Spec(), HERE).keys() - {"version", "dataset", "epoch", "step"}
    assert named | only_shapes == {parameter["name"] for parameter in describe()}
    assert not named & only_shapes


def test_of_a_state_of_another_version_the_version_is_told() -> None:
    with pytest.raises(StateMismatch, match=r"not a state of a RemoteDataset, version 2: it says that it is of version 3\."):
        read(write_state("a", Spec(), HERE) | {"version": 3}, "a", Spec())


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
def test_the_mix_may_be_another_behind_what_was_trained_on(now: dict[str, Any], is_taken: bool) -> None:
    then = Spec(mix="a:3,b:1", stopping_strategy="first_exhausted", snapshot="one+two", batch_size=4, world_size=3, skip="2")
    state = write_state("a", then, Position(step=6))  # 72 samples, and the 12 that are skipped
    if is_taken:
        assert read(state, "a", replace(then, **now)) == Position(step=6)
    else:
        with pytest.raises(StateMismatch, match=f"{next(iter(now))}: "):
            read(state, "a", replace(then, **now))


@pytest.mark.parametrize("values", [{"at": Position(epoch=1, step=5)}, {"by_worker": True}, {"drop_last": False}])
def test_the_mix_is_that_of_the_state_where_it_is_not_plain_what_was_trained_on(values: dict[str, Any]) -> None:
    """In a later epoch, in a loader's worker, and where the last step is filled."""
    options: dict[str, Any] = {"at": Position(step=5), "by_worker": False, "drop_last": True} | values
    then = Spec(
        mix="a:3,b:1", stopping_strategy="first_exhausted", snapshot="one+two", batch_size=4, drop_last=options["drop_last"]
    )
    state = write_state("a", then, options["at"])
    with pytest.raises(StateMismatch, match="mix: .* same values, or start"):
        read(state, "a", replace(then, mix="a:3,b:1;a:1,b:1@1000"), by_worker=options["by_worker"])
    assert read(state, "a", then, by_worker=options["by_worker"]) == options["at"]


def test_of_a_mix_that_changes_too_early_it_is_told_from_where_on_it_may() -> None:
    then = Spec(mix="a:3,b:1", stopping_strategy="first_exhausted", snapshot="one+two", batch_size=4)
    now = replace(then, mix="a:1,b:1")
    with pytest.raises(StateMismatch, match="values, or let the mix be another from sample 20 on, and no earlier: ") as told:
        read(write_state("a", then, Position(step=5)), "a", now)
    [mix] = re.findall("mix='([^']*WEIGHTS@20)'", str(told.value))
    going_on = replace(then, mix=mix.replace("WEIGHTS", "a:1,b:1"))
    assert read(write_state("a", then, Position(step=5)), "a", going_on) == Position(step=5)
    with pytest.raises(StateMismatch, match="mix: .* same values, or start"):
        read(write_state("a", then, Position()), "a", now)  # though nothing was trained on yet


def test_the_snapshot_to_go_on_with_is_of_all_datasets_that_are_in_the_mix_now() -> None:
    then = Spec(mix="a:3,c:1", stopping_strategy="first_exhausted", snapshot="one+three", batch_size=4)
    now = replace(then, mix="a:3,c:1;a:1,b:1,c:1@20", snapshot="new+two+three")
    with pytest.raises(StateMismatch, match=r"\(another of a\).* \(snapshot='one\+two\+three': the data as it was\)"):
        read(write_state("a", then, Position(step=5)), "a", now)
    assert read(write_state("a", then, Position(step=5)), "a", replace(now, snapshot="one+two+three")) == Position(step=5)


def test_of_steps_that_are_other_samples_now_it_is_told_what_they_were() -> None:
    then = Spec(batch_size=4, world_size=1, skip="samples:120-159")  # resolved, of skip="30-39"
    state, here = write_state("a", then, Position(step=50)), Spec(batch_size=2, world_size=4)
    with pytest.warns(UserWarning, match="leaves out samples:240-319 now, .* had 4. .*, pass skip='samples:120-159'"):
        read(state, "a", replace(here, skip="samples:240-319"))
    for skip in ("samples:120-159", "samples:240-318", "samples:240-319,400-407", None):
        read(state, "a", replace(here, skip=skip))  # nothing to tell


def test_of_a_range_that_is_added_it_is_told_where_the_run_counted_its_first_step() -> None:
    then = Spec(batch_size=4, world_size=2, skip="2-4")
    state = write_state("a", then, Position(step=15))
    with pytest.warns(
        UserWarning,
        match=r"left out 2-4, so what it called step 20 is step 23 in skip, and step 20 is another: check the range\.$",
    ):
        read(state, "a", replace(then, skip="2-4,20-21"))
    for spec in (replace(then, skip="3"), replace(then, skip=None), replace(then, skip="2-4")):
        read(state, "a", spec)  # nothing to tell
    read(state, "a", replace(then, batch_size=2, world_size=4, skip="2-4"))
    read(state, "a", replace(then, batch_size=2, skip="40"))  # in steps of another size


@pytest.mark.parametrize("skip", [None, "2-4"])
def test_of_a_range_that_the_run_has_trained_on_it_is_told(skip: str | None) -> None:
    then = Spec(batch_size=4, world_size=2, skip=skip)
    state = write_state("a", then, Position(step=15))
    for batch_size in (4, 2):
        with pytest.warns(UserWarning, match="is past samples:49-63, which skip leaves out now and its run did not"):
            read(state, "a", replace(then, batch_size=batch_size, skip="samples:49-63,145-150"), num_samples=500)
    with pytest.warns(UserWarning, match="is past samples:49-119, which" if skip is None else "is past samples:49-143, which"):
        read(state, "a", replace(then, skip="samples:49-150"), num_samples=500)
    come_or_known = "samples:145-150,16-39" if skip else "samples:145-150"
    read(state, "a", replace(then, skip=come_or_known), num_samples=500)  # nothing to tell
    read(state, "a", replace(then, skip="0-1"), num_samples=15 * 8)  # the epoch is over: this is for the next


def test_of_a_mixture_the_datasets_are_told_whose_data_changed() -> None:
    then = Spec(mix="a:3,b:1,c:1", stopping_strategy="first_exhausted", snapshot="one+two+three")
    with pytest.raises(StateMismatch, match=r"'one\+two\+three' then, 'one\+new\+three' now \(another of b\)"):
        read(write_state("a", then, HERE), "a", replace(then, snapshot="one+new+three"))
    with pytest.raises(StateMismatch, match=r"'new\+new' now \(another of a, b\); mix: "):
        read(write_state("a", then, HERE), "a", replace(then, mix="a:3,b:1", snapshot="new+new"))
    with pytest.raises(StateMismatch, match=r"'one\+two' now; mix: "):
        read(write_state("a", then, HERE), "a", replace(then, mix="a:3,b:1", snapshot="one+two"))
