"""What the audit makes of files: torn, damaged, joined, very large ones."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock import LedgerError
from penstock.audit import reading
from penstock.audit.report import as_json, audit
from penstock.ledger.file import find_ledgers
from support.fuzz import NESTED, altered
from support.ledgers import append, begin_of, change, entries, line, lines_of, report_on, words, write_run


def test_unreadable_line_is_no_proof_when_its_step_was_trained_again(ledger: Path) -> None:
    append(ledger, begin_of(), range(8))
    append(ledger, begin_of(start=1, step=5), range(5, 20), ends=True)
    change(ledger, f"   6 {6 * 64:016x}", f"   6 {6 * 64 + 1:016x}")
    report = report_on(ledger)
    assert not report.is_proven
    assert not len(report.orders[0].epochs[0].missing)
    assert words(ledger).startswith("NOT PROVEN: lines that cannot be read: 1\n")
    assert f"{ledger}, line 8 cannot be read: the file was damaged or edited" in words(ledger)


def test_torn_line_is_harmless_when_the_run_resumed_before_it(ledger: Path) -> None:
    append(ledger, begin_of(), range(8))
    ledger.write_text(ledger.read_text()[:-11] + "\n")
    append(ledger, begin_of(start=1, step=5), range(5, 20), ends=True)
    assert report_on(ledger).is_proven
    assert f"{ledger}, line 9 was cut off, as by a full disk, or a process or machine that went down" in words(ledger)


def test_torn_lines_of_killed_starts_are_harmless(ledger: Path) -> None:
    whole = lines_of(begin_of(), range(8))
    begin = lines_of(begin_of(start=1, step=5), [])
    after = lines_of(begin_of(start=2, parent=0, step=5), range(5, 20), ends=True)
    for cut in (*range(1, 24), *range(24, len(begin), 9)):
        for last in (whole, whole[:-11] + "\n"):  # of the start before, too, its last line may be cut
            ledger.write_text(f"{last}{begin[:-cut]}\n{after}")
            report = report_on(ledger)
            assert report.is_proven
            assert all(damage.is_torn for damage in report.damages)
        ledger.write_text(begin[:-cut])
        assert not report_on(ledger).orders or cut == 1


def test_damaged_lines_are_numbered(ledger: Path) -> None:
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


@pytest.mark.parametrize("min_run", [1, 7, 512])
def test_reading_is_equal_when_runs_of_lines_are_parsed_together(
    ledger: Path, monkeypatch: pytest.MonkeyPatch, min_run: int
) -> None:
    for start in range(3):
        append(ledger, begin_of(start=start, step=1400 * start, num_samples=100_000), range(1400 * start, 1400 * (start + 1)))
    lines = ledger.read_text().splitlines()
    lines[2] = lines[2].replace(" 0", " 1")
    lines[600], lines[1399] = lines[600][:-1] + "g", lines[1399].upper()
    lines[2500] = lines[2500][:30]
    ledger.write_text("\n".join(lines))
    monkeypatch.setattr(reading, "_MIN_RUN", 1 << 30)
    expected = reading.read_ledger(ledger)
    assert [damage.first for damage in expected.damages] == [3, 601, 1400, 2501]
    assert [len(section.steps) for section in expected.sections] == [1397, 1399, 1400]
    monkeypatch.setattr(reading, "_MIN_RUN", min_run)
    found = reading.read_ledger(ledger)
    assert (found.damages, entries(found)) == (expected.damages, entries(expected))


def test_files_may_be_joined_into_one(ledger: Path) -> None:
    write_run(ledger)
    whole = "\n".join(path.read_text() for path in find_ledgers(ledger))  # and an empty line says nothing
    for path in find_ledgers(ledger):
        path.unlink()
    ledger.write_text(whole)
    assert (report_on(ledger).is_proven, reading.read_ledger(ledger).damages) == (True, [])
    assert report_on(ledger).orders[0].ranks == [0, 1]
    later = ledger.with_name("later")
    write_run(later, epochs=1)
    joined = ledger.with_name("joined")
    joined.write_text("".join(path.read_text() for path in find_ledgers(later)))
    for path in find_ledgers(later):
        path.unlink()
    for rank in range(2):
        append(later, begin_of(rank, start=1, step=5, world_size=2), range(5, 10), ends=True)
    assert audit([joined, *find_ledgers(later)]).is_proven


def test_empty_ledger_proves_nothing(ledger: Path) -> None:
    append(ledger, begin_of(), [])
    assert words(ledger).startswith("NOT PROVEN: no batch is recorded\n")


def test_many_gaps_are_listed_by_the_first_and_the_last(ledger: Path) -> None:
    append(ledger, begin_of(num_samples=11_000), range(0, 2200, 2), ends=True)
    text = words(ledger)
    assert "... 1,080 more lines, see --json" in text
    assert text.count("MISSING") == 20
    [epoch] = as_json(report_on(ledger))["orders"][0]["epochs"]
    assert (len(epoch["gaps"]), epoch["missing"]["ranges"], len(epoch["missing"]["positions"])) == (1100, 1100, 1000)


BEGIN = json.loads(begin_of().to_text().removeprefix("begin "))
LINE = (
    st.sampled_from(["end", "lost 3", "lost x", f"{0:16d} {7:016x}", f"{'x':>16} {7:016x}", f"{-1:16d} {'g' * 16}"]) | st.text()
)


@given(st.lists(st.just(BEGIN) | altered(BEGIN) | altered(BEGIN["spec"]).map(lambda spec: BEGIN | {"spec": spec}) | LINE))
@example([BEGIN | {"time": "2025-01-01"}, "end"])
@example([BEGIN | {"num_samples": 2**63 - 1, "step": 2**63 - 1}, f"{2**53:16d} {7:016x}", "end"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_lines_with_valid_checksums_are_a_report_or_refused(ledger: Path, lines: list[dict[str, Any] | str]) -> None:
    content, begin = "", ""
    for text in lines:
        whole = text if isinstance(text, str) else "begin " + json.dumps(text)
        content += line(whole, begin if isinstance(text, str) else "")
        begin = begin if isinstance(text, str) else content[-9:-1]
    ledger.write_text(content, errors="replace")
    with suppress(LedgerError):
        as_json(audit([ledger]))


def test_deeply_nested_begin_line_is_refused(ledger: Path) -> None:
    ledger.write_text(line('begin {"ledger": 4, "spec": ' + NESTED))
    with pytest.raises(LedgerError, match="cannot be read"):
        audit([ledger])
