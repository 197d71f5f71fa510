"""torchdata's StatefulDataLoader: the state in mid-epoch, with workers and without."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import RemoteDataset, StateMismatch
from penstock.audit.report import audit
from penstock.ledger.file import find_ledgers
from support.recorded import SPEC, rows_of

LIBRARY = "torchdata"
pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than cores
]

with_any_workers = pytest.mark.parametrize(
    "options", [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 3, "persistent_workers": True}], ids=str
)


def loader_of(url: str, ledger: Path | None = None, epochs: int | None = None, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = RemoteDataset(url, "numbers", epochs=epochs, ledger=ledger, tensors=["input_ids"], **SPEC)
    return StatefulDataLoader(data, batch_size=None, **options)


@with_any_workers
def test_loader_state_in_mid_epoch_resumes_with_the_rest(url: str, options: dict[str, Any]) -> None:
    loader = loader_of(url, **options)
    loader.dataset.set_epoch(3)
    batches = iter(loader)
    first = rows_of(next(batches) for _ in range(7))
    state = loader.state_dict()
    rest = rows_of(batches)

    resumed = loader_of(url, **options)
    resumed.load_state_dict(state)

    assert len(resumed) == len(first + rest) == 20
    assert rows_of(resumed) == rest
    assert resumed.dataset.epoch == 3
    for each in (loader, resumed):
        each.dataset.set_epoch(4)
    assert rows_of(resumed) == rows_of(loader) != first + rest


@pytest.mark.parametrize(
    ("options", "num_before"),
    [
        ({"num_workers": 0}, 2),
        ({"num_workers": 3}, 20),
        ({"num_workers": 1, "persistent_workers": True, "snapshot_every_n_steps": 3}, 2),
        ({"num_workers": 3, "persistent_workers": True}, 2),
        ({"num_workers": 3, "persistent_workers": True}, 20),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:epoch 0 is given once more")
def test_repeated_epoch_resumes_in_its_second_pass(url: str, tmp_path: Path, options: dict[str, Any], num_before: int) -> None:
    """The loader asks workers that persist where they are as the pass begins; most have given nothing when it is saved."""
    loader = loader_of(url, tmp_path / "run.ledger", **options)
    first = rows_of(itertools.islice(iter(loader), num_before))
    batches = iter(loader)
    second = rows_of([next(batches)])
    state = loader.state_dict()
    del loader, batches

    resumed = loader_of(url, tmp_path / "run.ledger", **options)
    resumed.load_state_dict(state)
    second += rows_of(resumed)

    assert len(second) == 20
    assert second[:num_before] == first
    (epoch,) = audit(find_ledgers(tmp_path / "run.ledger")).orders[0].epochs
    assert (epoch.is_finished, len(epoch.missing), len(epoch.twice) > 0) == (True, 0, True)


@with_any_workers
def test_loader_that_reloads_a_checkpoint_repeatedly_is_proven(url: str, tmp_path: Path, options: dict[str, Any]) -> None:
    """Each time in workers that begin with the same seed, which the state holds."""
    loader = loader_of(url, tmp_path / "run.ledger", **options)
    rows_of(itertools.islice(iter(loader), 7))
    state = loader.state_dict()
    for _ in range(3):
        loader.load_state_dict(state)
        rows_of(itertools.islice(iter(loader), 5))
    loader.load_state_dict(state)
    assert len(rows_of(loader)) == 13
    report = audit(find_ledgers(tmp_path / "run.ledger"))
    assert report.is_proven
    assert report.orders[0].epochs[0].is_finished


@with_any_workers
@pytest.mark.parametrize("num_batches", [7, 20])
def test_ledgers_prove_a_resumed_loader(url: str, tmp_path: Path, options: dict[str, Any], num_batches: int) -> None:
    """Each worker resumes where it was itself, and each one's ledger holds batches that the loop never took."""
    killed = loader_of(url, tmp_path / "run.ledger", **options)
    batches = iter(killed)
    rows_of(next(batches) for _ in range(num_batches))
    state = killed.state_dict()
    rows_of(itertools.islice(batches, 3))
    del killed, batches

    resumed = loader_of(url, tmp_path / "run.ledger", **options)
    resumed.load_state_dict(state)
    resumed.dataset.set_epoch(0)
    assert len(rows_of(resumed)) == 20 - num_batches
    resumed.dataset.set_epoch(1)
    rows_of(resumed)

    report = audit(find_ledgers(tmp_path / "run.ledger"))
    assert report.is_proven
    assert [(epoch.epoch, epoch.num_due, epoch.is_finished) for epoch in report.orders[0].epochs] == [
        (0, 320, True), (1, 320, True)
    ]  # fmt: skip


