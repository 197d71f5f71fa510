"""What the audit says of runs that change the order of their samples, or what they mix."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from audited import report_on, words, write_run
from ledgers import FIRST, append, begin_of
from penstock.audit import audit
from penstock.ledger.begin import Begin


@pytest.mark.parametrize(("name", "values"), [("seed", [0, 9]), ("num_samples", [100, 104])])
def test_runs_on_other_data_or_in_another_order_are_accounted_for_apart(ledger: Path, name: str, values: list[int]) -> None:
    write_run(ledger, epochs=1)
    for rank in range(2):
        append(ledger, begin_of(rank, start=5, world_size=2, **{name: values[1]}), range(rank, 10), ends=True)
    report = report_on(ledger)
    found = [(dict(order.key)[name], order.is_proven) for order in report.orders]
    assert found == [(values[0], True), (values[1], False)]
    assert not report.is_proven


@pytest.mark.parametrize("order", [{"seed": 1}, {"snapshot": "later"}])
def test_an_epoch_that_is_left_for_another_order_lacks_its_rest(ledger: Path, order: dict[str, Any]) -> None:
    append(ledger, begin_of(), range(10))
    append(ledger, begin_of(start=1, epoch=1, **order), range(20), ends=True)
    assert words(ledger).startswith("NOT PROVEN: 50 samples not trained on\n")
    assert "MISSING epoch 0, steps 10-19 of start 1, rank 0: 50 samples at positions 50-99" in words(ledger)
    assert "LEFT    epoch 0 for another order of this dataset: start 1, 2025-01-01 01:01:00, resumed at epoch 1" in words(
        ledger
    )


def test_a_start_without_a_state_leaves_an_epoch_of_another_order_unless_it_is_trusted(ledger: Path) -> None:
    append(ledger, begin_of(), range(10))
    append(ledger, replace(begin_of(start=1, seed=1), num_loads=0), range(20), ends=True)
    assert not report_on(ledger).is_proven
    assert "If its weights were new: --assume-fresh-weights" in words(ledger)
    assert report_on(ledger, assume_fresh_weights=True).is_proven


def test_another_order_of_an_epoch_that_begins_it_anew_from_a_state_threw_away_what_was_trained_on(ledger: Path) -> None:
    append(ledger, begin_of(), range(20), ends=True)
    append(ledger, begin_of(epoch=1), range(7))
    append(ledger, begin_of(start=1, epoch=1, seed=1), range(20), ends=True)
    assert report_on(ledger).is_proven


def test_another_order_of_which_no_batch_was_trained_on_leaves_nothing(ledger: Path) -> None:
    append(ledger, begin_of(), range(7))
    append(ledger, begin_of(start=1, epoch=1, seed=1), [])
    assert report_on(ledger).is_proven


def test_an_epoch_of_which_no_batch_was_trained_on_is_not_left(ledger: Path) -> None:
    append(ledger, begin_of(), range(20), ends=True)
    append(ledger, begin_of(epoch=1), [])
    append(ledger, replace(begin_of(start=1, epoch=1, seed=1), num_loads=0), range(20), ends=True)
    assert report_on(ledger).is_proven


def test_a_rank_that_only_one_of_two_orders_has_is_in_nobodys_way(ledger: Path) -> None:
    write_run(ledger, epochs=1, seed=9)
    append(ledger, begin_of(start=1, epoch=1), range(20), ends=True)
    assert "MISSING" not in words(ledger)


def test_a_rank_that_takes_part_no_more_is_not_apart(ledger: Path) -> None:
    for rank in range(2):
        append(ledger, begin_of(rank, world_size=2), range(4))
    append(ledger, begin_of(1, world_size=2, start=1, step=4), [4])  # rank 0 came to no batch
    append(ledger, begin_of(start=2, offset=40), range(12), ends=True)
    assert report_on(ledger).is_proven


def test_an_order_that_was_begun_by_mistake_is_not_left_where_the_run_goes_on_from_its_own_state(ledger: Path) -> None:
    append(ledger, begin_of(), range(20), ends=True)
    append(ledger, begin_of(epoch=1), range(9))
    append(ledger, begin_of(start=1, epoch=1, step=2), range(2, 4))  # from which it does not go on
    append(ledger, replace(begin_of(start=2, seed=1), num_loads=0), range(4))
    append(ledger, begin_of(start=3, epoch=1, step=7), range(7, 20), ends=True)
    append(ledger, begin_of(start=3, epoch=2), range(20), ends=True)
    assert report_on(ledger).is_proven


@pytest.mark.parametrize("num_loads", [0, 1])
@pytest.mark.parametrize(("last", "is_proven"), [("one", False), ("two", True)])
def test_orders_that_take_turns_in_a_process_do_not_leave_each_other(
    ledger: Path, last: str, is_proven: bool, num_loads: int
) -> None:
    """Whichever goes on last has left the other, if that was not over."""
    one = replace(begin_of(), launch="one")
    two = replace(begin_of(seed=1), launch="two", num_loads=num_loads, time=FIRST + timedelta(seconds=1))
    append(ledger, one, range(5))
    append(ledger, two, range(20), ends=True)
    append(ledger, one, range(5, 8))
    if last == "one":
        append(ledger, replace(two, epoch=1, iteration=1, time=FIRST + timedelta(seconds=2)), range(20), ends=True)
    assert report_on(ledger).is_proven == is_proven


def test_another_split_is_other_data_and_leaves_nothing(ledger: Path) -> None:
    append(ledger, begin_of(split="train"), range(10))
    append(ledger, replace(begin_of(split="validation"), time=FIRST + timedelta(hours=1)), range(20), ends=True)
    assert report_on(ledger).is_proven


@pytest.mark.parametrize("num_ahead", [0, 3])
def test_a_mix_that_changes_behind_what_was_trained_on_is_one_run(ledger: Path, num_ahead: int) -> None:
    def begin(rank: int, start: int, step: int, mix: str, snapshot: str, num_samples: int) -> Begin:
        spec: dict[str, Any] = {"mix": mix, "snapshot": snapshot, "stopping_strategy": "first_exhausted"}
        return begin_of(rank, start=start, step=step, world_size=2, num_samples=num_samples, **spec)

    first, second, third = "a:7,b:3", "a:7,b:3;a:1,b:1@40", "a:7,b:3;a:1,b:1@40;a:1,c:1@80"
    for rank in range(2):
        append(ledger, begin(rank, 0, 0, first, "one+two", 100), range(4 + num_ahead))
        append(ledger, begin(rank, 1, 4, second, "one+two", 150), range(4, 8 + num_ahead))
        append(ledger, begin(rank, 2, 8, third, "one+two+three", 120), range(8, 12), ends=True)
    report = report_on(ledger)
    assert report.is_proven
    [order] = report.orders
    assert [(epoch.num_due, epoch.num_samples, epoch.is_finished) for epoch in order.epochs] == [(120, 120, True)]
    assert (
        f"snapshot=one+two+three, seed=0, shuffle=window, packing=rows, mix={third}, stopping_strategy=first_exhausted\n"
        in words(ledger)
    )


@pytest.mark.parametrize("num_tried", [0, 3])
def test_a_mix_that_was_tried_and_given_up_again_is_thrown_away(ledger: Path, num_tried: int) -> None:
    first, tried, second = "a:7,b:3", "a:7,b:3;b:1@40", "a:7,b:3;a:1,b:1@60"
    same: dict[str, Any] = {"snapshot": "one+two", "stopping_strategy": "first_exhausted"}
    append(ledger, begin_of(mix=first, **same), range(12))
    append(ledger, begin_of(mix=tried, start=1, step=8, num_samples=80, **same), range(8, 8 + num_tried))
    append(ledger, begin_of(mix=first, start=2, step=10, **same), range(10, 12))
    assert report_on(ledger).is_proven
    append(ledger, begin_of(mix=second, start=3, step=12, num_samples=120, **same), range(12, 24), ends=True)
    [order] = report_on(ledger).orders
    assert order.is_proven
    assert [(epoch.num_due, epoch.num_samples, epoch.is_finished) for epoch in order.epochs] == [(120, 120, True)]


def test_what_was_trained_on_behind_a_change_of_the_mix_is_not_of_the_run(ledger: Path) -> None:
    """A state of the first mix was loaded into the second, though it had passed the change: with strict=False."""
    first, second = "a:7,b:3", "a:7,b:3;a:1,b:1@40"
    same: dict[str, Any] = {"snapshot": "one+two", "stopping_strategy": "first_exhausted"}
    append(ledger, begin_of(mix=first, **same), range(12))
    append(ledger, begin_of(mix=second, start=1, step=8, **same), range(8, 9))
    append(ledger, begin_of(mix=second, start=2, step=12, **same), range(12, 20), ends=True)
    [order] = report_on(ledger).orders
    assert [epoch.missing.tolist() for epoch in order.epochs] == [[[45, 60]]]


def test_of_two_mixes_the_clock_of_one_rank_tells_which_came_first(ledger: Path) -> None:
    """Rank 0 was killed before its first batch under the second; the clock of rank 1 is behind."""
    same: dict[str, Any] = {"snapshot": "one+two", "stopping_strategy": "first_exhausted", "world_size": 2}
    for rank in range(2):
        begun = begin_of(rank, mix="a:7,b:3", **same)
        append(ledger, replace(begun, time=begun.time - timedelta(hours=5 * rank)), range(4))
    resumed = begin_of(1, mix="a:7,b:3;a:1,b:1@40", start=1, step=4, **same)
    append(ledger, replace(resumed, time=resumed.time - timedelta(hours=5)), range(4, 5))
    assert len(report_on(ledger).orders) == 1


def test_a_mix_that_changes_where_the_clock_is_behind_came_later_all_the_same(ledger: Path) -> None:
    same: dict[str, Any] = {"snapshot": "one+two", "stopping_strategy": "first_exhausted"}
    append(ledger, begin_of(mix="a:7,b:3", **same), range(8))
    resumed = begin_of(mix="a:7,b:3;a:1,b:1@40", start=1, step=8, **same)
    append(ledger, replace(resumed, time=resumed.time - timedelta(hours=5)), range(8, 20), ends=True)
    [order] = report_on(ledger).orders
    assert order.is_proven
    assert dict(order.key)["mix"] == "a:7,b:3;a:1,b:1@40"


def test_a_mix_that_changes_in_a_later_epoch_is_another_order(ledger: Path) -> None:
    """Where an epoch begins follows from the mix."""
    same: dict[str, Any] = {"snapshot": "one+two", "stopping_strategy": "first_exhausted"}
    append(ledger, begin_of(mix="a:7,b:3", **same), range(20), ends=True)
    append(ledger, begin_of(mix="a:7,b:3;a:1,b:1@120", start=1, epoch=1, step=4, **same), range(4, 16), ends=True)
    assert len(report_on(ledger).orders) == 2


def test_a_run_whose_mix_changes_is_one_in_whatever_order_its_files_are_named_and_whatever_clocks_say(ledger: Path) -> None:
    same: dict[str, Any] = {"snapshot": "one+two", "stopping_strategy": "first_exhausted"}
    paths = [append(ledger, begin_of(mix="a:7,b:3", batch_size=10, **same), range(4))]
    for start, steps in ((1, range(4, 6)), (2, range(6, 10))):
        for rank in range(2):
            begin = begin_of(rank, start=start, step=steps[0], world_size=2, mix="a:7,b:3;a:1,b:1@40", **same)
            begin = replace(begin, time=begin.time - timedelta(hours=3 * rank))
            paths.append(append(ledger.with_name(f"{start}"), begin, steps, ends=start == 2))
    for named in (paths, paths[::-1]):
        assert audit(named).is_proven


@pytest.mark.parametrize(
    ("mix", "values"),
    [
        ("a:7,b:3;a:1,b:1@39", {}),  # among what was trained on
        ("a:7,b:3;a:1,b:1@119", {"epoch": 1, "step": 4}),
        ("a:7,b:3;a:1,b:1@40", {"snapshot": "one+three"}),
        ("a:7,b:3;a:1,b:1@40", {"seed": 1}),
        ("a:7,b:3;a:1,b:1@40", {"step": 0}),  # a run of its own
        ("a:7,b:3;a:1,b:1@40", {"start": -1}),  # it was before
    ],
)
def test_another_mix_that_does_not_go_on_where_the_run_was_is_another_order(
    ledger: Path, mix: str, values: dict[str, Any]
) -> None:
    same: dict[str, Any] = {"snapshot": "one+two", "stopping_strategy": "first_exhausted"}
    first = append(ledger, begin_of(mix="a:7,b:3", **same), range(8))
    other = begin_of(mix=mix, **({"start": 1, "step": 8} | same | values))
    second = append(ledger.with_name("other"), other, range(8, 20), ends=True)
    assert len(audit([first, second]).orders) == 2
