"""Ledgers of runs that were never trained, and what the audit says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ledgers import append, begin_of
from penstock.audit.report import Report, audit
from penstock.audit.text import lines_of as words_of
from penstock.ledger.file import find_ledgers


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
