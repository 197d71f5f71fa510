"""A launch: one RemoteDataset of one process, with the workers of its loader. Its rounds on record are numbered."""

from __future__ import annotations

from penstock.rank import MAX_WORKERS, Worker
from penstock.state.shared import SharedCells

# FIRST          the name of the round that gave the launch's first batch; 0: none yet
# LOOP, WORKERS  one cell for the loop and one a worker: the last round that it wrote to a ledger, as the number of rounds so
#                far above the low bits of the round's name; they stay when the process ends
_FIRST, _LOOP, _WORKERS = range(3)
_NAME_BITS = 31


def round_name(number: int, worker: Worker | None) -> int:
    """The name of a process's round `number`: positive and the same for all workers of a loader, negative for the loop itself.

    Workers of one round share the seed that their loader drew when it began, and the number of rounds since. So they find the
    same name without asking each other.
    """
    return (worker.loader_seed + number) % (1 << 62) + 1 if worker else -number


class Launch:
    """What all rounds of a launch have in common. A fork that is no loader worker is a launch of its own, and so is a copy."""

    def __init__(self) -> None:
        self._cells = SharedCells(_WORKERS + MAX_WORKERS, handed_down=False)

    @property
    def name(self) -> str:
        """That no other has."""
        return self._cells.owner

    def is_first(self, number: int, worker: Worker | None) -> bool:
        """Whether no round before this one gave a batch, in whatever process."""
        return int(self._cells.now[_FIRST]) in (0, round_name(number, worker))

    def take(self, number: int, worker: Worker | None) -> None:
        """This round gives its first batch."""
        if not self._cells.now[_FIRST]:
            self._cells.now[_FIRST] = round_name(number, worker)

    def num_before(self, number: int, worker: Worker | None) -> int:
        """How many rounds were put on record before this one; mostly the same for all workers of a round.

        Nothing keeps two of them from asking at once: they find the same, since each writes but a cell of its own.
        """
        name, cells = _short(number, worker), self._cells.now
        found = [divmod(cell, 1 << _NAME_BITS) for cell in cells[_LOOP:].tolist() if cell]
        if worker:
            own = divmod(int(cells[_cell_of(worker)]), 1 << _NAME_BITS)
            same = max((up_to for up_to, its_name in found if its_name == name), default=0)
            if same and (same, name) != own:
                return same - 1
        return max((up_to for up_to, _ in found), default=0)

    def put_on_record(self, number: int, worker: Worker | None, num_before: int) -> None:
        """This round is put on record, behind so many others."""
        self._cells.now[_cell_of(worker)] = (num_before + 1 << _NAME_BITS) + _short(number, worker)


def _cell_of(worker: Worker | None) -> int:
    return _WORKERS + worker.first if worker else _LOOP


def _short(number: int, worker: Worker | None) -> int:
    return round_name(number, worker) % (1 << _NAME_BITS)
