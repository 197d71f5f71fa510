"""Ranks and loader workers: which rank this process is, and whether all ranks train on one snapshot and one order."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from getpass import getuser
from pathlib import Path
from typing import Any

import torch.distributed
from torch.utils.data import Dataset, get_worker_info

from penstock.errors import PenstockError, SpecError
from penstock.numbers import is_whole, plain
from penstock.spec import Spec
from penstock.text import listed

_REMEDY = "Make the dataset after torch.distributed is initialized, or pass rank and world_size"
_FIRST_CHECK = 16  # batches before ranks are compared; doubled for each further check
_MAX_LISTED = 4  # ranks
_TOLERANCE_SECONDS = 30.0  # delay between the ranks' starts that is not reported


@dataclass(frozen=True, slots=True)
class LoaderWorker:
    """A DataLoader's worker process, which takes every `stride`-th step from `first` on.

    loader  number of processes that the loop's process had started before this DataLoader's workers: it tells loaders apart
    """

    first: int
    stride: int
    loader: int


def find_worker() -> LoaderWorker | None:
    """Return the loader worker that this process is; None in the training loop's process."""
    info = get_worker_info()
    if info is None:
        return None
    # The loader's seed would not tell loaders apart: a loop may give torch one seed before each, and so does torchdata.
    number = re.search(r"\d+$", multiprocessing.current_process().name)
    return LoaderWorker(info.id, info.num_workers, int(number[0]) - info.id if number else 0)


def is_distributed() -> bool:
    """Whether torch.distributed is initialized in this process."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def find_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return rank and world size: as given, else torch.distributed's, else RANK and WORLD_SIZE, else 0 of 1.

    Raises SpecError: the values are invalid, or a launcher started several processes without a RANK.
    """
    if (rank is None) != (world_size is None):
        raise SpecError("give both rank and world_size, or neither", ("rank", "world_size"))
    if rank is None or world_size is None:
        if is_distributed():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return _rank_of_environment()
    rank, world_size = plain(rank), plain(world_size)
    if not (is_whole(rank) and is_whole(world_size) and 0 <= rank < world_size):
        raise SpecError(
            f"rank={rank!r} and world_size={world_size!r} must be integers with 0 <= rank < world_size",
            ("rank", "world_size"),
        )
    return rank, world_size


def _rank_of_environment() -> tuple[int, int]:
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and world_size is None:
        _check_single_process()
    if rank is None and world_size in (None, "1"):
        return 0, 1
    are_numbers = all(text and text.isdecimal() for text in (rank, world_size))
    if rank is None or world_size is None or not are_numbers or not int(rank) < int(world_size):
        raise SpecError(
            f"the environment has RANK={rank} and WORLD_SIZE={world_size}. Both must be set, with 0 <= RANK < WORLD_SIZE. "
            f"Start with torchrun, or pass rank and world_size.",
            ("rank", "world_size"),
        )
    return int(rank), int(world_size)


def _check_single_process() -> None:
    """Raises SpecError: srun or mpirun started several processes, and none has a RANK.

    The launchers' own variables do not give the rank: mpirun's processes inherit those of a Slurm batch script.
    """
    for name, launcher in (("SLURM_STEP_NUM_TASKS", "srun"), ("OMPI_COMM_WORLD_SIZE", "mpirun"), ("PMI_SIZE", "mpirun")):
        number = os.environ.get(name, "1")
        if number not in ("0", "1"):
            raise SpecError(
                f"{launcher} started {number} processes ({name}), and RANK is not set: each would train as rank 0 of 1 on the "
                f"same samples. {_REMEDY} (0 and 1 if each process trains alone).",
                ("rank", "world_size"),
            )


def check_rank(rank: int, world_size: int) -> None:
    """Raises PenstockError: torch.distributed was initialized with another rank after the dataset was made."""
    if is_distributed() and (now := find_rank(None, None)) != (rank, world_size):
        raise PenstockError(
            f"this dataset was made for rank {rank} of {world_size}, before torch.distributed was initialized as it is now. "
            f"This is rank {now[0]} of {now[1]}: ranks would train on the same samples. Make it after "
            f"init_process_group, or pass rank and world_size."
        )


