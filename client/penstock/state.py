"""State of a training loop: its position, the order of samples and the start that it comes from, as integers and strings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.errors import StateMismatch
from penstock.logs import warn
from penstock.mix import first_other, parse_mix
from penstock.skip import parse_skip, position_after, skips_more, spell_skip
from penstock.spec import MAX_COUNT, ORDER_PARAMETERS, Spec

if TYPE_CHECKING:  # the audit needs neither torch nor a transport
    from penstock.client import Client, Resolved
    from penstock.distributed import LoaderWorker

_VERSION = 3
_MAX_NUMBER = 2**64
# Parameters that decide the order only under some specs; otherwise the state holds None. If rows are joined or split, another
# seq_len makes other samples. Length buckets sort rows by their cut lengths, and seq2seq cuts prompt and response separately.
_DECIDES: Mapping[str, Callable[[Spec], object]] = {
    "window": lambda spec: spec.shuffle == "window",
    "seq_len": lambda spec: not spec.cuts_rows or spec.length_bucket_size,
    "labels": lambda spec: not spec.cuts_rows or spec.length_bucket_size,
    "task": lambda spec: spec.cuts_rows and spec.length_bucket_size,
}
_LATER = {"labels": "aligned", "overlap": 0, "repeat": 1}  # parameters that older states lack, and their values there
# Parameters that may change after the consumed samples.
OF_MIXTURES = ("mix", "snapshot")
_COUNTS = ("epoch", "step", "offset", "batch_size", "world_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """Place in an epoch: after its first `offset` samples and `step` further steps, out of `num_steps`."""

    epoch: int = 0
    offset: int = 0
    step: int = 0
    num_steps: int = 0

    @property
    def num_left(self) -> int:
        """Number of steps that are left."""
        return max(0, self.num_steps - self.step)


@dataclass(frozen=True, slots=True)
class StateOrigin:
    """Where a start comes from.

    run      id of its run; None for the first start, whose id the run takes
    parent   id of the start whose state was loaded; None without a state
    epoch    epoch of that state
    samples  samples of that epoch that were consumed
    """

    run: str | None = None
    parent: str | None = None
    epoch: int = 0
    samples: int = 0


def place_after(samples: int, spec: Spec, steps_per_epoch: int, num_epochs: int | None) -> Cursor:
    """Return the place after this number of samples of a run, over all ranks; an epoch counts as the samples of its steps.

    With `num_epochs`, it is at most the end of the last epoch.
    """
    epoch, rest = divmod(samples, steps_per_epoch * spec.samples_per_step)
    if num_epochs is not None and epoch >= num_epochs:
        return Cursor(epoch=num_epochs - 1, step=steps_per_epoch)
    if rest % spec.samples_per_step:
        return Cursor(epoch=epoch, offset=position_after(spec.skipped(), 0, rest))
    return Cursor(epoch=epoch, step=rest // spec.samples_per_step)  # so the batches keep their addresses


def write_state(dataset: str, spec: Spec, at: Cursor, run: str | None = None, start: str | None = None) -> dict[str, Any]:
    """Return the state; `run` and `start` are the ids of the run and of the start that consumed the samples."""
    return {
        "version": _VERSION,
        "dataset": dataset,
        "run": run,
        "start": start,
        "epoch": at.epoch,
        "step": at.step,
        "offset": at.offset,
        "batch_size": spec.batch_size,
        "world_size": spec.world_size,
        "skip": spec.skip,
        **order_of(spec),
    }


def resume(
    state: Mapping[str, Any], client: Client, resolved: Resolved, worker: LoaderWorker | None, *, strict: bool
) -> tuple[Cursor, StateOrigin]:
    """Return the place after the consumed samples, and the state's origin; `worker` is the loader worker that loads it.

    Raises StateMismatch: see read_state; or a worker's state is inside an epoch and counts other steps.
    Raises what Client.resolve raises.
    """
    spec, num_steps, num_samples = resolved.spec, resolved.num_steps, resolved.num_samples
    at = read_state(state, client.dataset, spec, num_samples=num_samples, by_worker=worker is not None, strict=strict)
    _, consumed = _read_counts(state)
    offset = min(at.offset, num_samples)  # a last step that drop_last=false fills counts samples past the epoch's end
    if worker and not _counts_like(state, spec):
        _check_is_over(state, client, spec, worker)
        offset = num_samples
    if offset:
        num_steps = client.resolve(replace(spec, offset=offset)).num_steps
    origin = StateOrigin(state.get("run"), state.get("start"), at.epoch, min(consumed, num_samples))
    return replace(at, offset=offset, num_steps=num_steps), origin


def read_state(
    state: Mapping[str, Any], dataset: str, spec: Spec, *, num_samples: int, by_worker: bool = False, strict: bool = True
) -> Cursor:
    """Return the place of a state, counted in samples if batch_size or world_size differ.

    `num_samples` is the number of samples of the spec's epoch, over all ranks. If the state belongs to other data or another
    order, and `strict` is False, the place is the same number of samples in the same epoch of this order, with a warning.

    Raises StateMismatch: it is no state, or it belongs to another order; the message lists the differences.
    """
    at, consumed = _read_counts(state)
    here = {"dataset": dataset, **order_of(spec)}
    # Only epoch 0: the start of a later epoch depends on the mix. Not in a loader worker: it counts steps of other workers,
    # too. Only with drop_last: otherwise the last step may repeat samples that were trained on already.
    may_go_on = at.epoch == 0 and not by_worker and spec.drop_last
    differing = _differing(state, here)
    if differing and may_go_on and goes_on(state, here, consumed):
        here |= {name: state.get(name) for name in OF_MIXTURES}
        differing = _differing(state, here)
    if differing and strict:
        may_change_mix = may_go_on and consumed and state.get("mix") and here["mix"] not in (None, state["mix"])
        mix_hint = f", or let the mix be another from sample {consumed:,} on" if may_change_mix else ""
        raise StateMismatch(
            f"this state belongs to another order of samples ({'; '.join(differing)}); going on from it would repeat some and "
            f"skip others. Make the dataset with the same values{mix_hint}, or start the epoch anew without the state, or "
            f"count as many samples as consumed: load_state_dict(state, strict=False)."
        )
    if differing:
        warn(
            f"this state belongs to another order of samples ({'; '.join(differing)}). Going on in epoch {at.epoch} after its "
            f"first {consumed:,} of {num_samples:,} samples, as this order counts them: some samples may come again, and "
            f"others not at all."
        )
    skipped = parse_skip(state["skip"], _samples_per_step(state)) if state["skip"] else ()
    if skipped and skips_more(spec.skipped(), skipped):
        warn(
            f"skip leaves out {spell_skip(spec.skipped())} now, and left out {spell_skip(skipped)} when this state was taken. "
            f"Check the ranges: skip counts all steps of an epoch, those left out, too, in steps of the present size."
        )
    if differing or not _counts_like(state, spec):
        return Cursor(epoch=at.epoch, offset=consumed)
    return at


def order_of(spec: Spec) -> dict[str, Any]:
    """Return the parameters that decide the order of a dataset's samples in an epoch."""
    # The same keys for every spec: torch.distributed.checkpoint loads by the keys that it finds here.
    return {n: getattr(spec, n) if n not in _DECIDES or _DECIDES[n](spec) else None for n in ORDER_PARAMETERS}


