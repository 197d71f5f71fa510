"""Progress: the steps that the training loop consumed, and the step range of its next iteration."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from penstock.distributed import Worker
from penstock.state.launch import Launch, round_name
from penstock.state.start import SharedStart, StepRange
from penstock.state.state import Position

_STUCK_LOOKS = 2  # one-batch iterations before the third


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One iteration of this process: the steps of a range that it yields. `number` and `num_sets` identify it.

    is_repetition  the iteration before it yielded more than one batch of the same epoch, and neither set_epoch nor
                   load_state_dict was called since: the loop repeats data, probably by mistake
    is_stuck       the third iteration in a row that begins at the same batch, after two that ended there: the loop
                   calls next(iter(data)) in each step
    is_first       no earlier pass yielded a batch, in any process
    num_loads      number of states loaded before it
    state_epoch    the epoch that the loop's last loaded state had consumed in part; None without such a state
    launch         names the process of the loop, also in the loop's loader workers
    """

    worker: Worker | None
    stretch: StepRange
    steps: range
    number: int
    num_sets: int
    is_repetition: bool
    is_stuck: bool
    is_first: bool
    num_loads: int
    state_epoch: int | None
    launch: str

    @property
    def name(self) -> int:
        """Name of the pass: positive and equal for all its workers; negative in the loop's process."""
        return round_name(self.number, self.worker)


