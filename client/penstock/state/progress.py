"""Progress: what the training loop consumed, and what its next iteration runs over."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from penstock.rank import Worker
from penstock.state.launch import Launch, round_name
from penstock.state.start import SharedStart, StepRange
from penstock.state.state import Position

_STUCK_LOOKS = 2  # before the third


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One iteration of this process: the steps of a stretch that it gives. `number` and `num_sets` tell it from others.

    is_repetition  the iteration before it gave more than one batch of the same epoch, and neither set_epoch nor load_state_dict
                   was called since: the loop repeats data, probably by mistake
    is_stuck       the third iteration in a row that begins at the same batch, while those before ended after it: a loop
                   that calls next(iter(data)) in each step
    is_first       no round before it gave a batch, in whatever process
    num_loads      how many states were loaded before it
    state_epoch    the epoch of which the last state that the loop loaded had consumed something; None if there is none
    launch         names the process whose loop it is, or whose loader's worker this is
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
        """Equal for all workers of the round, and positive; negative for the loop's own."""
        return round_name(self.number, self.worker)


@dataclass(slots=True)
class _Counted:
    """What the loop consumed since the start was set for the `num_sets`th time: so many batches of `steps` behind a position.

    A worker's steps are every second, say: it counts whole turns of all workers, and adds its own number when it resumes. The
    last turn may be short, so no more than `num_left` steps are consumed.
    """

    num_sets: int = 0
    position: Position = field(default_factory=Position)
    stride: int = 1
    num_left: int = 0
    num_batches: int = 0

    @property
    def num_steps(self) -> int:
        """The steps that these batches are."""
        return min(self.num_batches * self.stride, self.num_left)