def check_not_sharded_again(data: Dataset[Any], world_size: int) -> None:
    """Raises PenstockError: Accelerate iterates over this dataset to split each rank's share among the ranks again."""
    if world_size == 1 or "accelerate" not in sys.modules:
        return
    from accelerate.data_loader import DataLoaderDispatcher, IterableDatasetShard
    from accelerate.state import GradientState

    loader = GradientState().active_dataloader  # the prepared loader whose loop started last
    splits = isinstance(loader, DataLoaderDispatcher) or isinstance(getattr(loader, "dataset", None), IterableDatasetShard)
    if splits and _holds(loader.dataset, data):
        raise PenstockError(
            f"this dataset gives each of {world_size} ranks its share, and accelerator.prepare() splits that share among the "
            f"ranks again: most samples would be lost. Prepare the model and the optimizer only, and loop over the dataset."
        )


def _holds(dataset: Dataset[Any], data: Dataset[Any]) -> bool:
    """Whether one dataset is the other, or wraps it."""
    if dataset is data:
        return True
    return any(isinstance(value, Dataset) and _holds(value, data) for value in vars(dataset).values())


class SnapshotConsensus:
    """Agreement of a job's ranks on the latest snapshot while data arrives.

    A rank notes its snapshot in the store of torch.distributed, with a unique mark. A rank that has not taken that note yet
    takes it. A rank that has taken it is the first to ask again, and notes its current snapshot. No rank waits for another:
    a collective would hang if some rank does not make the dataset. Requests are not counted either: one rank alone may make
    another dataset to inspect a few batches.
    """

    def __init__(self, question: str) -> None:
        self._key = f"penstock/{question}"
        self._note = ""
        self._is_settled = False

    def propose(self, snapshot: str) -> str:
        """Return the first noted snapshot; `snapshot` while torch.distributed is not initialized."""
        if not self._note and job_store() is not None:
            note = f"{snapshot} {os.urandom(8).hex()}"
            noted = _compare_set(self._key, "", note)
            if noted and noted == _taken.get(self._key):  # not new to this process: replace it
                noted = _compare_set(self._key, noted, note)
            if noted:
                _taken[self._key] = noted
            self._note = noted or note
        return self._note.partition(" ")[0] or snapshot

    def check(self, snapshot: str) -> None:
        """Raises PenstockError: another rank noted another snapshot after torch.distributed was initialized."""
        _compare(snapshot, self.propose(snapshot))

    def settle(self, snapshot: str) -> None:
        """Check for the last time, right before the first batch.

        Notes that this process has taken since then, for another dataset, do not count.

        Raises PenstockError: another rank noted another snapshot, before or since.
        """
        self.check(snapshot)
        if self._note and not self._is_settled:
            noted = _compare_set(self._key, "", self._note)
            if noted and noted != _taken.get(self._key):
                _compare(snapshot, noted.partition(" ")[0])
            self._is_settled = True


def agree(question: str, answer: str) -> str:
    """Return the answer of the rank that asks first; this rank's `answer` while torch.distributed is not initialized.

    If a process asks a question again, it is another question: the ranks are expected to ask it equally often.
    """
    number = _num_asked[question] = _num_asked.get(question, 0) + 1
    return _compare_set(f"penstock/{question}/{number}", "", answer) or answer


_num_asked = dict[str, int]()  # by question of `agree`
_taken = dict[str, str]()  # the last note that this process took, by key: datasets of one process share it


def _compare_set(key: str, expected: str, text: str) -> str:
    """Replace a text in the job's store if it is the expected one; return the text that is there now, "" without a job."""
    store = job_store()
    with suppress(RuntimeError):  # the store's process has ended, and so has the job
        return bytes(store.compare_set(key, expected, text)).decode() if store is not None else ""
    return ""


def _compare(snapshot: str, noted: str) -> None:
    if noted != snapshot:
        raise PenstockError(
            f"this rank would train on snapshot {snapshot}, and others do on {noted}. Data arrived while they started, and "
            f"torch.distributed was not initialized yet, or one rank made one dataset more than the others. Make the dataset "
            f"after init_process_group, or pass snapshot={noted!r} to all ranks."
        )


