"""The course of a run: which of the batches that were recorded led to where it is, and which were thrown away.

A start that loaded a state goes on where that was saved. What was recorded after that place is thrown away: it trained weights
that nobody kept. A start goes on from the latest one before it that came as far as this place, with all that led to that one.

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

Reach = Mapping[int, Place]  # of each start, by its number


@dataclass(frozen=True, slots=True)
class Kept:
    """What of an iteration led to where the run is: all of it, or what none of `resumed` threw away."""

    iteration: Iteration
    resumed: tuple[Iteration, ...] = ()

    @property
    def runs(self) -> IntArray:
        """The steps that these are."""
        runs = self.iteration.own_runs
        for other in self.resumed:
            runs = self.iteration.runs_kept(runs, other)
        return runs

    @property
    def stop(self) -> Place | None:
        """The place where another iteration took over; None: its own end."""
        return min((other.place for other in self.resumed), default=None)

    def has_behind(self, place: Place) -> bool:
        """Whether a step after this place still counts: of a worker that was ahead of others when another iteration resumed."""
        return any(
            cut.slicing.position(step + 1) > place[1]
            for cut in self.resumed
            if cut.begin.epoch == place[0] and cut.begin.step < max(cut.first_steps.values())
            for step in cut.steps_of_others()
        )

    def cut_by(self, other: Iteration) -> Kept:
        """What is left of it where `other` resumes."""
        return replace(self, resumed=(*self.resumed, other))


Course = list[Kept]


def reaches(leader: RankRecord, records: Sequence[RankRecord]) -> dict[int, Place]:
    """How far all ranks that took part in a start of the leader's came: a state can have been saved up to there, not after."""
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
    """How far all ranks came in the starts of one, as far as they are the leader's, of which `reach` is."""
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
    """What led to where a rank is: iterations in their order, cut where a later one threw the rest away.

    `reach` is that of all ranks together.
    """
    courses: list[Course] = []  # what led to where each start came
    for iteration in iterations:
        number = iteration.start.number
        if number < len(courses):
            courses[number].append(Kept(iteration))
            if number < len(courses) - 1:  # it goes on beside a later start
                courses[-1].append(Kept(iteration))
        elif not courses:
            courses.append([Kept(iteration)])
        else:
            led_here = _resumed(courses, reach, iteration) if iteration.start.resumes else courses[-1]
            courses.append([*led_here, Kept(iteration)])
    return courses[-1]


def cuts_of(course: Course) -> dict[int, list[Iteration]]:
    """Of each start on a course, by its number, what took over from it, and from that in turn; each once."""
    cuts: dict[int, dict[int, Iteration]] = {}
    for kept in reversed(course):
        own = cuts.setdefault(kept.iteration.start.number, {})
        for cut in kept.resumed:
            for later in (cut, *cuts.get(cut.start.number, {}).values()):
                own.setdefault(id(later), later)
    return {number: list(own.values()) for number, own in cuts.items()}


def follow(record: RankRecord, cuts: Mapping[int, Sequence[Iteration]]) -> Course:
    """What of a rank's iterations is on the course of its leader, of which `cuts` are; all of its starts are the leader's.

    A rank has no part in a start that stops before its first batch, nor in those of a world size that leaves it out. Where it
    never began from that state, as where each rank evaluates by itself, it goes on beside that start.
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
    """What led to the place at which an iteration resumes."""
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
    # None came so far: what it went on from is not in the ledger, or the end of it was lost with the machine.
    return [kept.cut_by(resumed) for kept in courses[-1] if kept.iteration.place < place]
