"""The first round of iteration takes a start, however many workers it has, and whichever of them begin."""

import pickle
from collections.abc import Iterator
from copy import copy, deepcopy
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, ForkServerContext
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from penstock import rank
from penstock.distributed import Worker, find_worker
from penstock.errors import PenstockError
from penstock.state.launch import Launch
from penstock.state.progress import Progress
from penstock.state.start import SharedStart, StepRange
from penstock.state.state import Position

RESUMED = StepRange(position=Position(epoch=2, offset=100, step=7), num_steps=50)
# The second pickles what a process is given, as spawn does, and does not import torch anew for each.
CONTEXTS = [get_context("fork"), get_context("forkserver")]


def worker(first: int, loader_seed: int) -> Worker:
    return Worker(first, 3, loader_seed)


def take(start: SharedStart, number: int, worker: Worker | None) -> bool:
    """A round begins and gives a batch: whether of the stretch."""
    is_ours = start.begin(number, worker)
    start.enter(number, worker)
    start.take(number, worker)
    return is_ours


def test_a_start_is_taken_once() -> None:
    start = SharedStart(RESUMED)
    assert (start.stretch, start.stretch.num_left, start.is_taken) == (RESUMED, 43, False)
    assert take(start, 1, None)
    assert start.is_taken
    assert not take(start, 2, None)
    start.set(RESUMED, by_state=True)
    assert (start.is_taken, start.is_by_state) == (False, True)
    assert take(start, 3, None)
    assert not start.is_with_workers
    start.set(RESUMED, by_state=False)
    assert not start.is_by_state


def test_a_start_that_is_made_or_copied_while_evaluating_can_be_set_afterwards() -> None:
    with torch.inference_mode():
        made = SharedStart(RESUMED)
        copied = pickle.loads(pickle.dumps(made))
    for start in (made, copied):
        start.set(replace(RESUMED, num_steps=60), by_state=True)
        assert start.stretch.num_left == 53


def test_all_workers_of_one_round_take_it_and_those_of_the_next_do_not() -> None:
    start = SharedStart(RESUMED)
    assert [take(start, 1, worker(n, loader_seed=99)) for n in (2, 0)] == [True, True]
    # The loop was left before worker 1 began; the next loader's worker 1 must not do otherwise than its others.
    assert [take(start, 1, worker(n, loader_seed=12)) for n in range(3)] == [False] * 3
    assert start.is_with_workers


def test_rounds_of_loaders_with_one_seed_are_told_apart_though_not_all_workers_of_the_first_began() -> None:
    start = SharedStart(RESUMED)
    for _ in range(2):
        assert take(start, 1, worker(0, loader_seed=99))
        assert [take(start, 1, worker(n, loader_seed=99)) for n in range(3)] == [False] * 3
        start.set(RESUMED, by_state=True)
    for _ in range(2):
        assert [take(start, 1, worker(n, loader_seed=99)) for n in range(3)] == [True] * 3
        start.set(RESUMED, by_state=True)


def test_a_worker_that_was_never_asked_for_a_batch_is_of_the_next_round_of_the_same_name() -> None:
    """Its loader was dropped at once; the other worker has given a batch of the next when it begins that."""
    start = SharedStart(RESUMED)
    for n in range(2):
        assert start.begin(1, worker(n, loader_seed=99))
    assert [take(start, 1, worker(n, loader_seed=99)) for n in range(2)] == [True] * 2


def test_workers_that_are_killed_before_their_first_batch_take_nothing() -> None:
    start = SharedStart(RESUMED)
    assert [start.begin(1, worker(n, loader_seed=99)) for n in range(3)] == [True] * 3
    assert [take(start, 1, worker(n, loader_seed=12)) for n in range(3)] == [True] * 3


