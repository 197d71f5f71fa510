"""What is known of a data folder at one time: which names stand for datasets and mixtures, and why others stand for none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.text import did_you_mean, listed
from penstock_server.catalog.dataset import Dataset
from penstock_server.catalog.declared import DeclaredMixture, read_mixture
from penstock_server.catalog.held import Served
from penstock_server.problems import BadParameter, DatasetInvalid, UnknownDataset
from penstock_server.snapshots.folders import Survey


@dataclass(frozen=True, slots=True)
class Known:
    """The datasets, opened or not, the mixtures, and names that stand for none; never changed, but followed by another.

    unopened  why names of folders stand for no dataset
    unread    of folders that cannot be looked into, by their names: there may be datasets below
    missing   of names that would be mixtures the datasets that they lack
    others    of folders without shards a file that they hold instead
    """

    datasets: Mapping[str, Dataset] = field(default_factory=dict)
    mixtures: Mapping[str, DeclaredMixture] = field(default_factory=dict)
    unopened: Mapping[str, str] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, list[str]] = field(default_factory=dict)
    others: Mapping[str, Path] = field(default_factory=dict)

    @property
    def served(self) -> dict[str, Served]:
        """The latest snapshot of each dataset that is served, by its name, in the order of names."""
        return {name: latest for name, dataset in self.datasets.items() if (latest := dataset.held.latest)}

    @property
    def refused(self) -> dict[str, str]:
        """The names that are not served, with the reason."""
        held = {name: dataset.held for name, dataset in self.datasets.items()}
        return {**self.unopened, **{name: h.error for name, h in held.items() if h.error and not h.latest}}

    def find(self, name: str) -> Dataset:
        """The dataset of that name.

        Raises UnknownDataset: there is none. Raises DatasetInvalid: the name is of no folder, or maybe of one below a folder
        that cannot be looked into. Raises BadParameter: it is of a mixture.
        """
        if name in self.datasets:
            return self.datasets[name]
        if above := next((own for own in self.unread if name.startswith(f"{own}.")), None):
            raise DatasetInvalid(self.unread[above])
        if name in self.unopened:
            raise DatasetInvalid(self.unopened[name])
        if name in self.mixtures:
            raise BadParameter(
                f"{name} is a mixture, which has batches, a spec and a shuffle report; rows and snapshots belong to its "
                f"datasets: {', '.join(self.mixtures[name].mix.datasets)}. Ask for one of them. With "
                f"mix={self.mixtures[name].mix} the schedule of a row is that in the mixture."
            )
        refused = self.refused
        served = [other for other in (*self.datasets, *self.mixtures) if other not in refused]
        if other := self.others.get(name):
            hint = f" {other.parent} holds {other.name} and no file that ends in .parquet: make shards with penstock import."
        else:
            hint = did_you_mean(name, [*served, *refused])
        kept_out = f" Not served, for reasons that GET /v1/datasets gives: {listed(list(refused))}." if refused else ""
        raise UnknownDataset(f"there is no dataset {name!r}.{hint} Served: {listed(served) or 'none'}.{kept_out}")

    def followed_by(self, found: Survey, datasets: Iterable[Dataset]) -> Known:
        """What is known once the folders were found so, with these datasets in them."""
        known = {**self.datasets, **{dataset.name: dataset for dataset in datasets}}
        # What was never served, and whose folder is gone, nobody waits for.
        known = {n: d for n, d in known.items() if n in found.folders or d.held.records or found.why_unread(d.folder)}
        # What was declared in a folder that cannot be looked into now is served on, as its datasets are.
        mixtures = {name: one for name, one in self.mixtures.items() if name not in known and found.why_unread(one.folder)}
        unopened = {name: reason for name, reason in found.refused.items() if name not in known and name not in mixtures}
        lacking: dict[str, list[str]] = {}
        for name, folder in found.declared.items():
            if name in known:
                continue
            try:
                mixture = read_mixture(name, folder)
            except DatasetInvalid as refusal:
                unopened[name] = str(refusal)
                continue
            if missing := [own for own in mixture.mix.datasets if own not in known]:
                unopened[name], lacking[name] = _unmixed(folder, missing, found), missing
            else:
                mixtures[name] = mixture
        unread = {name: found.unread[folder] for name, folder in found.hidden.items()}
        return Known(dict(sorted(known.items())), mixtures, unopened, unread, lacking, found.others)


def _unmixed(folder: Path, missing: list[str], found: Survey) -> str:
    """Why a folder whose mix names these, which are no datasets, is no mixture."""
    if nested := [name for name in missing if name in found.declared]:
        return f"{folder} mixes {', '.join(nested)}, itself a mixture. Name the datasets of that, with weights of their own."
    if new := [name for name in missing if name in found.shards]:
        return f"{folder} mixes {', '.join(new)}, not opened so far: the next check will, or POST .../{new[0]}/refresh."
    return f"{folder} mixes {', '.join(missing)}, of which there is no folder here."
