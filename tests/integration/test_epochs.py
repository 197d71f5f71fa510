"""Iterations that go from epoch to epoch, and go on after the last batch that the loop was given."""

from __future__ import annotations

import itertools
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from penstock import PenstockError, RemoteDataset, SpecError
from penstock.audit.report import audit
from penstock.ledger.file import find_ledgers
from support.corpora import write_numbered
from support.recorded import rows_of
from support.servers import Serve, Server

NUM_ROWS, STEPS, EPOCHS = 56, 14, 3

# Three workers on two cores are more than torch advises.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(scope="module")
def server(serve: Serve, shared: Path) -> Server:
    write_numbered(shared / "numbers", NUM_ROWS)
    return serve(shared)


def dataset(server: Server, epochs: Any = EPOCHS, **settings: Any) -> RemoteDataset:
    spec: dict[str, Any] = {"batch_size": 4, "seq_len": 8, "seed": 3, "tensors": ["input_ids"]} | settings
    return RemoteDataset(server.url, "numbers", epochs=epochs, **spec)


@pytest.fixture(scope="module")
def expected(server: Server) -> list[list[int]]:
    """The rows of three epochs, as a loop that sets each epoch is given them."""
    data, rows = dataset(server, None), []
    for epoch in range(EPOCHS):
        data.set_epoch(epoch)
        rows += rows_of(data)
    return rows


def test_one_iteration_gives_all_epochs(server: Server, expected: list[list[int]]) -> None:
    data = dataset(server)
    assert (len(data), data.epochs, data.steps_per_epoch, data.epoch) == (EPOCHS * STEPS, EPOCHS, STEPS, 0)
    assert rows_of(data) == expected
    assert (len(data), list(data)) == (0, [])
    more = dataset(server, EPOCHS + 1)
    more.load_state_dict(data.state_dict())
    assert (len(more), more.epoch) == (STEPS, EPOCHS)


@pytest.mark.parametrize("num_batches", [1, 5, STEPS, 20])
def test_iterations_and_states_go_on_after_the_last_batch(server: Server, expected: list[list[int]], num_batches: int) -> None:
    """As a trainer has it that cuts the epoch with islice, and one that is killed each time."""
    one, rows, resumed = dataset(server), list[list[int]](), list[list[int]]()
    state = one.state_dict()
    while len(one):
        rows += rows_of(itertools.islice(one, num_batches))
        assert len(one) == max(0, len(expected) - len(rows))
        other = dataset(server)
        other.load_state_dict(state)
        resumed += rows_of(itertools.islice(other, num_batches))
        assert other.epoch == one.epoch
        state = other.state_dict()
    assert rows == resumed == expected


def test_endless_dataset_has_no_length(server: Server, expected: list[list[int]]) -> None:
    data = dataset(server, "endless")
    assert (data.epochs, bool(data)) == ("endless", True)
    with pytest.raises(TypeError, match="steps_per_epoch"):
        len(data)
    assert rows_of(itertools.islice(data, 2 * STEPS)) == expected[: 2 * STEPS]
    assert rows_of(itertools.islice(data, STEPS)) == expected[2 * STEPS :]
    assert data.epoch == EPOCHS


def test_set_epoch_goes_on_in_its_epoch_and_goes_to_another(server: Server, expected: list[list[int]]) -> None:
    data = dataset(server)
    assert rows_of(itertools.islice(data, STEPS)) == expected[:STEPS]
    data.set_epoch(0)  # by a loop that counts epochs, and resumes at an epoch's end
    assert rows_of(itertools.islice(data, 2)) == expected[STEPS : STEPS + 2]
    data.set_epoch(1)
    assert rows_of(itertools.islice(data, 2)) == expected[STEPS + 2 : STEPS + 4]
    data.set_epoch(2)
    assert rows_of(data) == expected[2 * STEPS :]
    with pytest.raises(SpecError, match="epoch 3 does not exist"):
        data.set_epoch(EPOCHS)
    data.rewind()
    assert rows_of(data) == expected


def test_next_epochs_are_fetched_before_the_loop_asks_for_them(server: Server) -> None:
    whole = dataset(server)
    list(whole)
    data = dataset(server)
    with closing(iter(data)) as batches:  # type: ignore[type-var]
        next(batches)
        deadline = time.monotonic() + 30
        while data.stats().num_bytes < whole.stats().num_bytes:
            assert time.monotonic() < deadline


@pytest.mark.parametrize("num_workers", [1, 3])
def test_order_is_the_same_for_any_number_of_workers(
    server: Server, expected: list[list[int]], num_workers: int, tmp_path: Path
) -> None:
    data = dataset(server, ledger=tmp_path / "run.ledger")
    loader = DataLoader(data, batch_size=None, num_workers=num_workers)
    assert (len(loader), rows_of(loader)) == (len(expected), expected)
    assert audit(find_ledgers(tmp_path / "run.ledger")).is_proven
    with pytest.raises(PenstockError, match="ran ahead of the loop"):
        next(iter(data))
    data.set_epoch(0)
    assert next(iter(data))["input_ids"][:, 0].tolist() == expected[0]


def test_ledger_of_iterations_that_go_on_is_proven(server: Server, tmp_path: Path) -> None:
    data = dataset(server, ledger=tmp_path / "run.ledger")
    while len(data):
        for _ in itertools.islice(data, 9):
            pass
    assert audit(find_ledgers(tmp_path / "run.ledger")).is_proven


def test_wrong_number_of_epochs_is_refused(server: Server) -> None:
    for epochs in (0, -1, 1.5, "forever", True):
        with pytest.raises(SpecError, match="epochs must be"):
            dataset(server, epochs)
