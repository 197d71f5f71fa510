"""The recorder of a dataset: paths that it takes, in whatever folder the loop runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock import LedgerError, RemoteDataset
from penstock.audit.reading import read_ledger
from support.ledgers import SPEC, pass_at, recorder


def test_recorder_continues_in_its_file_after_a_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = recorder(Path("run.ledger"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    data.open(SPEC, 1000, pass_at())
    assert len(read_ledger(tmp_path / "run.ledger").sections) == 1
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_unwritable_ledger_is_refused_before_any_request(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="Is a directory"):
        RemoteDataset("127.0.0.1:9", "numbers", ledger=tmp_path)
