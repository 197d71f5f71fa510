"""State of a training loop: a few integers and the snapshot's fingerprint. Written, read and checked here."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from penstock.errors import SpecError, StateMismatch
from penstock.mix import first_other, parse_mix
from penstock.numbers import is_whole, plain
from penstock.skip import first_new, kept_runs, parse_skip, position_after, spell_skip
from penstock.spec import MAX_COUNT, Spec

_VERSION = 2
# Parameters that decide the order of an epoch's samples. States of earlier versions lack a new name: a missing name must mean
# the default, otherwise every old checkpoint would be refused.
_ORDER = "snapshot seed shuffle window split packing overflow length_bucket_size mix stopping_strategy seq_len task".split()
# Parameters that decide the order only under some specs; otherwise the state holds None.
_AT_TIMES = ("window", "seq_len", "task")
# Parameters that may change after the consumed samples.
_OF_MIXTURES = ("mix", "snapshot")
# The integers of a state, each with its minimum.
_COUNTS = {"epoch": 0, "step": 0, "offset": 0, "batch_size": 1, "world_size": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Position in an epoch: `step` steps of the spec after the first `offset` samples."""

    epoch: int = 0
    offset: int = 0
    step: int = 0

    @property
    def is_within(self) -> bool:
        """Whether a part of the epoch is consumed."""
        return self.offset > 0 or self.step > 0


def write_state(dataset: str, spec: Spec, position: Position) -> dict[str, Any]:
    """Return the state as plain integers and strings."""
    return {
        "version": _VERSION,
        "dataset": dataset,
        "epoch": position.epoch,
        "step": position.step,
        "offset": position.offset,
        "batch_size": spec.batch_size,
        "world_size": spec.world_size,
        "skip": spec.skip,
        **order_of(spec),
    }


def read_state(
    state: Mapping[str, Any], dataset: str, spec: Spec, *, num_samples: int, by_worker: bool = False, strict: bool = True
) -> Position:
    """Return the position of a state, counted in samples if batch_size or world_size differ.

    `num_samples` is the number of samples of the spec's epoch, over all ranks. If the state belongs to other data or another
    order, and `strict` is False, the position is the same number of samples in the same epoch of this order, with a warning.

    Raises StateMismatch: it is no state, or it belongs to another order; the message lists the differences.
    """
    at, consumed = _read_counts(state)
    if at.offset > num_samples and strict and state.get("mix") == spec.mix and state.get("snapshot") == spec.snapshot:
        raise StateMismatch(f"this state is damaged: it begins after sample {at.offset:,} of {num_samples:,}.")
    here = {"dataset": dataset, **order_of(spec)}
    # Only epoch 0: the start of a later epoch depends on the mix. Not in a loader worker: it counts steps of other workers,
    # too. Only with drop_last: otherwise the last step may repeat samples that were trained on already.
    may_go_on = at.epoch == 0 and not by_worker and spec.drop_last
    if may_go_on and goes_on(state, here, consumed):
        here |= {name: state[name] for name in _OF_MIXTURES}
    differing = _differing(state, here)
    if differing and strict:
        way_back = _way_back(state, here, consumed if may_go_on else None)
        raise StateMismatch(
            f"this state belongs to another order of samples ({'; '.join(differing)}); going on from it would repeat some and "
            f"skip others. Make the dataset with the same values{way_back}, or start the epoch anew without the state, or "
            f"count as many samples as consumed: load_state_dict(state, strict=False)."
        )
    if differing:
        warnings.warn(
            f"this state belongs to another order of samples ({'; '.join(differing)}). Going on in epoch {at.epoch} after its "
            f"first {consumed:,} of {num_samples:,} samples, as this order counts them: some samples may come again, and "
            f"others not at all{'' if consumed < num_samples else '; nothing is left of this epoch'}.",
            stacklevel=4,  # of load_state_dict
        )
    if _skips_the_same_steps(state, spec):
        warnings.warn(
            f"skip leaves out {spec.skip} now, and left out {state['skip']} when this state was taken: the same steps are "
            f"other samples, since a step has {spec.samples_per_step:,} and had {state['batch_size'] * state['world_size']:,}. "
            f"To leave out what was left out then, pass skip={state['skip']!r}.",
            stacklevel=4,  # of load_state_dict
        )
    if added := _added_step(state, spec):
        warnings.warn(
            f"skip counts all steps of an epoch, those left out, too. The run of this state left out {state['skip']}, so what "
            f"it called step {added[0]:,} is step {added[1]:,} in skip, and step {added[0]:,} is another: check the range.",
            stacklevel=4,  # of load_state_dict
        )
    # A loader worker counts steps of other workers, too, and may be at its end before the epoch is.
    if not (differing or by_worker) and consumed < num_samples and (passed := _passed(state, spec, consumed)):
        warnings.warn(
            f"this state is past {passed}, which skip leaves out now and its run did not: they are trained on already. To "
            f"leave them out, load a state from before them.",
            stacklevel=4,  # of load_state_dict
        )
    if differing or not counts_like(state, spec):
        return Position(epoch=at.epoch, offset=consumed)
    return at