@cache
def find_job() -> str:
    """Return the name of this run, the same on all ranks: PENSTOCK_JOB, or its script, user, host and start.

    Before torch.distributed is initialized, ranks of a launcher share the address of rank 0 and the launcher's id of the run.
    """
    if job := os.environ.get("PENSTOCK_JOB"):
        return job
    try:
        user = getuser()
    except (KeyError, OSError):  # a container may have no name for its user
        user = str(os.getuid())
    host, start = socket.gethostname(), time.strftime("%Y-%m-%d %H:%M")
    if not is_distributed() and os.environ.get("WORLD_SIZE", "1") != "1":
        host = os.environ.get("MASTER_ADDR", host)
        ids = [os.environ.get(name, "") for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "MASTER_PORT")]
        start = next((text for text in ids if text not in ("", "none")), "")
    return agree("job", f"{Path(*sys.argv[:1]).name or 'python'} {user}@{host} {start}".strip())


class PeerCheck:
    """Comparison of an iteration's start with the other ranks' starts.

    Ranks share an epoch only if they iterate over one order from one position. Each rank notes its start in the store of
    torch.distributed; no rank waits for another. After a while rank 0 compares the notes.
    """

    def __init__(self, dataset: str, spec: Spec, epoch: int, step: int, rank: int) -> None:
        self._started, self._next_check = time.monotonic(), _FIRST_CHECK
        self._others = range(1, spec.world_size if rank == 0 else 1)
        self._start = {"epoch": epoch, "step": step, **spec.to_dict()}
        self._same = f"penstock/{dataset}/begun/{spec.digest}/{epoch}/{step}/"  # keys of ranks that start here
        self._last = f"penstock/{dataset}/began/"  # keys of each rank's last start
        self._store = _tcp_store()
        with suppress(RuntimeError):  # the store's process has ended, and so has the job
            if self._store is not None:
                self._store.set(f"{self._same}{rank}", "")
                self._store.set(f"{self._last}{rank}", json.dumps(self._start))

    def differences(self, num_batches: int) -> str:
        """Describe ranks that started elsewhere, after `num_batches` batches of this one; "" without any.

        Ranks that are only late are left out: ranks of some jobs do not synchronize.
        """
        if num_batches != self._next_check or not self._others or self._store is None:
            return ""
        self._next_check *= 2
        if time.monotonic() < self._started + _TOLERANCE_SECONDS:
            return ""
        with suppress(RuntimeError):
            if not self._has_all(f"{self._same}{other}" for other in self._others):
                missing = [other for other in self._others if not self._has_all([f"{self._same}{other}"])]
                return listed([f"rank {other} ({text})" for other in missing if (text := self._differing(other))], _MAX_LISTED)
        return ""

    def _differing(self, rank: int) -> str:
        """Describe how a rank's last start differs from this one; "" if the rank is only late."""
        if not self._has_all([f"{self._last}{rank}"]):
            return ""
        theirs = json.loads(self._store.get(f"{self._last}{rank}"))
        names = [name for name in {**self._start, **theirs} if self._start.get(name) != theirs.get(name)]
        if theirs["epoch"] < self._start["epoch"] and {*names} <= {"epoch", "step", "offset"}:
            return ""
        return ", ".join(f"{name}={theirs.get(name)}, not {self._start.get(name)}" for name in names)

    def _has_all(self, keys: Iterable[str]) -> bool:
        return bool(self._store.check([*keys]))


def _tcp_store() -> Any:
    """Return the job's store if it is a TCPStore: a file store blocks for minutes after its file is deleted."""
    if (store := job_store()) is None:
        return None
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # missing if built without distributed

    base = store
    while isinstance(base, PrefixStore):
        base = base.underlying_store
    return store if isinstance(base, TCPStore) else None


def job_store() -> Any:
    """Return the store that the ranks of this job share; None without torch.distributed or in a fork."""
    if not is_distributed() or _forked:
        return None
    from torch.distributed import distributed_c10d  # not importable if torch was built without distributed

    # Before torch 2.9 groups have no get_group_store.
    return getattr(torch.distributed.group.WORLD, "get_group_store", distributed_c10d._get_default_store)()


_forked: list[bool] = []  # not empty in a fork: it must not use the parent's connection to the store
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _forked.append(True) if is_distributed() else None)
