"""Where the next iteration starts, in memory that the training loop's process shares with its loader workers.

event      by whom                    when                                 what changes
load       the loop, or a worker      it loads a state                     how often it did
set        the loop                   set_epoch, load_state_dict           the stretch; nobody has taken it yet
choose     the loop                   set_epoch                            nothing, but what a state of it or before does
end        the loop                   it loads a state of an epoch's end   nothing, but that set_epoch may choose that epoch
begin      the loop, or each worker   an iteration begins                  nothing, but where a round of the same name took it
enter      a worker                   it is asked for its first batch      it notes which round it is in
take       the loop, or a worker      it gives its first batch             the stretch is its round's; later rounds begin anew
give_back  a worker                   it failed before its first batch     its note goes
move       a worker                   a state was loaded there             the stretch, but not whether it is taken
put_off    a worker                   ... and the loop chose a later epoch rounds behind the one that takes it begin that
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.errors import PenstockError
from penstock.rank import MAX_WORKERS, Worker
from penstock.state.launch import round_name
from penstock.state.shared import SharedCells
from penstock.state.state import Position

# EPOCH, OFFSET, STEP, NUM_STEPS  the stretch that the next iteration runs over
# SETS        how often a start was set
# CLAIM       the round of iteration that took this start; 0: none yet
# BY_WORKERS  1: loader workers iterated last
# BY_STATE    1: a state that was loaded set this start
# PUT_OFF     the epoch that set_epoch chose, and that waits until a worker's state of an earlier one is done; 0: none
# CHOSEN      1: the loop chose the epoch, and no iteration has gone on from there
# ENDED       1 + the epoch whose end a state told of, so that this start is the epoch after it; 0: none
# LOADS       the number of states loaded, up to the loop's last
# WITHIN      1 + the epoch of which that state had consumed something; 0: none
# ROUNDS      one a worker: the last round that it was in since the start was set; 0: none
# OWN_LOADS   one a worker: how many states it loaded itself since the loop last did, also in processes that are over
_EPOCH, _OFFSET, _STEP, _NUM_STEPS, _SETS, _CLAIM, _BY_WORKERS, _BY_STATE, _PUT_OFF, _CHOSEN, _LOADS, _WITHIN = range(12)
_ENDED = 12
_ROUNDS, _OWN_LOADS, _NUM_CELLS = (13 + n * MAX_WORKERS for n in range(3))
_NOBODYS = (1 << 63) - 1  # the claim of a round that is over


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRange:
    """What an iteration runs over: the steps from a position on, of `num_steps` after the position's offset."""

    position: Position
    num_steps: int

    @property
    def num_left(self) -> int:
        """How many steps it has."""
        return max(0, self.num_steps - self.position.step)