def test_rounds_of_workers_that_live_on_are_told_apart() -> None:
    start = SharedStart(RESUMED)
    for number, taken in ((1, True), (2, False), (3, False)):
        assert [take(start, number, worker(n, loader_seed=99)) for n in range(3)] == [taken] * 3
    start.set(RESUMED, by_state=True)
    assert [take(start, 4, worker(n, loader_seed=99)) for n in range(3)] == [True] * 3


def test_this_process_and_its_workers_take_it_from_one_another() -> None:
    start = SharedStart(RESUMED)
    assert take(start, 1, worker(0, loader_seed=5))
    assert not take(start, 1, None)
    assert not start.is_with_workers
    assert not take(start, 2, worker(0, loader_seed=5))
    assert start.is_with_workers
    start.set(RESUMED, by_state=True)
    assert not start.is_with_workers


def test_a_copy_is_on_its_own() -> None:
    start = SharedStart(RESUMED)
    again = pickle.loads(pickle.dumps(start))
    assert again.stretch == RESUMED
    assert take(start, 1, None)
    assert not again.is_taken
    assert again._shared.is_shared


@pytest.mark.parametrize("seeds", [(5, 5), (5, 6)])
def test_a_round_that_fails_before_its_first_batch_takes_nothing(seeds: tuple[int, int]) -> None:
    start = SharedStart(RESUMED)
    assert start.begin(1, None)
    start.give_back(None)
    for n in range(3):
        assert start.begin(1, worker(n, seeds[0]))
    for n in range(3):
        start.give_back(worker(n, seeds[0]))
    assert not start.is_taken
    assert [take(start, 1, worker(n, seeds[1])) for n in range(3)] == [True] * 3
    assert start.is_taken
    assert not take(start, 3, None)


def test_a_state_is_not_taken_by_workers_that_began_before_it_was_loaded() -> None:
    """They may come to their first batch when the loop has long left them."""
    progress = Progress(50)
    left = progress.begin(worker(0, loader_seed=99))
    progress.go_to(RESUMED, None)
    progress.take(left)
    assert (progress.has_loaded, progress.num_left) == (True, 43)
    assert progress.begin(worker(0, loader_seed=12)).steps == range(7, 50, 3)


def test_a_state_of_a_worker_is_for_its_next_round_alone_and_for_none_once_the_loop_chooses_an_epoch() -> None:
    """As of one that lives on from epoch to epoch."""
    progress, own = Progress(50), worker(1, loader_seed=99)
    whole = range(1, 50, 3)
    for then in (2, 3):  # the loop had chosen epoch 3 before the state came
        progress.go_to(RESUMED, own)
        assert (progress.position, progress.epoch, progress.num_left) == (RESUMED.position, 2, 50)  # whole for the others
        for epoch, steps in ((2, range(8, 50, 3)), (then, whole), (then, whole)):
            round_ = progress.begin(own)
            progress.take(round_)
            assert (round_.stretch.position.epoch, round_.steps) == (epoch, steps)
        progress.go_to(RESUMED, own)
        progress.set_epoch(3)
        assert progress.begin(own).steps == whole


def test_workers_that_load_their_states_at_once_put_off_the_epoch_that_the_loop_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Progress(50), worker(1, loader_seed=99)
    one.set_epoch(3)
    put_off = SharedStart.put_off

    def meanwhile(start: SharedStart, epoch: int) -> None:
        monkeypatch.undo()
        other = copy(one)  # which shares the start
        other.go_to(RESUMED, worker(0, loader_seed=99))
        put_off(start, epoch)

    monkeypatch.setattr(SharedStart, "put_off", meanwhile)
    one.go_to(RESUMED, two)
    epochs = []
    for _ in range(3):
        round_ = one.begin(two)
        one.take(round_)
        epochs.append(round_.stretch.position.epoch)
    assert epochs == [2, 3, 3]