class Progress:
    """How far the loop is, as far as this process knows."""

    def __init__(self, steps_per_epoch: int) -> None:
        self._steps_per_epoch = steps_per_epoch
        self._start, self._launch = SharedStart(self._whole(0)), Launch()
        self._own: tuple[int, StepRange] | None = None  # a loader worker's own start, until the shared one is set anew
        self._loaded: Worker | None = None  # that this process is, once it has loaded a state
        self._num_rounds = 0
        self._is_meant = False  # that the epoch is given once more
        self._num_looks = 0  # iterations in a row that ended after the same first batch
        self._counted = _Counted()

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._start.stretch.position.epoch

    @property
    def num_left(self) -> int:
        """The steps of the next iteration."""
        return self._steps_per_epoch if self._start.is_taken else self._start.stretch.num_left

    @property
    def discards(self) -> int:
        """The steps that remain after a position that was set, while no iteration has gone on from there; else 0."""
        at = self._start.stretch.position
        return self._start.stretch.num_left if not self._start.is_taken and (at.step or at.offset) else 0

    @property
    def has_loaded(self) -> bool:
        """Whether a state was loaded from which no iteration has gone on yet."""
        return not self._start.is_taken and self._start.is_by_state

    @property
    def is_resumed(self) -> bool:
        """Whether an iteration has gone on from where a state put it."""
        return self._start.is_taken and self._start.is_by_state

    @property
    def is_left(self) -> bool:
        """Whether the iteration before gave more than a batch to look at, and not all that it had to give."""
        counted = self._counted
        has_left = self._start.is_taken and counted.num_steps < counted.num_left
        return has_left and self._has_been_in(self._whole(self.epoch), self._start.num_sets)

    @property
    def is_with_workers(self) -> bool:
        """Whether loader workers consume, so that this process, not being one of them, cannot know the position."""
        return self._start.is_with_workers

    @property
    def position(self) -> Position:
        """What the loop consumed. What was set holds until an iteration goes on from there."""
        counted = self._counted
        if counted.num_sets != self._start.num_sets:
            return self._start.stretch.position
        return replace(counted.position, step=counted.position.step + counted.num_steps)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration begins the epoch at its first step."""
        self._set(self._whole(epoch), by_state=False)
        self._start.choose()

    def go_to(self, stretch: StepRange, worker: Worker | None) -> None:
        """The next iteration runs over this. Of a loader worker only its own does; the others' take the epoch from it.

        If nothing is left of the epoch, it begins the next one: otherwise a loop that never calls set_epoch would be given an
        epoch of no batches. A loop that chooses the ended epoch does mean that epoch, and is given no batches of it.

        Loaders hand a state on only when the loop begins an iteration. It may have chosen a later epoch before that, of which
        a state from the end of one knows nothing.
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
            if is_behind:  # of an epoch's end, too, a worker's state may tell that steps are left, which the loader passes over
                self._start.put_off(chosen)
            self._start.move(self._whole(stretch.position.epoch), by_state=True)
        self._own = (self._start.num_sets, stretch)
        self._counted = _Counted(self._start.num_sets, stretch.position)

    def confirm_epoch(self, epoch: int) -> None:
        """The loop chooses an epoch: if it is the same once more, that is meant, or the loop was told already; see is_left."""
        self._is_meant = True
        if epoch == self._start.ended_epoch:
            ended = Position(epoch=epoch, step=self._steps_per_epoch)
            self._set(StepRange(position=ended, num_steps=self._steps_per_epoch), by_state=True)
        self._start.choose()

    def begin(self, worker: Worker | None) -> Pass:
        """An iteration begins: from where it was set to, else the epoch anew."""
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
        """The iteration gave all of its batches. A stretch without steps is taken here, since it has no first batch."""
        if not round_.stretch.num_left:
            self.take(round_)

    def enter(self, round_: Pass) -> None:
        """The iteration is asked for its first batch."""
        if round_.num_sets == self._start.num_sets:
            self._start.enter(round_.number, round_.worker)

    def take(self, round_: Pass) -> None:
        """The iteration gives its first batch: the next one is another."""
        self._launch.take(round_.number, round_.worker)
        if round_.num_sets == self._start.num_sets:
            self._start.take(round_.number, round_.worker)

    def give_back(self, round_: Pass) -> None:
        """The iteration failed before its first batch: the next one runs over the same."""
        if round_.num_sets == self._start.num_sets:
            self._start.give_back(round_.worker)

    def num_before(self, round_: Pass) -> int:
        """How many rounds of the launch were put on record before this one."""
        return self._launch.num_before(round_.number, round_.worker)

    def put_on_record(self, round_: Pass, num_before: int) -> None:
        """This round is put on record, after so many others."""
        self._launch.put_on_record(round_.number, round_.worker, num_before)

    def counts(self, round_: Pass) -> bool:
        """Whether `position` is that of this iteration: no other began since, nor was the start set in this process."""
        return round_.number == self._num_rounds and round_.num_sets == self._counted.num_sets

    def count(self, round_: Pass, num_batches: int) -> None:
        """So many batches of the iteration are consumed."""
        # Whether a worker set the start is looked at when somebody asks for the position: of each batch it would take
        # microseconds.
        if self.counts(round_):
            self._counted.num_batches = num_batches

    def _has_been_in(self, stretch: StepRange, num_sets: int) -> bool:
        """Whether the iteration before came further into the epoch than to a first batch to look at."""
        at, num_steps = self._counted.position, self._counted.num_steps
        came_far = at.offset > 0 or at.step + num_steps > min(1, stretch.num_steps - 1)
        return self._counted.num_sets == num_sets and came_far

    def _has_looked_at(self, stretch: StepRange, num_sets: int) -> bool:
        """Whether the iteration before gave the first batch of this and ended."""
        counted = self._counted
        return (counted.num_sets, counted.position, counted.num_batches) == (num_sets, stretch.position, 1)

    def _set(self, stretch: StepRange, *, by_state: bool) -> None:
        self._num_rounds += 1  # what still iterates is no longer counted
        self._start.set(stretch, by_state=by_state)

    def _whole(self, epoch: int) -> StepRange:
        return StepRange(position=Position(epoch=epoch), num_steps=self._steps_per_epoch)


def _steps_of(stretch: StepRange, worker: Worker | None) -> range:
    """The steps of a stretch that are a worker's, or all."""
    first, stride = (worker.first, worker.stride) if worker else (0, 1)
    return range(stretch.position.step + first, stretch.num_steps, stride)