def counts_like(state: Mapping[str, Any], spec: Spec) -> bool:
    """Whether a state counts steps as the spec does: the same samples per step, and the same skip."""
    samples_per_step = state["batch_size"] * state["world_size"]
    return bool(samples_per_step == spec.samples_per_step and state.get("skip") == spec.skip)


def _added_step(state: Mapping[str, Any], spec: Spec) -> tuple[int, int] | None:
    """Return the first step that only the spec skips, as (its number in the state's run, its number in skip).

    None if both numbers are equal, or if a step had another size.
    """
    size = spec.samples_per_step
    if not state.get("skip") or state["batch_size"] * state["world_size"] != size:
        return None
    skipped = parse_skip(state["skip"], size)
    added = first_new(spec.skipped(), skipped)
    if added is None:
        return None
    step, is_inside = divmod(added, size)  # inside a step: the user did not count in steps
    there = position_after(skipped, 0, step * size) // size
    return (step, there) if there != step and not is_inside else None


def _passed(state: Mapping[str, Any], spec: Spec, consumed: int) -> str | None:
    """Return the consumed ranges of samples that only the spec skips, as a skip text; None without any."""
    if _skips_the_same_steps(state, spec):
        return None
    size = state["batch_size"] * state["world_size"]
    skipped = parse_skip(state["skip"], size) if state.get("skip") else ()
    behind = [(start, min(stop, consumed)) for start, stop in spec.skipped() if start < consumed]
    new = [(max(start, at), min(stop, end)) for start, stop in behind for at, end in kept_runs(skipped, stop)]
    return spell_skip(tuple(each for each in new if each[0] < each[1]))


def _skips_the_same_steps(state: Mapping[str, Any], spec: Spec) -> bool:
    """Whether a state skips the same step numbers as the spec, but other samples."""
    if not (state.get("skip") and spec.skip) or state["skip"] == spec.skip:
        return False
    then, now = state["batch_size"] * state["world_size"], spec.samples_per_step
    in_steps = [
        [(start / size, stop / size) for start, stop in ranges]
        for ranges, size in ((parse_skip(state["skip"], then), then), (spec.skipped(), now))
    ]
    return in_steps[0] == in_steps[1]


def order_of(spec: Spec) -> dict[str, Any]:
    """Return the parameters that decide the order of a dataset's samples in an epoch."""
    values = spec.to_dict()
    # If rows are joined or split, another seq_len makes other samples. Length buckets sort rows by their cut lengths, and
    # seq2seq cuts prompt and response separately.
    matters = {
        "window": spec.shuffle == "window",
        "seq_len": not spec.cuts_rows or spec.length_bucket_size,
        "task": spec.cuts_rows and spec.length_bucket_size,
    }
    # The same keys for every spec: torch.distributed.checkpoint loads by the keys that it finds here.
    return {name: values[name] if matters.get(name, True) else None for name in _ORDER}


def goes_on(then: Mapping[str, Any], now: Mapping[str, Any], sample: int) -> bool:
    """Whether two states or orders have the same mixture in samples [0, sample) of the first epoch.

    If so, the run may continue there with other weights or an additional dataset. Both have a `mix` and a `snapshot`.
    """
    try:
        one, other = (parse_mix(str(order.get("mix"))) for order in (then, now))
        return 0 < first_other(one, other) >= sample and not _changed_datasets(then, now)
    except ValueError:  # one is no mixture
        return False