def goes_on(then: Mapping[str, Any], now: Mapping[str, Any], sample: int) -> bool:
    """Whether two states or orders have the same mixture in samples [0, sample) of the first epoch.

    If so, the run may continue there with other weights or an additional dataset. Both have a `mix` and a `snapshot`.
    """
    try:
        mixes = [parse_mix(str(order.get("mix"))) for order in (then, now)]
        # The snapshot of each dataset of a mixture.
        known, present = (
            dict(zip(mix.datasets, str(order.get("snapshot")).split("+"), strict=True))
            for mix, order in zip(mixes, (then, now), strict=True)
        )
    except ValueError:  # one is no mixture
        return False
    return 0 < first_other(*mixes) >= sample and all(present.get(name, known[name]) == known[name] for name in known)


def _samples_per_step(state: Mapping[str, Any]) -> int:
    return int(state["batch_size"]) * int(state["world_size"])


def _counts_like(state: Mapping[str, Any], spec: Spec) -> bool:
    """Whether a state counts steps as the spec does: the same samples per step, and the same skip."""
    return _samples_per_step(state) == spec.samples_per_step and state.get("skip") == spec.skip


def _check_is_over(state: Mapping[str, Any], client: Client, spec: Spec, worker: LoaderWorker) -> None:
    """Check that a worker's state, which counts other steps than the spec, is at the end of the worker's epoch.

    Inside an epoch each worker's state is at another sample, and only the loader knows the loop's position.

    Raises StateMismatch: steps are left.
    """
    then = {name: state.get(name) for name in ("batch_size", "world_size", "skip")}
    counted = replace(spec, **then, offset=state["offset"])  # type: ignore[arg-type]
    if state["step"] + worker.first < client.resolve(counted).num_steps:
        now = {name: getattr(spec, name) for name in then}
        differing = "; ".join(f"{name}: {then[name]!r} then, {now[name]!r} now" for name in then if then[name] != now[name])
        raise StateMismatch(
            f"loader workers cannot resume inside an epoch with other steps ({differing}): each worker counts its own batches, "
            f"and cannot know what the loop consumed. Finish the epoch with the old values; the state at its end can be loaded "
            f"with the new ones. Or iterate without workers: a state of the dataset itself can be loaded with any values."
        )