@with_any_workers
def test_loader_state_between_epochs_continues_with_the_epoch_set(url: str, options: dict[str, Any]) -> None:
    loader = loader_of(url, **options)
    rows_of(loader)
    loader.dataset.set_epoch(1)
    state = loader.state_dict()
    expected = rows_of(loader)

    resumed = loader_of(url, **options)
    resumed.load_state_dict(state)
    resumed.dataset.set_epoch(1)
    assert rows_of(resumed) == expected
    resumed.dataset.set_epoch(2)
    loader.dataset.set_epoch(2)
    assert rows_of(resumed) == rows_of(loader) != expected


with_an_older_state = pytest.mark.parametrize(  # of a worker, than that of the epoch's end
    "options",
    [
        {"num_workers": 0, "snapshot_every_n_steps": 3},
        {"num_workers": 2, "snapshot_every_n_steps": 3},
        {"num_workers": 3, "snapshot_every_n_steps": 50},
        {"num_workers": 2, "snapshot_every_n_steps": 7, "persistent_workers": True},
    ],
    ids=str,
)


@with_an_older_state
def test_loader_state_of_an_epochs_end_continues_with_the_epoch_set(url: str, options: dict[str, Any]) -> None:
    """The loader hands it on after set_epoch, and that of a worker may be older than the epoch's end."""
    loader = loader_of(url, **options)
    rows_of(loader)
    state = loader.state_dict()
    expected = []
    for epoch in (1, 2):
        loader.dataset.set_epoch(epoch)
        expected.append(rows_of(loader))

    resumed = loader_of(url, **options)
    resumed.load_state_dict(state)
    for epoch in (1, 2):
        resumed.dataset.set_epoch(epoch)
        assert rows_of(resumed) == expected[epoch - 1]
        assert resumed.dataset.epoch == epoch


@with_an_older_state
def test_loader_state_of_an_epochs_end_can_be_loaded_again(url: str, options: dict[str, Any]) -> None:
    loader = loader_of(url, **options)
    rows_of(loader)
    state = loader.state_dict()
    loader.dataset.set_epoch(1)
    expected = rows_of(loader)
    for _ in range(2):
        loader.load_state_dict(state)
        loader.dataset.set_epoch(1)
        assert rows_of(loader) == expected
    loader.dataset.set_epoch(2)
    assert rows_of(loader) != expected


def test_loader_state_of_an_epochs_end_accepts_other_steps(url: str) -> None:
    """Twenty steps are no multiple of the workers: some have given fewer than others."""
    loader = loader_of(url, num_workers=3)
    rows_of(loader)
    state = loader.state_dict()

    for spec in (SPEC, SPEC | {"batch_size": 1}, SPEC | {"skip": "3-4"}):
        data = RemoteDataset(url, "numbers", **spec)
        data.set_epoch(1)
        expected = rows_of(data)
        resumed = type(loader)(data, batch_size=None, num_workers=3)
        resumed.load_state_dict(state)
        data.set_epoch(1)
        assert rows_of(resumed) == expected


