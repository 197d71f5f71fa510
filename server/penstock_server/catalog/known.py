"""State of a data folder at one time: its datasets and mixtures by name, and why other names are invalid."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.text import did_you_mean, listed
from penstock_server.catalog.dataset import Dataset
from penstock_server.catalog.held import Served
from penstock_server.catalog.mixtures import DeclaredMixture, read_mixture
from penstock_server.catalog.scan import Survey
from penstock_server.problems import BadParameter, DatasetInvalid, UnknownDataset


@dataclass(frozen=True, slots=True)
class Known:
    """Immutable state: datasets, opened or not, mixtures, and invalid names; a change replaces it by another.

    unopened  why a folder's name is not a dataset
    unread    folders that cannot be listed, by name: there may be datasets below
    missing   the datasets that an invalid mixture lacks, by the mixture's name
    others    for each folder without shards a file that it holds instead
    """

    datasets: Mapping[str, Dataset] = field(default_factory=dict)
    mixtures: Mapping[str, DeclaredMixture] = field(default_factory=dict)
    unopened: Mapping[str, str] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, list[str]] = field(default_factory=dict)
    others: Mapping[str, Path] = field(default_factory=dict)

    @property
    def served(self) -> dict[str, Served]:
        """Return the latest snapshot of each served dataset, by name, sorted by name."""
        return {name: latest for name, dataset in self.datasets.items() if (latest := dataset.held.latest)}

    @property
    def refused(self) -> dict[str, str]:
        """Return the names that are not served, each with the reason."""
        held = {name: dataset.held for name, dataset in self.datasets.items()}
        return {**self.unopened, **{name: h.error for name, h in held.items() if h.error and not h.latest}}

    def find(self, name: str) -> Dataset:
        """Return the dataset of that name.

        Raises UnknownDataset: no dataset has it.
        Raises DatasetInvalid: the name is not a single dataset folder, or may be below a folder that cannot be listed.
        Raises BadParameter: it is the name of a mixture.
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
        """Return the state that follows from a survey of the folders, with these datasets."""
        known = {**self.datasets, **{dataset.name: dataset for dataset in datasets}}
        # Forget a dataset that was never served and whose folder is gone: no job waits for it.
        known = {n: d for n, d in known.items() if n in found.folders or d.held.records or found.why_unread(d.folder)}
        # A mixture whose folder cannot be listed now is still served, as its datasets are.
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
    """Return why a folder whose mix names these missing datasets is not a mixture."""
    if nested := [name for name in missing if name in found.declared]:
        return f"{folder} mixes {', '.join(nested)}, itself a mixture. Name the datasets of that, with weights of their own."
    if new := [name for name in missing if name in found.shards]:
        return f"{folder} mixes {', '.join(new)}, not opened so far: the next check will, or POST .../{new[0]}/refresh."
    return f"{folder} mixes {', '.join(missing)}, of which there is no folder here."
