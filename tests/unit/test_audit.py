"""What the audit says of ledgers: of whole ones, and of those that something happened to."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from ledgers import FIRST, append, begin_of, lines_of
from penstock import Spec
from penstock.audit import Report, account, audit, compare, reading
from penstock.audit import report as report_module
from penstock.audit.facts import facts_of
from penstock.audit.positions import positions_of
from penstock.audit.reading import read_begins
from penstock.audit.text import lines_of as words_of
from penstock.commands import audit as command
from penstock.errors import AddressError, LedgerError, ServerUnavailable, UnknownDataset
from penstock.ledger.begin import Begin
from penstock.ledger.names import find_ledgers


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "run.ledger"


def report_on(ledger: Path, **settings: bool) -> Report:
    return audit(find_ledgers(ledger), **settings)


def words(ledger: Path, **settings: bool) -> str:
    return "\n".join(words_of(report_on(ledger, **settings)))


def write_run(ledger: Path, *, world_size: int = 2, epochs: int = 2, steps: int = 10, **spec: Any) -> None:
    """Whole epochs of 100 samples."""
    for rank in range(world_size):
        for epoch in range(epochs):
            append(ledger, begin_of(rank, epoch=epoch, world_size=world_size, **spec), range(steps), ends=True)


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


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
    write_run(other, split="train", mix="numbers:3,more:2", mix_stop="first", window=64)
    assert "packing=rows, window=64, split=train, mix=numbers:3,more:2, mix_stop=first\n" in words(other)


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
    [({}, {}), ({}, {"tail": "wrap"}), ({"mix": "a:7,b:3"}, {"mix": "a:7,b:3;a:1,b:1@25", "num_sequences": 102})],
)
def test_workers_that_go_on_from_unequal_steps_are_one_start(ledger: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
    then = {"snapshot": "one+two", "mix_stop": "first"} | then
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
                begin = begin_of(rank, world_size=2, num_sequences=1000)
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


@pytest.mark.parametrize(("tail", "steps", "due", "repeated"), [("drop", 11, 99, 0), ("wrap", 12, 100, 8)])
def test_a_tail_is_dropped_or_filled_and_neither_is_a_fault(
    ledger: Path, tail: str, steps: int, due: int, repeated: int
) -> None:
    write_run(ledger, world_size=3, epochs=1, steps=steps, batch_size=3, tail=tail)
    [epoch] = report_on(ledger).orders[0].epochs
    assert (epoch.is_proven, epoch.num_due, epoch.num_dropped, epoch.num_repeated) == (True, due, 100 - due, repeated)
    assert ("exactly once, but for 8 that tail=wrap repeats" in words(ledger)) == (tail == "wrap")
    assert ("100 samples, each once; 8 from the epoch's start once more, to fill" in words(ledger)) == (tail == "wrap")


def test_what_fills_a_last_step_is_told_whatever_the_run_resumed_as_at_its_end(ledger: Path) -> None:
    write_run(ledger, world_size=3, epochs=1, steps=12, batch_size=3, tail="wrap")
    append(ledger, begin_of(0, start=1, world_size=1, batch_size=50, tail="wrap", offset=100), range(0), ends=True, salt=1)
    append(ledger, begin_of(0, start=1, epoch=1, batch_size=50, tail="wrap"), range(2), ends=True)
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
        append(ledger, begin_of(rank, world_size=2, num_sequences=1000), range(steps))
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


def test_a_start_without_a_state_counts_everything_again_unless_it_is_trusted(ledger: Path) -> None:
    append(ledger, begin_of(), range(4))
    append(ledger, replace(begin_of(start=1), num_loads=0), range(20), ends=True)
    assert not report_on(ledger).is_proven
    assert "TWICE   epoch 0, 20 samples at positions 0-19: steps 0-3 of start 1, steps 0-3 of start 2" in words(ledger)
    assert "Start 2 loaded no state, so what was trained on before it counts, too." in words(ledger)
    assert report_on(ledger, trust_starts=True).is_proven


def test_an_epoch_that_a_process_goes_through_twice_is_trained_on_twice(ledger: Path) -> None:
    begin = begin_of()
    append(ledger, begin, range(20), ends=True)
    append(ledger, replace(begin, iteration=1), range(20), ends=True)
    assert words(ledger).startswith("NOT PROVEN: 100 samples trained on more than once\n")
    assert not report_on(ledger, trust_starts=True).is_proven


def test_of_each_start_those_steps_are_named_that_it_trained_again(ledger: Path) -> None:
    begins = [replace(begin_of(start=start), num_loads=0) for start in range(3)]
    append(ledger, begins[0], range(11))
    append(ledger, begins[1], range(20), ends=True)
    append(ledger, replace(begins[1], iteration=1), [0])
    append(ledger, begins[2], [0])
    assert "55 samples at positions 0-54: steps 0-10 of start 1, steps 0-10 of start 2, step 0 of start 3" in words(ledger)


def test_a_batch_whose_digest_changed_is_no_proof(ledger: Path) -> None:
    append(ledger, begin_of(), range(8), salt=1 << 40)
    append(ledger, begin_of(start=1, step=6), [6], salt=1 << 40)
    append(ledger, begin_of(start=2, step=5), range(5, 20), ends=True)
    assert words(ledger).startswith("NOT PROVEN: 3 batches changed\n")
    assert f"CHANGED epoch 0, step 6 of rank 0 had the digests {6 * 64 + (1 << 40):016x} and {6 * 64:016x}" in words(ledger)


def test_data_that_changed_altogether_is_told_about_as_fast_as_it_is_read(ledger: Path) -> None:
    num_steps = 80_000
    for start, salt in ((0, 0), (1, 1 << 40)):
        append(ledger, begin_of(start=start, num_sequences=5 * num_steps), range(num_steps), ends=True, salt=salt)
    before = time.process_time()
    assert len(report_on(ledger).orders[0].changed) == num_steps
    assert time.process_time() - before < 1.5  # a look at all steps for each of them takes several times as long


def test_of_many_batches_those_that_were_chosen_are_asked_for_again(ledger: Path) -> None:
    write_run(ledger)
    asked = [(begin.rank, begin.epoch, *steps) for begin, steps in compare._runs(find_ledgers(ledger), [3, 4, 9, 10, 25, 39])]
    assert asked == [(0, 0, 3, 4), (0, 0, 9), (0, 1, 0), (1, 0, 5), (1, 1, 9)]


def test_a_sample_is_drawn_by_chance_and_asked_for_a_few_at_a_time(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(ledger, begin_of(num_sequences=500), range(100))
    asked: list[list[int]] = []

    def differing(begin: Begin, digests: dict[int, str], servers: object) -> list[compare.Differing]:
        asked.append(list(digests))
        return []

    monkeypatch.setattr(compare, "_differing", differing)
    drawn = []
    for sample, expected in ((50, 50), (50, 50), (99, 99), (100, 100), (101, 100), (None, 100)):
        asked.clear()
        assert compare.compare([ledger], 100, [], sample).num_batches == expected
        assert all(steps == list(range(steps[0], steps[0] + len(steps))) for steps in asked)
        assert max(map(len, asked)) <= 16
        drawn.append([step for steps in asked for step in steps])
        assert (sorted(set(drawn[-1])), len(drawn[-1])) == (drawn[-1], expected)
    assert drawn[0] != drawn[1]


def test_rows_of_the_first_missing_batches_are_told_each_by_its_own_address(
    ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(ledger, world_size=3, epochs=1, steps=6)
    for rank in (1, 2):
        ledger.with_name(f"run.ledger.{rank}").unlink()
        append(ledger, begin_of(rank, world_size=3), [0, 1], ends=True)

    def source(begin: Begin, servers: object, rank: int) -> SimpleNamespace:
        def provenance(transport: object, spec: Spec, epoch: int, step: int) -> dict[str, Any]:
            if step in refusals:
                raise refusals[step]("no more")
            return {"asked": (rank, epoch, step)}

        return SimpleNamespace(connect=lambda: SimpleNamespace(close=lambda: None), provenance=provenance)

    refusals = {3: AddressError, 4: UnknownDataset}
    monkeypatch.setattr(compare, "_source", source)
    expected = {
        f"epoch 0, step {step} of start 1, rank {rank}": (
            {"reason": "no more"} if step in refusals else {"asked": (rank, 0, step)}
        )
        for step in range(2, 6)
        for rank in (1, 2)
    }
    assert dict(compare.rows_of_missing(report_on(ledger), [])) == expected
    monkeypatch.setattr(compare, "_MOST_BATCHES_SHOWN", 3)
    assert list(compare.rows_of_missing(report_on(ledger), [])) == list(expected.items())[:3]

    for rank, steps in ((0, range(20)), (1, [0])):
        append(ledger, replace(begin_of(rank, start=7, world_size=2), dataset="b"), steps)
    monkeypatch.setattr(compare, "_MOST_BATCHES_SHOWN", 100)
    named = [name for name, _ in compare.rows_of_missing(report_on(ledger), [])]
    assert len(set(named)) == len(named) > len(expected)
    assert "order 2 (b), epoch 0, step 1 of start 1, rank 1" in named


def asked(ledger: Path, **options: object) -> argparse.Namespace:
    """What `penstock audit` was called with."""
    usual = {"ledgers": [str(ledger)], "trust_starts": False, "server": None, "sample": None, "rows": False, "json": False}
    return argparse.Namespace(**usual | options)


def test_what_the_ledgers_say_is_told_though_no_server_answers(
    ledger: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(ledger)
    monkeypatch.setattr(compare, "_RETRY_SECONDS", 0)
    for is_json, first in ((False, "PROVEN: each sample that was due"), (True, '{\n  "proven": true')):
        with pytest.raises(ServerUnavailable, match="the report lacks what a server would say: no answer within"):
            command.run(asked(ledger, server=["http://127.0.0.1:1"], sample="9" * 5000, json=is_json))
        assert capsys.readouterr().out.startswith(first)


def test_how_many_batches_are_missing_is_told_though_not_the_rows_of_each(
    ledger: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(ledger, steps=6)  # of 10
    monkeypatch.setattr(command, "compare", lambda *_: compare.Comparison(0, []))
    monkeypatch.setattr(command, "rows_of_missing", lambda *_: {"one": {"sequences": []}, "two": {"reason": "no more"}})
    num_missing = sum(len(gap.ranks) * len(range(*gap.steps)) for e in report_on(ledger).orders[0].epochs for gap in e.gaps)
    assert num_missing > 3
    assert command.run(asked(ledger, server=["http://localhost:1"], rows=True)) == 1
    assert capsys.readouterr().out.endswith(f"\n{num_missing - 2} more batches are missing, of which no rows were asked for\n")
    assert command.run(asked(ledger, server=["http://localhost:1"], rows=True, json=True)) == 1
    assert json.loads(capsys.readouterr().out)["missing_batches_without_rows"] == num_missing - 2


def test_a_line_that_cannot_be_read_is_no_proof_even_of_a_step_that_was_trained_again(ledger: Path) -> None:
    append(ledger, begin_of(), range(8))
    append(ledger, begin_of(start=1, step=5), range(5, 20), ends=True)
    change(ledger, f"   6 {6 * 64:016x}", f"   6 {6 * 64 + 1:016x}")
    report = report_on(ledger)
    assert not report.is_proven
    assert not len(report.orders[0].epochs[0].missing)
    assert words(ledger).startswith("NOT PROVEN: 1 line cannot be read, and may say anything\n")
    assert f"{ledger}, line 8 cannot be read: the file was damaged or edited" in words(ledger)


def test_a_torn_line_is_told_and_does_no_harm_where_the_run_resumed_before_it(ledger: Path) -> None:
    append(ledger, begin_of(), range(8))
    ledger.write_text(ledger.read_text()[:-11] + "\n")
    append(ledger, begin_of(start=1, step=5), range(5, 20), ends=True)
    assert report_on(ledger).is_proven
    assert f"{ledger}, line 9 was cut off, as by a full disk, or a process or machine that went down" in words(ledger)


def test_whatever_is_left_of_the_lines_of_starts_that_were_killed_does_no_harm(ledger: Path) -> None:
    whole = lines_of(begin_of(), range(8))
    begin = lines_of(begin_of(start=1, step=5), [])
    for cut in range(1, len(begin)):
        for last in (whole, whole[:-11] + "\n"):  # of the start before, too, its last line may be cut
            ledger.write_text(f"{last}{begin[:-cut]}\n" + lines_of(begin_of(start=2, step=5), range(5, 20), ends=True))
            report = report_on(ledger)
            assert report.is_proven
            assert all(damage.is_torn for damage in report.damages)
        ledger.write_text(begin[:-cut])
        assert not report_on(ledger).orders or cut == 1


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


def test_an_audit_takes_the_files_as_they_are_when_it_begins(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(ledger, begin_of(), range(20), ends=True)

    def read_and_go_on(path: Path, nbytes: int) -> Iterator[Begin]:
        yield from read_begins(path, nbytes)
        append(ledger, begin_of(start=1, seed=1), range(3))

    monkeypatch.setattr(report_module, "read_begins", read_and_go_on)
    assert audit([ledger]).num_batches == 20
    with pytest.raises(LedgerError, match="none cannot be read: No such file"):
        audit([ledger.with_name("none")])


@pytest.mark.parametrize("chunk_bytes", [1000, 4 << 20])
def test_damaged_lines_are_numbered_in_whatever_portions_a_file_is_read(
    ledger: Path, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_CHUNK_BYTES", chunk_bytes)
    append(ledger, begin_of(), range(8))
    append(ledger, begin_of(start=1, step=5), range(5, 20), ends=True)
    lines = ledger.read_text().splitlines()
    for number in (4, 9):  # only that before a begin line can be as a process left it
        lines[number - 1] = lines[number - 1][:12]
    for number in (15, 16, 18):
        lines[number - 1] = lines[number - 1].replace(" 0", " 1")
    ledger.write_text("\n".join(lines) + "\n")
    assert [(damage.first, damage.last, damage.is_torn) for damage in reading.read_ledger(ledger).damages] == [
        (4, 4, False), (9, 9, True), (15, 16, False), (18, 18, False)
    ]  # fmt: skip


def test_files_may_be_joined_into_one(ledger: Path) -> None:
    write_run(ledger)
    whole = "\n".join(path.read_text() for path in find_ledgers(ledger))  # and an empty line says nothing
    for path in find_ledgers(ledger):
        path.unlink()
    ledger.write_text(whole)
    assert (report_on(ledger).is_proven, reading.read_ledger(ledger).damages) == (True, [])
    assert [history.rank for history in report_on(ledger).orders[0].ranks] == [0, 1]
    later = ledger.with_name("later")
    write_run(later, epochs=1)
    joined = ledger.with_name("joined")
    joined.write_text("".join(path.read_text() for path in find_ledgers(later)))
    for path in find_ledgers(later):
        path.unlink()
    for rank in range(2):
        append(later, begin_of(rank, start=1, step=5, world_size=2), range(5, 10), ends=True)
    assert audit([joined, *find_ledgers(later)]).is_proven


@pytest.mark.parametrize(("name", "values"), [("seed", [0, 9]), ("num_sequences", [100, 104])])
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
    assert "If its weights were new: --trust-starts" in words(ledger)
    assert report_on(ledger, trust_starts=True).is_proven


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
        append(ledger, begin_of(rank, world_size=2, num_sequences=300), range(9))
        append(ledger, begin_of(rank, world_size=2, start=1, step=5, num_sequences=300), range(5, 29))
    append(ledger, begin_of(0, world_size=2, start=2, step=5, num_sequences=300), [5])  # rank 1 came to no batch
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
        append(ledger, begin_of(rank, world_size=2, num_sequences=300), range(9))
        append(ledger, begin_of(rank, world_size=2, start=1, step=5, num_sequences=300), range(5, 30), ends=True)
    append(ledger, begin_of(0, world_size=2, start=2, step=5, num_sequences=300), range(5, 30), ends=True)
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
            begin = begin_of(rank, world_size=2, start=start, step=5 * start, num_sequences=2000)
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


def test_a_ledger_without_a_batch_proves_nothing(ledger: Path) -> None:
    append(ledger, begin_of(), [])
    assert words(ledger).startswith("NOT PROVEN: no batch is recorded\n")


def test_a_large_file_without_lines_is_not_read_to_its_end(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_CHUNK_BYTES", 1000)
    ledger.write_bytes(bytes(2500))
    with pytest.raises(LedgerError, match="is no ledger: it has lines of more than 1,000 bytes"):
        report_on(ledger)


def test_of_very_many_gaps_the_first_and_the_last_are_listed(ledger: Path) -> None:
    append(ledger, begin_of(num_sequences=11_000), range(0, 2200, 2), ends=True)
    text = words(ledger)
    assert "... 1,080 more lines, see --json" in text
    assert text.count("MISSING") == 20
    [epoch] = facts_of(report_on(ledger))["orders"][0]["epochs"]
    assert (len(epoch["gaps"]), epoch["missing"]["ranges"], len(epoch["missing"]["positions"])) == (1100, 1100, 1000)


@pytest.mark.parametrize("num_ahead", [0, 3])
def test_a_mix_that_changes_behind_what_was_trained_on_is_one_run(ledger: Path, num_ahead: int) -> None:
    def begin(rank: int, start: int, step: int, mix: str, snapshot: str, num_sequences: int) -> Begin:
        spec: dict[str, Any] = {"mix": mix, "snapshot": snapshot, "mix_stop": "first"}
        return begin_of(rank, start=start, step=step, world_size=2, num_sequences=num_sequences, **spec)

    first, second, third = "a:7,b:3", "a:7,b:3;a:1,b:1@40", "a:7,b:3;a:1,b:1@40;a:1,c:1@80"
    for rank in range(2):
        append(ledger, begin(rank, 0, 0, first, "one+two", 100), range(4 + num_ahead))
        append(ledger, begin(rank, 1, 4, second, "one+two", 150), range(4, 8 + num_ahead))
        append(ledger, begin(rank, 2, 8, third, "one+two+three", 120), range(8, 12), ends=True)
    report = report_on(ledger)
    assert report.is_proven
    [order] = report.orders
    assert [(epoch.num_due, epoch.num_sequences, epoch.is_finished) for epoch in order.epochs] == [(120, 120, True)]
    assert f"snapshot=one+two+three, seed=0, shuffle=window, packing=rows, mix={third}, mix_stop=first\n" in words(ledger)


@pytest.mark.parametrize("num_tried", [0, 3])
def test_a_mix_that_was_tried_and_given_up_again_is_thrown_away(ledger: Path, num_tried: int) -> None:
    first, tried, second = "a:7,b:3", "a:7,b:3;b:1@40", "a:7,b:3;a:1,b:1@60"
    same: dict[str, Any] = {"snapshot": "one+two", "mix_stop": "first"}
    append(ledger, begin_of(mix=first, **same), range(12))
    append(ledger, begin_of(mix=tried, start=1, step=8, num_sequences=80, **same), range(8, 8 + num_tried))
    append(ledger, begin_of(mix=first, start=2, step=10, **same), range(10, 12))
    assert report_on(ledger).is_proven
    append(ledger, begin_of(mix=second, start=3, step=12, num_sequences=120, **same), range(12, 24), ends=True)
    [order] = report_on(ledger).orders
    assert order.is_proven
    assert [(epoch.num_due, epoch.num_sequences, epoch.is_finished) for epoch in order.epochs] == [(120, 120, True)]


def test_what_was_trained_on_behind_a_change_of_the_mix_is_not_of_the_run(ledger: Path) -> None:
    """A state of the first mix was loaded into the second, though it had passed the change: with strict=False."""
    first, second = "a:7,b:3", "a:7,b:3;a:1,b:1@40"
    same: dict[str, Any] = {"snapshot": "one+two", "mix_stop": "first"}
    append(ledger, begin_of(mix=first, **same), range(12))
    append(ledger, begin_of(mix=second, start=1, step=8, **same), range(8, 9))
    append(ledger, begin_of(mix=second, start=2, step=12, **same), range(12, 20), ends=True)
    [order] = report_on(ledger).orders
    assert [epoch.missing.tolist() for epoch in order.epochs] == [[[45, 60]]]


def test_of_two_mixes_the_clock_of_one_rank_tells_which_came_first(ledger: Path) -> None:
    """Rank 0 was killed before its first batch under the second; the clock of rank 1 is behind."""
    same: dict[str, Any] = {"snapshot": "one+two", "mix_stop": "first", "world_size": 2}
    for rank in range(2):
        begun = begin_of(rank, mix="a:7,b:3", **same)
        append(ledger, replace(begun, time=begun.time - timedelta(hours=5 * rank)), range(4))
    resumed = begin_of(1, mix="a:7,b:3;a:1,b:1@40", start=1, step=4, **same)
    append(ledger, replace(resumed, time=resumed.time - timedelta(hours=5)), range(4, 5))
    assert len(report_on(ledger).orders) == 1


def test_a_mix_that_changes_where_the_clock_is_behind_came_later_all_the_same(ledger: Path) -> None:
    same: dict[str, Any] = {"snapshot": "one+two", "mix_stop": "first"}
    append(ledger, begin_of(mix="a:7,b:3", **same), range(8))
    resumed = begin_of(mix="a:7,b:3;a:1,b:1@40", start=1, step=8, **same)
    append(ledger, replace(resumed, time=resumed.time - timedelta(hours=5)), range(8, 20), ends=True)
    [order] = report_on(ledger).orders
    assert order.is_proven
    assert dict(order.key)["mix"] == "a:7,b:3;a:1,b:1@40"


def test_a_mix_that_changes_in_a_later_epoch_is_another_order(ledger: Path) -> None:
    """Where an epoch begins follows from the mix."""
    same: dict[str, Any] = {"snapshot": "one+two", "mix_stop": "first"}
    append(ledger, begin_of(mix="a:7,b:3", **same), range(20), ends=True)
    append(ledger, begin_of(mix="a:7,b:3;a:1,b:1@120", start=1, epoch=1, step=4, **same), range(4, 16), ends=True)
    assert len(report_on(ledger).orders) == 2


def test_a_run_whose_mix_changes_is_one_in_whatever_order_its_files_are_named_and_whatever_clocks_say(ledger: Path) -> None:
    same: dict[str, Any] = {"snapshot": "one+two", "mix_stop": "first"}
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
    same: dict[str, Any] = {"snapshot": "one+two", "mix_stop": "first"}
    first = append(ledger, begin_of(mix="a:7,b:3", **same), range(8))
    other = begin_of(mix=mix, **({"start": 1, "step": 8} | same | values))
    second = append(ledger.with_name("other"), other, range(8, 20), ends=True)
    assert len(audit([first, second]).orders) == 2


def test_each_batch_that_changed_is_told_and_what_is_refused_for_one_reason_once() -> None:
    changed = [compare.Differing("d", epoch, 0, 5, f"then-{epoch}", "now", is_refused=False) for epoch in range(2)]
    refused = [compare.Differing("d", 2, 0, step, "then", "it is gone", is_refused=True) for step in range(3)]
    assert list(command._compared(compare.Comparison(9, changed + refused)))[2:] == [
        "  CHANGED d, epoch 0, step 5 of rank 0: then-0 then, now now",
        "  CHANGED d, epoch 1, step 5 of rank 0: then-1 then, now now",
        "  CHANGED d, epoch 2, step 0 of rank 0 and 2 other batches, now it is gone",
    ]
