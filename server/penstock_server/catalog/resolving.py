"""Resolution of a spec: the datasets of its name and mix, their snapshots, and every parameter. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from penstock.skip import spell_skip
from penstock.spec import Spec, Split, StoppingStrategy
from penstock_server.catalog.declared import DeclaredMixture
from penstock_server.snapshots.snapshot import Snapshot

_REMEMBERED_SPECS = 32
_JOINT = "+"  # between the fingerprints of a mixture's snapshots, in the order of the names


def members_of(name: str, spec: Spec, declared: DeclaredMixture | None) -> tuple[Spec, tuple[str, ...], Sequence[str | None]]:
    """Return the spec with the name's mix filled in, its datasets, and their snapshots, None for the latest."""
    if declared and spec.mix is None:
        spec = _mixed(spec, str(declared.mix), declared.stopping_strategy)
    mix = spec.mixed()
    names = mix.datasets if mix else (name,)
    return spec, names, spec.snapshot.split(_JOINT) if spec.snapshot else [None] * len(names)


def resolved(spec: Spec, snapshots: Sequence[Snapshot]) -> Spec:
    """Return the spec with every parameter resolved against these snapshots, in the order of the datasets' names."""
    has_files = any(snapshot.split_rule == "files" for snapshot in snapshots)
    split = spec.split or ("train" if has_files else "all")
    return _resolved(spec, _JOINT.join(snapshot.fingerprint for snapshot in snapshots), split)


@lru_cache(maxsize=_REMEMBERED_SPECS)  # to check a spec anew takes as long as to find its plan
def _mixed(spec: Spec, mix: str, stopping_strategy: StoppingStrategy) -> Spec:
    return replace(spec, mix=mix, stopping_strategy=spec.stopping_strategy or stopping_strategy)


@lru_cache(maxsize=_REMEMBERED_SPECS)
def _resolved(spec: Spec, snapshot: str, split: Split) -> Spec:
    mix = spec.mixed()
    return replace(
        spec,
        snapshot=snapshot,
        split=split,
        target_seq_len=(spec.target_seq_len or spec.seq_len) if spec.task == "seq2seq" else None,
        skip=spell_skip(spec.skipped()),
        mix=str(mix) if mix else None,
        stopping_strategy=(spec.stopping_strategy or "first_exhausted") if mix else None,
    )
