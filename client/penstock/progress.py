"""Progress of a training loop through its epochs, also if the loop's DataLoader workers iterate.

The process of the loop and its workers share a few integers: the steps of the next pass, the pass that took them, and the ids
of the start. A pass is one iteration of the loop, in this process or in its workers. The first pass that yields a batch takes
the steps that were set; later passes repeat their epoch from its first step.
"""

from __future__ import annotations

import multiprocessing
import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import torch

from penstock.distributed import Worker, agree, find_worker
from penstock.errors import PenstockError
from penstock.state import Origin, Position, StepRange

_STUCK_LOOKS = 2  # one-batch iterations before the third
# EPOCH, OFFSET, STEP, NUM_STEPS  the steps of the next pass
# SETS        number of times that steps were set
# TAKEN_BY    the pass that took these steps; 0: none yet
# BY_WORKERS  1: loader workers yielded the last batch
# BY_STATE    1: a loaded state set the steps
# CHOSEN      1: the loop chose the epoch, and no pass has yielded a batch since
# START       id of the start of the next pass
# FIRST       the first pass of this start; 0: none has begun
# RUN, PARENT, PARENT_EPOCH, PARENT_SAMPLES  the start's origin; ids are 0 without one
_EPOCH, _OFFSET, _STEP, _NUM_STEPS, _SETS, _TAKEN_BY, _BY_WORKERS, _BY_STATE, _CHOSEN, _START = range(10)
_FIRST, _RUN, _PARENT, _PARENT_EPOCH, _PARENT_SAMPLES, _NUM_CELLS = range(10, 16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One iteration of this process: the steps of a range that it yields.

    name           equal for all workers of a pass and positive; negative in the loop's process
    num_sets       number of times that steps were set before it
    start, origin  id of the start, and the state that the start loaded
    is_first       no earlier pass of the start yielded a batch
    is_repetition  the iteration before it yielded more than one batch of the same epoch, and neither set_epoch nor
                   load_state_dict was called since: the loop repeats data, probably by mistake
    is_stuck       the third iteration in a row that begins at the same batch, after two that ended there: the loop
                   calls next(iter(data)) in each step
    """

    worker: Worker | None
    stretch: StepRange
    steps: range
    name: int
    num_sets: int
    start: str
    origin: Origin
    is_first: bool = False
    is_repetition: bool = False
    is_stuck: bool = False


@dataclass(slots=True)
class _Counted:
    """Batches that the loop consumed after `position`, since the steps were set for the `num_sets`th time.

    A worker yields every `stride`th step. It counts `stride` steps per batch, and adds its worker number when it resumes. The
    last turn of the workers may be short, so the count stops at `num_left` steps.
    """

    num_sets: int = 0
    position: Position = field(default_factory=Position)
    stride: int = 1
    num_left: int = 0
    num_batches: int = 0

    @property
    def num_steps(self) -> int:
        """Number of steps that these batches cover."""
        return min(self.num_batches * self.stride, self.num_left)


class Progress:
    """Position of the loop, as far as this process knows. `name` is equal for the ranks that share an epoch."""

    def __init__(self, steps_per_epoch: int, name: str = "") -> None:
        self._steps_per_epoch, self._name = steps_per_epoch, name
        self._shared = SharedCells(_NUM_CELLS)
        self._num_passes, self._latest = 0, 0  # the latest pass, unless steps were set since then
        # Steps and origin of this loader worker's next pass, from its own state, and the number of sets at that time.
        self._loaded: tuple[int, StepRange, Origin] | None = None
        self._ended_epoch: int | None = None  # the epoch that the loaded state had finished
        self._is_meant = False  # the loop repeats the epoch on purpose
        self._num_looks = 0  # iterations in a row that ended after the same first batch
        self._counted = _Counted()
        self._begin_start(Origin())
        self._set(self._whole(0), by_state=False)

    @property
    def _cells(self) -> torch.Tensor:
        return self._shared.now

    @property
    def _stretch(self) -> StepRange:
        """The steps that were set last, taken or not."""
        epoch, offset, step, num_steps = self._cells[: _NUM_STEPS + 1].tolist()
        return StepRange(position=Position(epoch=epoch, offset=offset, step=step), num_steps=num_steps)

    @property
    def _num_sets(self) -> int:
        return int(self._cells[_SETS])

    @property
    def _is_taken(self) -> bool:
        return bool(self._cells[_TAKEN_BY])

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return int(self._cells[_EPOCH])

    @property
    def num_left(self) -> int:
        """Number of steps of the next iteration."""
        return self._steps_per_epoch if self._is_taken else self._stretch.num_left

    @property
    def discards(self) -> int:
        """Number of steps after a set position that no iteration has continued from; 0 without one."""
        at = self._stretch.position
        return self._stretch.num_left if not self._is_taken and (at.step or at.offset) else 0

    @property
    def has_loaded(self) -> bool:
        """Whether a state was loaded, and no iteration has continued from it yet."""
        return not self._is_taken and bool(self._cells[_BY_STATE])

    @property
    def is_resumed(self) -> bool:
        """Whether an iteration has continued from a loaded state."""
        return self._is_taken and bool(self._cells[_BY_STATE])

    @property
    def is_left(self) -> bool:
        """Whether the last iteration yielded more than one batch, but not all of its batches."""
        has_left = self._is_taken and self._counted.num_steps < self._counted.num_left
        return has_left and self._has_been_in(self._whole(self.epoch), self._num_sets)

    @property
    def is_with_workers(self) -> bool:
        """Whether loader workers iterate, so that this process, which is not one, cannot know the position."""
        return self._is_taken and bool(self._cells[_BY_WORKERS])

    @property
    def position(self) -> Position:
        """Position of the loop: the end of its consumed steps, or a set position until an iteration continues from it."""
        counted = self._counted
        if counted.num_sets != self._num_sets:
            return self._stretch.position
        return replace(counted.position, step=counted.position.step + counted.num_steps)

    @property
    def start(self) -> str:
        """Id of the start of the next iteration."""
        return _text_of(self._cells[_START])

    @property
    def origin(self) -> Origin:
        """The state that this start loaded."""
        run, parent, epoch, samples = self._cells[_RUN:].tolist()
        return Origin(_text_of(run) if run else None, _text_of(parent) if parent else None, epoch, samples)

    @property
    def ids(self) -> tuple[str | None, str | None]:
        """Ids of the run and of the start that consumed the samples before the position; None without one."""
        origin = self.origin
        return (origin.run or self.start, self.start) if self._cells[_FIRST] else (origin.run, origin.parent)

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the first step of the epoch."""
        self._set(self._whole(epoch), by_state=False)
        self._cells[_CHOSEN] = 1

    def rewind(self, epoch: int) -> None:
        """Start the next iteration at the first step of the epoch, as a start without a state."""
        self._begin_start(Origin())
        self.set_epoch(epoch)

    def load(self, stretch: StepRange, origin: Origin, worker: Worker | None) -> None:
        """Set the steps of the next iteration from a state. In a loader worker, the others take only the epoch.

        If the epoch has no steps left, the next epoch begins: otherwise a loop that never calls set_epoch would get an epoch
        without batches. A loop that chooses the ended epoch means that epoch, and gets no batches of it.

        Loaders pass a state on only when the loop begins an iteration. The loop may have chosen a later epoch by then; a state
        from the end of an epoch does not know that.
        """
        epoch, chosen = stretch.position.epoch, self.epoch if self._cells[_CHOSEN] else None
        if worker:
            is_behind = chosen is not None and epoch < chosen
            if (_steps_of(stretch, worker) or epoch > self.epoch) and not is_behind:
                self._move(self._whole(epoch), by_state=True)
            self._loaded = (self._num_sets, stretch, origin)
            self._counted = _Counted(self._num_sets, stretch.position)
            return
        self._begin_start(origin)
        if stretch.num_left or chosen == epoch:
            self._set(stretch, by_state=True)
        elif chosen is None or chosen < epoch:
            self._set(self._whole(epoch + 1), by_state=True)
            self._ended_epoch = epoch

    def confirm_epoch(self, epoch: int) -> None:
        """Record that the loop chooses an epoch. A repeat is on purpose, or already warned about: see is_left."""
        self._is_meant = True
        if epoch == self._ended_epoch and not self._is_taken:
            ended = Position(epoch=epoch, step=self._steps_per_epoch)
            self._set(StepRange(position=ended, num_steps=self._steps_per_epoch), by_state=True)
        self._cells[_CHOSEN] = 1

    def begin(self, worker: Worker | None) -> Pass:
        """Begin an iteration at the steps that were set, or at the epoch's first step if a pass took them.

        Raises PenstockError: no memory is shared, so the loop's process and other workers would not see this worker's pass.
        """
        if worker and not self._shared.is_shared:
            raise PenstockError(
                "no memory could be shared between this process and its loader workers when the dataset was made, so it "
                "cannot count their batches. Give /dev/shm more room, or take num_workers=0: a thread fetches ahead anyway."
            )
        self._num_passes += 1
        name = (worker.loader << 32) + self._num_passes if worker else -self._num_passes
        has_begun = self._cells[_TAKEN_BY] not in (0, name)
        stretch, num_sets = self._whole(self.epoch) if has_begun else self._stretch, self._num_sets
        has_been_in = self._has_been_in(stretch, num_sets)
        was_look = has_begun and not worker and not has_been_in and self._has_looked_at(stretch, num_sets)
        self._num_looks = self._num_looks + 1 if was_look else 0
        is_repetition = has_begun and not worker and has_been_in and not self._is_meant
        self._is_meant = False
        is_first = not has_begun and bool(self._cells[_FIRST] in (0, name))
        start, origin = self.start, self.origin
        if worker and self._loaded and self._loaded[0] == num_sets:
            _, stretch, origin = self._loaded
            start = _derived_id(self._drawn, origin, name)
            self._write_ids(start, origin)
        elif has_begun:  # the epoch once more: a start without a state, as its positions were trained on before
            origin = Origin(run=origin.run or start)
            start = _derived_id(self._drawn, origin, name) if worker else self._draw(origin)
            self._write_ids(start, origin)
        self._loaded = None
        if worker and not self._cells[_FIRST]:
            self._cells[_FIRST] = name
        steps, self._latest = _steps_of(stretch, worker), name
        self._counted = _Counted(num_sets, stretch.position, steps.step, stretch.num_left)
        return Pass(
            worker=worker,
            stretch=stretch,
            steps=steps,
            name=name,
            num_sets=num_sets,
            start=start,
            origin=origin,
            is_first=is_first,
            is_repetition=is_repetition,
            is_stuck=self._num_looks == _STUCK_LOOKS,
        )

    def finish(self, this: Pass) -> None:
        """Record that the iteration yielded all its batches. An empty range is taken here: it has no first batch."""
        if not this.stretch.num_left:
            self.take(this)

    def take(self, this: Pass) -> None:
        """Record that the iteration yields its first batch; the next iteration is a new pass."""
        if this.start == self.start and not self._cells[_FIRST]:
            self._cells[_FIRST] = this.name
        if this.num_sets == self._num_sets:
            self._cells[_BY_WORKERS] = int(this.worker is not None)
            self._cells[_CHOSEN] = 0
            if not self._is_taken:
                self._cells[_TAKEN_BY] = this.name

    def counts(self, this: Pass) -> bool:
        """Whether `position` belongs to this iteration: since then none began, and this process set no steps."""
        return this.name == self._latest and this.num_sets == self._counted.num_sets

    def count(self, this: Pass, num_batches: int) -> None:
        """Record that the loop has consumed `num_batches` batches of the iteration."""
        # `position` checks whether a worker set the steps: a check here would cost microseconds per batch.
        if self.counts(this):
            self._counted.num_batches = num_batches

    def _has_been_in(self, stretch: StepRange, num_sets: int) -> bool:
        """Whether the last iteration came further into the epoch than its first batch."""
        at, num_steps = self._counted.position, self._counted.num_steps
        came_far = at.offset > 0 or at.step + num_steps > min(1, stretch.num_steps - 1)
        return self._counted.num_sets == num_sets and came_far

    def _has_looked_at(self, stretch: StepRange, num_sets: int) -> bool:
        """Whether the last iteration ended after the first batch of this range."""
        counted = self._counted
        return (counted.num_sets, counted.position, counted.num_batches) == (num_sets, stretch.position, 1)

    def _begin_start(self, origin: Origin) -> None:
        """Begin a start that loads a state."""
        self._drawn = self._draw(origin)
        self._write_ids(self._drawn, origin)

    def _draw(self, origin: Origin) -> str:
        """Draw the id of a start; the ranks of a job draw the same id."""
        return agree(f"start/{self._name}/{origin}", _draw_id())

    def _write_ids(self, start: str, origin: Origin) -> None:
        ids = [int(text or "0", 16) for text in (start, origin.run, origin.parent)]
        values = [ids[0], 0, *ids[1:], origin.epoch, origin.samples]
        self._cells[_START:] = torch.tensor(values, device="cpu")

    def _set(self, stretch: StepRange, *, by_state: bool) -> None:
        self._latest = 0  # stops the count of an iteration that still runs
        self._ended_epoch = None
        self._move(stretch, by_state=by_state)
        self._cells[_SETS] += 1
        self._cells[_TAKEN_BY] = self._cells[_CHOSEN] = 0

    def _move(self, stretch: StepRange, *, by_state: bool) -> None:
        """Move the steps; they stay taken or not taken."""
        at = stretch.position
        self._cells[: _NUM_STEPS + 1] = torch.tensor([at.epoch, at.offset, at.step, stretch.num_steps], device="cpu")
        self._cells[_BY_STATE] = by_state

    def _whole(self, epoch: int) -> StepRange:
        return StepRange(position=Position(epoch=epoch), num_steps=self._steps_per_epoch)


class SharedCells:
    """Integers that the process of the loop shares with its loader workers, initially 0.

    A copy, and a fork that is no loader worker, such as one for evaluation, has private cells: its passes are of another start.
    """

    def __init__(self, num_cells: int) -> None:
        with torch.inference_mode(False):  # an inference tensor cannot be written outside of inference mode
            self._own(torch.zeros(num_cells, dtype=torch.int64, device="cpu"))  # torch's default device may be a GPU

    def _own(self, memory: torch.Tensor) -> None:
        self._process, self._memory = os.getpid(), memory
        with suppress(RuntimeError):  # no shared memory: this matters only with loader workers
            memory.share_memory_()  # type: ignore[no-untyped-call]

    def _separate(self) -> None:
        with torch.inference_mode(False):
            self._own(self._memory.clone())
        self._memory[_START:] = 0
        self._memory[_START] = int(_draw_id(), 16)

    @property
    def now(self) -> torch.Tensor:
        """The cells, to read and write: int64, shape [num_cells]."""
        if self._process != os.getpid() and not self._is_shared_here():
            self._separate()
        return self._memory

    @property
    def is_shared(self) -> bool:
        """Whether workers see writes to the cells; False if no memory could be shared."""
        return bool(self.now.is_shared())  # type: ignore[no-untyped-call]

    def _is_shared_here(self) -> bool:
        """Whether this process is a loader worker of the process that made the cells."""
        parent = multiprocessing.parent_process()
        return parent is not None and parent.pid == self._process and find_worker() is not None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._process == os.getpid():  # unpickled in the same process: a copy
            self._separate()

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedCells:
        """Return a copy with private cells."""
        copied = SharedCells.__new__(SharedCells)
        copied._memory = self.now
        copied._separate()
        return copied


def _steps_of(stretch: StepRange, worker: Worker | None) -> range:
    """Return the steps of a range that a worker yields; all of them without a worker."""
    first, stride = (worker.first, worker.stride) if worker else (0, 1)
    return range(stretch.position.step + first, stretch.num_steps, stride)


def _draw_id() -> str:
    return _text_of(int.from_bytes(os.urandom(8), "big") >> 1 or 1)  # fits a signed cell


def _text_of(number: int | torch.Tensor) -> str:
    return f"{int(number):016x}"


def _derived_id(drawn: str, origin: Origin, name: int) -> str:
    """Return the id of a start whose loader workers loaded their states: the same in all of them, without communication."""
    digest = blake2b(f"{drawn}/{origin.parent}/{name}".encode(), digest_size=8).digest()
    return _text_of(int.from_bytes(digest, "big") >> 1)
