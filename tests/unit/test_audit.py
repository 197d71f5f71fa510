"""What the audit says of the ledgers of whole runs, and of what is missing in them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from audited import report_on, words, write_run
from ledgers import append, begin_of, lines_of
from penstock.audit import account
from penstock.audit.facts import facts_of
from penstock.audit.positions import positions_of


def test_whole_epochs_are_proven(ledger: Path) -> None:
    write_run(ledger)
    report = report_on(ledger)
    assert report.is_proven
    epochs = report.orders[0].epochs
    assert [(epoch.epoch, epoch.num_due, epoch.is_finished) for epoch in epochs] == [(0, 100, True), (1, 100, True)]
    assert words(ledger).startswith("PROVEN: each sample that was due, 200 in 2 epochs, was trained on exactly once\n")
    assert json.loads(json.dumps(facts_of(report)))["proven"] is True


def test_of_what_loader_workers_noted_no_more_is_said_than_that_the_loader_was_handed_it(ledger: Path) -> None:
    for worker in range(2):
        append(ledger, replace(begin_of(), worker=worker, num_workers=2), range(worker, 20, 2), ends=True)
    assert words(ledger).startswith(
        "PROVEN: each sample that was due, 100 in 1 epoch, was handed to the loader exactly once. Where the loop left "
        "an epoch early, the last batches, as many as the workers fetch ahead, may not have reached it\n"
    )
    assert [facts_of(report_on(ledger))[name] for name in ("proven", "by_workers")] == [True, True]
    append(ledger.with_name("other"), begin_of(), range(20), ends=True)
    assert facts_of(report_on(ledger.with_name("other")))["by_workers"] is False


def test_an_order_is_named_by_all_that_tells_it_from_others(ledger: Path) -> None:
    write_run(ledger)
    assert "numbers, snapshot=abc, seed=0, shuffle=window, packing=rows\n" in words(ledger)
    other = ledger.with_name("other")
    write_run(other, split="train", mix="numbers:3,more:2", stopping_strategy="first_exhausted", window=64)
    assert "packing=rows, window=64, split=train, mix=numbers:3,more:2, stopping_strategy=first_exhausted\n" in words(other)


@pytest.mark.parametrize(("drop_last", "steps", "due", "repeated"), [(True, 11, 99, 0), (False, 12, 100, 8)])
def test_a_tail_is_dropped_or_filled_and_neither_is_a_fault(
    ledger: Path, drop_last: bool, steps: int, due: int, repeated: int
) -> None:
    write_run(ledger, world_size=3, epochs=1, steps=steps, batch_size=3, drop_last=drop_last)
    [epoch] = report_on(ledger).orders[0].epochs
    assert (epoch.is_proven, epoch.num_due, epoch.num_dropped, epoch.num_repeated) == (True, due, 100 - due, repeated)
    assert ("exactly once, but for 8 that drop_last=false repeats" in words(ledger)) != drop_last
    assert ("100 samples, each once; 8 from the epoch's start once more, to fill" in words(ledger)) != drop_last


def test_what_fills_a_last_step_is_told_whatever_the_run_resumed_as_at_its_end(ledger: Path) -> None:
    write_run(ledger, world_size=3, epochs=1, steps=12, batch_size=3, drop_last=False)
    append(ledger, begin_of(0, start=1, world_size=1, batch_size=50, drop_last=False, offset=100), range(0), ends=True, salt=1)
    append(ledger, begin_of(0, start=1, epoch=1, batch_size=50, drop_last=False), range(2), ends=True)
    assert [epoch.num_repeated for epoch in report_on(ledger).orders[0].epochs] == [8, 0]


def test_what_is_skipped_is_not_missed(ledger: Path) -> None:
    write_run(ledger, epochs=1, steps=8, skip="samples:10-24,90-94")
    [epoch] = report_on(ledger).orders[0].epochs
    assert (epoch.is_proven, epoch.num_due, epoch.num_skipped) == (True, 80, 20)
    assert "80 of 100 samples, each once; 20 skipped" in words(ledger)


def test_of_what_is_dropped_that_which_is_skipped_is_no_part(ledger: Path) -> None:
    write_run(ledger, epochs=1, steps=9, skip="samples:97-98")
    [epoch] = report_on(ledger).orders[0].epochs
    assert (epoch.is_proven, epoch.num_due, epoch.num_skipped, epoch.num_dropped) == (True, 90, 2, 8)


def test_what_is_skipped_at_the_end_of_an_epoch_is_told_as_well(ledger: Path) -> None:
    write_run(ledger, epochs=1, steps=8, skip="samples:80-96")
    assert "80 of 100 samples, each once; 17 skipped; 3 dropped at the end" in words(ledger)


def test_a_skip_that_a_later_start_has_excuses_nothing_before_it(ledger: Path) -> None:
    append(ledger, begin_of(), [0, 1, *range(3, 8)])
    append(ledger, begin_of(start=1, offset=40, skip="samples:10-14"), range(12), ends=True)
    [epoch] = report_on(ledger).orders[0].epochs
    assert (epoch.missing.tolist(), epoch.num_due, epoch.num_skipped) == ([[10, 15]], 100, 0)
    assert [gap.steps for gap in epoch.gaps] == [(2, 3)]  # what the later start took over is not among them


def test_of_a_run_that_is_under_way_nothing_is_told_of_what_is_to_come(ledger: Path) -> None:
    for rank in range(2):
        append(ledger, begin_of(rank, world_size=2, skip="8"), [step for step in range(6) if (rank, step) != (1, 2)])
    [epoch] = report_on(ledger).orders[0].epochs
    assert [(gap.steps, gap.ranks) for gap in epoch.gaps] == [((2, 3), [1])]
    assert (epoch.is_finished, epoch.num_due, epoch.num_skipped, epoch.num_dropped, epoch.num_ahead) == (False, 60, 0, 0, 0)


def test_a_run_that_was_killed_behind_the_last_step_of_an_epoch_finished_it(ledger: Path) -> None:
    for rank in range(2):
        append(ledger, begin_of(rank, world_size=2, batch_size=3), range(16))
    [epoch] = report_on(ledger).orders[0].epochs
    assert (epoch.is_proven, epoch.is_finished, epoch.num_due, epoch.num_dropped) == (True, True, 96, 4)


def test_a_missing_batch_is_named_by_step_rank_and_positions(ledger: Path) -> None:
    write_run(ledger)
    path = ledger.with_name("run.ledger.1")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:4] + lines[5:]))
    report = report_on(ledger)
    assert not report.is_proven
    assert words(ledger).startswith("NOT PROVEN: 5 samples not trained on\n")
    assert "MISSING epoch 0, step 3 of start 1, rank 1: 5 samples at positions 35-39" in words(ledger)
    assert facts_of(report)["orders"][0]["epochs"][0]["missing"] == {"samples": 5, "ranges": 1, "positions": [[35, 40]]}


def test_the_ledgers_of_a_rank_that_are_not_there_are_missed(ledger: Path) -> None:
    write_run(ledger)
    ledger.with_name("run.ledger.1").unlink()
    assert "MISSING epoch 1, steps 0-9 of start 1, rank 1: 50 samples at positions 5-9, 15-19" in words(ledger)
    assert "MISSING the ledgers of rank 1: name the files of all ranks" in words(ledger)
    assert not report_on(ledger).is_proven


def test_a_run_whose_beginning_is_not_there_is_not_proven(ledger: Path) -> None:
    append(ledger, begin_of(start=1, step=5), range(5, 20), ends=True)
    assert "MISSING epoch 0, 25 samples at positions 0-24: no pass in these ledgers covers them" in words(ledger)


@pytest.mark.parametrize(("behind", "is_proven"), [(3, True), (16, True), (17, False)])
def test_ranks_of_a_killed_run_end_within_a_few_steps_of_each_other(ledger: Path, behind: int, is_proven: bool) -> None:
    for rank, steps in ((0, 50), (1, 50 - behind)):
        append(ledger, begin_of(rank, world_size=2, num_samples=1000), range(steps))
    [epoch] = report_on(ledger).orders[0].epochs
    assert (epoch.is_proven, epoch.steps_done, epoch.num_ahead) == (
        (True, 50 - behind, 5 * behind) if is_proven else (False, 50, 0)
    )


def test_once_a_rank_went_through_an_epoch_the_others_must_have_too(ledger: Path) -> None:
    append(ledger, begin_of(0, world_size=2), range(10), ends=True)
    append(ledger, begin_of(1, world_size=2), range(9))
    assert not report_on(ledger).is_proven
    assert "MISSING epoch 0, step 9 of start 1, rank 1" in words(ledger)


def test_an_epoch_that_is_left_for_another_lacks_its_rest(ledger: Path) -> None:
    append(ledger, begin_of(), range(15))
    append(ledger, begin_of(epoch=1), range(3))
    append(ledger, begin_of(epoch=4), range(3))
    assert "MISSING epoch 0, steps 15-19 of start 1, rank 0: 25 samples at positions 75-99" in words(ledger)
    assert "no batch of epochs 2-3 is recorded" in words(ledger)


def test_an_iteration_of_which_nothing_is_recorded_is_missed(ledger: Path) -> None:
    for epoch in (0, 1, 2):
        append(ledger, begin_of(epoch=epoch), range(20), ends=True)
    assert report_on(ledger).is_proven
    ledger.unlink()
    for iteration, epoch in ((0, 0), (2, 1)):  # and of iteration 1, which may have been of epoch 0 once more, nothing
        append(ledger, replace(begin_of(epoch=epoch), iteration=iteration), range(20), ends=True)
    assert words(ledger).startswith("NOT PROVEN: of 1 iteration nothing is recorded, though of later ones of the same process")
    assert facts_of(report_on(ledger))["lost_iterations"] == 1


def test_of_a_ledger_that_was_begun_anew_in_mid_run_the_iterations_before_are_missed(ledger: Path) -> None:
    for iteration in (2, 3):
        append(ledger, replace(begin_of(epoch=iteration), iteration=iteration), range(20), ends=True)
    assert words(ledger).startswith("NOT PROVEN: of 2 iterations nothing is recorded, though of later ones")


def test_a_round_of_which_no_worker_recorded_anything_is_missed(ledger: Path) -> None:
    append(ledger, begin_of(), range(20), ends=True)  # by the loop itself
    for iteration, epoch in ((2, 1), (3, 2)):
        for worker in (0, 1):
            of_worker: dict[str, Any] = {
                "worker": worker,
                "num_workers": 2,
                "round": 5 + iteration,
                "iteration": iteration,
            }
            with Path(f"{ledger}.worker{worker}").open("a") as file:
                file.write(lines_of(replace(begin_of(epoch=epoch), **of_worker), range(worker, 20, 2), ends=True))
    assert words(ledger).startswith("NOT PROVEN: of 1 iteration nothing is recorded, though of later ones of the same process")


def test_workers_of_one_round_are_one_iteration_whatever_their_numbers(ledger: Path) -> None:
    """One may have begun late, when others were in a later round already."""
    for start, steps in ((0, range(12)), (1, range(20))):
        for worker in (0, 1):
            of_worker: dict[str, Any] = {"worker": worker, "num_workers": 2, "round": 5, "iteration": worker}
            with Path(f"{ledger}.worker{worker}").open("a") as file:
                begin = replace(begin_of(start=start), **of_worker)
                file.write(lines_of(begin, steps[worker::2], ends=start == 1))
    assert words(ledger).startswith("PROVEN")


def test_an_epoch_of_which_a_state_had_consumed_something_is_missed_if_nothing_of_it_is_recorded(ledger: Path) -> None:
    append(ledger, begin_of(), range(20), ends=True)
    append(ledger, replace(begin_of(start=1, epoch=3), state_epoch=2), range(20), ends=True)
    assert words(ledger).startswith("NOT PROVEN: nothing is recorded of 1 epoch that a start resumed behind\n")
    assert "  MISSING epoch 2: start 2 loaded a state in which some of it was consumed, and nothing" in words(ledger)
    [order] = facts_of(report_on(ledger))["orders"]
    assert order["passed_over"] == [{"epoch": 2, "resumed_by": 2}]
    append(ledger, replace(begin_of(start=2, epoch=3), state_epoch=0), range(20), ends=True)  # which goes back
    assert len(report_on(ledger).orders[0].passed) == 1


def test_epochs_that_a_loop_leaves_out_are_told_beside_the_verdict(ledger: Path) -> None:
    append(ledger, begin_of(epoch=1), range(20), ends=True)
    append(ledger, replace(begin_of(start=1, epoch=1), epoch=10**9), range(20), ends=True)
    assert report_on(ledger).is_proven
    assert ", was trained on exactly once. Of epochs 0, 2-999999999 nothing is recorded\n" in words(ledger)
    assert "  no batch of epochs 2-999999999 is recorded" in words(ledger)
    for epoch in (0, 2):  # of other data, as in turns
        append(ledger, begin_of(start=2, epoch=epoch, seed=1), range(20), ends=True)
    assert "Of epochs 3-999999999 nothing is recorded\n" in words(ledger)


def test_of_many_starts_that_go_back_behind_many_others_not_each_pair_is_looked_at(
    ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = Mock(side_effect=positions_of)
    monkeypatch.setattr(account, "positions_of", looked_at)
    for start in range(1, 301):
        append(ledger, begin_of(start=start, step=10), range(10, 12))
    for start in range(301, 601):
        append(ledger, replace(begin_of(start=start), num_loads=0), range(3))
    [epoch] = report_on(ledger).orders[0].epochs
    assert epoch.twice.tolist() == [[0, 15]]
    assert looked_at.call_count < 1000
