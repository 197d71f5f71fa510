"""Course of a run: the recorded batches that led to its current weights, and those that were thrown away.

A start that loaded a state continues at the state's place. Records after that place are thrown away: they trained weights that
were discarded. A start continues from the latest earlier start that came as far as this place, with that start's own course.

Start 2 loads a state of step 60. Start 3 loads one of step 90, so it cannot be start 2's:

    start 1   0 ............ 60 ............ 90 ... 100
    start 2                  60 ..... 80
    start 3                                  90 ............ 150

    course    start 1 [0, 90), start 3 [90, 150); thrown away: start 1 [90, 100), start 2 [60, 80)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from penstock.audit.reading import IntArray
from penstock.audit.record import Iteration, Place, RankRecord

Reach = Mapping[int, Place]  # by start number: how far the start came


@dataclass(frozen=True, slots=True)
class Kept:
    """The part of an iteration on the course: all of it, except what `resumed` threw away."""

    iteration: Iteration
    resumed: tuple[Iteration, ...] = ()

    @property
    def runs(self) -> IntArray:
        """The kept steps."""
        runs = self.iteration.own_runs
        for other in self.resumed:
            runs = self.iteration.runs_kept(runs, other)
        return runs

    @property
    def stop(self) -> Place | None:
        """The place where another iteration took over; None: it kept its end."""
        return min((other.place for other in self.resumed), default=None)

    def has_behind(self, place: Place) -> bool:
        """Whether a step after this place counts: a worker was ahead of others when another iteration resumed."""
        return any(
            cut.slicing.position(step + 1) > place[1]
            for cut in self.resumed
            if cut.begin.epoch == place[0] and cut.begin.step < max(cut.first_steps.values())
            for step in cut.steps_of_others()
        )

    def cut_by(self, other: Iteration) -> Kept:
        """Return the part that remains after `other` resumes."""
        return replace(self, resumed=(*self.resumed, other))


Course = list[Kept]


def reaches(leader: RankRecord, records: Sequence[RankRecord]) -> dict[int, Place]:
    """Return how far all ranks came in each start of the leader: a state cannot have been saved after that place."""
    found = _reach(leader)
    for record in records:
        own = _reach(record)
        came = {start.in_run: own[start.number] for start in record.starts}
        for start in leader.starts:
            if start.number in came:
                found[start.number] = min(found[start.number], came[start.number])
            elif record.is_in_run and record.rank < start.slicing.world_size:  # it was killed before its first batch
                found[start.number] = min(found[start.number], start.place)
    return found


def reach_of(record: RankRecord, reach: Reach) -> Reach:
    """Return how far all ranks came in each start of one rank; `reach` covers the leader's starts."""
    own = _reach(record)
    return {s.number: own[s.number] if s.in_run is None else reach[s.in_run] for s in record.starts}


def _reach(record: RankRecord) -> dict[int, Place]:
    found: dict[int, Place] = {}
    for iteration in record.iterations:
        number, epoch = iteration.start.number, iteration.begin.epoch
        place = (epoch + 1, 0) if iteration.has_end else iteration.reach
        found[number] = max(place, found.get(number, place))
    return found


def course_of(iterations: Sequence[Iteration], reach: Reach) -> Course:
    """Return the course of a rank: its iterations in order, cut where a later one threw the rest away.

    `reach` is how far all ranks together came.
    """
    courses: list[Course] = []  # by start number
    for iteration in iterations:
        number = iteration.start.number
        if number < len(courses):
            courses[number].append(Kept(iteration))
            if number < len(courses) - 1:  # it continues in parallel to a later start
                courses[-1].append(Kept(iteration))
        elif not courses:
            courses.append([Kept(iteration)])
        else:
            led_here = _resumed(courses, reach, iteration) if iteration.start.resumes else courses[-1]
            courses.append([*led_here, Kept(iteration)])
    return courses[-1]


def cuts_of(course: Course) -> dict[int, list[Iteration]]:
    """Return, by start number, the iterations that took over from a start, directly or in turn; each once."""
    cuts: dict[int, dict[int, Iteration]] = {}
    for kept in reversed(course):
        own = cuts.setdefault(kept.iteration.start.number, {})
        for cut in kept.resumed:
            for later in (cut, *cuts.get(cut.start.number, {}).values()):
                own.setdefault(id(later), later)
    return {number: list(own.values()) for number, own in cuts.items()}


def follow(record: RankRecord, cuts: Mapping[int, Sequence[Iteration]]) -> Course:
    """Return a rank's iterations on the leader's course. `cuts` are the leader's; all starts of the rank are the leader's, too.

    A rank takes no part in a start that stops before its first batch, or whose world size excludes it. If the rank never
    loaded the state of a cut, as when each rank evaluates alone, it continues in parallel to that start.
    """
    loaded = {start.key for start in record.starts}
    found: Course = []
    for iteration in record.iterations:
        number = iteration.start.in_run
        if number is not None and number in cuts:
            later = (cut for cut in cuts[number] if cut.start.key in loaded or cut.slicing != iteration.slicing)
            found.append(Kept(iteration, tuple(later)))
    return found


def _resumed(courses: Sequence[Course], reach: Reach, resumed: Iteration) -> Course:
    """Return the course up to the place where an iteration resumes."""
    place = resumed.place
    together = (course for course in reversed(courses) if reach[course[-1].iteration.start.number] >= place)
    for course in chain(together, reversed(courses)):
        for at in reversed(range(len(course))):
            iteration = course[at].iteration
            if iteration.start.number == course[-1].iteration.start.number and iteration.may_have_saved(resumed):
                earlier = (kept.cut_by(resumed) if kept.has_behind(place) else kept for kept in course[:at])
                return [*earlier, course[at].cut_by(resumed)]
        is_at_start = place[1] == 0 and not resumed.steps_of_others()
        if is_at_start and course[-1].iteration.begin.epoch < place[0]:
            return course
    # No course came this far: its source is not in the ledger, or the end of that ledger was lost with the machine.
    return [kept.cut_by(resumed) for kept in courses[-1] if kept.iteration.place < place]
