"""Resuming: at every step, after a restart, with an emptied cache, under another world size; and what is refused."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker as worker_module
from torch.utils.data.datapipes.iter import IterableWrapper

from penstock import PenstockError, RemoteDataset, ServerUnavailable, SnapshotGone, SpecError, StateMismatch
from penstock import dataset as dataset_module
from penstock.tensors import Batch
from support.corpora import write_numbered
from support.recorded import contents, rows_of
from support.servers import Serve, Server

NUM_ROWS = 200


@pytest.fixture(scope="module")
def server(serve: Serve, shared: Path) -> Server:
    write_numbered(shared / "numbers", NUM_ROWS)
    return serve(shared)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    write_numbered(tmp_path / "data" / "numbers", NUM_ROWS)
    return tmp_path / "data"


@pytest.fixture
def mortal(data_dir: Path, tmp_path: Path, serve: Serve) -> Server:
    return serve(data_dir, cache_dir=tmp_path / "cache")


def dataset(server: Server, *, batch_size: int = 4, world_size: int = 1, rank: int = 0, **spec: Any) -> RemoteDataset:
    settings = {"seq_len": 8, "window": 64, "seed": 5, "retry_seconds": 60.0} | spec
    return RemoteDataset(
        server.url, "numbers", batch_size=batch_size, world_size=world_size, rank=rank, **settings,
    )  # fmt: skip


def epoch_of(batches: Iterable[Batch]) -> list[bytes]:
    return [*map(contents, batches)]


@contextmanager
def in_worker(data: RemoteDataset, number: int, num_workers: int) -> Iterator[None]:
    """What torch tells the code that runs in a loader worker."""
    worker_module._worker_info = worker_module.WorkerInfo(id=number, num_workers=num_workers, seed=0, dataset=data)
    try:
        yield
    finally:
        worker_module._worker_info = None


def rows(data: RemoteDataset) -> list[int]:
    return [row for batch in data for row in batch["input_ids"][:, 0].tolist()]


def state_after(data: RemoteDataset, num_batches: int) -> dict[str, object]:
    """The state in the loop's body of the last of so many batches, as a checkpoint stores it."""
    if num_batches:
        for number, _ in enumerate(data, start=1):
            if number == num_batches:
                break
    return dict(json.loads(json.dumps(data.state_dict())))


def test_state_of_every_step_resumes_to_the_same_bytes_after_a_restart(mortal: Server, tmp_path: Path) -> None:
    data = dataset(mortal, batch_size=8)
    data.set_epoch(2)
    whole = epoch_of(data)
    assert len(whole) == NUM_ROWS // 8
    states = []
    for step in range(len(whole) + 1):
        running = dataset(mortal, batch_size=8)
        running.set_epoch(2)
        states.append(state_after(running, step))
        assert states[-1]["step"] == step
    for restart in (False, True):
        if restart:
            mortal.kill()
            shutil.rmtree(tmp_path / "cache")
            mortal.start()
        for step, state in enumerate(states):
            resumed = dataset(mortal, batch_size=8)
            resumed.load_state_dict(state)
            resumed.set_epoch(2)
            assert (resumed.epoch, len(resumed)) == (2, len(whole) - step)
            assert epoch_of(resumed) == whole[step:]


def test_resumed_run_continues_with_whole_epochs(server: Server) -> None:
    data, resumed = dataset(server), dataset(server)
    resumed.load_state_dict(state_after(data, 7))
    epoch_of(resumed)
    for epoch in (1, 2):
        data.set_epoch(epoch)
        resumed.set_epoch(epoch)
        assert epoch_of(resumed) == epoch_of(data)
        assert len(resumed) == NUM_ROWS // 4


def test_set_epoch_of_the_resumed_epoch_keeps_the_position(server: Server) -> None:
    """What every training loop does: for epoch in range(data.epoch, ...): data.set_epoch(epoch)."""
    resumed = dataset(server)
    resumed.load_state_dict(state_after(dataset(server), 7))
    resumed.set_epoch(0)
    assert len(epoch_of(resumed)) == NUM_ROWS // 4 - 7


