"""What is measured of Penstock against itself, or against what its parts can do at best. A module each, with `measure(scale)`.

Each runs in a process of its own, started by run.py: `python benchmarks/ratio.py NAME WORK_DIR [--quick] [--minutes M]`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

NAMES = (
    *("static", "tls", "first_batch", "cold_parquet", "cold_text", "cold_start"),
    *("packings", "ranks", "memory", "object_store", "training_step"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How much is measured. `num_repeats` times in turn, of which the median counts."""

    work: Path
    num_samples: int
    text_rows: int
    num_documents: int
    length_rows: int
    num_ranks: int
    rank_seconds: float
    num_repeats: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """One row of the second table: ours, and what it is held against, in one unit; `theirs` is None where nothing is."""

    what: str
    against: str
    ours: float
    theirs: float | None
    unit: str
    note: str = ""


def full(work: Path, minutes: float | None) -> Scale:
    """What results are published of."""
    return Scale(
        work=work,
        num_samples=262_144,
        text_rows=150_000,
        num_documents=80_000,
        length_rows=100_000,
        num_ranks=1_000,
        rank_seconds=60 * (0.5 if minutes is None else minutes),
        num_repeats=5,
    )


def quick(work: Path, minutes: float | None) -> Scale:
    """A first impression."""
    return Scale(
        work=work,
        num_samples=16_384,
        text_rows=6_000,
        num_documents=6_400,
        length_rows=8_000,
        num_ranks=200,
        rank_seconds=60 * (0.05 if minutes is None else minutes),
        num_repeats=2,
    )


def seconds(function: Callable[[], object]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def in_turn(num_repeats: int, *functions: Callable[[], float]) -> list[float]:
    """The median of what each function measures, called in turn, so that none has the quieter minutes for itself."""
    found = [[function() for function in functions] for _ in range(num_repeats)]
    return [median(values) for values in zip(*found, strict=True)]
