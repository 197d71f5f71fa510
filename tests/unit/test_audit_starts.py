"""Which start a run went on from, of several that its ledgers tell of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from audited import report_on, words
from ledgers import FIRST, append, begin_of
from penstock.audit import Report
from penstock.audit.facts import facts_of
from penstock.ledger.begin import Begin


def test_a_rank_that_alone_was_killed_and_resumed_goes_on_where_it_was(ledger: Path) -> None:
    """Ranks that share no step of the training, as several independent evaluations do."""
    append(ledger, begin_of(0, world_size=2), range(7))
    append(ledger, begin_of(0, world_size=2, start=1, step=5), range(5, 10), ends=True)
    append(ledger, begin_of(1, world_size=2), range(10), ends=True)
    assert report_on(ledger).is_proven


def test_a_state_is_not_of_a_start_in_which_some_rank_did_not_come_so_far(ledger: Path) -> None:
    for rank, steps in ((0, 8), (1, 4)):
        append(ledger, begin_of(rank, world_size=2), range(8))
        append(ledger, begin_of(rank, world_size=2, start=1, step=2), range(2, steps))
        append(ledger, begin_of(rank, world_size=2, start=2, step=6), range(6, 10), ends=True)  # from a state of the first
    assert report_on(ledger).is_proven


def test_of_several_starts_from_one_state_the_last_counts_on_each_rank(ledger: Path) -> None:
    for rank in range(2):
        append(ledger, begin_of(rank, world_size=2), range(8))
        append(ledger, begin_of(rank, world_size=2, start=1, step=5), range(5, 7))
        append(ledger, begin_of(rank, world_size=2, start=2, step=5), range(5, 10), ends=True)
    assert report_on(ledger).is_proven


def test_a_start_is_known_by_how_far_its_ranks_came_where_one_lacks_some_of_several_from_one_state(ledger: Path) -> None:
    for rank in range(2):
        append(ledger, begin_of(rank, world_size=2, num_samples=300), range(9))
        append(ledger, begin_of(rank, world_size=2, start=1, step=5, num_samples=300), range(5, 29))
    append(ledger, begin_of(0, world_size=2, start=2, step=5, num_samples=300), [5])  # rank 1 came to no batch
    [epoch] = report_on(ledger).orders[0].epochs
    assert (epoch.missing.tolist(), epoch.twice.tolist(), epoch.num_due) == ([], [], 50)


def test_a_start_in_which_only_one_rank_began_and_none_trained_changes_nothing(ledger: Path) -> None:
    said = []
    for has_empty in (False, True):
        path = ledger.with_name(f"{has_empty}.ledger")
        append(path, begin_of(0, world_size=2), range(8))
        append(path, begin_of(0, world_size=2, start=4, step=6), range(6, 10), ends=True)
        append(path, begin_of(1, world_size=2), range(8))
        if has_empty:
            append(path, begin_of(1, world_size=2, start=1, step=2), [])
        last = begin_of(1, world_size=2, start=2, step=4)
        append(path, last, range(4, 10), ends=True)
        append(path, replace(last, step=0, iteration=1, time=last.time + timedelta(hours=1)), range(4))
        said.append(words(path))
    assert said[0] == said[1]
    assert said[0].startswith("NOT PROVEN: 20 samples trained on more than once, 1 rank resumed elsewhere")


def test_a_rank_of_which_nothing_is_recorded_of_the_last_of_several_starts_from_one_state_is_missed(ledger: Path) -> None:
    for rank in range(2):
        append(ledger, begin_of(rank, world_size=2, num_samples=300), range(9))
        append(ledger, begin_of(rank, world_size=2, start=1, step=5, num_samples=300), range(5, 30), ends=True)
    append(ledger, begin_of(0, world_size=2, start=2, step=5, num_samples=300), range(5, 30), ends=True)
    report = report_on(ledger)
    [epoch] = report.orders[0].epochs
    assert [(gap.ranks, gap.steps) for gap in epoch.gaps] == [([1], (5, 30))]
    assert [start["ranks"] for start in facts_of(report)["orders"][0]["starts"]] == [2, 2, 1]


def test_a_state_that_the_first_of_two_starts_from_one_state_saved_is_not_of_the_second(ledger: Path) -> None:
    append(ledger, begin_of(), range(9))
    append(ledger, begin_of(start=1, step=3), range(3, 20), ends=True)
    append(ledger, replace(begin_of(start=1, epoch=1), time=FIRST + timedelta(hours=1, minutes=1)), [0, 1])
    append(ledger, begin_of(start=2, step=3), [3, 4])
    append(ledger, begin_of(start=3, epoch=1), range(20), ends=True)
    assert report_on(ledger).is_proven


def test_a_state_may_be_of_an_epoch_that_a_start_has_left_since(ledger: Path) -> None:
    append(ledger, begin_of(), range(20), ends=True)
    append(ledger, begin_of(epoch=1), range(5))
    append(ledger, begin_of(start=1, step=12), [12, 13])
    append(ledger, begin_of(start=2, step=17), range(17, 20), ends=True)
    assert report_on(ledger).is_proven


def test_a_start_throws_away_what_a_worker_ahead_of_another_had_of_a_start_before(ledger: Path) -> None:
    append(ledger, begin_of(), [0])
    for start, begins_at in ((1, [1, 1, 1]), (2, [4, 1, 1])):
        for worker, step in enumerate(begins_at):
            begin = replace(begin_of(start=start, step=step), worker=worker, num_workers=3)
            append(ledger, begin, [1] if (start, worker) == (1, 0) else [])
    append(ledger, begin_of(start=3, step=1), [])
    [epoch] = report_on(ledger).orders[0].epochs
    assert epoch.due.tolist() == [[0, 5]]


@pytest.mark.parametrize(("steps", "missing"), [([5, 6, 7], []), ([5], [[65, 70]])])
def test_of_several_starts_from_one_state_that_counts_which_came_to_where_the_run_went_on(
    ledger: Path, steps: list[int], missing: list[list[int]]
) -> None:
    """The last that did, or, where the ends of all are lost, the one that came furthest."""
    for rank in range(2):
        append(ledger, begin_of(rank, world_size=2), range(6))
        append(ledger, begin_of(rank, world_size=2, start=1, step=5), [5, 6] if not rank else steps[1:-1])
        append(ledger, begin_of(rank, world_size=2, start=2, step=5), steps if rank else [5, 6, 7])
        append(ledger, begin_of(rank, world_size=2, start=3, step=7), [7, 8])
        append(ledger, begin_of(rank, world_size=2, start=4, step=5), [] if rank else [5])  # by mistake
        append(ledger, begin_of(rank, world_size=2, start=5, step=8), [8, 9], ends=True)
    [epoch] = report_on(ledger).orders[0].epochs
    assert (epoch.missing.tolist(), epoch.twice.tolist()) == (missing, [])


@pytest.mark.parametrize("other", [{"batch_size": 10, "offset": 20}, {"offset": 0}, {"offset": 20, "skip": "samples:90-94"}])
def test_a_start_goes_on_from_no_other_slicing_in_mid_epoch(ledger: Path, other: dict[str, Any]) -> None:
    """From there it would have been told in samples."""
    append(ledger, begin_of(batch_size=10), [0, 1])
    append(ledger, begin_of(start=1, offset=20), range(10))
    append(ledger, begin_of(start=2, **other), range(1, 8))  # of which nothing was kept
    append(ledger, begin_of(start=3, offset=20, step=4), range(4, 16), ends=True)
    assert report_on(ledger).is_proven


def test_a_start_goes_on_in_mid_epoch_on_more_ranks_whose_steps_are_of_the_same_samples(ledger: Path) -> None:
    append(ledger, begin_of(batch_size=10), range(8))
    append(ledger, begin_of(start=1, batch_size=10, step=3), [3])  # of which nothing was kept
    for rank in range(2):
        append(ledger, begin_of(rank, start=2, world_size=2, step=5), range(5, 10), ends=True)
    assert report_on(ledger).is_proven


def test_a_state_that_was_saved_behind_the_last_step_of_a_start_is_of_that_start(ledger: Path) -> None:
    """As one that is told to stop saves it: what an earlier start lost of those steps was trained again."""
    for start, worker, begins_at, steps in (
        (0, 0, 0, range(0, 12, 2)), (0, 1, 0, [1, 3, 7, 9, 11]),
        (1, 0, 4, [4, 6, 8]), (1, 1, 4, [5, 7]),
        (2, 0, 10, range(10, 20, 2)), (2, 1, 8, range(9, 20, 2)),
    ):  # fmt: skip
        begin = replace(begin_of(start=start, step=begins_at), worker=worker, num_workers=2)
        append(ledger, begin, steps, ends=start == 2)
    assert report_on(ledger).is_proven


@pytest.mark.parametrize(
    ("at", "one", "other"),
    [
        ({"offset": 50}, {"num_workers": 1, "round": 7}, {"num_workers": 1, "round": 7}),
        ({"step": 10}, {"num_workers": 1, "round": 7}, {"num_workers": 1, "round": 8}),
        ({"step": 10}, {"iteration": 0}, {"iteration": 1}),
    ],
)
def test_rounds_of_a_process_that_begin_elsewhere_are_two(
    ledger: Path, at: dict[str, int], one: dict[str, int], other: dict[str, int]
) -> None:
    append(ledger, begin_of(), range(10))
    rest, again = replace(begin_of(start=1, **at), **one), replace(begin_of(start=1, offset=0), **other)  # type: ignore[arg-type]
    append(ledger, rest, range(rest.step, 10 + rest.step), ends=True)
    append(ledger, replace(again, time=again.time + timedelta(minutes=1)), range(20), ends=True)
    assert words(ledger).startswith("NOT PROVEN: 100 samples trained on more than once\n")


def test_a_rank_that_came_to_no_batch_of_a_start_has_trained_what_counts_before_it(ledger: Path) -> None:
    for rank in range(2):
        append(ledger, begin_of(rank, world_size=2), range(8))
    append(ledger, begin_of(0, world_size=2, start=1, step=5), [5, 6])
    for rank in range(2):
        append(ledger, begin_of(rank, world_size=2, start=2, step=6), range(6, 10), ends=True)
    assert report_on(ledger).is_proven


def test_each_of_many_starts_may_go_on_behind_what_the_ledger_lost(ledger: Path) -> None:
    for rank in range(2):
        for start in range(40):  # a machine that goes down loses the last lines of each
            begin = begin_of(rank, world_size=2, start=start, step=5 * start, num_samples=2000)
            append(ledger, begin, range(5 * start, 5 * start + 4), ends=start == 39)
    [epoch] = report_on(ledger).orders[0].epochs
    lost = [[50 * start + 40, 50 * start + 50] for start in range(40)]
    assert (epoch.missing.tolist(), len(epoch.twice)) == (lost, 0)
    assert [leg.started.number for leg in epoch.legs] == list(range(40))


def test_starts_without_a_state_are_each_the_same_one_on_all_ranks(ledger: Path) -> None:
    for rank in range(2):
        append(ledger, begin_of(rank, world_size=2), range(4))
        append(ledger, replace(begin_of(rank, world_size=2, start=1), num_loads=0), range(10), ends=True)
    [epoch] = report_on(ledger).orders[0].epochs
    assert (epoch.missing.tolist(), epoch.twice.tolist()) == ([], [[0, 40]])


def test_a_start_without_a_state_that_was_thrown_away_is_not_taken_for_a_later_one(ledger: Path) -> None:
    append(ledger, begin_of(batch_size=10), range(3))
    for start, steps in ((1, 1), (3, 10)):
        for rank in range(2):
            append(ledger, replace(begin_of(rank, start=start, world_size=2), num_loads=0), range(steps), ends=start == 3)
        if start == 1:
            append(ledger, begin_of(start=2, batch_size=5, offset=20), range(2))
    [epoch] = report_on(ledger).orders[0].epochs
    assert (epoch.missing.tolist(), epoch.twice.tolist()) == ([], [[0, 30]])


def test_what_a_process_goes_on_with_behind_another_ones_start_counts_too(ledger: Path) -> None:
    one = replace(begin_of(), launch="one")
    two = replace(begin_of(epoch=1), launch="two", time=FIRST + timedelta(seconds=1))
    append(ledger, one, range(20), ends=True)
    append(ledger, two, range(20), ends=True)
    append(ledger, replace(one, epoch=1, iteration=1, time=FIRST + timedelta(seconds=2)), range(20), ends=True)
    assert words(ledger).startswith("NOT PROVEN: 100 samples trained on more than once\n")


def test_an_epoch_is_begun_with_the_state_of_a_start_that_ended_the_one_before_it(ledger: Path) -> None:
    append(ledger, begin_of(), range(20), ends=True)
    append(ledger, begin_of(start=1, step=14), [])  # began again from an older state, and was given up
    append(ledger, begin_of(start=2, epoch=1), range(20), ends=True)
    assert report_on(ledger).is_proven


def test_of_what_was_cut_twice_no_more_counts_than_before_the_first_cut(ledger: Path) -> None:
    append(ledger, begin_of(), range(12))
    append(ledger, begin_of(start=1, step=6), range(6, 8))
    append(ledger, begin_of(start=2, offset=47, batch_size=1), range(53), ends=True)  # of a state that no step here ends at
    [epoch] = report_on(ledger).orders[0].epochs
    assert (epoch.missing.tolist(), epoch.twice.tolist()) == ([[40, 47]], [])
    assert [(gap.steps, gap.leg.started.number) for gap in epoch.gaps] == [((8, 10), 1)]


def test_of_a_state_that_no_start_came_to_all_that_is_behind_it_was_thrown_away(ledger: Path) -> None:
    append(ledger, begin_of(), range(20), ends=True)
    append(ledger, begin_of(epoch=1), range(5))
    append(ledger, begin_of(start=1, offset=47, batch_size=1), range(53), ends=True)
    append(ledger, begin_of(start=1, epoch=1), range(20), ends=True)
    assert report_on(ledger).is_proven


def test_of_a_start_that_goes_back_to_an_earlier_epoch_the_later_one_is_thrown_away_on_all_ranks(ledger: Path) -> None:
    for rank in range(2):
        append(ledger, begin_of(rank, world_size=2), range(10), ends=True)
        append(ledger, begin_of(rank, world_size=2, epoch=1), range(4))
        append(ledger, begin_of(rank, world_size=2, start=1, step=7), range(7, 10), ends=True)
        append(ledger, begin_of(rank, world_size=2, start=1, epoch=1), range(10), ends=True)
    assert report_on(ledger).is_proven


def test_what_was_thrown_away_is_told_with_the_start_that_took_over(ledger: Path) -> None:
    for start, steps in ((0, range(10)), (1, range(6, 8)), (2, range(9, 20))):
        append(ledger, begin_of(start=start, step=steps[0]), steps, ends=start == 2)
    assert facts_of(report_on(ledger))["orders"][0]["thrown_away"] == [
        {"epoch": 0, "first_step": 9, "last_step": 9, "start": 1, "resumed_by": 3},
        {"epoch": 0, "first_step": 6, "last_step": 7, "start": 2, "resumed_by": 3},
    ]


@pytest.mark.parametrize("hours", [-2, 2])
def test_clocks_of_machines_may_differ(ledger: Path, hours: int) -> None:
    """Rank 1's clock is off, and the run goes on without it. What is lost, or trained again, is seen all the same."""

    def write(name: str, again: Begin, steps: Iterable[int]) -> Report:
        run = ledger.with_name(name)
        for rank in range(2):
            begin = begin_of(rank, world_size=2)
            append(run, replace(begin, time=begin.time + timedelta(hours=hours * rank)), range(4))
        append(run, again, steps, ends=True)
        return report_on(run)

    resumed = begin_of(start=1, offset=40)
    assert write("whole", resumed, range(12)).is_proven
    [lost] = write("lost", resumed, [0, 1, *range(5, 12)]).orders[0].epochs
    assert lost.missing.tolist() == [[50, 65]]
    [again] = write("again", replace(begin_of(start=1), num_loads=0), range(20)).orders[0].epochs
    assert again.twice.tolist() == [[0, 40]]


def test_a_rank_that_goes_on_where_the_clock_is_behind_began_later_all_the_same(ledger: Path) -> None:
    append(ledger, begin_of(), range(8))
    append(ledger, replace(begin_of(start=1, step=5), time=FIRST - timedelta(hours=2)), range(5, 20), ends=True)
    assert report_on(ledger).is_proven


def test_a_start_of_which_rank_0_came_to_no_batch_is_known_by_the_others(ledger: Path) -> None:
    for rank in range(2):
        append(ledger, begin_of(rank, world_size=2), range(7))
    for rank in (1, 2, 3):
        append(ledger, begin_of(rank, world_size=4, start=1, offset=50), [0])
    [order] = report_on(ledger).orders
    assert order.leader.rank == 1
    assert [(rank.rank, thrown.steps) for rank in order.ranks for thrown in rank.thrown] == [(0, (5, 7)), (1, (5, 7))]
    assert [epoch.twice.tolist() for epoch in order.epochs] == [[]]
