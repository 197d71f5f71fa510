"""The first pass takes the steps that were set, however many workers it has, and whichever of them begin."""

import pickle
from collections.abc import Iterator
from copy import copy, deepcopy
from dataclasses import replace
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, ForkServerContext

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from penstock.distributed import LoaderWorker, find_worker
from penstock.errors import PenstockError
from penstock.progress import Pass, Progress
from penstock.state import Cursor, StateOrigin

RESUMED = Cursor(epoch=2, offset=100, step=7, num_steps=50)
ENDED = replace(RESUMED, step=50)
ORIGIN = StateOrigin("1" * 16, "2" * 16, 2, 128)
# The second pickles what a process is given, as spawn does, and does not import torch anew for each.
CONTEXTS = [get_context("fork"), get_context("forkserver")]


def worker(first: int, loader: int = 0) -> LoaderWorker:
    return LoaderWorker(first, 3, loader)


def take(progress: Progress, worker: LoaderWorker | None = None) -> Pass:
    """A pass begins and yields a batch."""
    begun = progress.begin(worker)
    progress.take(begun)
    return begun


def steps_of(this: Pass) -> range:
    [(_, steps)] = this.epochs()
    return steps


def resumed() -> Progress:
    progress = Progress(50)
    progress.load(RESUMED, ORIGIN, None)
    return progress


def test_set_steps_are_taken_once() -> None:
    progress = resumed()
    assert (progress.cursor, progress.num_left, progress.has_loaded) == (RESUMED, 43, True)
    assert steps_of(take(progress)) == range(7, 50)
    assert (progress.num_left, progress.has_loaded, progress.is_resumed) == (50, False, True)
    assert steps_of(take(progress)) == range(50)
    progress.set_epoch(3)
    assert (progress.num_left, progress.is_resumed, take(progress).cursor) == (50, False, Cursor(epoch=3, num_steps=50))


def test_pass_takes_nothing_when_it_fails_before_its_first_batch() -> None:
    progress = resumed()
    for _ in range(2):
        assert steps_of(progress.begin(None)) == range(7, 50)
        assert steps_of(progress.begin(worker(0))) == range(7, 50, 3)


def test_progress_made_or_copied_in_inference_mode_can_be_set_afterwards() -> None:
    with torch.inference_mode():
        made = Progress(50)
        copied = pickle.loads(pickle.dumps(made))
    for progress in (made, copied):
        progress.set_epoch(4)
        assert progress.epoch == 4


def test_state_is_taken_by_all_workers_of_one_pass() -> None:
    progress = resumed()

    def steps(number: int, loader: int) -> range:
        return steps_of(take(copy(progress), worker(number, loader)))  # each in a process that shares the cells

    assert [steps(number, loader=1) for number in (2, 0)] == [range(9, 50, 3), range(7, 50, 3)]
    # The loop was left before worker 1 began; the next loader's worker 1 must not do otherwise than its others.
    assert [steps(number, loader=4) for number in range(3)] == [range(number, 50, 3) for number in range(3)]
    assert progress.is_with_workers
    take(progress)
    assert not progress.is_with_workers


def test_passes_of_persistent_workers_are_distinguished() -> None:
    loop = resumed()
    workers = [copy(loop) for _ in range(3)]
    for first in (7, 0, 0):
        steps = [steps_of(take(own, worker(number))) for number, own in enumerate(workers)]
        assert steps == [range(first + number, 50, 3) for number in range(3)]
    loop.load(RESUMED, ORIGIN, None)
    assert steps_of(take(workers[0], worker(0))) == range(7, 50, 3)


def test_copy_is_independent_and_has_another_start() -> None:
    progress = resumed()
    for copied in (pickle.loads(pickle.dumps(progress)), deepcopy(progress)):
        assert copied.cursor == RESUMED
        take(copied)
        assert not progress.is_resumed
        assert (copied.start != progress.start, copied.origin, copied.ids[1]) == (True, StateOrigin(), copied.start)


def test_state_is_not_taken_by_workers_started_before_it() -> None:
    """They may come to their first batch when the loop has long left them."""
    progress = Progress(50)
    left = progress.begin(worker(0, loader=1))
    progress.load(RESUMED, ORIGIN, None)
    progress.take(left)
    assert (progress.has_loaded, progress.num_left) == (True, 43)
    assert steps_of(progress.begin(worker(0, loader=4))) == range(7, 50, 3)


