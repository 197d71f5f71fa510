"""Start of the next iteration, in memory that the training loop's process shares with its loader workers.

event      actor                      when                                 effect
load       the loop, or a worker      it loads a state                     counts the load
set        the loop                   set_epoch, load_state_dict           sets the step range; no pass has taken it yet
choose     the loop                   set_epoch                            decides what a state of that epoch or before does
end        the loop                   it loads a state of an epoch's end   set_epoch may choose that epoch
begin      the loop, or each worker   an iteration begins                  none, unless a pass of the same name took the range
enter      a worker                   its first batch is requested         notes the worker's pass
take       the loop, or a worker      it yields its first batch            the pass takes the range; later passes begin anew
give_back  a worker                   it failed before its first batch     clears the worker's note
move       a worker                   it loaded a state                    moves the range; it stays taken or not taken
put_off    a worker                   ... and the loop chose a later epoch passes after the one that takes it begin that epoch
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.distributed import MAX_WORKERS, Worker
from penstock.errors import PenstockError
from penstock.state.launch import round_name
from penstock.state.shared import SharedCells
from penstock.state.state import Position

# EPOCH, OFFSET, STEP, NUM_STEPS  the step range of the next iteration
# SETS        number of times that a start was set
# CLAIM       the pass that took this start; 0: none yet
# BY_WORKERS  1: loader workers iterated last
# BY_STATE    1: a loaded state set this start
# PUT_OFF     the epoch that set_epoch chose; it waits until a worker's state of an earlier epoch is done; 0: none
# CHOSEN      1: the loop chose the epoch, and no iteration has continued from there
# ENDED       1 + the epoch that a loaded state had finished; this start is the epoch after it; 0: none
# LOADS       number of states loaded, up to the loop's last
# WITHIN      1 + the epoch that this last state had consumed in part; 0: none
# ROUNDS      one per worker: its last pass since the start was set; 0: none
# OWN_LOADS   one per worker: states that it loaded since the loop last did, also in processes that have ended
_EPOCH, _OFFSET, _STEP, _NUM_STEPS, _SETS, _CLAIM, _BY_WORKERS, _BY_STATE, _PUT_OFF, _CHOSEN, _LOADS, _WITHIN = range(12)
_ENDED = 12
_ROUNDS, _OWN_LOADS, _NUM_CELLS = (13 + n * MAX_WORKERS for n in range(3))
_NOBODYS = (1 << 63) - 1  # the claim of a pass that has ended


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRange:
    """Steps [position.step, num_steps) of an epoch, counted from the position's offset."""

    position: Position
    num_steps: int

    @property
    def num_left(self) -> int:
        """Number of steps in the range."""
        return max(0, self.num_steps - self.position.step)


