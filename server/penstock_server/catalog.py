"""The catalog: every dataset below the data folder, by name, opened once; and those that had to be refused, with the reason."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from penstock.spec import Spec
from penstock_server.blocks import Blocks
from penstock_server.folders import survey
from penstock_server.footers import Footers
from penstock_server.index import Index
from penstock_server.notes import drop_old_notes, open_notes
from penstock_server.plan import Plan, make_plan
from penstock_server.problems import DatasetRefused, UnknownDataset
from penstock_server.recipe import load_tokenizer
from penstock_server.snapshot import Snapshot, read_folder
from penstock_server.store import BlockStore

log = logging.getLogger("penstock.catalog")


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset that is served."""

    name: str
    snapshot: Snapshot
    blocks: Blocks
    index: Index

    def plan(self, spec: Spec) -> Plan:
        """The spec resolved against this dataset. Raises what make_plan raises."""
        return make_plan(self.name, self.snapshot, self.blocks, self.index, spec)


@dataclass(frozen=True, slots=True)
class Catalog:
    """The datasets of one data folder. `refused` are those that could not be opened, by name, with the reason.

    A dataset that is refused holds back no other: a half-written file must not stop the jobs that train on its neighbours.
    """

    datasets: dict[str, Dataset]
    refused: dict[str, str]

    def __getitem__(self, name: str) -> Dataset:
        """The dataset of that name. Raises UnknownDataset: there is none. Raises DatasetRefused: it could not be opened."""
        if name in self.datasets:
            return self.datasets[name]
        if name in self.refused:
            raise DatasetRefused(self.refused[name])
        known = [*self.datasets, *self.refused]
        close = get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise UnknownDataset(f"there is no dataset {name!r}.{hint} This server has: {', '.join(known)}.")


def open_catalog(data_dir: Path, tokenizer: Path | None, store: BlockStore) -> Catalog:
    """Opens every dataset in a folder; `tokenizer` is for text whose recipe names none.

    Raises DatasetRefused: there is no such folder, no Parquet in it, or nothing in it can be served; the message lists why.
    """
    if not data_dir.is_dir():
        what = "is a file, not a folder" if data_dir.exists() else "does not exist"
        raise DatasetRefused(f"the data folder {data_dir} {what}. Name a folder that holds Parquet files, or folders of them.")
    if tokenizer:
        load_tokenizer(tokenizer)  # a wrong flag is an error of its own, not one of each dataset
    drop_old_notes(store.cache.folder)
    found = survey(data_dir)
    datasets, refused = {}, found.refused
    for name, folder in found.folders.items():
        try:
            footers = Footers(folder, open_notes(store.cache.folder, folder) / "footers")
            snapshot = read_folder(folder, found.shards[name], tokenizer, footers).snapshot()
            blocks = Blocks(snapshot, store)
            index = Index(name, snapshot, blocks, store.cache.folder)
            datasets[name] = Dataset(name, snapshot, blocks, index)
        except DatasetRefused as refusal:
            refused[name] = str(refusal)
        except Exception as error:  # a fault of ours in one dataset must not stop the others
            log.exception("%s cannot be opened", folder)
            refused[name] = f"{folder} cannot be opened, by a fault of penstock: {type(error).__name__}: {error}"
    if not datasets and not refused:
        raise DatasetRefused(f"{data_dir} holds no file that ends in .parquet, nor does any folder below it.")
    if not datasets:
        reasons = "\n".join(f"{name}: {reason}" for name, reason in refused.items())
        raise DatasetRefused(f"nothing in {data_dir} can be served.\n{reasons}")
    return Catalog(datasets, refused)
