"""What the audit says of the ledgers of whole runs, and of what is missing in them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.audit.report import as_json
from support.ledgers import append, begin_of, line, report_on, words, write_run


def test_whole_epochs_are_proven(ledger: Path) -> None:
    write_run(ledger)
    report = report_on(ledger)
    assert report.is_proven
    epochs = report.orders[0].epochs
    assert [(epoch.epoch, epoch.num_due, epoch.is_finished) for epoch in epochs] == [(0, 100, True), (1, 100, True)]
    assert words(ledger).startswith("PROVEN: each sample that was due, 200 in 2 epochs, was trained on exactly once\n")
    assert json.loads(json.dumps(as_json(report)))["proven"] is True


def test_of_what_loader_workers_noted_no_more_is_said_than_that_the_loader_was_handed_it(ledger: Path) -> None:
    for worker in range(2):
        append(ledger, replace(begin_of(), worker=worker, num_workers=2), range(worker, 20, 2), ends=True)
    assert words(ledger).startswith(
        "PROVEN: each sample that was due, 100 in 1 epoch, was handed to the loader exactly once. If the loop left "
        "an epoch early, the batches that the workers had fetched ahead may not have reached it\n"
    )
    assert [as_json(report_on(ledger))[name] for name in ("proven", "by_workers")] == [True, True]
    append(ledger.with_name("other"), begin_of(), range(20), ends=True)
    assert as_json(report_on(ledger.with_name("other")))["by_workers"] is False


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
    assert ("exactly once, except 8 that drop_last=false repeats" in words(ledger)) != drop_last
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
    assert as_json(report)["orders"][0]["epochs"][0]["missing"] == {"samples": 5, "ranges": 1, "positions": [[35, 40]]}


def test_the_ledgers_of_a_rank_that_are_not_there_are_missed(ledger: Path) -> None:
    write_run(ledger)
    ledger.with_name("run.ledger.1").unlink()
    assert "MISSING epoch 1, steps 0-9 of start 1, rank 1: 50 samples at positions 5-9, 15-19" in words(ledger)
    assert "MISSING the ledgers of rank 1: name the files of all ranks" in words(ledger)
    assert not report_on(ledger).is_proven


def test_a_run_whose_beginning_is_not_there_is_not_proven(ledger: Path) -> None:
    append(ledger, begin_of(start=1, step=5), range(5, 20), ends=True)
    assert words(ledger).startswith("NOT PROVEN: 25 samples not trained on, 1 start resumed from a start without a record\n")
    assert "MISSING epoch 0, 25 samples at positions 0-24: no start in these ledgers covers them" in words(ledger)
    assert "MISSING the start with the id 0000000000000001: start 1 resumed from its state, in epoch 0" in words(ledger)
    assert as_json(report_on(ledger))["orders"][0]["unknown_parent"] == "0000000000000001"


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


def test_epochs_that_a_loop_leaves_out_are_told_beside_the_verdict(ledger: Path) -> None:
    append(ledger, begin_of(epoch=1), range(20), ends=True)
    append(ledger, replace(begin_of(start=1, epoch=1, step=20), step=0, epoch=10**9), range(20), ends=True)
    assert report_on(ledger).is_proven
    assert ", was trained on exactly once. Nothing is recorded of epochs 0, 2-999999999\n" in words(ledger)
    assert "  no batch of epochs 2-999999999 is recorded" in words(ledger)


def test_lines_that_could_not_be_written_are_no_proof(ledger: Path) -> None:
    append(ledger, begin_of(), range(20), ends=True)
    with ledger.open("a") as file:
        file.write(line("lost 3", ledger.read_text().splitlines()[0][-8:]))
    assert words(ledger).startswith("NOT PROVEN: 3 lines could not be written\n")
    assert as_json(report_on(ledger))["lost_lines"] == 3


def test_an_epoch_that_a_state_had_begun_is_missed_if_nothing_of_it_is_recorded(ledger: Path) -> None:
    append(ledger, begin_of(), range(20), ends=True)
    append(ledger, replace(begin_of(start=1, epoch=2, step=5), epoch=3, step=0), range(20), ends=True)
    assert words(ledger).startswith("NOT PROVEN: 1 epoch without a record, although a start resumed after it\n")
    assert "MISSING epoch 2: start 2 loaded a state in which some of it was consumed" in words(ledger)
    assert as_json(report_on(ledger))["orders"][0]["passed_over"] == [{"epoch": 2, "resumed_by": 2}]


def test_a_copy_of_a_ledger_is_not_taken_for_another_rank(ledger: Path) -> None:
    append(ledger, begin_of(), range(9))
    ledger.with_name("run.ledger.7").write_text(ledger.read_text())
    append(ledger, begin_of(start=1, step=9), range(9, 20), ends=True)
    ledger.with_name("run.ledger.20261101").write_text(ledger.read_text())
    assert (report_on(ledger).is_proven, report_on(ledger).num_batches) == (True, 20)
