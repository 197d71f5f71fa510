"""Where the next iteration starts, in memory that the training loop's process shares with its loader workers.

event      by whom                    when                                 what changes
load       the loop, or a worker      it loads a state                     how often it did
set        the loop                   set_epoch, load_state_dict           the stretch; nobody has taken it yet
begin      the loop, or each worker   an iteration begins                  nothing, but where a round of the same name took it
enter      a worker                   it is asked for its first batch      it notes which round it is in
take       the loop, or a worker      it gives its first batch             the stretch is its round's; later rounds begin anew
give_back  a worker                   it failed before its first batch     its note goes
move       a worker                   a state was loaded there             the stretch, but not whether it is taken
put_off    a worker                   ... and the loop chose a later epoch rounds behind the one that takes it begin that
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch

from penstock.errors import PenstockError
from penstock.place.state import Position
from penstock.rank import MOST_WORKERS, Worker, find_worker

# The cells of the shared memory. SETS counts how often a start was set; CLAIM is the round of iteration that took it, 0 for
# none yet; BY_WORKERS is 1 where loader workers iterated last, BY_STATE where a state that was loaded put it where it is.
# PUT_OFF is the epoch that the loop chose and that a worker's state of an earlier one goes before, 0 for none. LOADS counts the
# states that were loaded up to the loop's last, and BEGUN the epochs that this one had begun; FIRST is the round of the very
# first batch, 0 for none yet. Behind them are three cells for each worker: the round that it was last in since the start was
# set, 0 for none; how many states it loaded itself since the loop did; and the last round that it put on record;
# the latter two also of processes that are over. The very last cell is the round that the loop's process put on record.
_EPOCH, _OFFSET, _STEP, _NUM_STEPS, _SETS, _CLAIM, _BY_WORKERS, _BY_STATE, _PUT_OFF, _LOADS, _BEGUN, _FIRST = range(12)
_ROUNDS, _OWN_LOADS, _RECORDED, _OWN_RECORD = (12 + n * MOST_WORKERS for n in range(4))
_NUM_CELLS = _OWN_RECORD + 1
_NAME_BITS = 31  # of a round on record; above them is its number
_NOBODYS = (1 << 63) - 1  # the claim of a round that is over
_known: WeakSet[SharedStart] = WeakSet()  # in this process


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
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

    def __init__(self, stretch: Stretch) -> None:
        self._begin_launch()
        self._memory = torch.zeros(_NUM_CELLS, dtype=torch.int64, device="cpu")  # whatever torch's default is
        self._share()
        _known.add(self)
        self.set(stretch, by_state=False)

    @property
    def _cells(self) -> torch.Tensor:
        self.own()
        return self._memory

    def own(self) -> None:
        """A process that inherited this, and is no loader worker, goes on with a copy of its own."""
        if os.getpid() != self._owner and not find_worker():
            self._go_on_alone(self._memory)

    def _go_on_alone(self, memory: torch.Tensor) -> None:
        """With a copy of this memory, and as a launch of its own, of which nothing was given or put on record yet."""
        self._begin_launch()
        self._memory = memory.clone()
        self._memory[_FIRST] = 0
        self._memory[_RECORDED:] = 0
        self._share()

    def _begin_launch(self) -> None:
        self._owner, self._launch = os.getpid(), os.urandom(8).hex()

    @property
    def launch(self) -> str:
        """A name that is this process's and its loader workers' alone."""
        self.own()
        return self._launch

    def _share(self) -> None:
        if self._memory.is_inference():  # outside of inference mode nobody could write to it
            with torch.inference_mode(False):
                self._memory = self._memory.clone()
        with suppress(RuntimeError):  # no memory can be shared: without loader workers that does not matter
            self._memory.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def stretch(self) -> Stretch:
        """As it was set last, taken or not."""
        epoch, offset, step, num_steps = self._cells[: _NUM_STEPS + 1].tolist()
        return Stretch(position=Position(epoch=epoch, offset=offset, step=step), num_steps=num_steps)

    @property
    def num_sets(self) -> int:
        """How often it was set."""
        return int(self._cells[_SETS])

    def load(self, num_begun: int, worker: Worker | None) -> None:
        """The loop loads a state, or a worker does, as torchdata has each of them do when they begin.

        It is of a run that had begun so many epochs.
        """
        by_workers = self._cells[_OWN_LOADS:_RECORDED]
        if worker is None:
            self._cells[_BEGUN] = num_begun
            self._cells[_LOADS] += by_workers.max() + 1
            by_workers.zero_()
        else:
            by_workers[worker.first] += 1

    def num_loads(self, loaded: Worker | None) -> int:
        """How often a state was loaded: the same number for all workers of a round, and for none of a round before.

        `loaded` is a worker that has loaded its own; others have not come to that yet, or never do.
        """
        by_workers = self._cells[_OWN_LOADS:_RECORDED]
        own = by_workers[loaded.first] if loaded else by_workers.max()
        return int(self._cells[_LOADS] + own)

    @property
    def num_begun(self) -> int:
        """How many epochs had been begun in the state that the loop loaded last; 0 if it loaded none."""
        return int(self._cells[_BEGUN])

    def num_before(self, number: int, worker: Worker | None) -> int:
        """How many rounds of this launch were put on record before this one; the same for all workers of a round.

        Nothing keeps two of them from asking at once: they find the same, since each writes but a cell of its own.
        """
        name, own = round_name(number, worker) % (1 << _NAME_BITS), int(self._cells[_on_record(worker)])
        found = [divmod(cell, 1 << _NAME_BITS) for cell in self._cells[_RECORDED:].tolist() if cell]
        if worker:
            others = max((behind for behind, its_name in found if its_name == name), default=0)
            if others and (others, name) != divmod(own, 1 << _NAME_BITS):
                return others - 1
        return max((behind for behind, _ in found), default=0)

    def put_on_record(self, number: int, worker: Worker | None, num_before: int) -> None:
        """This round is put on record, behind so many others."""
        name = round_name(number, worker) % (1 << _NAME_BITS)
        self._cells[_on_record(worker)] = (num_before + 1 << _NAME_BITS) + name

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
        """Whether the loop set it where it is, and no iteration has gone on from there."""
        return not self.is_taken and not self.is_by_state

    @property
    def put_off_epoch(self) -> int | None:
        """The epoch that was put off, which rounds begin once the stretch is taken; None for none."""
        return int(self._cells[_PUT_OFF]) or None

    def put_off(self) -> None:
        """The epoch that it is in, which is not the first, is begun once the stretch that it is moved to is taken."""
        self._cells[_PUT_OFF] = self._cells[_EPOCH]

    def set(self, stretch: Stretch, *, by_state: bool) -> None:
        """The next iteration, of this process or of its workers, takes this."""
        self.move(stretch, by_state=by_state)
        self._cells[_PUT_OFF] = 0
        self._cells[_SETS] += 1
        self._cells[_CLAIM] = 0
        self._cells[_ROUNDS:_OWN_LOADS] = 0

    def move(self, stretch: Stretch, *, by_state: bool) -> None:
        """The start is elsewhere; whether it is taken stays as it is."""
        at = stretch.position
        self._cells[: _NUM_STEPS + 1] = torch.tensor([at.epoch, at.offset, at.step, stretch.num_steps], device="cpu")
        self._cells[_BY_STATE] = by_state

    def begin(self, number: int, worker: Worker | None) -> bool:
        """Whether the stretch is this round's: no round took it yet, or this one did in another worker.

        `number` counts the rounds of this process. Workers share the seed that their loader drew when it began, and rounds
        that they have gone through since: what tells one round from the next, also from one in which not all of them began.

        Raises PenstockError: what the worker begins with, the loop's process and the other workers would not see.
        """
        if worker and not self._cells.is_shared():  # type: ignore[no-untyped-call]
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

    def is_first(self, number: int, worker: Worker | None) -> bool:
        """Whether no round before this one gave a batch."""
        return int(self._cells[_FIRST]) in (0, round_name(number, worker))

    def take(self, number: int, worker: Worker | None) -> None:
        """This round gives its first batch: if nobody has taken the stretch, it does."""
        self._cells[_BY_WORKERS] = int(worker is not None)
        claim = round_name(number, worker)
        if not self.is_taken:
            self._cells[_CLAIM] = claim
        if not self._cells[_FIRST]:
            self._cells[_FIRST] = claim

    def give_back(self, worker: Worker | None) -> None:
        """This round failed before its first batch: the next one may begin as if it had not."""
        if worker:
            self._cells[_ROUNDS + worker.first] = 0

    def __getstate__(self) -> dict[str, Any]:
        """What goes along to loader workers, which share it with the process that starts them."""
        self.own()
        return self.__dict__

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedStart:
        """One that begins at the same place."""
        other = SharedStart.__new__(SharedStart)
        other._go_on_alone(self._cells)
        _known.add(other)
        return other

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._share()  # a copy would otherwise tell its own workers nothing
        _known.add(self)


def _on_record(worker: Worker | None) -> int:
    """The cell of the last round that it put on record."""
    return _RECORDED + worker.first if worker else _OWN_RECORD


def round_name(number: int, worker: Worker | None) -> int:
    """The name of a round: positive for those of workers, and the same for all of them; negative for those of the loop."""
    return (worker.loader_seed + number) % (1 << 62) + 1 if worker else -number


def _own_all() -> None:
    """Workers that are forked share what is in this process by then: else they would move the start of whoever made it."""
    for start in list(_known):
        start.own()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_own_all)
