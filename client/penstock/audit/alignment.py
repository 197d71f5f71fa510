"""Alignment of a rank's starts with the leader's. Ranks share no name for a start, and either may lack some.

Each rank lists its starts that reached a batch, in the order of their begins. If one rank lacks some of several starts from
the same state, the alignment pairs starts that came about equally far:

    leader   start 1  0 ...... 62     start 2  40 ...... 79     start 3  40 . 41
    rank 1   start 1  0 ...... 61     start 2  40 ...... 80                         so its start 2 is the leader's start 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.audit.intervals import size
from penstock.audit.record import Iteration, RankRecord, StartKey

# More than all steps of a run: a start stays unpaired only if the leader has no start for it.
_UNKNOWN = 1 << 62
# The search drops a pairing that leaves out this many more starts than another: thousands of starts have too many pairings.
_MAX_UNKNOWN = 16
_Pairs = tuple[tuple[int, int], "_Pairs"] | tuple[()]


def align(record: RankRecord, leader: RankRecord) -> RankRecord:
    """Return a rank's record with each start linked to the leader's start, if there is one.

    It drops unlinked starts without a step: they trained nothing.
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
    """Count the recorded steps of each start."""
    found: dict[int, int] = {}
    for iteration in iterations:
        number = iteration.start.number
        found[number] = found.get(number, 0) + size(iteration.runs)
    return found


def _match(own: Sequence[tuple[StartKey, int]], theirs: Sequence[tuple[StartKey, int]]) -> list[tuple[int, int]]:
    """Pair starts of equal keys, in order on both sides: most pairs first, then fewest steps that only one side has.

    Among equally good pairings it takes the earliest of `theirs`.
    """
    numbers: dict[StartKey, list[int]] = {}
    for number, (key, _) in enumerate(theirs):
        numbers.setdefault(key, []).append(number)
    # Pairings so far, sorted, as (number of `theirs` used up, cost, pairs). A pairing that uses up more is kept only if it
    # costs less. Initially all steps of `theirs` count as unpaired.
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
    """Return the pairings that no other beats in both used-up starts and cost."""
    found: list[tuple[int, int, _Pairs]] = []
    most = min(cost for _, cost, _ in ways) + _MAX_UNKNOWN * _UNKNOWN
    for way in sorted(ways, key=lambda way: way[:2]):
        if way[1] < most and (not found or way[1] < found[-1][1]):
            found.append(way)
    return found
