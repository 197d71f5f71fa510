"""Ranks that begin an epoch side by side, and those that begin elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from penstock import company
from penstock.company import Company
from penstock.spec import Spec
from penstock.state.state import Position

HERE = Position(epoch=1)
SPEC: dict[str, Any] = {"batch_size": 8, "seed": 7, "snapshot": "a"}


@pytest.fixture(autouse=True)
def _store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = PrefixStore("job", TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False))  # as torch gives it
    monkeypatch.setattr(company, "job_store", lambda: store)
    monkeypatch.setattr(company, "_WHILE_SECONDS", 0.0)


def begun(rank: int, at: Position = HERE, world_size: int = 2, dataset: str = "docs", **other: Any) -> Company:
    return Company(dataset, Spec(world_size=world_size, **SPEC | other), at, rank)


def test_ranks_that_begin_together_are_in_company() -> None:
    first = begun(0, world_size=4)
    for rank in (1, 2, 3):
        assert first.elsewhere(1) == ""
        begun(rank, world_size=4)
    begun(1, Position(epoch=2), world_size=4)  # it is ahead
    assert [first.elsewhere(number) for number in range(1, 200)] == [""] * 199


@pytest.mark.parametrize(
    ("at", "other", "told"),
    [
        (HERE, {"seed": 8}, "rank 1 (seed=8, not 7)"),
        (HERE, {"batch_size": 4, "packing": "concat"}, "rank 1 (batch_size=4, not 8, packing=concat, not rows)"),
        (Position(epoch=2), {}, "rank 1 (epoch=2, not 1)"),
        (Position(epoch=1, step=20), {}, "rank 1 (step=20, not 0)"),
        (Position(epoch=0), {"seed": 8}, "rank 1 (epoch=0, not 1, seed=8, not 7)"),
        (Position(epoch=0, step=20), {}, ""),  # it may come here yet
        (HERE, {"dataset": "wiki"}, ""),
    ],
)
def test_a_rank_that_begins_elsewhere_is_told_with_what_differs(at: Position, other: dict[str, Any], told: str) -> None:
    first = begun(0)
    begun(1, at, **other)
    assert [first.elsewhere(number) for number in range(1, 17)] == [""] * 15 + [told]


def test_others_may_begin_later_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(company, "_WHILE_SECONDS", 60.0)
    first = begun(0, world_size=9)
    for rank in range(1, 9):
        begun(rank, world_size=9, seed=rank)
    assert [first.elsewhere(number) for number in range(1, 33)] == [""] * 32
    monkeypatch.setattr(company, "_WHILE_SECONDS", 0.0)
    assert [first.elsewhere(number) for number in range(33, 64)] == [""] * 31
    others = [f"rank {rank} (seed={rank}, not 7)" for rank in (1, 2, 3, 4)]  # and rank 7 has that of the first
    assert first.elsewhere(64) == f"{', '.join(others)} and 3 more"


def test_without_a_store_that_answers_at_once_nobody_is_looked_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for store in (None, PrefixStore("job", FileStore(str(tmp_path / "store"), 2))):
        monkeypatch.setattr(company, "job_store", lambda store=store: store)
        first = begun(0)
        begun(1, seed=8)
        assert first.elsewhere(16) == ""
