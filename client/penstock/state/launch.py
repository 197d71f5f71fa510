"""Launch: one RemoteDataset of one process, with its loader workers. It numbers its recorded passes."""

from __future__ import annotations

from penstock.distributed import MAX_WORKERS, Worker
from penstock.state.shared import SharedCells

# FIRST          the name of the pass that yielded the launch's first batch; 0: none yet
# LOOP, WORKERS  one cell for the loop and one per worker: its last recorded pass, as (number of passes so far) << 31 plus the
#                low 31 bits of the pass's name; the cells outlive a worker's process
_FIRST, _LOOP, _WORKERS = range(3)
_NAME_BITS = 31


def round_name(number: int, worker: Worker | None) -> int:
    """Return the name of a process's pass `number`: positive and equal for all workers; negative in the loop's process.

    Workers of one pass share the seed that their loader drew at its begin, and the number of passes since then. So they derive
    the same name without communication.
    """
    return (worker.loader_seed + number) % (1 << 62) + 1 if worker else -number


class Launch:
    """Shared state of all passes of a launch. A fork that is no loader worker, or a copy, is a new launch."""

    def __init__(self) -> None:
        self._cells = SharedCells(_WORKERS + MAX_WORKERS, handed_down=False)

    @property
    def name(self) -> str:
        """Unique name of the launch."""
        return self._cells.owner

    def is_first(self, number: int, worker: Worker | None) -> bool:
        """Whether no earlier pass yielded a batch, in any process."""
        return int(self._cells.now[_FIRST]) in (0, round_name(number, worker))

    def take(self, number: int, worker: Worker | None) -> None:
        """Record that this pass yields its first batch."""
        if not self._cells.now[_FIRST]:
            self._cells.now[_FIRST] = round_name(number, worker)

    def num_before(self, number: int, worker: Worker | None) -> int:
        """Count the passes recorded before this one; mostly equal for all workers of a pass.

        Two workers may call it concurrently: they find the same number, because each writes only its cell.
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
        """Record this pass; `num_before` passes were recorded before it."""
        self._cells.now[_cell_of(worker)] = (num_before + 1 << _NAME_BITS) + _short(number, worker)


def _cell_of(worker: Worker | None) -> int:
    return _WORKERS + worker.first if worker else _LOOP


def _short(number: int, worker: Worker | None) -> int:
    return round_name(number, worker) % (1 << _NAME_BITS)
