"""The catalog: every dataset below the data folder, by name, opened once; and those that had to be refused, with the reason."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from penstock.skip import spell_skip
from penstock.spec import Spec
from penstock_server.blocks import Blocks
from penstock_server.index import Index
from penstock_server.member import Member, OrderKey
from penstock_server.plan import Plan, make_plan
from penstock_server.problems import BadParameter, DatasetRefused, SnapshotGone, UnknownDataset
from penstock_server.snapshot import Snapshot, open_snapshot, shard_paths
from penstock_server.store import BlockStore
from penstock_server.tokenizer import load_tokenizer

log = logging.getLogger("penstock.catalog")

_JOINT = "+"  # between the fingerprints of a mixture's snapshots, in the order of the names


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset that is served."""

    name: str
    snapshot: Snapshot
    blocks: Blocks
    index: Index

    def member(self, spec: Spec, fingerprint: str | None) -> Member:
        """The dataset as a spec reads it.

        Raises SnapshotGone: the spec names a snapshot that is not here. Raises DatasetRefused: too many rows are bad.
        """
        if fingerprint not in (None, self.snapshot.fingerprint):
            raise SnapshotGone(
                f"snapshot {fingerprint} of {self.name} is not on this server, which has {self.snapshot.fingerprint}: the "
                f"shards or the recipe changed since this run began. Resume on the old shards and recipe, or start a new run."
            )
        self.blocks.quarantine.check()
        return Member(self.name, self.snapshot, self.blocks, self.index, OrderKey.of(spec))


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

    def plan(self, name: str, spec: Spec) -> Plan:
        """The spec resolved against a dataset, or against all that its mix names, this one among them.

        Raises BadParameter: the mix leaves it out. Raises SnapshotGone, and what make_plan raises.
        """
        mix = spec.mixed()
        names = mix.datasets if mix else (name,)
        if name not in names:
            raise BadParameter(f"mix={spec.mix} leaves out {name}, which the URL names. Name one of {', '.join(names)} there.")
        fingerprints = spec.snapshot.split(_JOINT) if spec.snapshot else [None] * len(names)
        if len(fingerprints) != len(names):
            raise SnapshotGone(
                f"snapshot {spec.snapshot} is not one of {len(names)} datasets: the mix changed since this run began."
            )
        members = tuple(self[own].member(spec, fingerprint) for own, fingerprint in zip(names, fingerprints, strict=True))
        resolved = replace(
            spec,
            snapshot=_JOINT.join(member.snapshot.fingerprint for member in members),
            target_len=(spec.target_len or spec.seq_len) if spec.task == "seq2seq" else None,
            skip=spell_skip(spec.skipped()),
            mix=str(mix) if mix else None,
            mix_stop=(spec.mix_stop or "first") if mix else None,
        )
        return make_plan(name, members, resolved)


def open_catalog(data_dir: Path, tokenizer: Path | None, store: BlockStore) -> Catalog:
    """Opens every dataset in a folder; `tokenizer` is for text whose recipe names none.

    Raises DatasetRefused: there is no such folder, no Parquet in it, or nothing in it can be served; the message lists why.
    """
    if not data_dir.is_dir():
        what = "is a file, not a folder" if data_dir.exists() else "does not exist"
        raise DatasetRefused(f"the data folder {data_dir} {what}. Name a folder that holds Parquet files, or folders of them.")
    if tokenizer:
        load_tokenizer(tokenizer)  # a wrong flag is an error of its own, not one of each dataset
    folders, refused = _find(data_dir)
    datasets = {}
    for name, folder in folders.items():
        try:
            snapshot = open_snapshot(folder, tokenizer)
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


def _find(data_dir: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """The folders that hold shards by their dataset's name, and what is refused already.

    The name is the path below the data folder, joined with dots.
    """
    found: dict[str, list[Path]] = {}
    refused: dict[str, str] = {}
    visited: set[tuple[int, int]] = set()

    def name_of(folder: Path) -> str:
        return ".".join(folder.relative_to(data_dir).parts) or data_dir.resolve().name

    def unreadable(error: OSError) -> None:
        folder = Path(error.filename)
        refused[name_of(folder)] = f"{folder} cannot be read: {error.strerror}. Mend its permissions, or move it away."

    for root, names, _ in os.walk(data_dir, followlinks=True, onerror=unreadable):
        stat = Path(root).stat()
        if (stat.st_dev, stat.st_ino) in visited:  # a link that leads back
            names.clear()
            continue
        visited.add((stat.st_dev, stat.st_ino))
        names[:] = sorted(name for name in names if name[0] not in "._")
        if shard_paths(Path(root)):
            found.setdefault(name_of(Path(root)), []).append(Path(root))
    for name, folders in found.items():
        if len(folders) > 1:
            listed = " and ".join(map(str, folders))
            refused[name] = f"{listed} would both be the dataset {name!r}. Rename one of the folders."
    return {name: folders[0] for name, folders in found.items() if len(folders) == 1}, refused
