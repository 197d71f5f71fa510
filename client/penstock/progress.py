"""Progress of a training loop through its epochs, also if the loop's DataLoader workers iterate.

The process of the loop and its workers share a few integers: the steps of the next pass, the pass that took them, and the ids
of the start. A pass is one iteration of the loop, in this process or in its workers. The first pass that yields a batch takes
the steps that were set; later passes repeat their epoch from its first step.

With a number of epochs, a pass goes from epoch to epoch, and later passes go on after the batches that the loop consumed.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import torch

from penstock.distributed import LoaderWorker, agree, find_worker
from penstock.errors import PenstockError
from penstock.state import Cursor, StateOrigin

_STUCK_LOOKS = 2  # one-batch iterations before the third


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One iteration of this process, from a cursor on.

    later          epochs that it goes on with after that of the cursor, of `steps_per_epoch` steps each
    name           equal for all workers of a pass and positive; negative in the loop's process
    num_sets       number of times that steps were set before it
    start, origin  id of the start, and the state that the start loaded
    is_first       no earlier pass of the start yielded a batch
    is_repetition  the iteration before it yielded more than one batch of the same epoch, and neither set_epoch nor
                   load_state_dict was called since: the loop repeats data, probably by mistake
    is_stuck       the third iteration in a row that begins at the same batch, after two that ended there: the loop
                   calls next(iter(data)) in each step
    """

    worker: LoaderWorker | None
    cursor: Cursor
    later: range = range(0)
    steps_per_epoch: int
    name: int
    num_sets: int
    start: str
    origin: StateOrigin
    is_first: bool = False
    is_repetition: bool = False
    is_stuck: bool = False

    @property
    def stride(self) -> int:
        """Steps of the pass for each batch of this process: a loader worker takes a part of them."""
        return self.worker.stride if self.worker else 1

    @property
    def num_batches(self) -> int:
        """Number of batches that this process yields."""
        first = self.worker.first if self.worker else 0
        return max(0, -(-(self._num_steps - first) // self.stride))

    def epochs(self) -> Iterator[tuple[Cursor, range]]:
        """Yield where the pass begins in each epoch, and the steps that this process takes of that epoch."""
        at, first = self.cursor, self.worker.first if self.worker else 0
        yield at, range(at.step + first, at.num_steps, self.stride)
        for epoch in self.later:
            first = (first - at.num_left) % self.stride  # workers take turns across the border
            at = Cursor(epoch=epoch, num_steps=self.steps_per_epoch)
            yield at, range(first, at.num_steps, self.stride)

    def after(self, num_batches: int) -> Cursor:
        """Return the place after the consumed batches of this process.

        A worker yields every `stride`th step. It counts `stride` steps per batch, and adds its worker number when it resumes.
        The last turn of the workers may be short.
        """
        at, num_steps = self.cursor, min(num_batches * self.stride, self._num_steps)
        if num_steps <= at.num_left:
            return replace(at, step=at.step + num_steps)
        # After an epoch's last step the place is still in that epoch: a loop may choose it once more.
        num_epochs, step = divmod(num_steps - at.num_left - 1, self.steps_per_epoch)
        return Cursor(epoch=self.later[num_epochs], step=step + 1, num_steps=self.steps_per_epoch)

    @property
    def _num_steps(self) -> int:
        return self.cursor.num_left + len(self.later) * self.steps_per_epoch


class Progress:
    """Place of the loop, as far as this process knows. `name` is equal for the ranks that share an epoch.

    num_epochs  epochs that iterations go through, one after the other; None: an iteration is one epoch
    """

    def __init__(self, steps_per_epoch: int, name: str = "", num_epochs: int | None = None) -> None:
        self._steps_per_epoch, self._name, self._num_epochs = steps_per_epoch, name, num_epochs
        self._cells = SharedCells()
        self._num_passes = 0
        self._pass: Pass | None = None  # the latest pass, unless this process has set steps since then
        self._num_batches = 0  # those of the latest pass that the loop has consumed
        # Place and origin of this loader worker's next pass, from the worker's own state, and the number of sets at that time.
        self._loaded: tuple[int, Cursor, StateOrigin] | None = None
        self._ended_epoch: int | None = None  # the epoch that the loaded state had finished
        self._is_meant = False  # the loop repeats the epoch on purpose
        self._num_looks = 0  # iterations in a row that ended after the same first batch
        self._begin_start(StateOrigin())
        self._set(self._whole(0))

    @property
    def _next(self) -> Cursor:
        """The place that was set last, taken or not."""
        cells = self._cells
        return Cursor(epoch=cells["epoch"], offset=cells["offset"], step=cells["step"], num_steps=cells["num_steps"])

    @property
    def _is_taken(self) -> bool:
        return bool(self._cells["taken_by"])

    @property
    def goes_on(self) -> bool:
        """Whether the next iteration goes on after the batches of the last one."""
        return self._num_epochs is not None and self._is_taken

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        if self._num_epochs is None:
            return self._cells["epoch"]
        at = self.cursor
        return at.epoch + 1 if not at.num_left and self._later(at) else at.epoch

    def is_in(self, epoch: int) -> bool:
        """Whether the next iteration begins in this epoch, or goes on right after its last step."""
        if self.goes_on and self.is_with_workers:  # where in it is not known
            return False
        return epoch == self.epoch or (self._num_epochs is not None and epoch == self.cursor.epoch)

    @property
    def num_left(self) -> int:
        """Number of steps of the next iteration."""
        if self._num_epochs is None:
            return self._steps_per_epoch if self._is_taken else self._next.num_left
        at = self.cursor
        return at.num_left + len(self._later(at)) * self._steps_per_epoch

    @property
    def discards(self) -> int:
        """Number of steps after a set place that no iteration has continued from; 0 without one."""
        at = self._next
        return at.num_left if not self._is_taken and (at.step or at.offset) else 0

    @property
    def has_loaded(self) -> bool:
        """Whether a state was loaded, and no iteration has continued from it yet."""
        return not self._is_taken and bool(self._cells["by_state"])

    @property
    def is_resumed(self) -> bool:
        """Whether an iteration has continued from a loaded state."""
        return self._is_taken and bool(self._cells["by_state"])

    @property
    def is_left(self) -> bool:
        """Whether the last iteration yielded more than one batch, but not all of its batches."""
        return self._is_taken and self._came_far and self.cursor.num_left > 0

    @property
    def is_with_workers(self) -> bool:
        """Whether loader workers iterate, so that this process, which is not one, cannot know the place."""
        return self._is_taken and bool(self._cells["by_workers"])

    @property
    def cursor(self) -> Cursor:
        """Place of the loop: the end of its consumed steps, or a set place until an iteration continues from it."""
        num_sets, last = self._cells["num_sets"], self._pass
        if self._loaded and self._loaded[0] == num_sets:
            return self._loaded[1]
        if not last or last.num_sets != num_sets:
            return self._next
        return last.after(self._num_batches)

    @property
    def _came_far(self) -> bool:
        """Whether the last iteration came further into the epoch than its first batch, and no steps were set since then."""
        last = self._pass
        if not last or last.num_sets != self._cells["num_sets"]:
            return False
        at = last.after(self._num_batches)
        return last.cursor.offset > 0 or at.epoch > last.cursor.epoch or at.step > min(1, self._steps_per_epoch - 1)

    @property
    def start(self) -> str:
        """Id of the start of the next iteration."""
        return _text_of(self._cells["start"])

    @property
    def origin(self) -> StateOrigin:
        """The state that this start loaded."""
        cells = self._cells
        run, parent = (_text_of(cells[name]) if cells[name] else None for name in ("run", "parent"))
        return StateOrigin(run, parent, cells["parent_epoch"], cells["parent_samples"])

    @property
    def ids(self) -> tuple[str | None, str | None]:
        """Ids of the run and of the start that consumed the samples before the place; None without one."""
        origin = self.origin
        return (origin.run or self.start, self.start) if self._cells["first"] else (origin.run, origin.parent)

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the first step of the epoch."""
        self._set(self._whole(epoch))
        self._cells.update(chosen=True)

    def rewind(self, epoch: int) -> None:
        """Start the next iteration at the first step of the epoch, as a start without a state."""
        self._begin_start(StateOrigin())
        self.set_epoch(epoch)

    def load(self, at: Cursor, origin: StateOrigin, worker: LoaderWorker | None) -> None:
        """Set the place of the next iteration from a state. In a loader worker, the others take only the epoch.

        If the epoch has no steps left, the next epoch begins: otherwise a loop that never calls set_epoch would get an epoch
        without batches. A loop that chooses the ended epoch means that epoch, and gets no batches of it.

        Loaders pass a state on only when the loop begins an iteration. The loop may have chosen a later epoch by then; a state
        from the end of an epoch does not know that.
        """
        chosen = self._cells["epoch"] if self._cells["chosen"] else None
        if worker:
            is_behind = chosen is not None and at.epoch < chosen
            if (at.num_left > worker.first or at.epoch > self.epoch) and not is_behind:
                self._move(self._whole(at.epoch), by_state=True)
            self._loaded = (self._cells["num_sets"], at, origin)
            return
        self._begin_start(origin)
        if at.num_left or chosen == at.epoch:
            self._set(at, by_state=True)
        elif chosen is None or chosen < at.epoch:
            self._set(self._whole(at.epoch + 1) if self._num_epochs is None else at, by_state=True)
            self._ended_epoch = at.epoch

    def confirm_epoch(self, epoch: int) -> None:
        """Record that the loop chooses an epoch. A repeat is on purpose, or already warned about: see is_left."""
        self._is_meant = True
        if epoch == self._ended_epoch and not self._is_taken:
            self._set(replace(self._whole(epoch), step=self._steps_per_epoch), by_state=True)
        self._cells.update(chosen=True)

    def begin(self, worker: LoaderWorker | None) -> Pass:
        """Begin an iteration at the place that was set, or at the epoch's first step if a pass took that place.

        Raises PenstockError: no memory is shared, so the loop's process and other workers would not see this worker's pass; or
        the iteration would go on after one of loader workers.
        """
        if worker and not self._cells.is_shared:
            raise PenstockError(
                "no memory could be shared between this process and its loader workers when the dataset was made, so it "
                "cannot count their batches. Give /dev/shm more room, or take num_workers=0: a thread fetches ahead anyway."
            )
        self._num_passes += 1
        name = (worker.loader << 32) + self._num_passes if worker else -self._num_passes
        num_sets, first = self._cells["num_sets"], self._cells["first"]
        has_begun = self._cells["taken_by"] not in (0, name)
        is_loaded = worker is not None and self._loaded is not None and self._loaded[0] == num_sets
        if has_begun and self._num_epochs is not None and not is_loaded:
            raise PenstockError(
                "with epochs=, an iteration goes on after the batches that the loop was given. But the loader workers of the "
                "last one ran ahead of the loop, so their number is not known. Take num_workers=0: a thread fetches ahead "
                "anyway. Or take torchdata's StatefulDataLoader and load its state, or call set_epoch or load_state_dict."
            )
        cursor, start, origin = self._whole(self.epoch) if has_begun else self._next, self.start, self.origin
        is_again = has_begun and not worker
        was_look = is_again and not self._came_far and self._num_batches == 1 and self._is_at(cursor, num_sets)
        self._num_looks = self._num_looks + 1 if was_look else 0
        is_repetition = is_again and self._came_far and not self._is_meant
        if worker and self._loaded and is_loaded:
            _, cursor, origin = self._loaded
            start = _derived_id(self._drawn, origin, name)
            self._write_ids(start, origin)
        elif has_begun:  # the epoch once more: a start without a state, as its positions were trained on before
            origin = StateOrigin(run=origin.run or start)
            start = _derived_id(self._drawn, origin, name) if worker else self._draw(origin)
            self._write_ids(start, origin)
        if worker and not self._cells["first"]:
            self._cells.update(first=name)
        self._loaded, self._is_meant, self._num_batches = None, False, 0
        self._pass = Pass(
            worker=worker,
            cursor=cursor,
            later=self._later(cursor),
            steps_per_epoch=self._steps_per_epoch,
            name=name,
            num_sets=num_sets,
            start=start,
            origin=origin,
            is_first=not has_begun and first in (0, name),
            is_repetition=is_repetition,
            is_stuck=self._num_looks == _STUCK_LOOKS,
        )
        return self._pass

    def _is_at(self, cursor: Cursor, num_sets: int) -> bool:
        """Whether the last iteration began at this place."""
        return self._pass is not None and (self._pass.cursor, self._pass.num_sets) == (cursor, num_sets)

    def finish(self, this: Pass) -> None:
        """Record that the iteration yielded all its batches. An empty range is taken here: it has no first batch."""
        if not this.cursor.num_left:
            self.take(this)

    def take(self, this: Pass) -> None:
        """Record that the iteration yields its first batch; the next iteration is a new pass."""
        if this.start == self.start and not self._cells["first"]:
            self._cells.update(first=this.name)
        if this.num_sets == self._cells["num_sets"]:
            self._cells.update(by_workers=this.worker is not None, chosen=False, taken_by=self._cells["taken_by"] or this.name)

    def counts(self, this: Pass) -> bool:
        """Whether `cursor` belongs to this iteration: since then none began, and this process set no steps."""
        return this is self._pass

    def count(self, this: Pass, num_batches: int) -> None:
        """Record that the loop has consumed `num_batches` batches of the iteration."""
        # `cursor` checks whether a worker set the steps: a check here would cost microseconds per batch.
        if this is self._pass:
            self._num_batches = num_batches

    def _begin_start(self, origin: StateOrigin) -> None:
        """Begin a start that loads a state."""
        self._drawn = self._draw(origin)
        self._write_ids(self._drawn, origin)

    def _draw(self, origin: StateOrigin) -> str:
        """Draw the id of a start; the ranks of a job draw the same id."""
        return agree(f"start/{self._name}/{origin}", _draw_id())

    def _write_ids(self, start: str, origin: StateOrigin) -> None:
        run, parent = (int(text or "0", 16) for text in (origin.run, origin.parent))
        ids = {"start": int(start, 16), "first": 0, "run": run, "parent": parent}
        self._cells.update(**ids, parent_epoch=origin.epoch, parent_samples=origin.samples)

    def _set(self, at: Cursor, *, by_state: bool = False) -> None:
        self._pass = self._loaded = self._ended_epoch = None  # no pass: stops the count of an iteration that still runs
        self._move(at, by_state=by_state)
        self._cells.update(num_sets=self._cells["num_sets"] + 1, taken_by=0, chosen=False)

    def _move(self, at: Cursor, *, by_state: bool) -> None:
        """Move the next place; it stays taken or not taken."""
        self._cells.update(epoch=at.epoch, offset=at.offset, step=at.step, num_steps=at.num_steps, by_state=by_state)

    def _whole(self, epoch: int) -> Cursor:
        return Cursor(epoch=epoch, num_steps=self._steps_per_epoch)

    def _later(self, at: Cursor) -> range:
        """Return the epochs that an iteration from this place goes on with."""
        return range(at.epoch + 1, self._num_epochs if self._num_epochs and self._steps_per_epoch else 0)


class SharedCells:
    """Integers that the process of the loop shares with its loader workers, initially 0.

    epoch, offset, step, num_steps  place of the next pass
    num_sets    number of times that a place was set
    taken_by    the pass that took it; 0: none yet
    by_workers  1: loader workers yielded the last batch
    by_state    1: a loaded state set the place
    chosen      1: the loop chose the epoch, and no pass has yielded a batch since
    start       id of the start of the next pass
    first       the first pass of this start; 0: none has begun
    run, parent, parent_epoch, parent_samples  the start's origin; ids are 0 without one

    A copy, and a fork that is no loader worker, such as one for evaluation, has private cells: its passes are of another start.
    """

    NAMES = (
        *("epoch", "offset", "step", "num_steps", "num_sets", "taken_by", "by_workers", "by_state", "chosen"),
        *("start", "first", "run", "parent", "parent_epoch", "parent_samples"),
    )

    def __init__(self) -> None:
        with torch.inference_mode(False):  # an inference tensor cannot be written outside of inference mode
            self._own(torch.zeros(len(self.NAMES), dtype=torch.int64, device="cpu"))  # torch's default device may be a GPU

    def __getitem__(self, name: str) -> int:
        return int(self._now[self.NAMES.index(name)])

    def update(self, **values: int) -> None:
        """Write some cells."""
        now = self._now
        for name, value in values.items():
            now[self.NAMES.index(name)] = value

    @property
    def is_shared(self) -> bool:
        """Whether workers see writes to the cells; False if no memory could be shared."""
        return bool(self._now.is_shared())  # type: ignore[no-untyped-call]

    @property
    def _now(self) -> torch.Tensor:
        if self._process != os.getpid() and not self._is_shared_here():
            self._separate()
        return self._memory

    def _own(self, memory: torch.Tensor) -> None:
        self._process, self._memory = os.getpid(), memory
        with suppress(RuntimeError):  # no shared memory: this matters only with loader workers
            memory.share_memory_()  # type: ignore[no-untyped-call]

    def _separate(self) -> None:
        with torch.inference_mode(False):
            self._own(self._memory.clone())
        self.update(start=int(_draw_id(), 16), first=0, run=0, parent=0, parent_epoch=0, parent_samples=0)

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
        copied._memory = self._now
        copied._separate()
        return copied


def _draw_id() -> str:
    return _text_of(int.from_bytes(os.urandom(8), "big") >> 1 or 1)  # fits a signed cell


def _text_of(number: int) -> str:
    return f"{number:016x}"


def _derived_id(drawn: str, origin: StateOrigin, name: int) -> str:
    """Return the id of a start whose loader workers loaded their states: the same in all of them, without communication."""
    digest = blake2b(f"{drawn}/{origin.parent}/{name}".encode(), digest_size=8).digest()
    return _text_of(int.from_bytes(digest, "big") >> 1)