@dataclass(slots=True)
class _Counted:
    """Batches that the loop consumed after `position`, since the start was set for the `num_sets`th time.

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
    """Position of the loop, as far as this process knows."""

    def __init__(self, steps_per_epoch: int) -> None:
        self._steps_per_epoch = steps_per_epoch
        self._start, self._launch = SharedStart(self._whole(0)), Launch()
        # A loader worker's start: (num_sets, range). A new shared start replaces it.
        self._own: tuple[int, StepRange] | None = None
        # The worker that this process is; None until it has loaded a state.
        self._loaded: Worker | None = None
        self._num_rounds = 0
        # The loop repeats the epoch on purpose.
        self._is_meant = False
        self._num_looks = 0  # iterations in a row that ended after the same first batch
        self._counted = _Counted()

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._start.stretch.position.epoch

    @property
    def num_left(self) -> int:
        """Number of steps of the next iteration."""
        return self._steps_per_epoch if self._start.is_taken else self._start.stretch.num_left

    @property
    def discards(self) -> int:
        """Number of steps after a set position that no iteration has continued from; 0 without one."""
        at = self._start.stretch.position
        return self._start.stretch.num_left if not self._start.is_taken and (at.step or at.offset) else 0

    @property
    def has_loaded(self) -> bool:
        """Whether a state was loaded, and no iteration has continued from it yet."""
        return not self._start.is_taken and self._start.is_by_state

    @property
    def is_resumed(self) -> bool:
        """Whether an iteration has continued from a loaded state."""
        return self._start.is_taken and self._start.is_by_state

    @property
    def is_left(self) -> bool:
        """Whether the last iteration yielded more than one batch, but not all of its batches."""
        counted = self._counted
        has_left = self._start.is_taken and counted.num_steps < counted.num_left
        return has_left and self._has_been_in(self._whole(self.epoch), self._start.num_sets)

    @property
    def is_with_workers(self) -> bool:
        """Whether loader workers iterate, so that this process, which is not one, cannot know the position."""
        return self._start.is_with_workers

    @property
    def position(self) -> Position:
        """Position of the loop: the end of its consumed steps, or a set position until an iteration continues from it."""
        counted = self._counted
        if counted.num_sets != self._start.num_sets:
            return self._start.stretch.position
        return replace(counted.position, step=counted.position.step + counted.num_steps)

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the first step of the epoch."""
        self._set(self._whole(epoch), by_state=False)
        self._start.choose()

    def go_to(self, stretch: StepRange, worker: Worker | None) -> None:
        """Set the range of the next iteration from a state. In a loader worker, the others take only the epoch.

        If the epoch has no steps left, the next epoch begins: otherwise a loop that never calls set_epoch would get an epoch
        without batches. A loop that chooses the ended epoch means that epoch, and gets no batches of it.

        Loaders pass a state on only when the loop begins an iteration. The loop may have chosen a later epoch by then; a state
        from the end of an epoch does not know that.
        """
        chosen = self.epoch  # read once: another worker may move the start at any moment
        is_behind = self._start.is_chosen and stretch.position.epoch < chosen
        is_meant = self._start.is_chosen and stretch.position.epoch == chosen
        self._start.load(stretch.position, worker)
        self._loaded = worker
        if worker is None:
            if stretch.num_left or is_meant:
                self._set(stretch, by_state=True)
            elif not is_behind:
                self._set(self._whole(stretch.position.epoch + 1), by_state=True)
                self._start.end(stretch.position.epoch)
            return
        if _steps_of(stretch, worker) or stretch.position.epoch > self.epoch:
            # A worker's state may report steps left even at an epoch's end; the loader skips them.
            if is_behind:
                self._start.put_off(chosen)
            self._start.move(self._whole(stretch.position.epoch), by_state=True)
        self._own = (self._start.num_sets, stretch)
        self._counted = _Counted(self._start.num_sets, stretch.position)

    def confirm_epoch(self, epoch: int) -> None:
        """Record that the loop chooses an epoch. A repeat is on purpose, or already warned about: see is_left."""
        self._is_meant = True
        if epoch == self._start.ended_epoch:
            ended = Position(epoch=epoch, step=self._steps_per_epoch)
            self._set(StepRange(position=ended, num_steps=self._steps_per_epoch), by_state=True)
        self._start.choose()

    def begin(self, worker: Worker | None) -> Pass:
        """Begin an iteration at the start that was set, or at the epoch's first step if that start is taken."""
        self._num_rounds += 1
        is_ours = self._start.begin(self._num_rounds, worker)
        if not is_ours and (epoch := self._start.put_off_epoch):
            self._start.move(self._whole(epoch), by_state=False)
        stretch = self._start.stretch if is_ours else self._whole(self.epoch)
        num_sets = self._start.num_sets
        begins_again = not worker and not is_ours
        has_been_in = self._has_been_in(stretch, num_sets)
        is_repetition = begins_again and has_been_in and not self._is_meant
        self._is_meant = False
        was_look = begins_again and not has_been_in and self._has_looked_at(stretch, num_sets)
        self._num_looks = self._num_looks + 1 if was_look else 0
        if self._own and self._own[0] == num_sets:
            stretch = self._own[1]
        self._own = None
        steps = _steps_of(stretch, worker)
        self._counted = _Counted(num_sets, stretch.position, steps.step, stretch.num_left)
        return Pass(
            worker=worker,
            stretch=stretch,
            steps=steps,
            number=self._num_rounds,
            num_sets=num_sets,
            is_repetition=is_repetition,
            is_stuck=self._num_looks == _STUCK_LOOKS,
            is_first=self._launch.is_first(self._num_rounds, worker),
            num_loads=self._start.num_loads(self._loaded),
            state_epoch=self._start.state_epoch,
            launch=self._launch.name,
        )

    def finish(self, round_: Pass) -> None:
        """Record that the iteration yielded all its batches. An empty range is taken here: it has no first batch."""
        if not round_.stretch.num_left:
            self.take(round_)

    def enter(self, round_: Pass) -> None:
        """Record that the loop requests the first batch of the iteration."""
        if round_.num_sets == self._start.num_sets:
            self._start.enter(round_.number, round_.worker)

    def take(self, round_: Pass) -> None:
        """Record that the iteration yields its first batch; the next iteration is a new pass."""
        self._launch.take(round_.number, round_.worker)
        if round_.num_sets == self._start.num_sets:
            self._start.take(round_.number, round_.worker)

    def give_back(self, round_: Pass) -> None:
        """Record that the iteration failed before its first batch; the next one has the same range."""
        if round_.num_sets == self._start.num_sets:
            self._start.give_back(round_.worker)

    def num_before(self, round_: Pass) -> int:
        """Number of passes of the launch that were recorded before this one."""
        return self._launch.num_before(round_.number, round_.worker)

    def put_on_record(self, round_: Pass, num_before: int) -> None:
        """Record this pass; `num_before` passes were recorded before it."""
        self._launch.put_on_record(round_.number, round_.worker, num_before)

    def counts(self, round_: Pass) -> bool:
        """Whether `position` belongs to this iteration: since then none began, and this process set no start."""
        return round_.number == self._num_rounds and round_.num_sets == self._counted.num_sets

    def count(self, round_: Pass, num_batches: int) -> None:
        """Record that the loop has consumed `num_batches` batches of the iteration."""
        # `position` checks whether a worker set the start: a check here would cost microseconds per batch.
        if self.counts(round_):
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

    def _set(self, stretch: StepRange, *, by_state: bool) -> None:
        self._num_rounds += 1  # stops the count of an iteration that still runs
        self._start.set(stretch, by_state=by_state)

    def _whole(self, epoch: int) -> StepRange:
        return StepRange(position=Position(epoch=epoch), num_steps=self._steps_per_epoch)


def _steps_of(stretch: StepRange, worker: Worker | None) -> range:
    """Return the steps of a range that a worker yields; all of them without a worker."""
    first, stride = (worker.first, worker.stride) if worker else (0, 1)
    return range(stretch.position.step + first, stretch.num_steps, stride)
