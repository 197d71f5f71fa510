"""Resuming: what is left of an epoch after a state, in the steps of the dataset that it is loaded into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.errors import StateMismatch
from penstock.rank import Worker
from penstock.source import Resolved, Source
from penstock.spec import MAX_COUNT, Spec
from penstock.state.start import StepRange
from penstock.state.state import counts_like, read_state


def stretch_behind(
    state: Mapping[str, Any], source: Source, resolved: Resolved, worker: Worker | None, *, strict: bool
) -> StepRange:
    """The stretch after what was consumed, in the epochs of a spec that is resolved; `worker` is who loads the state.

    Raises StateMismatch: the state is refused, see read_state; or it is a worker's, and counts other steps in mid-epoch.
    Raises what Source.resolve raises.
    """
    spec, num_steps = resolved.spec, resolved.num_steps
    position = read_state(
        state, source.dataset, spec, num_samples=resolved.num_samples, by_worker=worker is not None, strict=strict
    )
    if worker and not counts_like(state, spec):
        _check_is_over(state, source, spec, worker)
        position = replace(position, offset=MAX_COUNT)
    if position.offset:
        # A wrapped last step counts samples past the epoch's end.
        position = replace(position, offset=min(position.offset, resolved.num_samples))
        num_steps = source.resolve(replace(spec, offset=position.offset)).num_steps
    if position.step > num_steps + 1:  # the last may have been filled, and be dropped now
        raise StateMismatch(f"this state is damaged: it is at step {position.step:,} of {num_steps:,}.")
    return StepRange(position=position, num_steps=num_steps)


def _check_is_over(state: Mapping[str, Any], source: Source, spec: Spec, worker: Worker) -> None:
    """Whether a worker's part of the epoch is consumed in its state, which counts other steps than the spec.

    In mid-epoch each worker's state is at another sample, and only their loader knows at which one the loop is.
    Raises StateMismatch: it is not.
    """
    then = {name: state.get(name) for name in ("batch_size", "world_size", "skip")}
    counted = replace(spec, **then, offset=state["offset"])  # type: ignore[arg-type]
    if state["step"] + worker.first < source.resolve(counted).num_steps:
        now = {name: getattr(spec, name) for name in then}
        told = "; ".join(f"{name}: {then[name]!r} then, {now[name]!r} now" for name in then if then[name] != now[name])
        raise StateMismatch(
            f"loader workers cannot go on in the midst of an epoch with other steps ({told}): each worker knows what it gave, "
            f"but not what the loop consumed. Finish the epoch with the old values: the state at its end can be loaded with "
            f"the new ones. Or iterate without workers: a state of the dataset itself can be loaded with any values."
        )
