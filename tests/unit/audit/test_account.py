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


def test_workers_prove_only_what_the_loader_was_handed(ledger: Path) -> None:
    for worker in range(2):
        append(ledger, replace(begin_of(), worker=worker, num_workers=2), range(worker, 20, 2), ends=True)
    assert words(ledger).startswith(
        "PROVEN: each sample that was due, 100 in 1 epoch, was handed to the loader exactly once. If the loop left "
        "an epoch early, the batches that the workers had fetched ahead may not have reached it\n"
    )
    assert [as_json(report_on(ledger))[name] for name in ("proven", "by_workers")] == [True, True]
    append(ledger.with_name("other"), begin_of(), range(20), ends=True)
    assert as_json(report_on(ledger.with_name("other")))["by_workers"] is False


def test_order_is_named_by_its_parameters(ledger: Path) -> None:
    write_run(ledger, split="train", mix="numbers:3,more:2", stopping_strategy="first_exhausted", window=64)
    named = words(ledger).splitlines()[2].split(", ")
    assert {"dataset=numbers", "snapshot=abc", "seed=0", "window=64", "split=train", "mix=numbers:3,more:2"} <= {*named}


@pytest.mark.parametrize(("drop_last", "steps", "due", "repeated"), [(True, 11, 99, 0), (False, 12, 100, 8)])
def test_dropped_or_filled_tail_is_no_fault(ledger: Path, drop_last: bool, steps: int, due: int, repeated: int) -> None:
    write_run(ledger, world_size=3, epochs=1, steps=steps, batch_size=3, drop_last=drop_last)
    [epoch] = report_on(ledger).orders[0].epochs
    assert (epoch.is_proven, epoch.num_due, epoch.num_dropped, epoch.num_repeated) == (True, due, 100 - due, repeated)
    assert ("100 samples, each once; 8 from the epoch's start once more, to fill" in words(ledger)) != drop_last


def test_repeated_samples_are_counted_when_the_run_resumed_at_the_end(ledger: Path) -> None:
    write_run(ledger, world_size=3, epochs=1, steps=12, batch_size=3, drop_last=False)
    append(ledger, begin_of(0, start=1, world_size=1, batch_size=50, drop_last=False, offset=100), range(0), ends=True, salt=1)
    append(ledger, begin_of(0, start=1, epoch=1, batch_size=50, drop_last=False), range(2), ends=True)
    assert [epoch.num_repeated for epoch in report_on(ledger).orders[0].epochs] == [8, 0]


def test_skipped_samples_are_not_missing(ledger: Path) -> None:
    write_run(ledger, epochs=1, steps=8, skip="samples:10-24,90-94")
    [epoch] = report_on(ledger).orders[0].epochs
    assert (epoch.is_proven, epoch.num_due, epoch.num_skipped) == (True, 80, 20)
    assert "80 of 100 samples, each once; 20 skipped" in words(ledger)


def test_skip_of_a_later_start_excuses_nothing_before_it(ledger: Path) -> None:
    append(ledger, begin_of(), [0, 1, *range(3, 8)])
    append(ledger, begin_of(start=1, offset=40, skip="samples:10-14"), range(12), ends=True)
    [epoch] = report_on(ledger).orders[0].epochs
    assert (epoch.missing.tolist(), epoch.num_due, epoch.num_skipped) == ([[10, 15]], 100, 0)
    assert [gap.steps for gap in epoch.gaps] == [range(2, 3)]  # what the later start took over is not among them


def test_unfinished_run_is_due_only_what_it_reached(ledger: Path) -> None:
    for rank in range(2):
        append(ledger, begin_of(rank, world_size=2, skip="8"), [step for step in range(6) if (rank, step) != (1, 2)])
    [epoch] = report_on(ledger).orders[0].epochs
    assert [(gap.steps, gap.ranks) for gap in epoch.gaps] == [(range(2, 3), [1])]
    assert (epoch.is_finished, epoch.num_due, epoch.num_skipped, epoch.num_dropped) == (False, 60, 0, 0)


def test_epoch_is_finished_when_the_run_was_killed_after_its_last_step(ledger: Path) -> None:
    for rank in range(2):
        append(ledger, begin_of(rank, world_size=2, batch_size=3), range(16))
    [epoch] = report_on(ledger).orders[0].epochs
    assert (epoch.is_proven, epoch.is_finished, epoch.num_due, epoch.num_dropped) == (True, True, 96, 4)


