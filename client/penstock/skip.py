"""Ranges of an epoch that a run leaves out, such as the steps around a loss spike.

41000-41200,50000-50010      steps, both ends included, counted as if nothing were skipped
samples:1000-1999            samples of the epoch, over all ranks: the same whatever the batch size
"""

from __future__ import annotations

import re
from functools import lru_cache

from penstock.errors import SpecError

Ranges = tuple[tuple[int, int], ...]

_SAMPLES = "samples:"
_RANGE = re.compile(r"([0-9]{1,16})(?:-([0-9]{1,16}))?")
_LAST = 2**53  # as far as samples are counted: a range may end anywhere past an epoch


@lru_cache(maxsize=64)
def parse_skip(text: str, samples_per_step: int) -> Ranges:
    """Parse ranges of samples, half-open, sorted and disjoint. Raises SpecError: the text is invalid."""
    unit = 1 if text.startswith(_SAMPLES) else samples_per_step
    ranges = []
    for part in text.removeprefix(_SAMPLES).split(","):
        found = _RANGE.fullmatch(part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last:
            raise SpecError(f"skip={text!r}: {part!r} is not a range FIRST-LAST, such as 41000-41200", ("skip",))
        ranges.append((min(first * unit, _LAST), min((last + 1) * unit, _LAST)))
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if start == stop:  # after the last sample
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def spell_skip(ranges: Ranges) -> str | None:
    """Spell ranges of samples; None without any."""
    return _SAMPLES + ",".join(f"{start}-{stop - 1}" for start, stop in ranges) if ranges else None


def num_kept_before(ranges: Ranges, position: int) -> int:
    """Return the number of kept positions below this one."""
    return position - sum(min(stop, position) - start for start, stop in ranges if start < position)


def skips_more(ranges: Ranges, known: Ranges) -> bool:
    """Whether a position in `ranges` is not in `known`."""
    return any(num_kept_before(known, start) < num_kept_before(known, stop) for start, stop in ranges)


def kept_runs(ranges: Ranges, num_samples: int) -> list[tuple[int, int]]:
    """Return the half-open runs of kept positions among the first `num_samples`, without empty ones."""
    inside = [(start, stop) for start, stop in ranges if start < num_samples]
    starts = [0, *(stop for _, stop in inside)]
    stops = [*(start for start, _ in inside), num_samples]
    return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]


def position_after(ranges: Ranges, offset: int, num_samples: int) -> int:
    """Return the position after `num_samples` kept samples, counted from position `offset` on."""
    position, left = offset, num_samples
    for start, stop in ranges:
        room = max(0, start - position)
        if left <= room:
            break
        position, left = max(position, stop), left - room
    return position + left
