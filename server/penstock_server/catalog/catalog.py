"""Catalog of the datasets below the data folder, by name, with the reason why a name cannot be served."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from stat import S_ISDIR

from penstock.spec import Spec
from penstock.text import counted
from penstock_server.batches.plan import Plan, make_plan
from penstock_server.blocks.cache import CacheFolder
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.dataset import Change, Dataset
from penstock_server.catalog.held import Served
from penstock_server.catalog.known import Known
from penstock_server.catalog.mixtures import DeclaredMixture, members_of, resolved
from penstock_server.catalog.notes import drop_old_notes
from penstock_server.catalog.scan import Survey, survey
from penstock_server.files import may_be_there, spelled
from penstock_server.index.index import drop_old_counts
from penstock_server.problems import BadParameter, Busy, DatasetInvalid, DatasetUnavailable, ShardUnavailable, UnknownDataset
from penstock_server.recipes.tokenizer import load_tokenizer

_CATCH_UP_SECONDS = 2.0  # a request waits this long, in a thread, for a poll of the folders to end


class Catalog:
    """Datasets of one data folder. `tokenizer` is the default for text recipes that name no tokenizer.

    A refused dataset does not affect the others: a half-written file must not stop jobs that train on its neighbours.
    """

    def __init__(self, data_dir: Path, tokenizer: Path | None, store: BlockStore) -> None:
        self._data_dir, self._tokenizer, self._store = data_dir, tokenizer, store
        self._known = Known()
        self._looking = threading.Lock()

    @property
    def datasets(self) -> dict[str, Served]:
        """Return the latest snapshot of each served dataset, by name, sorted by name."""
        return self._known.served

    @property
    def mixtures(self) -> Mapping[str, DeclaredMixture]:
        """Return the declared mixtures, by name."""
        return self._known.mixtures

    @property
    def refused(self) -> dict[str, str]:
        """Return the names that are not served, each with the reason."""
        return self._known.refused

    def __getitem__(self, name: str) -> Dataset:
        """Return the dataset of that name.

        Raises UnknownDataset, DatasetInvalid, BadParameter: see Known.find.
        Raises ShardUnavailable: the folder, of a dataset or a mixture, is below a broken symlink.
        """
        try:
            return self._known.find(name)
        except (UnknownDataset, DatasetInvalid):
            for own in self._known.missing.get(name, [name]):
                folders = (self._data_dir / own, self._data_dir.joinpath(*own.split(".")))
                if away := next(filter(None, map(_link_to_nothing, folders)), None):
                    raise ShardUnavailable(
                        f"there is no dataset {own!r} now: {away} is a link to nothing. Bring back what it leads to, or remove "
                        f"it."
                    ) from None
            raise

    def plan(self, name: str, spec: Spec) -> Plan:
        """Resolve the spec against a dataset, or against all datasets that its mix names, this one included.

        Raises BadParameter: the mix leaves it out, or `snapshot` does not name one snapshot per dataset.
        Raises Busy: the snapshot may be in new data that a poll is reading.
        Raises DatasetUnavailable: the folder cannot be opened now, so the server does not know whether it has the snapshot.
        Raises SnapshotGone, DatasetInvalid, and the errors of make_plan.
        """
        try:
            spec, found = self._found(name, spec)
        except DatasetInvalid as refusal:
            if spec.snapshot is None:
                raise
            raise DatasetUnavailable(
                f"snapshot {spec.snapshot} may be served again: {refusal} Its runs wait, and go on once that is mended."
            ) from refusal
        spec = resolved(spec, [served.snapshot for served in found])
        return make_plan(name, tuple(served.member(spec) for served in found), spec)

    def _found(self, name: str, spec: Spec) -> tuple[Spec, list[Served]]:
        """Return the spec with the mix of this name filled in, and its snapshots."""
        if name in self._known.unopened:  # the name may be a mixture whose datasets are unknown
            _ = self[name]  # raises the reason
        declared = self._known.mixtures.get(name)
        spec, names, fingerprints = members_of(name, spec, declared)
        if name not in names and not declared:
            raise BadParameter(
                f"mix={spec.mix} leaves out {name}, the dataset that is asked for. Ask for one of {', '.join(names)}."
            )
        if len(fingerprints) != len(names):
            raise BadParameter(
                f"snapshot {spec.snapshot} is of {counted(len(fingerprints), 'dataset')} and not of {len(names)}. Name one of "
                f"each, joined by +, in the order of {', '.join(names)}: those of before, and of one that was added its own."
            )
        found = [self._served(own, fingerprint) for own, fingerprint in zip(names, fingerprints, strict=True)]
        if spec.stopping_strategy and not spec.mix:
            raise BadParameter(
                f"stopping_strategy={spec.stopping_strategy} says when the epoch of a mixture ends, but {name} is not a "
                f"mixture: give a mix."
            )
        return spec, found

    def may_block(self, name: str, spec: Spec) -> bool:
        """Return whether `plan` may wait for a poll: the spec names no snapshot, or one that this server does not know."""
        _, names, fingerprints = members_of(name, spec, self._known.mixtures.get(name))
        known = self._known.datasets
        return any(
            own in known and known[own].is_behind(fingerprint) for own, fingerprint in zip(names, fingerprints, strict=False)
        )

    def open(self, *, joins: bool = False) -> None:
        """Open the datasets in the data folder.

        With `joins`, open only what other servers of this folder serve already: newer files may be half copied.
        Raises DatasetInvalid: the folder has no Parquet file, or no dataset can be served; the message lists the reasons.
        """
        with self._looking:
            found = survey(self._data_dir)
            datasets = [self._dataset(name, folder) for name, folder in found.folders.items()]
            for dataset in datasets:
                if joins:
                    with suppress(Exception):  # refresh reports the error
                        dataset.join(found.shards[dataset.name])
                if not dataset.held.latest:
                    with suppress(DatasetInvalid):  # a request for the dataset raises the error
                        dataset.refresh(found.shards[dataset.name])
            self._known = self._known.followed_by(found, datasets)
        if not any(dataset.held.snapshots for dataset in self._known.datasets.values()):
            if not self.refused:
                raise DatasetInvalid(
                    f"{self._data_dir} holds no file that ends in .parquet, nor does any folder below it. Make shards of "
                    f"other files with penstock import."
                )
            reasons = "\n".join(f"{name}: {reason}" for name, reason in self.refused.items())
            raise DatasetInvalid(f"nothing in {self._data_dir} can be served.\n{reasons}")

    def refresh(self, name: str) -> Change:
        """Load the changes in a dataset's folder at once.

        Raises UnknownDataset: no dataset has this name.
        Raises DatasetInvalid: the folder cannot be opened; the server goes on serving the previous snapshots.
        """
        with self._looking:
            found = survey(self._data_dir)
            if name not in found.folders:
                self._known = self._known.followed_by(found, [])
                dataset = self[name]
                raise DatasetInvalid(self._miss(dataset, found))
            dataset = self._dataset(name, found.folders[name])
            try:
                return dataset.refresh(found.shards[name])
            except DatasetInvalid as refusal:
                latest = dataset.held.latest
                served = f"\nUntil then snapshot {latest.snapshot.fingerprint} is served." if latest else ""
                raise DatasetInvalid(f"{refusal}{served}") from refusal
            finally:
                self._known = self._known.followed_by(found, [dataset])

    def poll(self) -> bool:
        """Load the changes in all folders that have settled. Return False if some folder is still changing.

        Also release blocks that another process has evicted, so that an idle process holds no disk space.
        """
        self._store.maps.let_go()
        with self._looking:
            found = survey(self._data_dir)
            quiet = True
            datasets = [self._dataset(name, folder) for name, folder in found.folders.items()]
            for dataset in datasets:
                quiet = dataset.poll(found.shards[dataset.name]) and quiet
            self._known = self._known.followed_by(found, datasets)
            for name, dataset in self._known.datasets.items():
                if name not in found.folders:
                    self._miss(dataset, found)
            return quiet

    def _served(self, name: str, fingerprint: str | None) -> Served:
        dataset = self[name]
        # Several processes at one address each find new data separately. Without this, the ranks of one run could begin on
        # two snapshots, and a rank on the new one could get SnapshotGone from another process.
        if dataset.is_behind(fingerprint):
            if self._looking.acquire(timeout=_CATCH_UP_SECONDS):
                try:
                    dataset.catch_up()
                finally:
                    self._looking.release()
            elif fingerprint and dataset.is_behind(fingerprint):
                raise Busy(
                    f"snapshot {fingerprint} of {name} is not known here yet, and new data is being looked at. Ask again."
                )
        return dataset.served(fingerprint)

    def _dataset(self, name: str, folder: Path) -> Dataset:
        known = self._known.datasets.get(name)
        return known if known and known.folder == folder else Dataset(name, folder, self._tokenizer, self._store)

    def _miss(self, dataset: Dataset, found: Survey) -> str:
        """Mark a dataset whose folder has no shards any more, or cannot be listed. Return the reason."""
        folder = dataset.folder
        if reason := found.refused.get(dataset.name) or found.why_unread(folder):
            dataset.fail(reason)
        elif away := _link_to_nothing(folder):
            reason = (
                f"{away} is a link to nothing: what it leads to is away. Bring that back, or restart the server to forget it."
            )
            dataset.fail(reason)
        elif found.folders and not may_be_there(folder):
            reason = f"{folder} was removed. Put it back, or restart the server to forget it."
            dataset.remove(reason)
        else:  # if all folders vanish at once, the disk is gone: serve from the cache
            reason = f"{folder} holds no shard any more. Put them back, or restart the server to forget it."
            dataset.fail(reason)
        return reason


def _link_to_nothing(folder: Path) -> Path | None:
    """Return the broken symlink among a folder and its parents, such as one into a missing mount; None if there isn't one."""
    with suppress(OSError, ValueError):  # the name is not a valid file name
        return next((path for path in (folder, *folder.parents) if path.is_symlink() and not path.exists()), None)
    return None


