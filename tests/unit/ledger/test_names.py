"""Which file a rank or a worker writes to, and what can be none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ledger_files import SPEC, book, open_files
from ledgers import behind, round_at
from penstock import LedgerError, RemoteDataset, SpecError
from penstock.audit.reading import read_ledger
from penstock.distributed import Worker
from penstock.ledger.names import find_ledgers, ledger_path
from penstock.ledger.recorder import Recorder


@pytest.mark.parametrize(
    "name", ["run.ledger", "run-{rank}.ledger", "run.{rank}", "rank{rank}/run.ledger", "[a]*?**/run.ledger"]
)
def test_each_rank_and_each_worker_has_a_file_of_its_own_and_all_are_found(tmp_path: Path, name: str) -> None:
    expected = []
    for rank in (0, 11):
        ledger_path(tmp_path / name, rank).parent.mkdir(exist_ok=True)
        data = book(tmp_path / name, rank)
        for worker in (None, Worker(first=2, stride=3, loader_seed=5)):
            data.open(replace(SPEC, world_size=12), 1000, round_at(worker=worker), behind(0)).close()
            path = ledger_path(tmp_path / name, rank, worker.first if worker else None)
            begin = read_ledger(path).parts[0].begin
            assert (begin.rank, begin.worker, begin.num_workers) == (rank, *((2, 3) if worker else (0, 0)))
            assert begin.round == (round_at(worker=worker).name if worker else 0)
            expected.append(path)
    (expected[0].parent / "run.ledger.txt").touch()
    (expected[0].parent / "run-0.ledger.old").touch()
    assert find_ledgers(tmp_path / name) == sorted(set(expected))
    assert len(set(expected)) == 4


def test_a_single_process_writes_to_the_very_file_that_is_named() -> None:
    assert ledger_path("run.ledger", 0) == Path("run.ledger").absolute()
    assert ledger_path("run.ledger", 3, 1) == Path("run.ledger.3.worker1").absolute()


def test_a_process_that_changes_its_folder_goes_on_in_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = book(Path("run.ledger"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    data.open(SPEC, 1000, round_at(), behind(0)).close()
    assert len(read_ledger(tmp_path / "run.ledger").parts) == 1
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("notes.txt", "notes.txt is no ledger, and will not be written to: name another file"),
        ("words.txt", "words.txt is no ledger, and will not be written to: name another file"),
        (
            "older.ledger",
            "older.ledger was begun by a penstock whose ledgers are of version 1, and this one writes version 3: no",
        ),
        ("torn.ledger", "torn.ledger was begun by a penstock whose ledgers are of version 4, and"),
        ("none/run.ledger", "cannot be written: No such file or directory"),
        (".", "cannot be written: Is a directory"),
    ],
)
def test_what_cannot_be_a_ledger_is_refused_at_once(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "notes.txt").write_text("begin at the beginning")
    (tmp_path / "words.txt").write_text("begin\nend\n")
    (tmp_path / "older.ledger").write_text('begin {"ledger": 1, "launch": "a"} 01234567\n')
    (tmp_path / "torn.ledger").write_text('beg\nbegin {"ledger": 4, "launch": "a"} 01234567\n')
    before = open_files(tmp_path)
    with pytest.raises(LedgerError, match=message):
        book(tmp_path / name)
    assert open_files(tmp_path) == before
    assert (tmp_path / "notes.txt").read_text() == "begin at the beginning"


@pytest.mark.parametrize("given", [True, 3, b"run.ledger", ["run.ledger"], "", "run\0.ledger", "\ud800"])
def test_what_is_no_path_is_refused(given: Any) -> None:
    with pytest.raises(SpecError, match=r"ledger must be the path of a file, not "):
        Recorder(given, "numbers", 0)


def test_a_ledger_that_cannot_be_written_is_told_before_any_server_is_asked(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="Is a directory; name a file in a folder"):
        RemoteDataset("127.0.0.1:9", "numbers", ledger=tmp_path)
