"""Mixtures that folders declare, and the resolution of a spec against a name's datasets.

A folder without shards declares a mixture in its penstock.toml:

mix = "wiki:0.7,code:0.3"   # see penstock.mix
stopping_strategy = "first_exhausted"   # or "all_exhausted", "never"
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from penstock.errors import SpecError
from penstock.mix import Mix
from penstock.skip import spell_skip
from penstock.spec import Spec, Split, StoppingStrategy
from penstock_server.catalog.snapshot import Snapshot
from penstock_server.problems import DatasetInvalid
from penstock_server.recipes.config import read_toml
from penstock_server.recipes.infer import FILE_NAME

_CACHED_SPECS = 32
_JOINT = "+"  # between the fingerprints of a mixture's snapshots, in the order of the names


@dataclass(frozen=True, slots=True)
class DeclaredMixture:
    """Mixture under a name: the default mix and stopping strategy of a spec. `folder` declares it."""

    name: str
    folder: Path
    mix: Mix
    stopping_strategy: StoppingStrategy


def read_mixture(name: str, folder: Path, datasets: Collection[str]) -> DeclaredMixture:
    """Return the mixture that a folder declares.

    Raises DatasetInvalid: its penstock.toml is wrong, or mixes a name that is not in `datasets`.
    """
    path = folder / FILE_NAME
    document = read_toml(path)
    if unknown := [key for key in document if key not in ("mix", "stopping_strategy")]:
        raise DatasetInvalid(
            f"{path} has the keys {', '.join(unknown)}, but no shard is beside it. A mixture has only mix and "
            f"stopping_strategy."
        )
    try:
        spec = Spec(mix=document.get("mix"), stopping_strategy=document.get("stopping_strategy"))
    except SpecError as error:
        raise DatasetInvalid(f"{path}: {error}.") from error
    mix = spec.mixed()
    if mix is None:
        raise DatasetInvalid(f'{path} is in a folder without shards and has no mix, such as mix = "wiki:0.7,code:0.3".')
    if missing := [dataset for dataset in mix.datasets if dataset not in datasets]:
        raise DatasetInvalid(
            f"{path} mixes {', '.join(missing)}, which the server does not have. Name folders with shards, not other mixtures."
        )
    return DeclaredMixture(name, folder, mix, spec.stopping_strategy or "first_exhausted")


class SpecResolver:
    """Resolves specs. Recent results are cached: to check a spec anew takes as long as to find its plan."""

    def __init__(self) -> None:
        self._mixed, self._resolved = lru_cache(_CACHED_SPECS)(_mixed), lru_cache(_CACHED_SPECS)(_resolved)

    def members(
        self, name: str, spec: Spec, declared: DeclaredMixture | None
    ) -> tuple[Spec, tuple[str, ...], Sequence[str | None]]:
        """Return the spec with the name's mix filled in, its datasets, and their snapshots, None for the latest."""
        if declared and spec.mix is None:
            spec = self._mixed(spec, str(declared.mix), declared.stopping_strategy)
        mix = spec.mixed()
        names = mix.datasets if mix else (name,)
        return spec, names, spec.snapshot.split(_JOINT) if spec.snapshot else [None] * len(names)

    def resolve(self, spec: Spec, snapshots: Sequence[Snapshot]) -> Spec:
        """Return the spec with every parameter resolved against these snapshots, in the order of the datasets' names."""
        has_files = any(snapshot.split_rule == "files" for snapshot in snapshots)
        split = spec.split or ("train" if has_files else "all")
        return self._resolved(spec, _JOINT.join(snapshot.fingerprint for snapshot in snapshots), split)


def _mixed(spec: Spec, mix: str, stopping_strategy: StoppingStrategy) -> Spec:
    return replace(spec, mix=mix, stopping_strategy=spec.stopping_strategy or stopping_strategy)


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