def _tidy(cache: CacheFolder, drop: Callable[[Path, float], None]) -> None:
    """Drop unused files from the cache folder. If it cannot be listed now, leave that to a later call."""
    with suppress(OSError):
        drop(cache.folder, time.time())


def _why_no_folder(path: Path) -> str:
    try:
        return "" if S_ISDIR(path.stat().st_mode) else "is a file, not a folder"
    except FileNotFoundError:
        return "does not exist"
    except OSError as error:
        return f"cannot be looked into: {error.strerror}"


def open_catalog(data_dir: Path, tokenizer: Path | None, store: BlockStore, *, joins: bool = False) -> Catalog:
    """Return the opened catalog of a folder. `joins`: see Catalog.open.

    Raises DatasetInvalid: the folder does not exist, the tokenizer file is invalid, or see Catalog.open.
    """
    if what := _why_no_folder(data_dir):
        raise DatasetInvalid(f"the data folder {data_dir} {what}. Name a folder that holds Parquet files, or folders of them.")
    if spelled(str(data_dir)) != str(data_dir):
        raise DatasetInvalid(
            f"the data folder {spelled(str(data_dir))} has a name that is not UTF-8, and no answer could hold it. Rename it, "
            f"or make a link to it and name that."
        )
    if tokenizer:
        load_tokenizer(tokenizer)  # report a wrong flag once, not once per dataset
    _tidy(store.cache, drop_old_counts)
    catalog = Catalog(data_dir, tokenizer, store)
    catalog.open(joins=joins)
    _tidy(store.cache, drop_old_notes)  # last: a served dataset may have been missing for long, or the clock was wrong
    return catalog
