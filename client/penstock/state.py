"""The state of a training loop: a few integers and the fingerprint. How it is written, and when it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import StateMismatch
from penstock.skip import behind, parse_skip
from penstock.spec import Spec

_VERSION = 1
# What decides which sample stands where in an epoch.
_ORDER = ("snapshot", "seed", "shuffle", "window", "split", "packing", "long_rows", "group_by_length", "mix", "mix_stop")
_COUNTS = ("epoch", "step", "offset", "batch_size", "world_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """How far an epoch is consumed: `step` steps of the spec behind the first `offset` samples."""

    epoch: int = 0
    offset: int = 0
    step: int = 0


def write_state(dataset: str, spec: Spec, position: Position) -> dict[str, Any]:
    """The state as plain integers and strings."""
    return {
        "version": _VERSION,
        "dataset": dataset,
        "epoch": position.epoch,
        "step": position.step,
        "offset": position.offset,
        "batch_size": spec.batch_size,
        "world_size": spec.world_size,
        "skip": spec.skip,
        **_order(spec),
    }


def _order(spec: Spec) -> dict[str, Any]:
    values, names = spec.to_dict(), [*_ORDER]
    if (spec.packing, spec.long_rows) != ("rows", "truncate"):
        names += ["seq_len"]  # where rows are joined or cut, sequences of another length are other samples
    elif spec.group_by_length:
        names += ["seq_len", "task"]  # rows are sorted by their lengths as they are cut; in seq2seq they are not cut as a whole
    return {name: values[name] for name in names}


def read_state(state: Mapping[str, Any], dataset: str, spec: Spec) -> Position:
    """The position that a state names. Under another batch_size or world_size it is counted in samples.

    Raises StateMismatch: it is no state, or of other data or of another order; the message lists what differs.
    """
    if not isinstance(state, Mapping) or state.get("version") != _VERSION:
        what = f"it has the keys {list(state)[:10]!r}" if isinstance(state, Mapping) else f"it is a {type(state).__name__}"
        raise StateMismatch(f"this is no state of a RemoteDataset, version {_VERSION}: {what}")
    here = {"dataset": dataset, **_order(spec)}
    differing = [f"{n}: {state.get(n)!r} then, {value!r} now" for n, value in here.items() if state.get(n) != value]
    if differing:
        raise StateMismatch(
            f"this state belongs to another order of samples ({'; '.join(differing)}); going on with it would repeat some and "
            f"skip others. Make the dataset with the same values, or start the epoch anew without the state."
        )
    counts = {name: state.get(name) for name in _COUNTS}
    wrong = [f"{name}={n!r}" for name, n in counts.items() if isinstance(n, bool) or not isinstance(n, int) or n < 0]
    if wrong:
        raise StateMismatch(f"this state is damaged: {', '.join(wrong)} must be whole numbers from 0.")
    epoch, step, offset, batch_size, world_size = (int(state[name]) for name in _COUNTS)
    skip = state.get("skip")
    if batch_size * world_size != spec.batch_size * spec.world_size or skip != spec.skip:
        skipped = parse_skip(skip, batch_size * world_size) if isinstance(skip, str) else ()
        offset, step = behind(skipped, offset, step * batch_size * world_size), 0
    return Position(epoch=epoch, offset=offset, step=step)