@pytest.mark.parametrize(("epoch", "step", "expected"), [(0, 7, 2), (0, 50, 2), (3, 7, 2), (3, 50, 3)])
def test_the_epoch_is_that_of_a_workers_state_unless_that_is_over_and_the_loop_came_further(
    epoch: int, step: int, expected: int
) -> None:
    progress = Progress(50)
    progress.set_epoch(epoch)
    progress.go_to(replace(RESUMED, position=replace(RESUMED.position, step=step)), worker(1, loader_seed=99))
    assert progress.epoch == expected


@pytest.mark.parametrize(("epoch", "step", "expected"), [(0, 50, 3), (2, 50, 2), (3, 7, 2), (3, 50, 3)])
def test_a_state_of_an_epochs_end_leaves_a_loop_that_chose_a_later_one_there(epoch: int, step: int, expected: int) -> None:
    progress = Progress(50)
    progress.set_epoch(epoch)
    progress.go_to(replace(RESUMED, position=replace(RESUMED.position, step=step)), None)
    assert progress.epoch == expected
    progress.take(progress.begin(None))
    progress.go_to(replace(RESUMED, position=replace(RESUMED.position, step=50)), None)  # back from an epoch that it is in
    assert (progress.epoch, progress.num_left) == (3, 50)


def test_workers_of_a_round_tell_the_same_number_of_loads_and_those_of_others_another() -> None:
    loop = Progress(50)

    def loads(num_workers: int, *, each_loads: bool) -> list[int]:
        found = []
        for n in range(num_workers):
            process = copy(loop)  # which shares the start
            if each_loads:
                process.go_to(RESUMED, worker(n, loader_seed=99))
            found.append(process.begin(worker(n, loader_seed=99)).num_loads)
        return found

    assert [loads(2, each_loads=True) for _ in range(2)] == [[1, 1], [2, 2]]
    assert loads(4, each_loads=False) == [2, 2, 2, 2]  # also of more workers, of which some never loaded any
    loop.go_to(RESUMED, None)
    assert loads(4, each_loads=False) == [3, 3, 3, 3]
    assert loads(2, each_loads=True) == [4, 4]


def test_workers_that_gave_all_of_an_epoch_are_at_its_end_though_their_last_turn_is_short() -> None:
    progress = Progress(50)
    round_ = progress.begin(worker(1, loader_seed=99))
    progress.count(round_, 16)
    assert progress.position.step == 48
    progress.count(round_, 17)
    assert progress.position.step == 50


@pytest.mark.parametrize("context", CONTEXTS, ids=["fork", "pickle"])
def test_another_process_that_comes_by_it_moves_nobody_elses(context: ForkContext | ForkServerContext) -> None:
    """As one that evaluates does, on the dataset that another process trains on."""
    start = SharedStart(RESUMED)
    other = context.Process(
        target=start.set, args=(StepRange(position=Position(epoch=9), num_steps=1),), kwargs={"by_state": True}
    )
    other.start()
    other.join()
    assert (other.exitcode, start.stretch, start.num_sets) == (0, RESUMED, 1)


def put_on_record(launch: Launch, number: int, worker: Worker | None) -> int:
    """How many rounds were put on record before this one."""
    num_before = launch.num_before(number, worker)
    launch.put_on_record(number, worker, num_before)
    return num_before


def test_rounds_on_record_are_numbered_and_workers_of_one_round_alike() -> None:
    launch = Launch()

    def by_workers(seed: int, *workers: int, number: int = 1) -> list[int]:
        return [put_on_record(launch, number, worker(n, seed)) for n in workers]

    assert [put_on_record(launch, number, None) for number in (1, 2)] == [0, 1]
    assert by_workers(5, 0, 1, 2) == [2, 2, 2]
    assert put_on_record(launch, 3, None) == 3
    assert by_workers(6, 1) == [4]  # of which the others never began
    assert by_workers(7, 2, 0, 1) == [5, 5, 5]
    assert by_workers(7, 0, 1, number=2) == [6, 6]  # the same processes again
    assert by_workers(5, 0, 1, 2) == [7, 7, 7]  # of a loader that was given the same seed
    assert by_workers(5, 0, 1, 2) == [8, 8, 8]
    assert by_workers(9, 0, 1) == [9, 9]
    assert by_workers(8, 0) == [10]
    assert by_workers(9, 2) == [9]  # that comes late
    assert by_workers(8, 2, 1) == [10, 10]
    # Two that ask before either is on record.
    assert [launch.num_before(1, worker(n, 10)) for n in (0, 1)] == [11, 11]