def test_state_of_a_worker_is_for_its_next_pass_unless_the_loop_chooses_an_epoch() -> None:
    """As of one that lives on from epoch to epoch."""
    progress, own = Progress(50), worker(1)
    for then in (2, 3):  # the loop had chosen epoch 3 before the state came
        progress.load(RESUMED, ORIGIN, own)
        assert progress.cursor == RESUMED
        for epoch, steps in ((2, range(8, 50, 3)), (then, range(1, 50, 3)), (then, range(1, 50, 3))):
            begun = take(progress, own)
            assert (begun.cursor.epoch, steps_of(begun)) == (epoch, steps)
        progress.load(RESUMED, ORIGIN, own)
        progress.set_epoch(3)
        assert steps_of(progress.begin(own)) == range(1, 50, 3)


@pytest.mark.parametrize(("epoch", "step", "expected"), [(0, 7, 2), (0, 50, 2), (3, 7, 3), (3, 50, 3)])
def test_state_of_a_worker_moves_the_epoch_unless_the_loop_chose_a_later_one(epoch: int, step: int, expected: int) -> None:
    progress = Progress(50)
    progress.set_epoch(epoch)
    progress.load(replace(RESUMED, step=step), ORIGIN, worker(1))
    assert progress.epoch == expected


@pytest.mark.parametrize(("epoch", "step", "expected"), [(0, 50, 3), (2, 50, 2), (3, 7, 2), (3, 50, 3)])
def test_state_of_an_epochs_end_keeps_a_later_epoch_of_the_loop(epoch: int, step: int, expected: int) -> None:
    progress = Progress(50)
    progress.set_epoch(epoch)
    progress.load(replace(RESUMED, step=step), ORIGIN, None)
    assert progress.epoch == expected
    take(progress)
    progress.load(ENDED, ORIGIN, None)  # back from an epoch that it is in
    assert (progress.epoch, progress.num_left) == (3, 50)


def test_last_turn_of_workers_may_be_short() -> None:
    progress = Progress(50)
    begun = progress.begin(worker(1))
    for num_batches, step in ((16, 48), (17, 50)):
        progress.count(begun, num_batches)
        assert progress.cursor.step == step


def test_state_names_the_start_that_consumed_its_samples() -> None:
    progress = Progress(50)
    assert [*progress.ids] == [None, None]
    first = take(progress).start
    assert [*progress.ids] == [first, first]
    progress.set_epoch(1)
    assert take(progress).start == first
    progress.load(RESUMED, StateOrigin(first, first, 2, 128), None)
    assert [*progress.ids] == [first, first]
    second = take(progress)
    assert second.start != first
    assert [*progress.ids, second.origin.parent] == [first, second.start, first]
    again = take(progress)  # the same epoch once more, without a state
    assert (again.start != second.start, again.origin) == (True, StateOrigin(run=first))
    progress.rewind(0)
    assert [*progress.ids] == [None, None]


def test_workers_of_one_pass_are_one_start_when_they_load_states() -> None:
    loop = Progress(50)

    def starts(loader: int) -> set[str]:
        found = set()
        for number in range(3):
            process = copy(loop)  # which shares the cells
            process.load(RESUMED, replace(ORIGIN, samples=number), worker(number, loader))
            begun = process.begin(worker(number, loader))
            assert begun.origin == replace(ORIGIN, samples=number)
            found.add(begun.start)
        return found

    [[first], [second]] = starts(loader=1), starts(loader=4)
    assert first != second
    assert loop.ids == ("1" * 16, second)


@pytest.mark.parametrize("context", CONTEXTS, ids=["fork", "pickle"])
def test_progress_is_unchanged_by_another_process(context: ForkContext | ForkServerContext) -> None:
    """As one that evaluates on the dataset that its parent trains on."""
    progress = resumed()
    other = context.Process(target=progress.set_epoch, args=(9,))
    other.start()
    other.join()
    assert (other.exitcode, progress.cursor) == (0, RESUMED)


class _Passes(IterableDataset[tuple[int, str]]):
    """The first step of each worker's pass, and the id of its start."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def __iter__(self) -> Iterator[tuple[int, str]]:
        found = find_worker()
        begun = take(self.progress, found)
        yield begun.cursor.step, begun.start


def _loops(dataset: _Passes, told: Connection) -> None:
    """What a process that did not make the progress sees of its workers' first pass."""
    get_context("forkserver").set_forkserver_preload(["penstock.progress"])  # the server of this process, not of the tests
    told.send(list(DataLoader(dataset, batch_size=None, num_workers=2)))


def test_workers_share_the_progress_of_their_loop() -> None:
    progress = resumed()
    passes = [list(DataLoader(_Passes(progress), batch_size=None, num_workers=2)) for _ in range(2)]
    assert [[step for step, _ in each] for each in passes] == [[7, 7], [0, 0]]
    assert [len({start for _, start in each}) for each in passes] == [1, 1]
    assert progress.is_with_workers