def _changed_datasets(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return datasets of both mixtures whose snapshots differ. Raises ValueError: one is no mixture."""
    known, found = _data_of(then), _data_of(now)
    return [name for name in known if name in found and known[name] != found[name]]


def _data_of(order: Mapping[str, Any]) -> dict[str, str]:
    """Return the snapshot of each dataset of a mixture. Raises ValueError: the order is no mixture."""
    return dict(zip(parse_mix(str(order.get("mix"))).datasets, str(order.get("snapshot")).split("+"), strict=True))


def _read_counts(state: Mapping[str, Any]) -> tuple[Position, int]:
    """Return a state's position in its steps and in samples of its epoch. Raises StateMismatch: it is no state."""
    if not isinstance(state, Mapping) or state.get("version") != _VERSION:
        what = f"it is a {type(state).__name__}"
        if isinstance(state, Mapping):
            version = state.get("version")
            what = f"it has the keys {list(state)[:10]!r}" if version is None else f"it says that it is of version {version!r}"
        raise StateMismatch(f"this is not a state of a RemoteDataset, version {_VERSION}: {what}. Load what state_dict gave.")
    counts = {name: plain(state.get(name)) for name in _COUNTS}
    wrong = [
        f"{name}={n!r} must be a whole number from {_COUNTS[name]} to {MAX_COUNT:,}"
        for name, n in counts.items()
        if not _counts(name, n)
    ]
    skip = state.get("skip")
    if not isinstance(skip, str | None):
        wrong.append(f"skip={skip!r} must be a text, or None")
    if wrong:
        raise StateMismatch(f"this state is damaged: {', '.join(wrong)}.")
    epoch, step, offset, batch_size, world_size = counts.values()
    samples_per_step = batch_size * world_size
    try:
        skipped = parse_skip(skip, samples_per_step) if skip is not None else ()
    except SpecError as error:
        raise StateMismatch(f"this state is damaged: {error}.") from error
    consumed = position_after(skipped, offset, min(step * samples_per_step, MAX_COUNT))
    return Position(epoch=epoch, offset=offset, step=step), consumed


def _counts(name: str, value: object) -> bool:
    """Whether a value of the state is an integer in its valid range."""
    return is_whole(value) and _COUNTS[name] <= value <= MAX_COUNT


def _way_back(state: Mapping[str, Any], here: Mapping[str, Any], consumed: int | None) -> str:
    """Suggest how to use a refused state: the old snapshot, or a mix that changes after the consumed samples."""
    then, is_same = state.get("snapshot"), state.get("dataset") == here["dataset"]
    # For mixtures: the old snapshot of each known dataset, the current one of each new dataset.
    with suppress(ValueError):  # no mixtures
        known, found = _data_of(state), _data_of(here)
        then = "+".join(known.get(name, now) for name, now in found.items())
    told = f" (snapshot={then!r}: the data as it was)" if is_same and isinstance(then, str) and then != here["snapshot"] else ""
    if state.get("mix") and here["mix"] and state["mix"] != here["mix"] and consumed:
        told += f", or let the mix be another from sample {consumed:,} on, and no earlier"
        if "@" not in str(state["mix"]):
            told += f": mix='{state['mix']};WEIGHTS@{consumed}'"
    return told


def _differing(state: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Describe each order parameter that differs from the state."""
    pairs = [(name, state.get(name), value) for name, value in here.items()]
    # If only one side has None, another parameter causes the difference, or it has no effect: do not list it.
    told = [(n, then, now) for n, then, now in pairs if then != now and not (n in _AT_TIMES and None in (then, now))]
    changed: list[str] = []
    with suppress(ValueError):  # no mixture
        changed = _changed_datasets(state, here)
    of_what = {"snapshot": f" (another of {', '.join(changed)})"} if changed else {}
    return [f"{name}: {then!r} then, {now!r} now{of_what.get(name, '')}" for name, then, now in told]
