"""What the audit says of batches that changed, and what it asks a server."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock import Spec
from penstock.audit import compare
from penstock.cli import audit as command
from penstock.errors import OutOfRange, ServerUnavailable, UnknownDataset
from penstock.ledger.begin import Begin
from penstock.ledger.file import find_ledgers
from support.ledgers import append, begin_of, report_on, words, write_run
from support.servers import pages


def test_changed_digest_is_no_proof(ledger: Path) -> None:
    append(ledger, begin_of(), range(8), salt=1 << 40)
    append(ledger, begin_of(start=1, step=6), [6], salt=1 << 40)
    append(ledger, begin_of(start=2, step=5), range(5, 20), ends=True)
    assert words(ledger).startswith("NOT PROVEN: batches that changed: 3\n")
    assert f"CHANGED epoch 0, step 6 of rank 0 had the digests {6 * 64 + (1 << 40):016x} and {6 * 64:016x}" in words(ledger)


def test_wholly_changed_data_is_reported_quickly(ledger: Path) -> None:
    num_steps = 80_000
    for start, salt in ((0, 0), (1, 1 << 40)):
        append(ledger, begin_of(start=start, num_samples=5 * num_steps), range(num_steps), ends=True, salt=salt)
    before = time.process_time()
    assert len(report_on(ledger).orders[0].changed) == num_steps
    assert time.process_time() - before < 1.5  # a look at all steps for each of them takes several times as long


def test_compare_requests_the_chosen_batches(ledger: Path) -> None:
    write_run(ledger)
    asked = [
        (begin.rank, begin.epoch, *steps)
        for begin, steps in compare._runs(find_ledgers(ledger), np.array([3, 4, 9, 10, 25, 39]))
    ]
    assert asked == [(0, 0, 3, 4), (0, 0, 9), (0, 1, 0), (1, 0, 5), (1, 1, 9)]


def test_spot_check_draws_at_random_and_requests_in_portions(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(ledger, begin_of(num_samples=500), range(100))
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


def test_rows_of_missing_batches_are_listed_by_address(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(ledger, world_size=3, epochs=1, steps=6)
    for rank in (1, 2):
        ledger.with_name(f"run.ledger.{rank}").unlink()
        append(ledger, begin_of(rank, world_size=3), [0, 1], ends=True)

    def source(begin: Begin, servers: object, rank: int) -> SimpleNamespace:
        def provenance(transport: object, spec: Spec, epoch: int, step: int) -> dict[str, Any]:
            if step in refusals:
                raise refusals[step]("no more")
            return {"asked": (rank, epoch, step)}

        return SimpleNamespace(connect=lambda **_: SimpleNamespace(close=lambda: None), provenance=provenance)

    refusals = {3: OutOfRange, 4: UnknownDataset}
    monkeypatch.setattr(compare, "_client", source)
    expected = {
        f"epoch 0, step {step} of start 1, rank {rank}": (
            {"reason": "no more"} if step in refusals else {"asked": (rank, 0, step)}
        )
        for step in range(2, 6)
        for rank in (1, 2)
    }
    assert dict(compare.rows_of_missing(report_on(ledger), [])) == expected
    monkeypatch.setattr(compare, "_MAX_BATCHES_SHOWN", 3)
    assert list(compare.rows_of_missing(report_on(ledger), [])) == list(expected.items())[:3]

    for rank, steps in ((0, range(20)), (1, [0])):
        append(ledger, replace(begin_of(rank, start=7, world_size=2), dataset="b"), steps)
    monkeypatch.setattr(compare, "_MAX_BATCHES_SHOWN", 100)
    named = [name for name, _ in compare.rows_of_missing(report_on(ledger), [])]
    assert len(set(named)) == len(named) > len(expected)
    assert "order 2 (b), epoch 0, step 1 of start 1, rank 1" in named


def asked(ledger: Path, **options: object) -> argparse.Namespace:
    """What `penstock audit` was called with."""
    usual = {
        "ledgers": [str(ledger)],
        "assume_fresh_weights": False,
        "server": None,
        "spot_check": None,
        "rows": False,
        "json": False,
    }
    return argparse.Namespace(**usual | options)


def test_report_is_printed_when_no_server_answers(
    ledger: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(ledger)
    monkeypatch.setattr(compare, "_RETRY_SECONDS", 0)
    with (
        pages(lambda path: (200, b'{"status": "ok", "wire": 1}') if path == "/healthz" else (503, b"")) as away,
        pages(lambda _: (404, b"")) as stranger,
    ):
        for server, reason in (
            ("http://127.0.0.1:1", "http://127.0.0.1:1 does not answer: "),
            (stranger, f"{stranger} answers /healthz with status 404"),
            (away, "no answer within"),
        ):
            for is_json, first in ((False, "PROVEN: each sample that was due"), (True, '{\n  "proven": true')):
                with pytest.raises(ServerUnavailable, match=f"the report lacks what a server would say: {reason}"):
                    command.run(asked(ledger, server=[server], spot_check="9" * 40, json=is_json))
                assert capsys.readouterr().out.startswith(first)


def test_missing_batches_are_counted_beyond_the_listed_rows(
    ledger: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(ledger, steps=6)  # of 10
    monkeypatch.setattr(command, "greet", lambda _: {})
    monkeypatch.setattr(command, "compare", lambda *_: compare.Comparison(0, []))
    monkeypatch.setattr(command, "rows_of_missing", lambda *_: {"one": {"samples": []}, "two": {"reason": "no more"}})
    num_missing = sum(len(gap.ranks) * len(gap.steps) for e in report_on(ledger).orders[0].epochs for gap in e.gaps)
    assert num_missing > 3
    assert command.run(asked(ledger, server=["http://localhost:1"], rows=True)) == 1
    assert capsys.readouterr().out.endswith(f"\n{num_missing - 2} more batches are missing; their rows were not requested\n")
    assert command.run(asked(ledger, server=["http://localhost:1"], rows=True, json=True)) == 1
    assert json.loads(capsys.readouterr().out)["missing_batches_without_rows"] == num_missing - 2


def test_changed_batches_are_listed_and_equal_refusals_are_joined() -> None:
    changed = [compare.Differing("d", epoch, 0, 5, f"then-{epoch}", "now", is_refused=False) for epoch in range(2)]
    refused = [compare.Differing("d", 2, 0, step, "then", "it is gone", is_refused=True) for step in range(3)]
    assert list(command._compared(compare.Comparison(9, changed + refused)))[2:] == [
        "  CHANGED d, epoch 0, step 5 of rank 0: then-0 then, now now",
        "  CHANGED d, epoch 1, step 5 of rank 0: then-1 then, now now",
        "  CHANGED d, epoch 2, step 0 of rank 0 and 2 other batches, now it is gone",
    ]
