"""Declared mixtures: folders without shards, whose penstock.toml says which datasets make them up, and with which weights.

mix = "wiki:0.7,code:0.3"   # see penstock.mix
mix_stop = "first"          # or "all", "never"
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.errors import SpecError
from penstock.mix import Mix
from penstock.spec import MixStop, Spec
from penstock_server.problems import DatasetRefused
from penstock_server.recipes.declaration import FILE_NAME, read_toml


@dataclass(frozen=True, slots=True)
class DeclaredMixture:
    """A mixture by its name: the mix and the rule that ends its epochs, for specs that name neither; `folder` declares it."""

    name: str
    folder: Path
    mix: Mix
    mix_stop: MixStop


def read_mixture(name: str, folder: Path) -> DeclaredMixture:
    """The mixture that a folder declares. Raises DatasetRefused: its penstock.toml is wrong."""
    path = folder / FILE_NAME
    given = read_toml(path)
    if unknown := [key for key in given if key not in ("mix", "mix_stop")]:
        raise DatasetRefused(
            f"{path} has the keys {', '.join(unknown)}, but no shard is beside it. A mixture has only mix and mix_stop."
        )
    try:
        spec = Spec(mix=given.get("mix"), mix_stop=given.get("mix_stop"))
    except SpecError as error:
        raise DatasetRefused(f"{path}: {error}.") from error
    mix = spec.mixed()
    if mix is None:
        raise DatasetRefused(f'{path} stands in a folder without shards and names no mix, such as mix = "wiki:0.7,code:0.3".')
    return DeclaredMixture(name, folder, mix, spec.mix_stop or "first")
