"""The catalog: every dataset below the data folder, by name, opened once; and those that had to be refused, with the reason."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from penstock.spec import Spec
from penstock_server.blocks import BlockCache, Blocks
from penstock_server.plan import Plan, make_plan
from penstock_server.problems import DatasetRefused, UnknownDataset
from penstock_server.recipe import load_tokenizer
from penstock_server.snapshot import Snapshot, open_snapshot, shard_paths


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset that is served."""

    name: str
    snapshot: Snapshot
    blocks: Blocks

    def plan(self, spec: Spec) -> Plan:
        """The spec resolved against this dataset. Raises SnapshotGone, BadParameter: it does not fit."""
        return make_plan(self.name, self.snapshot, self.blocks, spec)


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
        close = get_close_matches(name, self.datasets, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise UnknownDataset(f"there is no dataset {name!r}.{hint} This server has: {', '.join(self.datasets) or 'none'}.")


def open_catalog(data_dir: Path, tokenizer: Path | None, cache: BlockCache) -> Catalog:
    """Opens every dataset in a folder; `tokenizer` is for text whose recipe names none.

    Raises DatasetRefused: there is no such folder, no Parquet in it, or nothing in it can be served; the message lists why.
    """
    if not data_dir.is_dir():
        what = "is a file, not a folder" if data_dir.exists() else "does not exist"
        raise DatasetRefused(f"the data folder {data_dir} {what}. Name a folder that holds Parquet files, or folders of them.")
    if tokenizer:
        load_tokenizer(tokenizer)  # a wrong flag is an error of its own, not one of each dataset
    datasets, refused = {}, {}
    for name, folder in _folders(data_dir):
        try:
            snapshot = open_snapshot(folder, tokenizer)
            datasets[name] = Dataset(name, snapshot, Blocks(snapshot, cache))
        except DatasetRefused as refusal:
            refused[name] = str(refusal)
    if not datasets and not refused:
        raise DatasetRefused(f"{data_dir} holds no file that ends in .parquet, nor does any folder below it.")
    if not datasets:
        reasons = "\n".join(f"{name}: {reason}" for name, reason in refused.items())
        raise DatasetRefused(f"nothing in {data_dir} can be served.\n{reasons}")
    return Catalog(datasets, refused)


def _folders(data_dir: Path) -> Iterator[tuple[str, Path]]:
    """Each folder that holds shards, with its dataset's name: its path below the data folder, joined with dots."""
    for root, names, _ in os.walk(data_dir, followlinks=True):
        names[:] = sorted(name for name in names if name[0] not in "._")
        folder = Path(root)
        if shard_paths(folder):
            yield ".".join(folder.relative_to(data_dir).parts) or data_dir.resolve().name, folder