def _read_counts(state: Mapping[str, Any]) -> tuple[Cursor, int]:
    """Return a state's place, and its position in the epoch's samples. Raises StateMismatch: it is no state."""
    if not isinstance(state, Mapping) or "version" not in state:
        shown = list(state)[:10] if isinstance(state, Mapping) else type(state).__name__
        raise StateMismatch(f"this is not a state of a RemoteDataset, but {shown}. Load what state_dict returned.")
    if any(
        isinstance(value, int) and abs(value) > _MAX_NUMBER for value in state.values()
    ):  # str() refuses thousands of digits
        raise StateMismatch("this state is damaged: a number is too large.")
    if state["version"] != _VERSION:
        raise StateMismatch(
            f"this is a state of version {state['version']!r}, and this penstock reads version {_VERSION}. Load it with the "
            f"penstock that saved it."
        )
    try:
        epoch, step, offset, batch_size, world_size = (int(state[name]) for name in _COUNTS)
        if not (0 <= min(epoch, step, offset) and 1 <= min(batch_size, world_size)):
            raise ValueError("a count is negative")
        if not isinstance(state["skip"], str | None):
            raise TypeError(f"skip is {state['skip']!r}")
        skipped = parse_skip(state["skip"], batch_size * world_size) if state["skip"] else ()
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise StateMismatch(f"this state is damaged: {error}.") from error
    consumed = position_after(skipped, offset, min(step * batch_size * world_size, MAX_COUNT))
    return Cursor(epoch=epoch, offset=offset, step=step), consumed


def _differing(state: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Describe each order parameter that differs from the state."""
    pairs = [(name, state.get(name, _LATER.get(name)), value) for name, value in here.items()]
    # If only one side has None, another parameter causes the difference, or it has no effect: do not list it.
    listed = [(n, then, now) for n, then, now in pairs if then != now and not (n in _DECIDES and None in (then, now))]
    return [f"{name}: {then!r} then, {now!r} now" for name, then, now in listed]