class SharedStart:
    """The stretch of the next iteration. The first round that gives a batch takes it; later ones begin their epoch anew.

    A round is one pass of the loop, whether this process iterates or a DataLoader's workers do, each in a process of its own.
    One that fails before its first batch takes nothing. A process that inherits this and is no loader worker, such as a fork
    that evaluates, goes on with a copy of its own.
    """

    def __init__(self, stretch: StepRange) -> None:
        self._shared = SharedCells(_NUM_CELLS, handed_down=True)
        self.set(stretch, by_state=False)

    @property
    def _cells(self) -> torch.Tensor:
        return self._shared.now

    @property
    def stretch(self) -> StepRange:
        """As it was set last, taken or not."""
        epoch, offset, step, num_steps = self._cells[: _NUM_STEPS + 1].tolist()
        return StepRange(position=Position(epoch=epoch, offset=offset, step=step), num_steps=num_steps)

    @property
    def num_sets(self) -> int:
        """How often it was set."""
        return int(self._cells[_SETS])

    def load(self, position: Position, worker: Worker | None) -> None:
        """The loop loads a state of this place, or a worker does, as torchdata has each of them do when they begin."""
        by_workers = self._cells[_OWN_LOADS:]
        if worker is None:
            self._cells[_WITHIN] = position.epoch + 1 if position.is_within else 0
            self._cells[_LOADS] += by_workers.max() + 1
            by_workers.zero_()
        else:
            by_workers[worker.first] += 1

    def num_loads(self, loaded: Worker | None) -> int:
        """How often a state was loaded: the same number for all workers of a round, and for none of a round before.

        `loaded` is a worker that has loaded its own; others have not come to that yet, or never do.
        """
        by_workers = self._cells[_OWN_LOADS:]
        own = by_workers[loaded.first] if loaded else by_workers.max()
        return int(self._cells[_LOADS] + own)

    @property
    def state_epoch(self) -> int | None:
        """The epoch of which something was consumed in the state that the loop loaded last; None if it loaded none."""
        within = int(self._cells[_WITHIN])
        return within - 1 if within else None

    @property
    def is_taken(self) -> bool:
        """Whether an iteration has given a batch since it was set, or found that there was none to give."""
        return bool(self._cells[_CLAIM])

    @property
    def is_with_workers(self) -> bool:
        """Whether loader workers have given batches since it was set, and are the last who did."""
        return self.is_taken and bool(self._cells[_BY_WORKERS])

    @property
    def is_by_state(self) -> bool:
        """Whether a state that was loaded put it where it is."""
        return bool(self._cells[_BY_STATE])

    @property
    def is_chosen(self) -> bool:
        """Whether the loop chose the epoch that it is in, and no iteration has gone on from there."""
        return bool(self._cells[_CHOSEN])

    def choose(self) -> None:
        """The loop chooses the epoch that it is in."""
        self._cells[_CHOSEN] = 1

    @property
    def ended_epoch(self) -> int | None:
        """The epoch whose end a state told of, while no iteration has gone on in the one after it; else None."""
        ended = int(self._cells[_ENDED])
        return ended - 1 if ended and not self.is_taken else None

    def end(self, epoch: int) -> None:
        """The start that was set last is the epoch after this one, whose end a state told of."""
        self._cells[_ENDED] = epoch + 1

    @property
    def put_off_epoch(self) -> int | None:
        """The epoch that was put off, which rounds begin once the stretch is taken; None for none."""
        return int(self._cells[_PUT_OFF]) or None

    def put_off(self, epoch: int) -> None:
        """An epoch, which is not the first, is begun once the stretch that it is moved to is taken."""
        self._cells[_PUT_OFF] = epoch

    def set(self, stretch: StepRange, *, by_state: bool) -> None:
        """The next iteration, of this process or of its workers, takes this."""
        self.move(stretch, by_state=by_state)
        self._cells[_PUT_OFF] = self._cells[_CHOSEN] = self._cells[_ENDED] = 0
        self._cells[_SETS] += 1
        self._cells[_CLAIM] = 0
        self._cells[_ROUNDS:_OWN_LOADS] = 0

    def move(self, stretch: StepRange, *, by_state: bool) -> None:
        """The start is elsewhere; whether it is taken stays as it is."""
        at = stretch.position
        self._cells[: _NUM_STEPS + 1] = torch.tensor([at.epoch, at.offset, at.step, stretch.num_steps], device="cpu")
        self._cells[_BY_STATE] = by_state

    def begin(self, number: int, worker: Worker | None) -> bool:
        """Whether the stretch is this round's: no round took it yet, or this one did in another worker.

        `number` counts the rounds of this process.

        Raises PenstockError: what the worker begins with, the loop's process and the other workers would not see.
        """
        if worker and not self._shared.is_shared:
            raise PenstockError(
                "no memory could be shared between this process and its loader workers when the dataset was made, so it "
                "cannot be told where they are. Give /dev/shm more room, or take num_workers=0: a thread fetches ahead anyway."
            )
        claim = round_name(number, worker)
        if self.is_taken and self._cells[_CLAIM] != claim:
            return False
        # An earlier round of the same name took it: the loop gives torch the same seed before each.
        if worker and self.is_taken and self._cells[_ROUNDS + worker.first] == claim:
            self._cells[_CLAIM] = _NOBODYS
            return False
        return True

    def enter(self, number: int, worker: Worker | None) -> None:
        """This round is asked for its first batch."""
        if worker:
            self._cells[_ROUNDS + worker.first] = round_name(number, worker)

    def take(self, number: int, worker: Worker | None) -> None:
        """This round gives its first batch: if nobody has taken the stretch, it does."""
        self._cells[_BY_WORKERS] = int(worker is not None)
        self._cells[_CHOSEN] = 0
        if not self.is_taken:
            self._cells[_CLAIM] = round_name(number, worker)

    def give_back(self, worker: Worker | None) -> None:
        """This round failed before its first batch: the next one may begin as if it had not."""
        if worker:
            self._cells[_ROUNDS + worker.first] = 0
