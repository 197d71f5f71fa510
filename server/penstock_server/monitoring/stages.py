"""Stages: what some work does now, and how long it did what; see penstock.wire.report for the names."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class _State(NamedTuple):
    seconds: dict[str, float]
    stage: str | None
    since: float


class StageClock:
    """Seconds that some work spent in each stage. One thread at a time enters stages; any thread reads."""

    def __init__(self, stage: str | None = None) -> None:
        self._state = _State({}, stage, time.monotonic())  # replaced as a whole, for the readers

    @property
    def stage(self) -> str | None:
        """The stage that the work is in; None before it begins and after it ended."""
        return self._state.stage

    def enter(self, stage: str | None) -> None:
        """Begin a stage; None ends the work."""
        now = time.monotonic()
        self._state = _State(_counted(self._state, now), stage, now)

    def end_as(self, stage: str) -> None:
        """End the current stage, and count its time as that of another one."""
        now = time.monotonic()
        self._state = _State(_counted(self._state._replace(stage=stage), now), None, now)

    def add(self, stages: Mapping[str, float], next_stage: str | None) -> None:
        """End a stage by its division into others, in seconds, and begin the next one."""
        seconds = dict(self._state.seconds)
        for stage, spent in stages.items():
            seconds[stage] = seconds.get(stage, 0.0) + spent
        self._state = _State(seconds, next_stage, time.monotonic())

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage so far, those of the current stage included."""
        return _counted(self._state, time.monotonic())


def _counted(state: _State, now: float) -> dict[str, float]:
    if state.stage is None:
        return state.seconds
    return state.seconds | {state.stage: state.seconds.get(state.stage, 0.0) + now - state.since}


class SharedWait:
    """A wait for the work of other threads, divided among its stages in proportion to the work."""

    def __init__(self, clocks: Iterable[StageClock]) -> None:
        self._began_at = time.monotonic()
        self._before = [(clock, clock.seconds()) for clock in clocks]

    def stages(self) -> dict[str, float]:
        """Return the seconds of the wait so far by stage; they sum up to its length."""
        work = dict[str, float]()
        for clock, before in self._before:
            for stage, seconds in clock.seconds().items():
                work[stage] = work.get(stage, 0.0) + seconds - before.get(stage, 0.0)
        waited, total = time.monotonic() - self._began_at, sum(work.values())
        if total <= 0.0:
            return {"queue": waited}
        return {stage: waited * seconds / total for stage, seconds in work.items() if seconds > 0.0}
