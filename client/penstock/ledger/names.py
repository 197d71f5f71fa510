"""Which files are of one ledger: of each rank one, and of each of its loader's workers."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path

_RANK = "{rank}"


def ledger_path(ledger: str | os.PathLike[str], rank: int, worker: int | None = None) -> Path:
    """The file of one process: the path with the rank for {rank}; else the path for rank 0, path.1 for rank 1, ...

    A loader's worker writes to path.worker0, or to path.1.worker0.
    """
    path = os.fspath(ledger)
    path = path.replace(_RANK, str(rank)) if _RANK in path else path + (f".{rank}" if rank else "")
    return Path(path + ("" if worker is None else f".worker{worker}")).absolute()


def find_ledgers(ledger: str | os.PathLike[str]) -> list[Path]:
    """The files that are there, of all ranks and workers, for a path as RemoteDataset takes it; or those of one rank."""
    path = Path(ledger).absolute()
    pieces = str(path.relative_to(path.anchor)).split(_RANK)
    rank, behind = (r"\d+", "") if len(pieces) > 1 else ("", r"(\.\d+)?")
    pattern = re.compile(rank.join(map(re.escape, pieces)) + behind + r"(\.worker\d+)?")
    wildcards = "*".join([*map(glob.escape, pieces), ""])
    found = Path(path.anchor).glob(re.sub(r"\*+", "*", wildcards))  # two stars would be another thing
    return sorted(one for one in found if pattern.fullmatch(str(one.relative_to(path.anchor))) and one.is_file())
