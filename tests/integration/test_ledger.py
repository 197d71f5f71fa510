"""Ledgers of real runs on a real server: written by trainers that are killed, and audited by the command."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
from torch.utils.data import DataLoader

from penstock import RemoteDataset, SpecError
from penstock.audit.reading import read_ledger
from penstock.audit.report import audit
from penstock.ledger.file import find_ledgers
from support.corpora import write_numbered
from support.processes import Fork
from support.servers import Serve, Server, penstock

NUM_ROWS = 240

# Three workers on two cores are more than torch advises.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
TRAINER = Path(__file__).with_name("ledger_trainer.py")


@pytest.fixture(scope="module")
def server(serve: Serve, shared: Path) -> Server:
    write_numbered(shared / "numbers", NUM_ROWS)
    return serve(shared)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "run.ledger"


def dataset(server: Server, ledger: Path, *, rank: int = 0, world_size: int = 1, **spec: Any) -> RemoteDataset:
    settings: dict[str, Any] = {"batch_size": 4, "seq_len": 8, "prefetch_bytes": 1 << 16, "tensors": ["input_ids"]} | spec
    return RemoteDataset(server.url, "numbers", rank=rank, world_size=world_size, ledger=ledger, **settings)


def audited(*arguments: str | Path) -> tuple[int, str]:
    """Exit status and output of `penstock audit`."""
    done = penstock("audit", *arguments)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def train(server: Server, folder: Path, world_size: int, batch_size: int, num_steps: int, *, kill: bool) -> None:
    """All ranks for so many steps; then they end, or are killed."""
    last = 0 if kill else num_steps
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                closing(Fork(server.url, folder, *map(str, (rank, world_size, batch_size, last)), script=TRAINER))
            )
            for rank in range(world_size)
        ]
        for step in range(1, num_steps + 1):
            for rank in ranks:
                assert rank.stdout.readline() == f"{step}\n"
            for rank in ranks:
                if step == num_steps and kill:
                    rank.kill()
                    continue
                rank.stdin.write("\n")
                rank.stdin.flush()
        for rank in ranks:
            assert rank.communicate(60)[0] == (-9 if kill else 0)


def test_killed_run_is_proven_when_resumed_with_other_world_sizes(server: Server, tmp_path: Path) -> None:
    train(server, tmp_path, 2, 4, 12, kill=True)  # 30 steps an epoch
    train(server, tmp_path, 3, 4, 25, kill=True)
    train(server, tmp_path, 2, 6, 20, kill=False)
    assert sorted(path.name for path in tmp_path.glob("run.ledger*")) == ["run.ledger", "run.ledger.1", "run.ledger.2"]
    status, said = audited(tmp_path / "run.ledger", "--server", server.url, "--spot-check", "all")
    assert status == 0, said
    assert said.startswith("PROVEN: each sample that was due")
    assert "discarded: start 2 resumed from a checkpoint before them" in said
    assert "0 are not what they were" in said

    (tmp_path / "run.ledger.1").rename(tmp_path / "lost")
    status, said = audited(tmp_path / "run.ledger", "--server", server.url, "--rows", "--json")
    report = json.loads(said)
    assert (status, report["proven"], report["orders"][0]["absent_ranks"]) == (1, False, [1])
    first = report["missing_rows"]["epoch 0, step 0 of start 1, rank 1"]["samples"]
    provenance = server.json(
        "/v1/datasets/numbers/epochs/0/ranks/1/batches/0/provenance", batch_size=4, seq_len=8, world_size=2, seed=3
    )
    assert first == provenance["samples"]


def test_audit_verdict_stands_when_the_server_has_other_data(serve: Serve, tmp_path: Path) -> None:
    write_numbered(tmp_path / "data" / "numbers", 40)
    ledger = tmp_path / "run.ledger"
    with serve(tmp_path / "data") as old:
        list(RemoteDataset(old.url, "numbers", batch_size=4, seq_len=8, ledger=ledger))
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(lines[:5] + lines[6:]))
    write_numbered(tmp_path / "data" / "numbers", 50)
    new = serve(tmp_path / "data")
    status, said = audited(ledger, "--server", new.url, "--rows", "--spot-check", "1")
    assert (status, said.startswith("NOT PROVEN: samples not trained on: 4")) == (1, True)
    assert "epoch 0, step 4 of start 1, rank 0: the server does not name its rows: snapshot" in said


def test_ledger_holds_exactly_the_batches_given_to_the_loop(server: Server, ledger: Path) -> None:
    data = dataset(server, ledger)
    for number, _ in enumerate(data, start=1):
        assert sum(len(section.steps) for section in read_ledger(ledger).sections) == number
        if number == 7:
            break
    [section] = read_ledger(ledger).sections
    frames = server.frames("/v1/datasets/numbers/epochs/0/ranks/0/batches", stop=7, **data.spec.to_query())
    assert [f"{digest:016x}" for digest in section.digests.tolist()] == [frame.digest for frame in frames]
    assert (section.steps.tolist(), section.has_end, section.begin.num_samples) == (list(range(7)), False, NUM_ROWS)
    assert section.begin.spec == data.spec


def test_run_is_proven_with_any_number_of_workers(server: Server, tmp_path: Path) -> None:
    for num_workers in (0, 1, 3):
        ledger = tmp_path / str(num_workers) / "run.ledger"
        ledger.parent.mkdir()
        for rank in range(2):
            data = dataset(server, ledger, rank=rank, world_size=2)
            loader = DataLoader(data, batch_size=None, num_workers=num_workers)
            for epoch in range(2):
                data.set_epoch(epoch)
                assert len(list(loader)) == NUM_ROWS // 8
        assert len([path for path in find_ledgers(ledger) if path.stat().st_size]) == 2 * max(1, num_workers)
        report = audit(find_ledgers(ledger))
        assert (report.is_proven, report.by_workers) == (True, num_workers > 0)
        assert [(epoch.num_due, epoch.is_finished) for epoch in report.orders[0].epochs] == 2 * [(NUM_ROWS, True)]


def test_audit_finds_an_epoch_that_workers_repeat(server: Server, ledger: Path) -> None:
    loader = DataLoader(dataset(server, ledger), batch_size=None, num_workers=2)
    for _ in range(2):
        assert len(list(loader)) == NUM_ROWS // 4
    [epoch] = audit(find_ledgers(ledger)).orders[0].epochs
    assert epoch.twice.tolist() == [[0, NUM_ROWS]]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_run_is_proven_when_it_restarts_an_epoch(server: Server, ledger: Path, options: dict[str, Any]) -> None:
    data = dataset(server, ledger)
    loader = DataLoader(data, batch_size=None, **options)
    assert len(list(loader)) == NUM_ROWS // 4
    data.set_epoch(1)
    state = data.state_dict()
    for _ in range(2):
        assert len(list(islice(loader, 10))) == 10
        data.load_state_dict(state)
    assert len(list(loader)) == NUM_ROWS // 4
    report = audit(find_ledgers(ledger))
    assert report.is_proven
    assert [epoch.is_finished for epoch in report.orders[0].epochs] == [True, True]


def test_audit_finds_a_run_that_loaded_no_state(server: Server, ledger: Path) -> None:
    for num_steps in (9, 60):
        for number, _ in enumerate(dataset(server, ledger), start=1):
            if number == num_steps:
                break
    status, said = audited(ledger)
    assert (status, "samples trained on more than once: 36" in said, "loaded no state" in said) == (1, True, True)
    assert audited(ledger, "--assume-fresh-weights")[0] == 0


@pytest.mark.parametrize(("first", "second"), [(5, 5), (5, 7), (7, 5)])
def test_run_is_not_proven_when_ranks_resume_from_different_states(
    server: Server, ledger: Path, first: int, second: int
) -> None:
    states: list[list[dict[str, Any]]] = [[], []]
    for rank in range(2):
        data = dataset(server, ledger, rank=rank, world_size=2)
        for number, _ in enumerate(data):
            states[rank].append(data.state_dict())
            if number == 9:
                break
    for rank, step in enumerate((first, second)):
        data = dataset(server, ledger, rank=rank, world_size=2)
        data.load_state_dict(states[rank][step - 1])
        assert len(list(data)) == NUM_ROWS // 8 - step
    status, said = audited(ledger)
    if first == second:
        assert status == 0
    else:
        assert status == 1
        assert "ranks that resumed elsewhere than the others: 1" in said.splitlines()[0]
        assert "APART   rank 1 took no part in start 2, but in start 3: " in said


def test_ledger_is_unchanged_by_workers_forked_in_mid_loop(server: Server, ledger: Path) -> None:
    evaluated = RemoteDataset(server.url, "numbers", batch_size=60, seq_len=8, rank=0, world_size=1)
    data = dataset(server, ledger)
    for number, _ in enumerate(data):
        if number % 20 == 0:
            assert len(list(DataLoader(evaluated, batch_size=None, num_workers=2))) == 4
    reading = read_ledger(ledger)
    assert (len(reading.sections), reading.sections[0].has_end, reading.damages) == (1, True, [])
    assert audit([ledger]).is_proven


def test_audit_proves_mixtures_skips_and_packings(serve: Serve, tmp_path: Path) -> None:
    for name, rows in (("one", 90), ("two", 50)):
        write_numbered(tmp_path / "data" / name, rows)
    server = serve(tmp_path / "data")
    for settings in ({"mix": "one:2,two:1"}, {"skip": "2-4", "drop_last": False}, {"packing": "concat"}):
        ledger = tmp_path / f"{next(iter(settings))}.ledger"
        for rank in range(2):
            data = RemoteDataset(server.url, "one", batch_size=4, seq_len=8, rank=rank, world_size=2, ledger=ledger, **settings)
            for epoch in range(2):
                data.set_epoch(epoch)
                assert len(list(data)) == len(data)
        report = audit(find_ledgers(ledger))
        assert report.is_proven
        assert all(e.num_due + e.num_skipped + e.num_dropped == e.num_samples for e in report.orders[0].epochs)


def test_audit_reports_batches_that_the_server_changed(serve: Serve, tmp_path: Path) -> None:
    write_numbered(tmp_path / "data" / "numbers", 40)
    server = serve(tmp_path / "data")
    list(dataset(server, tmp_path / "run.ledger"))
    server.kill()
    write_numbered(tmp_path / "data" / "numbers", 40, row_group_size=9)
    server.start()
    status, said = audited(tmp_path / "run.ledger", "--server", f"{server.url}/numbers")
    assert said.startswith("NOT PROVEN: batches not as before when requested again: 10\n")
    assert (status, "10 are not what they were" in said, said.count("is gone: part-000.parquet was rewritten")) == (1, True, 1)
    assert "  CHANGED numbers, epoch 0, step 0 of rank 0 and 9 other batches, now " in said
    server.kill()
    status, said = audited(tmp_path / "run.ledger")
    assert (status, said.startswith("PROVEN")) == (0, True)


def test_audit_reads_a_ledger_once_when_named_by_several_paths(server: Server, tmp_path: Path) -> None:
    list(dataset(server, tmp_path / "run.ledger"))
    (tmp_path / "sub").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    names = [tmp_path / folder / "run.ledger" for folder in ("", "sub/..", "link")]
    status, said = audited(*names, "--json")
    assert (status, json.loads(said)["ledgers"]) == (0, [str(names[0])])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{ledger}"], "is not a ledger"),
        ([__file__], "test_ledger.py is no ledger"),
        (["."], ". is not a ledger"),
        (["{ledger}", "--spot-check", "5"], "--spot-check and --rows ask a server: name it with --server URL"),
        (["{ledger}", "--server", "http://localhost:1", "--spot-check", "few"], "'few' is not an integer or 'all'"),
        ([], "the following arguments are required: LEDGER"),
    ],
)
def test_audit_fails_with_a_reason(ledger: Path, arguments: list[str], message: str) -> None:
    status, said = audited(*(argument.format(ledger=ledger) for argument in arguments))
    assert (status, message in said) == (2, True), said


def test_replay_keeps_no_ledger(server: Server, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="leave the ledger out"):
        dataset(server, tmp_path / "run.ledger", replay=3)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_removed_ledger_folder_stops_no_epoch_and_is_reported(server: Server, tmp_path: Path, num_workers: int) -> None:
    """New workers, of which none has written anything yet, begin each of them."""
    ledger = tmp_path / "logs" / "run.ledger"
    ledger.parent.mkdir()
    data = dataset(server, ledger)
    loader = DataLoader(data, batch_size=None, num_workers=num_workers)
    assert len(list(loader)) == NUM_ROWS // 4
    rmtree(ledger.parent)
    data.set_epoch(1)
    assert len(list(loader)) == NUM_ROWS // 4
    data.set_epoch(2)
    state = data.state_dict()
    ledger.parent.mkdir()
    del data, loader
    resumed = dataset(server, ledger)
    resumed.load_state_dict(state)
    list(DataLoader(resumed, batch_size=None, num_workers=num_workers))
    status, said = audited(ledger)
    assert (status, "starts resumed from a start without a record: 1" in said.splitlines()[0]) == (1, True)
