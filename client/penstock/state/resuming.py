"""Resuming: the steps that remain of an epoch after a state, as the loading dataset counts them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.client import Client, Resolved
from penstock.distributed import Worker
from penstock.errors import StateMismatch
from penstock.spec import MAX_COUNT, Spec
from penstock.state.start import StepRange
from penstock.state.state import counts_like, read_state


def stretch_behind(
    state: Mapping[str, Any], client: Client, resolved: Resolved, worker: Worker | None, *, strict: bool
) -> StepRange:
    """Return the step range after the consumed samples; `worker` is the loader worker that loads the state.

    Raises StateMismatch: the state is refused, see read_state; or a worker's state counts other steps inside an epoch.
    Raises what Client.resolve raises.
    """
    spec, num_steps = resolved.spec, resolved.num_steps
    position = read_state(
        state, client.dataset, spec, num_samples=resolved.num_samples, by_worker=worker is not None, strict=strict
    )
    if worker and not counts_like(state, spec):
        _check_is_over(state, client, spec, worker)
        position = replace(position, offset=MAX_COUNT)
    if position.offset:
        # A wrapped last step counts samples past the epoch's end.
        position = replace(position, offset=min(position.offset, resolved.num_samples))
        num_steps = client.resolve(replace(spec, offset=position.offset)).num_steps
    if position.step > num_steps + 1:  # + 1: the state's run may have filled a last step that this one drops
        raise StateMismatch(f"this state is damaged: it is at step {position.step:,} of {num_steps:,}.")
    return StepRange(position=position, num_steps=num_steps)


def _check_is_over(state: Mapping[str, Any], client: Client, spec: Spec, worker: Worker) -> None:
    """Check that a worker's state, which counts other steps than the spec, is at the end of the worker's epoch.

    Inside an epoch each worker's state is at another sample, and only the loader knows the loop's position.

    Raises StateMismatch: steps are left.
    """
    then = {name: state.get(name) for name in ("batch_size", "world_size", "skip")}
    counted = replace(spec, **then, offset=state["offset"])  # type: ignore[arg-type]
    if state["step"] + worker.first < client.resolve(counted).num_steps:
        now = {name: getattr(spec, name) for name in then}
        told = "; ".join(f"{name}: {then[name]!r} then, {now[name]!r} now" for name in then if then[name] != now[name])
        raise StateMismatch(
            f"loader workers cannot go on in the midst of an epoch with other steps ({told}): each worker knows what it gave, "
            f"but not what the loop consumed. Finish the epoch with the old values: the state at its end can be loaded with "
            f"the new ones. Or iterate without workers: a state of the dataset itself can be loaded with any values."
        )
