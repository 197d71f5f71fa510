"""Starts that resume, of one or several ranks: what is trained twice, discarded, or by whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock.audit.report import as_json
from penstock.ledger.begin import Begin
from support.ledgers import FIRST, append, begin_of, id_of, report_on, words


def under_own_id(begin: Begin) -> Begin:
    """The same iteration of a rank without torch.distributed, which draws an id that no other rank has."""
    return begin if not begin.rank else replace(begin, start=f"{begin.rank}{begin.start[1:]}")


def append_by_workers(ledger: Path, begin: Begin, firsts: Sequence[int], stop: int, *, ends: bool = False) -> None:
    """Appends a pass of loader workers, each of which begins at its own first step, and gives steps below `stop`."""
    for worker, first in enumerate(firsts):
        samples = first * begin.spec.samples_per_step if begin.parent else 0
        of_worker = replace(begin, worker=worker, num_workers=len(firsts), pass_name=9, step=first, parent_samples=samples)
        append(ledger, of_worker, range(first + worker, stop, len(firsts)), ends=ends)


@pytest.mark.parametrize("own", [lambda begin: begin, under_own_id])
def test_steps_trained_twice_around_a_resume_count_once(ledger: Path, own: Any) -> None:
    for rank in range(2):
        append(ledger, own(begin_of(rank, world_size=2)), range(8))
        append(ledger, own(begin_of(rank, world_size=2, start=1, step=5)), range(5, 10), ends=True)
    assert report_on(ledger).is_proven
    assert "epoch 0, steps 5-7 of start 1 discarded: start 2 resumed from a checkpoint before them" in words(ledger)
    assert as_json(report_on(ledger))["orders"][0]["discarded"] == [
        {"epoch": 0, "first_step": 5, "last_step": 7, "start": 1, "resumed_by": 2}
    ]


def test_steps_not_reached_again_after_a_resume_are_discarded(ledger: Path) -> None:
    append(ledger, begin_of(), range(8))
    append(ledger, begin_of(start=1, step=2), range(2, 4))
    assert "epoch 0, steps 2-7 of start 1 discarded: start 2 resumed" in words(ledger)
    [epoch] = report_on(ledger).orders[0].epochs
    assert (epoch.is_proven, epoch.is_finished, epoch.steps_done, epoch.num_due) == (True, False, 4, 20)
    assert "epoch 0: 20 of 100 samples, each once; it is not finished: all ranks reached step 4 of 20" in words(ledger)


def test_finished_epoch_is_unfinished_when_a_start_returns_to_it(ledger: Path) -> None:
    append(ledger, begin_of(), range(8))
    append(ledger, begin_of(start=1, step=5), range(5, 20), ends=True)
    append(ledger, begin_of(start=2, parent=0, step=5), range(5, 9))
    [epoch] = report_on(ledger).orders[0].epochs
    assert (epoch.is_proven, epoch.is_finished, epoch.steps_done, epoch.num_due) == (True, False, 9, 45)


@pytest.mark.parametrize(("parent", "is_proven"), [(0, True), (1, False)])
def test_start_that_the_state_names_counts(ledger: Path, parent: int, is_proven: bool) -> None:
    """Both starts reached step 9, and one of them has lost a line."""
    append(ledger, begin_of(), range(12))
    append(ledger, begin_of(start=1, step=5), [5, 6, 8, 9, 10])
    append(ledger, begin_of(start=2, parent=parent, step=9), range(9, 20), ends=True)
    assert report_on(ledger).is_proven == is_proven
    assert ("step 7 of start 2, rank 0" in words(ledger)) != is_proven


def test_lineage_continues_through_abandoned_starts(ledger: Path) -> None:
    append(ledger, begin_of(), range(20), ends=True)
    append(ledger, begin_of(epoch=1), range(5))
    append(ledger, begin_of(start=1, step=12), [12, 13])
    append(ledger, begin_of(start=2, parent=0, epoch=1, step=4), range(4, 9))
    append(ledger, begin_of(start=3, epoch=1, step=7), range(7, 20), ends=True)
    assert report_on(ledger).is_proven
    assert as_json(report_on(ledger))["orders"][0]["discarded"] == [
        {"epoch": 1, "first_step": 4, "last_step": 4, "start": 1, "resumed_by": 3},
        {"epoch": 0, "first_step": 12, "last_step": 13, "start": 2, "resumed_by": 3},
        {"epoch": 1, "first_step": 7, "last_step": 8, "start": 3, "resumed_by": 4},
    ]


def test_start_that_chose_an_earlier_epoch_repeats_samples(ledger: Path) -> None:
    for epoch in (0, 1, 2):
        append(ledger, begin_of(epoch=epoch), range(20), ends=True)
    append(ledger, replace(begin_of(start=1, epoch=2, step=20), epoch=1, step=0), range(20), ends=True)
    assert [len(epoch.twice) for epoch in report_on(ledger).orders[0].epochs] == [0, 1, 0]


def test_samples_lost_at_the_end_of_a_start_are_missing(ledger: Path) -> None:
    append(ledger, begin_of(), range(20), ends=True)
    append(ledger, begin_of(epoch=1), range(3))
    append(ledger, begin_of(start=1, epoch=1, step=5), range(5, 20), ends=True)
    assert [epoch.missing.tolist() for epoch in report_on(ledger).orders[0].epochs] == [[], [[15, 25]]]


def test_start_without_its_parent_is_no_proof(ledger: Path) -> None:
    append(ledger, begin_of(), range(20), ends=True)
    append(ledger, begin_of(start=2, epoch=1), range(20), ends=True)
    assert words(ledger).startswith("NOT PROVEN: starts resumed from a start without a record: 1\n")
    assert f"MISSING the start with the id {id_of(1)}: start 2 resumed from its state" in words(ledger)


@pytest.mark.parametrize("drop_last", [True, False])
def test_workers_at_unequal_steps_are_one_start(ledger: Path, drop_last: bool) -> None:
    append_by_workers(ledger, begin_of(), (0, 0, 0), 8)  # in turn they gave steps 0 to 4 before the state
    append_by_workers(ledger, begin_of(start=1, drop_last=drop_last), (6, 6, 3), 20, ends=True)
    assert report_on(ledger).is_proven
    assert "epoch 0, steps 5-7 of start 1 discarded: start 2 resumed" in words(ledger)


@pytest.mark.parametrize("firsts", [((4, 4), (6, 4)), ((6, 4), (6, 6))])
def test_workers_of_several_ranks_and_starts_resume_at_their_own_steps(
    ledger: Path, firsts: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    for rank in range(2):
        for start, (begins_at, stop) in enumerate(zip([(0, 0), *firsts], (8, 7, 10), strict=True)):
            append_by_workers(ledger, begin_of(rank, start=start, world_size=2), begins_at, stop, ends=start == 2)
    assert report_on(ledger).is_proven


def test_step_ahead_of_a_worker_is_discarded_by_an_earlier_start(ledger: Path) -> None:
    append_by_workers(ledger, begin_of(), (0, 0), 9)
    append_by_workers(ledger, begin_of(start=1), (6, 2), 4)
    append(ledger, begin_of(start=2, step=3), range(3, 20), ends=True)
    assert report_on(ledger).is_proven


def test_epoch_is_unfinished_when_one_of_two_workers_finished(ledger: Path) -> None:
    append(ledger, replace(begin_of(), worker=0, num_workers=2), range(0, 20, 2), ends=True)
    append(ledger, replace(begin_of(), worker=1, num_workers=2), range(1, 15, 2))
    [epoch] = report_on(ledger).orders[0].epochs
    assert (epoch.is_proven, epoch.is_finished, epoch.steps_done) == (True, False, 15)


def test_ranks_of_many_workers_may_differ_more_when_a_run_is_killed(ledger: Path) -> None:
    for num_workers, is_proven in ((8, True), (2, False)):
        run = ledger.with_name(f"of{num_workers}.ledger")
        for rank, steps in enumerate((40, 20)):
            append_by_workers(run, begin_of(rank, world_size=2, num_samples=1000), (0,) * num_workers, steps)
        [epoch] = report_on(run).orders[0].epochs
        assert (epoch.is_proven, epoch.steps_done) == (is_proven, 20 if is_proven else 40)


def test_steps_before_the_slowest_worker_are_kept_when_it_resumed_at_the_start(ledger: Path) -> None:
    append_by_workers(ledger, begin_of(), (0, 0), 3)
    append_by_workers(ledger, begin_of(start=1), (2, 0), 20, ends=True)
    assert report_on(ledger).is_proven


def test_run_with_another_world_size_continues_at_the_same_sample(ledger: Path) -> None:
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


def test_start_without_a_state_repeats_everything_unless_its_weights_are_fresh(ledger: Path) -> None:
    append(ledger, begin_of(), range(4))
    append(ledger, begin_of(start=1, parent=None), range(20), ends=True)
    assert not report_on(ledger).is_proven
    assert "TWICE   epoch 0, 20 samples at positions 0-19: steps 0-3 of start 1, steps 0-3 of start 2" in words(ledger)
    assert "Start 2 loaded no state" in words(ledger)
    assert report_on(ledger, assume_fresh_weights=True).is_proven


def test_abandoned_start_without_a_state_does_not_count(ledger: Path) -> None:
    append(ledger, begin_of(), range(9))
    append(ledger, begin_of(start=1, parent=None), range(3))
    append(ledger, begin_of(start=2, parent=0, step=7), range(7, 20), ends=True)
    assert report_on(ledger).is_proven


def test_epoch_is_trained_on_twice_when_a_start_repeats_it(ledger: Path) -> None:
    append(ledger, begin_of(), range(20), ends=True)
    append(ledger, replace(begin_of(), time=FIRST + timedelta(hours=1)), range(20), ends=True)
    assert words(ledger).startswith("NOT PROVEN: samples trained on more than once: 100\n")
    assert not report_on(ledger, assume_fresh_weights=True).is_proven


@pytest.mark.parametrize("own", [lambda begin: begin, under_own_id])
def test_run_is_not_proven_when_a_rank_resumed_from_another_state(ledger: Path, own: Any) -> None:
    for rank, step in ((0, 5), (1, 3)):
        append(ledger, own(begin_of(rank, world_size=2)), range(8))
        start = 1 if own is under_own_id else 1 + rank
        append(ledger, own(begin_of(rank, world_size=2, start=start, parent=0, step=step)), range(step, 10), ends=True)
    assert "ranks that resumed elsewhere than the others: 1" in words(ledger).splitlines()[0]
    assert "APART   rank 1 took no part in start 2, but in start 3: " in words(ledger)
    assert as_json(report_on(ledger))["orders"][0]["apart"] == [{"rank": 1, "start": 3, "last_start": 2}]


def test_rank_killed_before_its_first_batch_is_harmless(ledger: Path) -> None:
    for rank in range(2):
        append(ledger, begin_of(rank, world_size=2), range(8))
    append(ledger, begin_of(0, world_size=2, start=1, step=5), [5])
    append(ledger, begin_of(1, world_size=2, start=2, parent=0, step=5), [5])
    for rank in range(2):
        append(ledger, begin_of(rank, world_size=2, start=3, parent=0, step=6), range(6, 10), ends=True)
    assert report_on(ledger).is_proven
    assert [start["ranks"] for start in as_json(report_on(ledger))["orders"][0]["starts"]] == [2, 1, 2, 1]


def test_starts_of_one_state_are_matched_by_order_when_ids_differ(ledger: Path) -> None:
    for rank in range(2):
        append(ledger, under_own_id(begin_of(rank, world_size=2)), range(8))
        for start, steps in ((1, range(5, 7)), (2, range(5, 10))):
            begin = begin_of(rank, world_size=2, start=start, parent=0, step=5)
            append(ledger, under_own_id(begin), steps, ends=start == 2)
    assert report_on(ledger).is_proven
    assert [start["ranks"] for start in as_json(report_on(ledger))["orders"][0]["starts"]] == [2, 2, 2]


def test_starts_of_one_state_are_not_matched_when_a_rank_lacks_one(ledger: Path) -> None:
    for rank in range(2):
        append(ledger, under_own_id(begin_of(rank, world_size=2)), range(8))
    append(ledger, begin_of(0, world_size=2, start=1, parent=0, step=5), [5])
    for rank in range(2):
        begin = begin_of(rank, world_size=2, start=2, parent=0, step=5)
        append(ledger, under_own_id(begin), range(5, 10), ends=True)
    assert "or was killed before its first batch" in words(ledger)


def test_starts_may_resume_after_lost_lines(ledger: Path) -> None:
    for rank in range(2):
        for start in range(40):  # a machine that goes down loses the last lines of each
            begin = begin_of(rank, world_size=2, start=start, step=5 * start, num_samples=2000)
            append(ledger, begin, range(5 * start, 5 * start + 4), ends=start == 39)
    [epoch] = report_on(ledger).orders[0].epochs
    assert (epoch.missing.tolist(), len(epoch.twice)) == ([[50 * n + 40, 50 * n + 50] for n in range(40)], 0)
    assert [segment.start.number for segment in epoch.segments] == list(range(1, 41))


def test_start_counts_when_it_continues_after_a_later_one(ledger: Path) -> None:
    """Two datasets of one process, without states."""
    one, two = begin_of(), replace(begin_of(start=1, parent=None, epoch=1), time=FIRST + timedelta(seconds=1))
    append(ledger, one, range(20), ends=True)
    append(ledger, two, range(20), ends=True)
    append(ledger, replace(one, epoch=1, time=FIRST + timedelta(seconds=2)), range(20), ends=True)
    assert words(ledger).startswith("NOT PROVEN: samples trained on more than once: 100\n")
