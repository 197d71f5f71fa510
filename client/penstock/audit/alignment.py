"""Which starts of a rank are which of the leader's. Ranks have no name for a start in common, and either may lack some.

Each lists those in which it came to a batch, in the order in which they began. Where one lacks some of several from the same
state, those are taken for the same in which both came about as far:

    leader   start 1  0 ...... 62     start 2  40 ...... 79     start 3  40 . 41
    rank 1   start 1  0 ...... 61     start 2  40 ...... 80                         so its start 2 is the leader's start 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.audit.intervals import size
from penstock.audit.record import Iteration, RankRecord, StartKey

_UNKNOWN = 1 << 62  # more than all steps of a run: a start is left without one of the leader's only where there is none for it
_MAX_UNKNOWN = 16  # starts that one way of pairing leaves out and another does not; of thousands not all ways are tried
_Pairs = tuple[tuple[int, int], "_Pairs"] | tuple[()]


def align(record: RankRecord, leader: RankRecord) -> RankRecord:
    """The record of a rank whose starts know which of the leader's they are, as far as they are any.

    Without those that are none and have no step: in them nothing was trained.
    """
    own, theirs = record.starts, [start for start in leader.starts if record.rank < start.slicing.world_size]
    steps, their_steps = _steps_of(record.iterations), _steps_of(leader.iterations)
    if [start.key for start in own] == [start.key for start in theirs]:
        pairs = list(zip(own, theirs, strict=True))
    else:
        found = _match([(start.key, steps[start.number]) for start in own], [(s.key, their_steps[s.number]) for s in theirs])
        pairs = [(own[one], theirs[other]) for one, other in found]
    in_run = {one.number: other.number for one, other in pairs}
    kept = [start for start in own if start.number in in_run or steps[start.number]] or own
    starts = {s.number: replace(s, number=number, in_run=in_run.get(s.number)) for number, s in enumerate(kept)}
    iterations = [i for i in record.iterations if i.start.number in starts]
    return replace(record, iterations=[replace(i, start=starts[i.start.number]) for i in iterations])


def _steps_of(iterations: Sequence[Iteration]) -> dict[int, int]:
    """How many steps each start recorded."""
    found: dict[int, int] = {}
    for iteration in iterations:
        number = iteration.start.number
        found[number] = found.get(number, 0) + size(iteration.runs)
    return found


def _match(own: Sequence[tuple[StartKey, int]], theirs: Sequence[tuple[StartKey, int]]) -> list[tuple[int, int]]:
    """Pairs of equal keys, in both orders: as many as there can be, with the fewest steps that one of the two has alone.

    Of pairs that are as good, the earliest of theirs.
    """
    numbers: dict[StartKey, list[int]] = {}
    for number, (key, _) in enumerate(theirs):
        numbers.setdefault(key, []).append(number)
    # Ways to pair those so far, as (how many of theirs are used up, cost, pairs), sorted: one that uses up more of theirs is
    # kept only if it costs less. At first all steps of theirs count as alone.
    best: list[tuple[int, int, _Pairs]] = [(0, sum(steps for _, steps in theirs), ())]
    for one, (key, steps) in enumerate(own):
        ways = [(behind, cost + _UNKNOWN, pairs) for behind, cost, pairs in best]
        at = 0
        for other in numbers.get(key, []):
            while at + 1 < len(best) and best[at + 1][0] <= other:
                at += 1
            behind, cost, pairs = best[at]
            if behind <= other:
                ways.append((other + 1, cost - theirs[other][1] + abs(theirs[other][1] - steps), ((one, other), pairs)))
        best = _not_outdone(ways)
    found, (_, _, pairs) = list[tuple[int, int]](), best[-1]
    while pairs:
        pair, pairs = pairs
        found.append(pair)
    return found[::-1]


def _not_outdone(ways: Sequence[tuple[int, int, _Pairs]]) -> list[tuple[int, int, _Pairs]]:
    """Those beside which no other has as few behind and costs as little."""
    found: list[tuple[int, int, _Pairs]] = []
    most = min(cost for _, cost, _ in ways) + _MAX_UNKNOWN * _UNKNOWN
    for way in sorted(ways, key=lambda way: way[:2]):
        if way[1] < most and (not found or way[1] < found[-1][1]):
            found.append(way)
    return found
