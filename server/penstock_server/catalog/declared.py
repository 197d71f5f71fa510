"""Declared mixtures: folders without shards whose penstock.toml lists datasets and their weights.

mix = "wiki:0.7,code:0.3"   # see penstock.mix
stopping_strategy = "first_exhausted"   # or "all_exhausted", "never"
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.errors import SpecError
from penstock.mix import Mix
from penstock.spec import Spec, StoppingStrategy
from penstock_server.problems import DatasetInvalid
from penstock_server.recipes.declaration import FILE_NAME, read_toml


@dataclass(frozen=True, slots=True)
class DeclaredMixture:
    """Mixture under a name: the default mix and stopping strategy of a spec. `folder` declares it."""

    name: str
    folder: Path
    mix: Mix
    stopping_strategy: StoppingStrategy


def read_mixture(name: str, folder: Path) -> DeclaredMixture:
    """Return the mixture that a folder declares. Raises DatasetInvalid: its penstock.toml is wrong."""
    path = folder / FILE_NAME
    given = read_toml(path)
    if unknown := [key for key in given if key not in ("mix", "stopping_strategy")]:
        raise DatasetInvalid(
            f"{path} has the keys {', '.join(unknown)}, but no shard is beside it. A mixture has only mix and "
            f"stopping_strategy."
        )
    try:
        spec = Spec(mix=given.get("mix"), stopping_strategy=given.get("stopping_strategy"))
    except SpecError as error:
        raise DatasetInvalid(f"{path}: {error}.") from error
    mix = spec.mixed()
    if mix is None:
        raise DatasetInvalid(f'{path} stands in a folder without shards and names no mix, such as mix = "wiki:0.7,code:0.3".')
    return DeclaredMixture(name, folder, mix, spec.stopping_strategy or "first_exhausted")
