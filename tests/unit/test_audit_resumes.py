"""What the audit says of runs that resume: what was trained on twice, thrown away, or by whom."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from audited import report_on, words
from ledgers import FIRST, append, begin_of, lines_of
from penstock.audit.facts import facts_of


def test_steps_that_were_trained_twice_around_a_resume_are_told_and_counted_once(ledger: Path) -> None:
    for rank in range(2):
        append(ledger, begin_of(rank, world_size=2), range(8))
        append(ledger, begin_of(rank, world_size=2, start=1, step=5), range(5, 10), ends=True)
    assert report_on(ledger).is_proven
    assert (
        "epoch 0, steps 5-7 of start 1 were trained twice: start 2 resumed from a checkpoint before them; only the second "
        "time counts" in words(ledger)
    )  # fmt: skip
    assert facts_of(report_on(ledger))["orders"][0]["thrown_away"] == [
        {"epoch": 0, "first_step": 5, "last_step": 7, "start": 1, "resumed_by": 2}
    ]


def test_steps_that_a_resumed_run_has_not_come_to_again_were_thrown_away(ledger: Path) -> None:
    append(ledger, begin_of(), range(8))
    append(ledger, begin_of(start=1, step=2), range(2, 4))
    assert "epoch 0, steps 2-7 of start 1 were thrown away: start 2 resumed" in words(ledger)
    [epoch] = report_on(ledger).orders[0].epochs
    assert (epoch.is_proven, epoch.is_finished, epoch.steps_done, epoch.num_due) == (True, False, 4, 20)
    assert "epoch 0: 20 of 100 samples, each once; it is not finished: all ranks reached step 4 of 20" in words(ledger)


def test_an_epoch_that_came_to_its_end_is_not_over_once_a_start_goes_back_into_it(ledger: Path) -> None:
    append(ledger, begin_of(), range(8))
    append(ledger, begin_of(start=1, step=5), range(5, 20), ends=True)
    append(ledger, begin_of(start=2, step=5), range(5, 9))
    [epoch] = report_on(ledger).orders[0].epochs
    assert (epoch.is_proven, epoch.is_finished, epoch.steps_done, epoch.num_due) == (True, False, 9, 45)


def test_a_state_that_a_process_loads_once_it_has_trained_begins_a_start_too(ledger: Path) -> None:
    append(ledger, begin_of(), range(8))
    append(ledger, replace(begin_of(), num_loads=1, step=5, time=FIRST + timedelta(minutes=9)), range(5, 20), ends=True)
    assert report_on(ledger).is_proven
    assert "epoch 0, steps 5-7 of start 1 were trained twice: start 2 resumed" in words(ledger)


@pytest.mark.parametrize(
    ("then", "now"),
    [({}, {}), ({}, {"drop_last": False}), ({"mix": "a:7,b:3"}, {"mix": "a:7,b:3;a:1,b:1@25", "num_samples": 102})],
)
def test_workers_that_go_on_from_unequal_steps_are_one_start(ledger: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
    then = {"snapshot": "one+two", "stopping_strategy": "first_exhausted"} | then
    for worker, begins_at in ((0, 6), (1, 6), (2, 3)):  # in turn they gave steps 0 to 4
        append(ledger, replace(begin_of(**then), worker=worker, num_workers=3), range(worker, 8, 3))
        resumed = replace(begin_of(start=1, step=begins_at, **(then | now)), worker=worker, num_workers=3)
        append(ledger, resumed, range(begins_at + worker, 20, 3), ends=True)
    assert report_on(ledger).is_proven
    assert "epoch 0, steps 5-7 of start 1 were trained twice: start 2 resumed" in words(ledger)


@pytest.mark.parametrize("begins_at", [((4, 4), (6, 4)), ((6, 4), (6, 6))])
def test_starts_of_workers_that_differ_in_where_one_of_them_begins_are_two(
    ledger: Path, begins_at: tuple[tuple[int, int], ...]
) -> None:
    for rank in range(2):
        for start, (firsts, stop) in enumerate(zip([(0, 0), *begins_at], (8, 7, 10), strict=True)):
            for worker, first in enumerate(firsts):
                begin = begin_of(rank, start=start, step=first, world_size=2)
                append(ledger, replace(begin, worker=worker, num_workers=2), range(first + worker, stop, 2), ends=start == 2)
    assert report_on(ledger).is_proven


def test_a_state_of_unequal_workers_is_of_a_start_in_which_the_last_of_them_came_so_far(ledger: Path) -> None:
    for start, firsts, stop in ((0, (0, 0), 8), (1, (2, 2), 4), (2, (6, 4), 20)):  # the last has steps 0 to 4 behind it
        for worker, first in enumerate(firsts):
            begin = replace(begin_of(start=start, step=first), worker=worker, num_workers=2)
            append(ledger, begin, range(first + worker, stop, 2), ends=start == 2)
    assert report_on(ledger).is_proven


def test_starts_are_told_with_the_ranks_that_took_part_in_each(ledger: Path) -> None:
    fresh, again = begin_of(world_size=2), begin_of(world_size=2, start=1)
    later, last = begin_of(world_size=2, start=2, step=5), begin_of(world_size=2, start=3, epoch=1, step=5)
    for begin in (fresh, again, later, last):
        append(ledger, begin, [begin.step])
    for begin in (fresh, later):
        append(ledger, replace(begin, rank=1), [begin.step])
    [order] = facts_of(report_on(ledger))["orders"]
    assert [start["ranks"] for start in order["starts"]] == [2, 1, 2, 1]


def test_ranks_that_went_on_from_different_states_are_told(ledger: Path) -> None:
    """Each by itself has trained on all of its samples."""
    for rank, step in ((0, 5), (1, 3)):
        append(ledger, begin_of(rank, world_size=2), range(8))
        append(ledger, begin_of(rank, world_size=2, start=1, step=step), range(step, 10), ends=True)
    report = report_on(ledger)
    [epoch] = report.orders[0].epochs
    assert (epoch.is_proven, report.is_proven) == (True, False)
    assert facts_of(report)["orders"][0]["apart"] == [{"rank": 1, "epoch": 0, "step": 3, "leader_epoch": 0, "leader_step": 5}]


@pytest.mark.parametrize("places", [[(5, 5), (7, 5)], [(7, 7), (7, 5)], [(5, 5), (5, 7)], [(7, 5), (5, 7)]])
def test_ranks_that_went_on_from_different_states_are_told_also_where_each_had_once_begun_where_the_other_does(
    ledger: Path, places: list[tuple[int, int]]
) -> None:
    for rank in range(2):
        append(ledger, begin_of(rank, world_size=2), range(9))
    for start, steps in enumerate(places, start=1):
        for rank, step in enumerate(steps):
            begin = begin_of(rank, world_size=2, start=start, step=step)
            append(ledger, begin, range(step, step + 2) if start == 1 else range(step, 10), ends=start == 2)
    assert words(ledger).startswith("NOT PROVEN: 1 rank resumed elsewhere than the others\n")


def test_an_epoch_that_one_of_two_workers_went_through_is_not_over(ledger: Path) -> None:
    append(ledger, replace(begin_of(), worker=0, num_workers=2), range(0, 20, 2), ends=True)
    append(ledger, replace(begin_of(), worker=1, num_workers=2), range(1, 15, 2))
    [epoch] = report_on(ledger).orders[0].epochs
    assert (epoch.is_proven, epoch.is_finished, epoch.steps_done) == (True, False, 15)


def test_where_the_end_of_a_start_is_lost_the_epochs_before_it_are_not(ledger: Path) -> None:
    append(ledger, begin_of(), range(20), ends=True)
    append(ledger, begin_of(epoch=1), range(3))
    append(ledger, begin_of(start=1, epoch=1, step=5), range(5, 20), ends=True)
    assert [epoch.missing.tolist() for epoch in report_on(ledger).orders[0].epochs] == [[], [[15, 25]]]


def test_where_lines_of_an_epoch_are_lost_a_start_that_goes_back_into_it_has_thrown_away_the_next(ledger: Path) -> None:
    append(ledger, begin_of(), [*range(9), *range(11, 20)], ends=True)
    append(ledger, begin_of(epoch=1), range(5))
    append(ledger, begin_of(start=1, step=11), range(11, 20))
    [epoch] = report_on(ledger).orders[0].epochs
    assert (epoch.epoch, epoch.missing.tolist()) == (0, [[45, 55]])


def test_ranks_of_many_workers_may_be_further_apart_when_a_run_is_killed(ledger: Path) -> None:
    for num_workers, is_proven in ((8, True), (2, False)):
        run = ledger.with_name(f"of{num_workers}.ledger")
        for rank, steps in enumerate((40, 20)):
            for worker in range(num_workers):
                begin = begin_of(rank, world_size=2, num_samples=1000)
                append(run, replace(begin, worker=worker, num_workers=num_workers), range(worker, steps, num_workers))
        [epoch] = report_on(run).orders[0].epochs
        assert (epoch.is_proven, epoch.steps_done) == (is_proven, 20 if is_proven else 40)


def test_another_world_size_and_batch_size_go_on_at_the_same_sample(ledger: Path) -> None:
    for rank in range(4):
        append(ledger, begin_of(rank, world_size=4), range(3))
    for rank in range(2):
        begin = begin_of(rank, start=1, world_size=2, batch_size=4, offset=40)
        append(ledger, begin, range(7), ends=True, salt=1 << 40)  # its steps are other ones, whatever their numbers
    append(ledger, begin_of(0, start=2, epoch=1, batch_size=50), range(2), ends=True)
    report = report_on(ledger)
    assert report.is_proven
    assert [(e.epoch, e.num_due, e.num_dropped) for e in report.orders[0].epochs] == [(0, 96, 4), (1, 100, 0)]
    assert "start 2, 2025-01-01 01:00:00, resumed at epoch 0, step 0 after the first 40 samples, on 2 ranks" in words(ledger)


def test_a_start_without_a_state_counts_everything_again_unless_it_is_trusted(ledger: Path) -> None:
    append(ledger, begin_of(), range(4))
    append(ledger, replace(begin_of(start=1), num_loads=0), range(20), ends=True)
    assert not report_on(ledger).is_proven
    assert "TWICE   epoch 0, 20 samples at positions 0-19: steps 0-3 of start 1, steps 0-3 of start 2" in words(ledger)
    assert "Start 2 loaded no state, so what was trained on before it counts, too." in words(ledger)
    assert report_on(ledger, assume_fresh_weights=True).is_proven


def test_an_epoch_that_a_process_goes_through_twice_is_trained_on_twice(ledger: Path) -> None:
    begin = begin_of()
    append(ledger, begin, range(20), ends=True)
    append(ledger, replace(begin, iteration=1), range(20), ends=True)
    assert words(ledger).startswith("NOT PROVEN: 100 samples trained on more than once\n")
    assert not report_on(ledger, assume_fresh_weights=True).is_proven


def test_of_each_start_those_steps_are_named_that_it_trained_again(ledger: Path) -> None:
    begins = [replace(begin_of(start=start), num_loads=0) for start in range(3)]
    append(ledger, begins[0], range(11))
    append(ledger, begins[1], range(20), ends=True)
    append(ledger, replace(begins[1], iteration=1), [0])
    append(ledger, begins[2], [0])
    assert "55 samples at positions 0-54: steps 0-10 of start 1, steps 0-10 of start 2, step 0 of start 3" in words(ledger)


def test_a_state_of_which_one_worker_has_a_step_behind_it_is_not_that_of_the_end_of_the_epoch_before(ledger: Path) -> None:
    def workers(start: int, epoch: int, steps: range, firsts: tuple[int, int], *, ends: bool = False) -> None:
        for worker in (0, 1):
            of_worker: dict[str, Any] = {"worker": worker, "num_workers": 2, "round": 5 + start, "step": firsts[worker]}
            with Path(f"{ledger}.worker{worker}").open("a") as file:
                begin = replace(begin_of(start=start, epoch=epoch), **of_worker)
                file.write(lines_of(begin, steps[(worker + steps.start) % 2 :: 2], ends=ends))

    workers(0, 0, range(20), (0, 0), ends=True)
    workers(0, 1, range(3), (0, 0))  # a state is saved behind step 0
    workers(1, 0, range(10, 20), (10, 10), ends=True)  # an older one is tried, up to the end of its epoch
    workers(2, 1, range(1, 20), (2, 0), ends=True)
    assert words(ledger).startswith("PROVEN")


def test_a_start_that_goes_back_behind_its_own_state_trains_again_on_what_that_was_trained_on(ledger: Path) -> None:
    """It loaded a state of epoch 2, and then its loop chose epoch 1."""
    for epoch in (0, 1, 2):
        append(ledger, replace(begin_of(epoch=epoch), iteration=epoch), range(20), ends=True)
    append(ledger, replace(begin_of(start=1, epoch=1), state_epoch=2), range(20), ends=True)
    assert [len(epoch.twice) for epoch in report_on(ledger).orders[0].epochs] == [0, 1, 0]


def test_a_state_that_was_loaded_and_given_up_again_shows_nothing(ledger: Path) -> None:
    append(ledger, begin_of(start=1, step=8), [])
    append(ledger, begin_of(start=0), range(20), ends=True)
    assert report_on(ledger).is_proven


def test_an_epoch_that_is_trained_on_again_behind_a_state_of_its_end_is_trained_on_twice(ledger: Path) -> None:
    """Though of the first time nothing is recorded: the disk was full."""
    append(ledger, begin_of(), range(20), ends=True)
    append(ledger, begin_of(start=1, epoch=1, step=20, skip="samples:0-4"), [], ends=True)
    append(ledger, replace(begin_of(start=1, epoch=1), iteration=1), range(20), ends=True)
    [_, epoch] = report_on(ledger).orders[0].epochs
    assert (epoch.missing.tolist(), epoch.twice.tolist()) == ([], [[5, 100]])
