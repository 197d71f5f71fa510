"""The header of a rank's report, and the server's timing."""

from __future__ import annotations

import json
import os
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.wire.report import STAGES, Report, format_timing, parse_timing
from support.fuzz import altered

REPORT = Report(
    job="train.py ann@gpu7 & co ü",
    num_workers=4,
    epoch=2,
    step=812,
    compute_seconds=1.5,
    num_batches=8,
    num_tokens=65_536,
    num_retries=1,
    num_corrupted=1,
    buffered_bytes=3 << 20,
    wait_seconds={"tokenize": 0.25, "network": 0.125},
)


def test_report_is_the_same_after_its_way_through_a_header() -> None:
    header = REPORT.to_header()
    assert header.isascii()
    assert Report.from_header(header) == REPORT


def header(**values: object) -> str:
    """The header of a report with some values replaced."""
    return json.dumps(json.loads(REPORT.to_header()) | values)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "job=j",
        "9" * 5000,
        "[" * 4000,
        header(job=""),
        header(job=7),
        header(job="j" * 201),
        header(compute_seconds=float("nan")),
        header(compute_seconds=float("inf")),
        header(compute_seconds=-1),
        header(step=-2),
        header(workers=0),
        header(step=None),
        header(tokens=1e300),
        header(tokens="many"),
        header(epoch=10**400),
        header(epoch="1.5"),
        header(epoch=float("inf")),
        header(wait_seconds=None),
        header(wait_seconds={"tokenize": "x"}),
    ],
)
def test_invalid_report_is_ignored(text: str) -> None:
    assert Report.from_header(text) is None


def test_job_name_that_is_not_utf8_is_escaped() -> None:
    found = Report.from_header(Report(job=os.fsdecode(b"run \xff")).to_header())
    assert found is not None
    assert found.job == "run \\udcff"


def test_unknown_stage_is_ignored() -> None:
    found = Report.from_header(header(wait_seconds={"sleeping": 3, "read": 1}))
    assert found is not None
    assert found.wait_seconds == {"read": 1.0}


REPORTS = altered(json.loads(REPORT.to_header())) | altered(dict.fromkeys(STAGES, 1.5)).map(
    lambda waits: json.loads(REPORT.to_header()) | {"wait_seconds": waits}
)


@given(st.text(max_size=300) | REPORTS.map(json.dumps))
def test_any_header_is_a_report_or_ignored(header: str) -> None:
    found = Report.from_header(header)
    if found is not None:
        assert {*found.wait_seconds} <= {*STAGES}
        assert all(0 <= seconds < inf for seconds in (found.compute_seconds, *found.wait_seconds.values()))
        assert Report.from_header(found.to_header()) is not None


@given(st.lists(st.sampled_from([*STAGES, ";", "dur", "=", ",", "1", ".", "9" * 400, "nan", " "])).map("".join) | st.text())
def test_any_timing_is_seconds_of_stages(header: str) -> None:
    assert all(stage in STAGES and 0 <= seconds < inf for stage, seconds in parse_timing(header).items())


def test_amounts_since_the_last_report() -> None:
    later = Report(
        job="j",
        epoch=3,
        step=1,
        compute_seconds=2.0,
        num_batches=9,
        num_tokens=70_000,
        wait_seconds={"tokenize": 0.5, "read": 1.0},
    )
    assert later.since(REPORT) == Report(
        job="j",
        epoch=3,
        step=1,
        compute_seconds=0.5,
        num_batches=1,
        num_tokens=4_464,
        num_retries=-1,
        num_corrupted=-1,
        wait_seconds={"tokenize": 0.25, "network": -0.125, "read": 1.0},
    )


def test_timing_of_the_server_comes_back_and_entries_of_proxies_are_left_out() -> None:
    text = format_timing({"read": 0.0001, "tokenize": 0.8012})
    assert text == "read;dur=0.100, tokenize;dur=801.200"
    assert parse_timing(f"cdn-cache;desc=HIT, edge;dur=1, {text}, make;dur=x") == pytest.approx(
        {"read": 0.0001, "tokenize": 0.8012}
    )