def test_missing_batch_is_named_by_step_rank_and_positions(ledger: Path) -> None:
    write_run(ledger)
    path = ledger.with_name("run.ledger.1")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:4] + lines[5:]))
    report = report_on(ledger)
    assert not report.is_proven
    assert words(ledger).startswith("NOT PROVEN: samples not trained on: 5\n")
    assert "MISSING epoch 0, step 3 of start 1, rank 1: 5 samples at positions 35-39" in words(ledger)
    assert as_json(report)["orders"][0]["epochs"][0]["missing"] == {"samples": 5, "ranges": 1, "positions": [[35, 40]]}


def test_absent_ledgers_of_a_rank_are_named(ledger: Path) -> None:
    write_run(ledger)
    ledger.with_name("run.ledger.1").unlink()
    assert "MISSING epoch 1, steps 0-9 of start 1, rank 1: 50 samples at positions 5-9, 15-19" in words(ledger)
    assert "MISSING the ledgers of rank 1: name the files of all ranks" in words(ledger)
    assert not report_on(ledger).is_proven


def test_run_is_not_proven_when_its_beginning_is_absent(ledger: Path) -> None:
    append(ledger, begin_of(start=1, step=5), range(5, 20), ends=True)
    assert words(ledger).startswith("NOT PROVEN: samples not trained on: 25, starts resumed from a start without a record: 1\n")
    assert "MISSING epoch 0, 25 samples at positions 0-24: no start in these ledgers covers them" in words(ledger)
    assert "MISSING the start with the id 0000000000000001: start 1 resumed from its state, in epoch 0" in words(ledger)
    assert as_json(report_on(ledger))["orders"][0]["unknown_parent"] == "0000000000000001"


@pytest.mark.parametrize(("behind", "is_proven"), [(3, True), (16, True), (17, False)])
def test_ranks_of_a_killed_run_end_within_a_few_steps_of_each_other(ledger: Path, behind: int, is_proven: bool) -> None:
    for rank, steps in ((0, 50), (1, 50 - behind)):
        append(ledger, begin_of(rank, world_size=2, num_samples=1000), range(steps))
    [epoch] = report_on(ledger).orders[0].epochs
    assert (epoch.is_proven, epoch.steps_done) == ((True, 50 - behind) if is_proven else (False, 50))


def test_rank_is_incomplete_when_another_ended_the_epoch(ledger: Path) -> None:
    append(ledger, begin_of(0, world_size=2), range(10), ends=True)
    append(ledger, begin_of(1, world_size=2), range(9))
    assert not report_on(ledger).is_proven
    assert "MISSING epoch 0, step 9 of start 1, rank 1" in words(ledger)


def test_epoch_lacks_its_rest_when_it_is_left_for_another(ledger: Path) -> None:
    append(ledger, begin_of(), range(15))
    append(ledger, begin_of(epoch=1), range(3))
    assert "MISSING epoch 0, steps 15-19 of start 1, rank 0: 25 samples at positions 75-99" in words(ledger)


def test_unwritten_lines_are_no_proof(ledger: Path) -> None:
    append(ledger, begin_of(), range(20), ends=True)
    with ledger.open("a") as file:
        file.write(line("lost 3", ledger.read_text().splitlines()[0][-8:]))
    assert words(ledger).startswith("NOT PROVEN: lines that could not be written: 3\n")
    assert as_json(report_on(ledger))["lost_lines"] == 3


def test_epoch_is_missing_when_a_state_was_in_it_and_nothing_is_recorded(ledger: Path) -> None:
    append(ledger, begin_of(), range(20), ends=True)
    append(ledger, replace(begin_of(start=1, epoch=2, step=5), epoch=3, step=0), range(20), ends=True)
    assert words(ledger).startswith("NOT PROVEN: samples not trained on: 100\n")
    assert "MISSING epoch 2, steps 0-4 of start 1, rank 0: 25 samples at positions 0-24" in words(ledger)
    assert [(epoch.epoch, len(epoch.missing)) for epoch in report_on(ledger).orders[0].epochs] == [(0, 0), (2, 1), (3, 0)]


def test_copied_ledger_is_not_another_rank(ledger: Path) -> None:
    append(ledger, begin_of(), range(9))
    ledger.with_name("run.ledger.7").write_text(ledger.read_text())
    append(ledger, begin_of(start=1, step=9), range(9, 20), ends=True)
    ledger.with_name("run.ledger.20261101").write_text(ledger.read_text())
    assert (report_on(ledger).is_proven, report_on(ledger).num_batches) == (True, 20)