class SharedStart:
    """Step range of the next iteration. The first pass that yields a batch takes it; later passes restart their epoch.

    A pass is one iteration of the loop, in this process or in the processes of a DataLoader's workers. A pass that fails
    before its first batch takes nothing. A process that inherits this and is no loader worker, such as a fork for evaluation,
    continues with a private copy.
    """

    def __init__(self, stretch: StepRange) -> None:
        self._shared = SharedCells(_NUM_CELLS, handed_down=True)
        self.set(stretch, by_state=False)

    @property
    def _cells(self) -> torch.Tensor:
        return self._shared.now

    @property
    def stretch(self) -> StepRange:
        """The step range that was set last, taken or not."""
        epoch, offset, step, num_steps = self._cells[: _NUM_STEPS + 1].tolist()
        return StepRange(position=Position(epoch=epoch, offset=offset, step=step), num_steps=num_steps)

    @property
    def num_sets(self) -> int:
        """Number of times that the start was set."""
        return int(self._cells[_SETS])

    def load(self, position: Position, worker: Worker | None) -> None:
        """Record that the loop or a worker loads a state; torchdata has each worker load one as it begins."""
        by_workers = self._cells[_OWN_LOADS:]
        if worker is None:
            self._cells[_WITHIN] = position.epoch + 1 if position.is_within else 0
            self._cells[_LOADS] += by_workers.max() + 1
            by_workers.zero_()
        else:
            by_workers[worker.first] += 1

    def num_loads(self, loaded: Worker | None) -> int:
        """Number of states loaded: equal for all workers of a pass, and different from any earlier pass.

        `loaded` is a worker that has loaded its own state; other workers load theirs later or never.
        """
        by_workers = self._cells[_OWN_LOADS:]
        own = by_workers[loaded.first] if loaded else by_workers.max()
        return int(self._cells[_LOADS] + own)

    @property
    def state_epoch(self) -> int | None:
        """The epoch that the loop's last loaded state had consumed in part; None if there is no such state."""
        within = int(self._cells[_WITHIN])
        return within - 1 if within else None

    @property
    def is_taken(self) -> bool:
        """Whether an iteration has yielded a batch since the start was set, or had no batch to yield."""
        return bool(self._cells[_CLAIM])

    @property
    def is_with_workers(self) -> bool:
        """Whether loader workers yielded the latest batches since the start was set."""
        return self.is_taken and bool(self._cells[_BY_WORKERS])

    @property
    def is_by_state(self) -> bool:
        """Whether a loaded state set this start."""
        return bool(self._cells[_BY_STATE])

    @property
    def is_chosen(self) -> bool:
        """Whether the loop chose the current epoch, and no iteration has continued from there."""
        return bool(self._cells[_CHOSEN])

    def choose(self) -> None:
        """Record that the loop chooses the current epoch."""
        self._cells[_CHOSEN] = 1

    @property
    def ended_epoch(self) -> int | None:
        """The epoch that a loaded state had finished; None once an iteration has continued in the next epoch."""
        ended = int(self._cells[_ENDED])
        return ended - 1 if ended and not self.is_taken else None

    def end(self, epoch: int) -> None:
        """Record that a loaded state had finished this epoch; the start is the epoch after it."""
        self._cells[_ENDED] = epoch + 1

    @property
    def put_off_epoch(self) -> int | None:
        """The postponed epoch, which passes begin once the range is taken; None without one."""
        return int(self._cells[_PUT_OFF]) or None

    def put_off(self, epoch: int) -> None:
        """Postpone an epoch > 0 until a pass has taken the range that `move` sets."""
        self._cells[_PUT_OFF] = epoch

    def set(self, stretch: StepRange, *, by_state: bool) -> None:
        """Set the range of the next iteration, in this process or in its workers."""
        self.move(stretch, by_state=by_state)
        self._cells[_PUT_OFF] = self._cells[_CHOSEN] = self._cells[_ENDED] = 0
        self._cells[_SETS] += 1
        self._cells[_CLAIM] = 0
        self._cells[_ROUNDS:_OWN_LOADS] = 0

    def move(self, stretch: StepRange, *, by_state: bool) -> None:
        """Move the start; it stays taken or not taken."""
        at = stretch.position
        self._cells[: _NUM_STEPS + 1] = torch.tensor([at.epoch, at.offset, at.step, stretch.num_steps], device="cpu")
        self._cells[_BY_STATE] = by_state

    def begin(self, number: int, worker: Worker | None) -> bool:
        """Whether this pass has the range: no pass took it yet, or this pass did in another worker.

        `number` counts the passes of this process.

        Raises:
            PenstockError: no memory is shared, so the loop's process and other workers would not see this worker's start.
        """
        if worker and not self._shared.is_shared:
            raise PenstockError(
                "no memory could be shared between this process and its loader workers when the dataset was made, so it "
                "cannot be told where they are. Give /dev/shm more room, or take num_workers=0: a thread fetches ahead anyway."
            )
        claim = round_name(number, worker)
        if self.is_taken and self._cells[_CLAIM] != claim:
            return False
        # An earlier pass of the same name took it: the loop gives torch the same seed before each.
        if worker and self.is_taken and self._cells[_ROUNDS + worker.first] == claim:
            self._cells[_CLAIM] = _NOBODYS
            return False
        return True

    def enter(self, number: int, worker: Worker | None) -> None:
        """Record that the loop requests the first batch of this pass."""
        if worker:
            self._cells[_ROUNDS + worker.first] = round_name(number, worker)

    def take(self, number: int, worker: Worker | None) -> None:
        """Record that this pass yields its first batch; it takes the range if no pass has."""
        self._cells[_BY_WORKERS] = int(worker is not None)
        self._cells[_CHOSEN] = 0
        if not self.is_taken:
            self._cells[_CLAIM] = round_name(number, worker)

    def give_back(self, worker: Worker | None) -> None:
        """Record that this pass failed before its first batch; the next pass begins as if it had not."""
        if worker:
            self._cells[_ROUNDS + worker.first] = 0
