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
from itertools import chain

from penstock.audit.history import Iteration, Kept, Place, StartKey

Course = list[Kept]


def reaches(ranks: Sequence[Sequence[Iteration]]) -> dict[StartKey, Place]:
    """How far all ranks that took part in a start came: a state can have been saved up to there, and not behind."""
    found: dict[StartKey, Place] = {}
    for iterations in ranks:
        own: dict[StartKey, Place] = {}
        for iteration in iterations:
            key, epoch = iteration.start.key, iteration.begin.epoch
            place = (epoch + 1, 0) if iteration.has_end else iteration.reach
            own[key] = max(place, own.get(key, place))
        for key, place in own.items():
            found[key] = min(place, found.get(key, place))
    return found


def course_of(iterations: Sequence[Iteration], reach: Mapping[StartKey, Place]) -> Course:
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


def follow(
    iterations: Sequence[Iteration], course: Course, cuts: Mapping[int, Sequence[Iteration]], leader: Sequence[Iteration]
) -> Course | None:
    """What of a rank's iterations is on the course of its leader, with its cuts; None if it started when the leader did not.

    A rank has no part in a start that stops before its first batch, nor in those of a world size that leaves it out.
    """
    own: dict[StartKey, list[list[Iteration]]] = {}  # the rank's starts, and each one's iterations
    for iteration in iterations:
        again = own.setdefault(iteration.start.key, [])
        if not again or again[-1][0].start is not iteration.start:
            again.append([])
        again[-1].append(iteration)
    if not own.keys() <= {iteration.start.key for iteration in leader}:
        return None
    firsts = {kept.iteration.start.number: kept.iteration for kept in reversed(course)}
    for key, again in own.items():
        numbers = dict.fromkeys(iteration.start.number for iteration in leader if iteration.start.key == key)
        if not again[0][0].start.resumes and len(again) == len(numbers):  # else it is not known which of them it has no part in
            own[key] = [one for one, number in zip(again, numbers, strict=True) if number in firsts]
    found: Course = []
    for number in reversed(firsts):
        first, again = firsts[number], own.get(firsts[number].start.key, [])
        if any(cut.start.key == first.start.key for cut in cuts[number]):
            continue  # tried again from the same state
        if not first.start.resumes:
            again, own[first.start.key] = again[:1], again[1:]
        later = tuple(cut for cut in cuts[number] if cut.start.key in own or cut.slicing != first.slicing)
        found += [Kept(iteration, later) for iteration in _try(again, cuts[number])]
    return found


def _try(again: Sequence[list[Iteration]], later: Sequence[Iteration]) -> list[Iteration]:
    """The iterations of the last of several starts from one state that came to where the run went on."""
    if not again:
        return []
    place = later[0].place if later else again[-1][-1].reach
    came = [iterations for iterations in again if iterations[-1].reach >= place]
    return came[-1] if came else max(again, key=lambda iterations: iterations[-1].reach)


def _resumed(courses: Sequence[Course], reach: Mapping[StartKey, Place], resumed: Iteration) -> Course:
    """What led to the place at which an iteration resumes."""
    place = resumed.place
    together = (course for course in reversed(courses) if reach[course[-1].iteration.start.key] >= place)
    for course in chain(together, reversed(courses)):
        for at in reversed(range(len(course))):
            iteration = course[at].iteration
            if iteration.start is course[-1].iteration.start and iteration.may_have_saved(resumed):
                return [*course[:at], course[at].before(resumed)]
        if place[1] == 0 and course[-1].iteration.begin.epoch < place[0]:
            return course
    # None came so far: what it went on from is not in the ledger, or the end of it was lost with the machine.
    return [kept.before(resumed) for kept in courses[-1]]