@pytest.mark.parametrize("context", CONTEXTS, ids=["fork", "pickle"])
def test_progress_of_a_fork_is_moved_by_its_own_workers_only(context: ForkContext | ForkServerContext) -> None:
    progress = resumed()
    here, there = context.Pipe()
    other = context.Process(target=_loops, args=(_Passes(progress), there))
    other.start()
    there.close()  # or one that dies would be waited for
    assert [step for step, _ in here.recv()] == [7, 7]
    other.join()
    assert not progress.is_resumed


def test_workers_are_refused_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensor: torch.Tensor) -> None:
        raise RuntimeError("unable to write to file </torch_1>: No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    progress = resumed()
    assert steps_of(take(progress)) == range(7, 50)
    with pytest.raises(PenstockError, match=r"Give /dev/shm more room"):
        progress.begin(worker(0))


class Loop:
    """A loop of a progress whose epochs have ten steps, and what it was given: pairs of epoch and step."""

    def __init__(self, num_epochs: int) -> None:
        self.progress = Progress(10, num_epochs=num_epochs)
        self.given: list[tuple[int, int]] = []

    def take(self, num_batches: int) -> None:
        """Another iteration, which the loop leaves after so many batches."""
        if self.progress.goes_on:
            self.progress.load(self.progress.cursor, ORIGIN, None)
        this = self.progress.begin(None)
        batches = ((at.epoch, step) for at, steps in this.epochs() for step in steps)
        for number, batch in enumerate(islice(batches, num_batches), start=1):
            self.progress.take(this)
            self.progress.count(this, number)
            self.given.append(batch)
        if len(self.given) == 10 * 3:
            self.progress.finish(this)


def test_iterations_of_several_epochs_go_on_after_the_last_batch() -> None:
    for num_batches in (1, 3, 7, 10, 11, 25, 40):
        loop = Loop(3)
        while loop.progress.num_left:
            before = loop.progress.num_left
            loop.take(num_batches)
            assert loop.progress.num_left == max(0, before - num_batches)
        assert loop.given == [(epoch, step) for epoch in range(3) for step in range(10)]
        loop.take(1)
        assert (len(loop.given), loop.progress.epoch) == (30, 2)


def test_place_after_an_epochs_last_step_is_in_that_epoch_and_goes_on_with_the_next() -> None:
    loop = Loop(3)
    loop.take(10)
    assert loop.progress.cursor == Cursor(epoch=0, step=10, num_steps=10)
    assert (loop.progress.epoch, loop.progress.is_in(0), loop.progress.is_in(1), loop.progress.is_in(2)) == (
        1,
        True,
        True,
        False,
    )
    other = Loop(3)
    other.progress.load(loop.progress.cursor, ORIGIN, None)
    other.take(2)
    assert other.given == [(1, 0), (1, 1)]


@pytest.mark.parametrize("stride", [1, 2, 3, 7, 12, 31])
def test_workers_take_turns_across_epochs(stride: int) -> None:
    progress = Progress(10, num_epochs=4)
    progress.load(Cursor(epoch=1, step=3, num_steps=10), ORIGIN, None)
    expected = [(1, step) for step in range(3, 10)] + [(epoch, step) for epoch in (2, 3) for step in range(10)]
    passes = [take(copy(progress), LoaderWorker(first, stride, 0)) for first in range(stride)]
    assert [this.num_batches for this in passes] == [len(expected[first::stride]) for first in range(stride)]
    for first, this in enumerate(passes):
        assert [(at.epoch, step) for at, steps in this.epochs() for step in steps] == expected[first::stride]
        # All workers that yielded as many batches count to the same place, from which each goes on with its own.
        for number in range(this.num_batches + 1):
            resumed = replace(this, cursor=this.after(number))
            resumed = replace(resumed, later=range(resumed.cursor.epoch + 1, 4))
            rest = [(at.epoch, step) for at, steps in resumed.epochs() for step in steps]
            assert rest == expected[first::stride][number:]


def test_iteration_does_not_go_on_after_one_of_loader_workers() -> None:
    progress = Progress(10, num_epochs=3)
    for number in range(2):
        take(copy(progress), LoaderWorker(number, 2, 1))
    for later in (None, LoaderWorker(0, 2, 3)):
        with pytest.raises(PenstockError, match="ran ahead of the loop"):
            copy(progress).begin(later)
    progress.set_epoch(1)
    take(progress)