def test_set_epoch_warns_when_it_discards_a_resumed_position(server: Server) -> None:
    for batch_size, num_left in ((4, NUM_ROWS // 4 - 7), (2, NUM_ROWS // 2 - 14)):
        resumed = dataset(server, batch_size=batch_size)
        resumed.load_state_dict(state_after(dataset(server), 7))
        with pytest.warns(
            UserWarning, match=rf"set_epoch\(1\) discards the position .* with {num_left} batches left of epoch 0"
        ):
            resumed.set_epoch(1)


def test_set_epoch_does_not_warn_after_the_end_of_an_epoch(server: Server) -> None:
    data = dataset(server)
    resumed = dataset(server)
    resumed.load_state_dict(state_after(data, len(data)))
    resumed.set_epoch(1)  # warnings are errors here
    assert len(resumed) == NUM_ROWS // 4


def test_interrupted_loop_warns_when_it_starts_over(server: Server) -> None:
    """As a cell of a notebook does that is run once more."""

    def train(data: RemoteDataset, num_batches: int) -> list[list[int]]:
        given = list[list[int]]()
        for epoch in range(data.epoch, 2):
            data.set_epoch(epoch)
            given += rows_of(itertools.islice(data, num_batches - len(given)))
            if len(given) == num_batches:
                break
        return given

    data = dataset(server)
    first = train(data, 9)
    with pytest.warns(
        UserWarning, match=r"set_epoch\(0\) starts .* again .* after 9 steps.*load_state_dict\(data.state_dict"
    ) as told:
        assert train(data, 9) == first
    assert told[0].filename == __file__
    assert "epoch 0, at step 9 of 50" in repr(data)
    data.load_state_dict(data.state_dict())  # and as it says
    assert first + train(data, 90) == train(dataset(server), 99)
    data.rewind(1)  # who begins anew on purpose says so
    assert train(data, 9) == train(dataset(server), 59)[50:]
    meant = dataset(server, shuffle="none")
    assert train(meant, 9) == train(meant, 9)


@pytest.mark.parametrize("num_before", [0, 1, 7])
def test_interrupted_batch_comes_again(server: Server, num_before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data, given = dataset(server), list[list[int]]()

    def interrupted(batches: Iterator[Batch]) -> Batch:
        batch = next(batches)
        if len(given) == num_before:
            raise KeyboardInterrupt
        return batch

    def train() -> None:
        for batch in data:
            given.extend(rows_of([batch]))

    with monkeypatch.context() as patch:
        patch.setattr("penstock.iteration.next", interrupted, raising=False)
        with pytest.raises(KeyboardInterrupt):
            train()
    data.load_state_dict(data.state_dict())
    train()
    assert given == rows_of(dataset(server))


@pytest.mark.parametrize(("before", "after"), [((4, 1), (4, 2)), ((4, 2), (4, 1)), ((2, 3), (5, 2)), ((3, 3), (1, 7))])
def test_resume_with_another_world_size_continues_at_the_same_sample(
    server: Server, before: tuple[int, int], after: tuple[int, int]
) -> None:
    everything = rows(dataset(server, batch_size=1))
    state = state_after(dataset(server, batch_size=before[0], world_size=before[1]), 6)
    consumed = 6 * before[0] * before[1]
    ranks = [dataset(server, batch_size=after[0], world_size=after[1], rank=rank) for rank in range(after[1])]
    for data in ranks:
        data.load_state_dict(state)
    batches = [rows_of(data) for data in ranks]
    samples = [row for step in zip(*batches, strict=True) for batch in step for row in batch]
    assert samples == everything[consumed : consumed + len(samples)]
    assert NUM_ROWS - consumed - len(samples) < after[0] * after[1]
    for data in ranks:
        data.set_epoch(1)
        assert len(data) == NUM_ROWS // (after[0] * after[1])


def test_second_resume_with_a_third_world_size_continues_at_the_same_sample(server: Server) -> None:
    everything = rows(dataset(server, batch_size=1))
    second = dataset(server, batch_size=3, world_size=2)
    second.load_state_dict(state_after(dataset(server, batch_size=5), 4))
    third = dataset(server, batch_size=1)
    third.load_state_dict(state_after(second, 2))
    assert rows(third) == everything[5 * 4 + 6 * 2 :]


def test_state_of_another_order_continues_after_its_samples_when_not_strict(server: Server) -> None:
    data = dataset(server, seed=6)
    whole = rows(data)
    with pytest.warns(UserWarning, match="seed: 5 then, 6 now.* after its first 12 of [0-9,]+ samples") as told:
        data.load_state_dict(state_after(dataset(server), 3), strict=False)
    assert [warning.filename for warning in told] == [__file__]
    assert len(data) == (NUM_ROWS - 12) // 4
    assert rows(data) == whole[12:]


def test_state_may_hold_numpy_integers(server: Server) -> None:
    data = dataset(server)
    data.load_state_dict(data.state_dict() | {"step": np.int64(3)})
    assert len(data) == len(dataset(server)) - 3


def test_epoch_is_limited(server: Server) -> None:
    with pytest.raises(SpecError, match="epoch must be a whole number from 0 to 9,007,199,254,740,992"):
        dataset(server).set_epoch(2**64)


@pytest.mark.parametrize("other", [{"batch_size": 3, "drop_last": False}, {"batch_size": 7, "drop_last": True}])
def test_end_of_a_wrapped_epoch_resumes_with_another_batch_size(server: Server, other: dict[str, Any]) -> None:
    data = dataset(server, batch_size=7, drop_last=False)
    state = state_after(data, len(data))
    resumed = dataset(server, **other)
    resumed.load_state_dict(state)
    resumed.set_epoch(0)
    assert len(resumed) == 0
    assert epoch_of(resumed) == []


def test_set_epoch_in_mid_loop_skips_nothing(server: Server) -> None:
    data = dataset(server)

    def loop() -> None:
        for number, _ in enumerate(data):
            if number == 2:
                data.set_epoch(1)
            if number == 5:
                break

    with pytest.warns(UserWarning, match="continues with batch 4 of its iteration .* Call them between two") as told:
        loop()
    assert len(told) == 1
    assert (data.state_dict()["epoch"], data.state_dict()["step"]) == (1, 0)
    assert len(epoch_of(data)) == NUM_ROWS // 4


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda data: pickle.loads(pickle.dumps(data))])
def test_copy_sets_the_epoch_of_its_own_workers(server: Server, duplicate: Callable[[RemoteDataset], RemoteDataset]) -> None:
    data = duplicate(dataset(server))
    expected = dataset(server)
    loader = DataLoader(data, batch_size=None, num_workers=2, persistent_workers=True)
    for epoch in range(3):
        data.set_epoch(epoch)
        expected.set_epoch(epoch)
        assert rows_of(loader) == rows_of(expected)
    with pytest.raises(PenstockError, match="they run ahead of the loop"):
        data.state_dict()


def test_worker_yields_each_batch_when_it_copies_the_dataset(server: Server) -> None:
    copied_in_worker = IterableWrapper(dataset(server))
    assert rows_of(DataLoader(copied_in_worker, batch_size=None, num_workers=1)) == rows_of(dataset(server))


def test_worker_resumes_from_its_own_state(server: Server) -> None:
    """As torchdata's StatefulDataLoader does: every worker saves and loads the dataset's state in its own process."""
    whole = epoch_of(dataset(server))
    for consumed in range(7):
        resumed = []
        for worker in range(3):
            data = dataset(server)
            with in_worker(data, worker, 3):
                batches = iter(data)
                for _ in range(consumed):
                    next(batches)
                state = data.state_dict()
                again = dataset(server)
                again.load_state_dict(state)
                resumed.append(epoch_of(again))
        turns = [batch for turn in itertools.zip_longest(*resumed) for batch in turn if batch is not None]
        assert turns == whole[3 * consumed :]


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_resume_from_a_state_and_continue_with_whole_epochs(server: Server, persistent: bool) -> None:
    whole = rows_of(dataset(server))
    data = dataset(server)
    loader = DataLoader(data, batch_size=None, num_workers=2, persistent_workers=persistent)
    assert rows_of(loader) == whole
    for step in (9, 31):
        data.load_state_dict(state_after(dataset(server), step))
        assert len(data) == len(whole) - step
        assert rows_of(loader) == whole[step:]
        assert len(data) == len(whole)
        assert rows_of(loader) == whole


def test_workers_resume_once_when_loaders_share_a_seed(server: Server) -> None:
    whole = rows_of(dataset(server))
    data = dataset(server)
    data.load_state_dict(state_after(dataset(server), 9))
    loader = DataLoader(data, batch_size=None, num_workers=2)
    for expected in (whole[9:], whole, whole):
        torch.manual_seed(0)
        assert len(data) == len(expected)
        assert rows_of(loader) == expected


def test_abandoned_workers_start_over_together(server: Server) -> None:
    whole = rows_of(dataset(server))
    data = dataset(server)
    data.load_state_dict(state_after(dataset(server), 9))
    for _ in DataLoader(data, batch_size=None, num_workers=2):
        break
    assert rows_of(DataLoader(data, batch_size=None, num_workers=2)) == whole


def test_state_is_known_between_epochs_of_workers(server: Server) -> None:
    data = dataset(server)
    rows_of(DataLoader(data, batch_size=None, num_workers=2))
    with pytest.raises(PenstockError, match="they run ahead of the loop"):
        data.state_dict()
    data.set_epoch(1)
    assert [data.state_dict()[name] for name in ("epoch", "step")] == [1, 0]


def test_run_refuses_to_continue_with_other_data(mortal: Server, data_dir: Path) -> None:
    data = dataset(mortal)
    state, snapshot = state_after(data, 3), data.snapshot
    mortal.kill()
    write_numbered(data_dir / "numbers", NUM_ROWS, row_group_size=9)
    mortal.start()
    with pytest.raises(SnapshotGone, match=f"snapshot {snapshot} of numbers is gone: part-000.parquet was rewritten"):
        epoch_of(data)
    with pytest.raises(SnapshotGone):
        dataset(mortal, snapshot=snapshot)
    with pytest.raises(StateMismatch, match="snapshot: "):
        dataset(mortal).load_state_dict(state)


def test_killed_server_repeats_and_loses_no_batch(mortal: Server) -> None:
    """Small buffers, so that the client really is in the middle of fetching whenever the server dies."""
    expected = epoch_of(dataset(mortal))
    data = dataset(mortal, prefetch_bytes=1)
    seen = []
    for number, batch in enumerate(data):
        seen.append(contents(batch))
        if number % 12 == 5:
            mortal.kill()
            threading.Timer(0.2, mortal.start).start()
    assert seen == expected
    assert data.stats().num_retries > 0
    assert data.stats().wait_seconds > 0.2


def test_server_down_for_too_long_is_one_error(mortal: Server) -> None:
    data = dataset(mortal, retry_seconds=0.5, prefetch_bytes=1)
    batches = iter(data)
    next(batches)
    mortal.kill()
    with pytest.raises(ServerUnavailable, match=r"no answer within retry_seconds=0.5 from http://127.0.0.1:\d+"):
        list(batches)
    assert data.state_dict()["step"] >= 1


def test_failed_iteration_consumes_nothing(mortal: Server) -> None:
    """Whoever tries again after the server came back goes on where the state was taken."""
    data = dataset(mortal, retry_seconds=0.2)
    whole = epoch_of(dataset(mortal))
    data.load_state_dict(state_after(dataset(mortal), 7))
    mortal.kill()
    for _ in range(2):
        with pytest.raises(ServerUnavailable):
            next(iter(data))
        assert (data.state_dict()["step"], len(data)) == (7, len(whole) - 7)
    mortal.start()
    assert epoch_of(data) == whole[7:]
    assert epoch_of(data) == whole


@pytest.mark.parametrize("seeds", [(1, 2), (1, 1)])
def test_failed_workers_consume_nothing(mortal: Server, seeds: tuple[int, int]) -> None:
    data = dataset(mortal, retry_seconds=0.2)
    whole = epoch_of(dataset(mortal))
    data.load_state_dict(state_after(dataset(mortal), 7))
    mortal.kill()
    torch.manual_seed(seeds[0])  # of the loader's seed depends what rounds of workers are called
    with pytest.raises(ServerUnavailable):
        list(DataLoader(data, batch_size=None, num_workers=2))
    mortal.start()
    torch.manual_seed(seeds[1])
    assert epoch_of(DataLoader(data, batch_size=None, num_workers=2)) == whole[7:]
    torch.manual_seed(seeds[1])
    assert epoch_of(DataLoader(data, batch_size=None, num_workers=2)) == whole


def test_iteration_that_cannot_start_consumes_nothing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    data = dataset(server)
    whole = epoch_of(dataset(server))
    data.load_state_dict(state_after(dataset(server), 7))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(dataset_module, "BatchIterator", fail)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            next(iter(data))
    assert data.state_dict()["step"] == 7
    assert epoch_of(data) == whole[7:]


def test_state_of_an_epochs_end_begins_the_next_epoch_unless_set_epoch_returns(server: Server) -> None:
    following = dataset(server)
    following.set_epoch(1)
    expected = epoch_of(following)
    for num_workers in (0, 2):
        data = dataset(server)
        loader = DataLoader(data, batch_size=None, num_workers=num_workers)
        data.load_state_dict(state_after(dataset(server), len(expected)))
        assert (data.epoch, len(data)) == (1, len(expected))
        assert epoch_of(loader) == expected
        data.load_state_dict(state_after(dataset(server), len(expected)))
        data.set_epoch(0)
        assert epoch_of(loader) == []
        data.set_epoch(1)
        assert epoch_of(loader) == expected


def test_second_iterator_in_mid_loop_warns_that_the_position_moves(server: Server) -> None:
    data = dataset(server)

    def loop() -> None:
        for number, _ in enumerate(data):
            if number == 3:
                next(iter(data))

    with pytest.warns(UserWarning, match="state_dict returns their position"):
        loop()
    assert data.state_dict()["step"] == 1


@pytest.mark.parametrize(("num_workers", "epochs"), [(0, None), (0, 2), (2, None)])
def test_state_after_a_batch_resumes_with_the_next_one(server: Server, num_workers: int, epochs: int | None) -> None:
    """Also one that the loop was given before the last, and one that came from a loader worker."""
    data = dataset(server, epochs=epochs)
    data.load_state_dict(dataset(server).state_dict() | {"step": 3, "batch_size": 5, "offset": 2})
    batches = iter(DataLoader(data, batch_size=None, num_workers=num_workers))
    given = [next(batches) for _ in range(6)]
    state = pickle.loads(pickle.dumps(data.state_after(given[3])))
    del batches
    resumed = dataset(server)
    resumed.load_state_dict(state)
    assert rows_of(itertools.islice(resumed, 2)) == rows_of(given[4:])
    if not num_workers:
        assert data.state_after(given[-1]) == data.state_dict()


def test_batch_of_another_dataset_or_without_its_address_has_no_state(server: Server) -> None:
    data = dataset(server)
    batch = next(iter(data))
    with pytest.raises(PenstockError, match="no address: something made a new dict"):
        data.state_after({**batch})  # type: ignore[arg-type]
    with pytest.raises(PenstockError, match="no batch of this dataset since its last state"):
        dataset(server, seed=99).state_after(batch)


def test_seek_counts_samples_over_epochs_ranks_and_batch_sizes(server: Server) -> None:
    """As consumed_samples of a run whose batches become larger."""
    one = dataset(server, batch_size=1, epochs=3)
    order = [row for rows in rows_of(one) for row in rows]
    for samples, batch_size, world_size in ((0, 4, 1), (12, 4, 1), (13, 4, 1), (NUM_ROWS - 8, 4, 2), (NUM_ROWS + 4, 2, 2)):
        of_ranks = []
        for rank in range(world_size):
            data = dataset(server, batch_size=batch_size, rank=rank, world_size=world_size, epochs=3)
            data.seek(samples=samples)
            of_ranks.append(rows_of(itertools.islice(data, 2)))
        found = [row for step in zip(*of_ranks, strict=True) for rows in step for row in rows]
        assert found == order[samples : samples + 2 * batch_size * world_size]
    one.seek(3 * NUM_ROWS)
    assert len(one) == len(list(one)) == 0
    with pytest.raises(SpecError, match="samples must be a whole number"):
        one.seek(-1)


def test_state_dict_takes_the_arguments_of_trainers(server: Server) -> None:
    data = dataset(server)
    assert data.state_dict(160, from_beginning=True) == data.state_dict()
    assert (data.batch_size, data.dataset_name) == (data.spec.batch_size, "numbers")