@pytest.mark.parametrize(
    ("other", "num_batches"),
    [({"batch_size": 8}, 1), ({"rank": 1, "world_size": 2}, 19), ({"skip": "18-18"}, 6)],
    ids=["batch_size", "world_size", "skip"],
)
def test_workers_refuse_a_state_with_other_samples_per_step(
    url: str, other: dict[str, Any], num_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would count its own as all that the loop was given."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)  # so long it waits for each that failed
    loader = loader_of(url, num_workers=2)
    rows_of(itertools.islice(iter(loader), num_batches))

    resumed = type(loader)(RemoteDataset(url, "numbers", **(SPEC | other)), batch_size=None, num_workers=2)
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(StateMismatch, match=f"inside an epoch .*{[*other][-1]}: .* then, .* now"):
        rows_of(resumed)
    del loader, resumed
    gc.collect()  # what waits for them does so now


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_warns_when_set_epoch_would_repeat_the_resumed_epoch(url: str, num_workers: int) -> None:
    loader = loader_of(url, num_workers=num_workers)
    loader.dataset.set_epoch(1)
    rows_of(itertools.islice(iter(loader), 7))
    state = loader.state_dict()

    resumed = loader_of(url, num_workers=num_workers)
    resumed.load_state_dict(state)
    resumed.dataset.set_epoch(0)  # as data.epoch says, until the loader hands the state on
    rows_of(resumed)
    with pytest.warns(UserWarning, match=r"continued epoch 1 .* set_epoch\(1\) starts it again from its first batch"):
        resumed.dataset.set_epoch(1)
    resumed.dataset.set_epoch(2)


@pytest.mark.parametrize(("num_workers", "num_batches"), [(0, 27), (2, 27), (3, 27), (3, 20), (3, 21), (4, 41), (2, 11)])
def test_loader_state_goes_on_across_epochs(url: str, tmp_path: Path, num_workers: int, num_batches: int) -> None:
    """Each process gives the loop so many batches, and the last one what is left of three epochs."""
    data, rows, state = RemoteDataset(url, "numbers", epochs=3, **SPEC), list[list[int]](), None
    while len(rows) < len(data):
        loader = loader_of(url, tmp_path / "run.ledger", epochs=3, num_workers=num_workers)
        if state:
            loader.load_state_dict(state)
        for batch in itertools.islice(loader, num_batches):
            rows += rows_of([batch])
            state = loader.state_dict()
    assert rows == rows_of(data)
    assert audit(find_ledgers(tmp_path / "run.ledger")).is_proven


@pytest.mark.parametrize(("num_workers", "num_batches"), [(2, 21), (3, 21), (3, 41), (4, 22)])
def test_killed_loader_is_proven_where_its_workers_turn_crosses_an_epoch(
    url: str, tmp_path: Path, num_workers: int, num_batches: int
) -> None:
    killed = loader_of(url, tmp_path / "run.ledger", epochs=3, num_workers=num_workers, prefetch_factor=3)
    batches = iter(killed)
    rows = rows_of(next(batches) for _ in range(num_batches))
    state = killed.state_dict()
    rows_of(itertools.islice(batches, 5))  # trained on after the checkpoint
    del killed, batches
    resumed = loader_of(url, tmp_path / "run.ledger", epochs=3, num_workers=num_workers)
    resumed.load_state_dict(state)
    rows += rows_of(resumed)
    assert rows == rows_of(RemoteDataset(url, "numbers", epochs=3, **SPEC))
    assert audit(find_ledgers(tmp_path / "run.ledger")).is_proven


@pytest.mark.parametrize("num_batches", [1, 19, 20, 39, 40])
def test_nodes_pipeline_resumes_from_its_state(url: str, num_batches: int) -> None:
    """Its loader looks a batch ahead, a prefetcher more; it would begin the epoch anew whose last batch was given."""
    from torchdata.nodes import IterableWrapper, Loader, ParallelMapper, Prefetcher

    def pipeline() -> tuple[RemoteDataset, Any]:
        data = RemoteDataset(url, "numbers", **SPEC)
        mapped = ParallelMapper(IterableWrapper(data), dict, num_workers=2, method="thread")
        return data, Loader(Prefetcher(mapped, prefetch_factor=3, snapshot_frequency=2), restart_on_stop_iteration=False)

    def train(first: int, stop: int | None) -> tuple[int, Any]:
        for epoch in range(first, 3):
            data.set_epoch(epoch)
            for batch in loader:
                given.append(batch["input_ids"][:, 0].tolist())
                if len(given) == stop:
                    return epoch, loader.state_dict()
        return 3, None

    expected = list[list[int]]()
    data = RemoteDataset(url, "numbers", **SPEC)
    for epoch in range(3):
        data.set_epoch(epoch)
        expected += rows_of(data)

    given = list[list[int]]()
    data, loader = pipeline()
    epoch, state = train(0, num_batches)
    data, loader = pipeline()
    loader.load_state_dict(state)
    train(epoch, None)
    assert given == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_dataloader_example_resumes_with_the_same_weights(url: str, tmp_path: Path, num_workers: int) -> None:
    import train_dataloader

    def train(checkpoint: str, steps: int) -> dict[str, Any]:
        path = str(tmp_path / checkpoint / "gpt.pt")
        train_dataloader.main([url, "numbers", "--steps", str(steps), "--checkpoint", path, "--workers", str(num_workers)])
        return dict(torch.load(path))

    whole = train("whole", 25)
    for steps in (8, 20, 25):  # in the middle of an epoch, and at its end
        parts = train("parts", steps)

    assert whole["step"] == parts["step"]
    assert all(torch.equal(weight, parts["model"][name]) for name, weight in whole["model"].items())