def test_a_copy_begins_at_the_same_place_and_is_a_launch_of_its_own() -> None:
    start, launch = SharedStart(RESUMED), Launch()
    take(start, 1, None)
    launch.take(1, None)
    put_on_record(launch, 1, None)
    copied, other = deepcopy((start, launch))
    assert (launch.num_before(3, None), other.num_before(3, None)) == (1, 0)
    assert (launch.is_first(2, None), other.is_first(2, None)) == (False, True)
    assert other.name != launch.name
    assert (copied.stretch, copied.is_taken) == (RESUMED, True)
    copied.set(replace(RESUMED, num_steps=60), by_state=True)
    assert start.stretch == RESUMED


def _loops(dataset: IterableDataset[tuple[bool, str]], start: SharedStart, launch: Launch, told: Connection) -> None:
    """What a process that did not make the start sees of two rounds of its own workers."""
    get_context("forkserver").set_forkserver_preload(["penstock.state.start"])  # the server of this process, not of the tests
    rounds = [list(DataLoader(dataset, batch_size=None, num_workers=2)) for _ in range(2)]
    launches = {name for given in rounds for _, name in given}
    told.send(([[is_ours for is_ours, _ in given] for given in rounds], start.is_with_workers, launches == {launch.name},
               launch.name, launch.num_before(1, None)))  # fmt: skip


class _Rounds(IterableDataset[tuple[bool, str]]):
    """Whether a round of workers takes the start, and of what launch it is; once a worker. Counts it as put on record."""

    def __init__(self, start: SharedStart, launch: Launch) -> None:
        self.start, self.launch = start, launch

    def __iter__(self) -> Iterator[tuple[bool, str]]:
        found = find_worker()
        is_ours = self.start.begin(1, found)
        self.start.take(1, found)
        put_on_record(self.launch, 1, found)
        yield is_ours, self.launch.name


@pytest.mark.parametrize("context", CONTEXTS, ids=["fork", "pickle"])
def test_a_process_that_did_not_make_it_shares_it_with_its_own_workers(context: ForkContext | ForkServerContext) -> None:
    start, launch = SharedStart(RESUMED), Launch()
    put_on_record(launch, 1, worker(1, 5))  # of the launch that made it
    here, there = context.Pipe()
    other = context.Process(target=_loops, args=(_Rounds(start, launch), start, launch, there))
    other.start()
    there.close()  # or one that dies would be waited for
    rounds, is_with_workers, is_one_launch, name, num_on_record = here.recv()
    assert (rounds, is_with_workers, is_one_launch) == ([[True, True], [False, False]], True, True)
    other.join()
    assert num_on_record == 2
    assert name != launch.name
    assert (start.is_taken, start.num_sets) == (False, 1)  # as the process has it that made it


def test_more_workers_than_are_kept_track_of_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "get_worker_info", lambda: SimpleNamespace(id=1, num_workers=1025, seed=8))
    with pytest.raises(PenstockError, match="a DataLoader of 1,025 workers has more than the 1,024"):
        find_worker()


def test_without_shared_memory_only_workers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensor: torch.Tensor) -> None:
        raise RuntimeError("unable to write to file </torch_1>: No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    start = SharedStart(RESUMED)
    assert take(start, 1, None)
    with pytest.raises(PenstockError, match=r"Give /dev/shm more room, or take num_workers=0"):
        start.begin(2, worker(0, loader_seed=5))
