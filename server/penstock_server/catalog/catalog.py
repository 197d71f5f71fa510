"""The catalog: every dataset below the data folder, by name; and what cannot be served, with the reason."""

from __future__ import annotations

import threading
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
from penstock_server.catalog.declared import DeclaredMixture
from penstock_server.catalog.held import Served
from penstock_server.catalog.known import Known
from penstock_server.catalog.resolving import members_of, resolved
from penstock_server.files import may_be_there, spelled
from penstock_server.index.index import drop_old_counts
from penstock_server.problems import BadParameter, Busy, DatasetInvalid, DatasetUnavailable, ShardUnavailable, UnknownDataset
from penstock_server.recipes.tokenizer import load_tokenizer
from penstock_server.snapshots.folders import Survey, survey
from penstock_server.snapshots.notes import drop_old_notes

_CATCH_UP_SECONDS = 2.0  # that a request waits, in a thread, for a look at the folders that is under way


class Catalog:
    """The datasets of one data folder; `tokenizer` is for text whose recipe names none.

    A dataset that is refused holds back no other: a half-written file must not stop the jobs that train on its neighbours.
    """

    def __init__(self, data_dir: Path, tokenizer: Path | None, store: BlockStore) -> None:
        self._data_dir, self._tokenizer, self._store = data_dir, tokenizer, store
        self._known = Known()
        self._looking = threading.Lock()

    @property
    def datasets(self) -> dict[str, Served]:
        """The latest snapshot of each dataset that is served, by its name, in the order of names."""
        return self._known.served

    @property
    def mixtures(self) -> Mapping[str, DeclaredMixture]:
        """The mixtures that are declared, by their names."""
        return self._known.mixtures

    @property
    def refused(self) -> dict[str, str]:
        """The names that are not served, with the reason."""
        return self._known.refused

    def __getitem__(self, name: str) -> Dataset:
        """The dataset of that name. Raises UnknownDataset, DatasetInvalid, BadParameter: see Known.find.

        Raises ShardUnavailable: it is none now, but would be if a link led somewhere; so would a mixture.
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
        """The spec resolved against a dataset, or against all that its mix names, this one among them.

        Raises BadParameter: the mix leaves it out, or the snapshot is not one of each. Raises Busy: the snapshot may be among
        new data that is being looked at. Raises DatasetUnavailable: nobody knows if it is here, since its folder cannot be
        opened now.
        Raises SnapshotGone, DatasetInvalid, and what make_plan raises.
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
        """The spec with the mix that the name stands for, and the snapshots that it is of."""
        if name in self._known.unopened:  # it may stand for a mixture, and nobody knows of which datasets
            _ = self[name]  # raises why
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
        """Whether `plan` may wait for a look at the folders: the spec names no snapshot, or one that is unknown here."""
        _, names, fingerprints = members_of(name, spec, self._known.mixtures.get(name))
        known = self._known.datasets
        return any(
            own in known and known[own].is_behind(fingerprint) for own, fingerprint in zip(names, fingerprints, strict=False)
        )

    def open(self, *, joins: bool = False) -> None:
        """Opens what is in the data folder; if it joins others that serve it, what they do, for what is new may be half copied.

        Raises DatasetInvalid: there is no Parquet in it, or nothing of it can be served; the message lists why.
        """
        with self._looking:
            found = survey(self._data_dir)
            datasets = [self._dataset(name, folder) for name, folder in found.folders.items()]
            for dataset in datasets:
                if joins:
                    with suppress(Exception):  # refresh tells what it is
                        dataset.join(found.shards[dataset.name])
                if not dataset.held.latest:
                    with suppress(DatasetInvalid):  # it says so itself when it is asked
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
        """Takes in what changed in a dataset's folder, at once.

        Raises UnknownDataset: there is none. Raises DatasetInvalid: it cannot be opened as it is; what was served is
        served on.
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
        """Takes in what changed in all folders, once nothing changes there any more. False: something does.

        Blocks that another process has evicted are let go of, too, so that one that serves nothing holds no disk space.
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
        # Of several processes at one address each finds new data for itself: without this the ranks of one run could begin on
        # two snapshots, and one that began on the new one be told that it is gone.
        if dataset.is_behind(fingerprint):
            if self._looking.acquire(timeout=_CATCH_UP_SECONDS):
                try:
                    dataset.catch_up()
                    if fingerprint:
                        dataset.recall(fingerprint)
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
        """Tells a dataset that its folder holds no shards any more, or cannot be looked into; gives the reason."""
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
        else:  # with all folders gone at once it is rather the disk that is: what is cached can be served meanwhile
            reason = f"{folder} holds no shard any more. Put them back, or restart the server to forget it."
            dataset.fail(reason)
        return reason


def _link_to_nothing(folder: Path) -> Path | None:
    """What leads nowhere of a folder and those that it lies in, as a link to a mount that is away does."""
    with suppress(OSError, ValueError):  # of a name that can be no file's
        return next((path for path in (folder, *folder.parents) if path.is_symlink() and not path.exists()), None)
    return None


def _tidy(cache: CacheFolder, drop: Callable[[Path, float], None]) -> None:
    """Has the cache folder rid of what nobody uses; another time, where it cannot be looked at now."""
    with suppress(OSError):
        drop(cache.folder, cache.now())


def _why_no_folder(path: Path) -> str:
    try:
        return "" if S_ISDIR(path.stat().st_mode) else "is a file, not a folder"
    except FileNotFoundError:
        return "does not exist"
    except OSError as error:
        return f"cannot be looked into: {error.strerror}"


def open_catalog(data_dir: Path, tokenizer: Path | None, store: BlockStore, *, joins: bool = False) -> Catalog:
    """The catalog of a folder, opened; `joins`: see Catalog.open.

    Raises DatasetInvalid: there is no such folder, the tokenizer is none, or see Catalog.open.
    """
    if what := _why_no_folder(data_dir):
        raise DatasetInvalid(f"the data folder {data_dir} {what}. Name a folder that holds Parquet files, or folders of them.")
    if spelled(str(data_dir)) != str(data_dir):
        raise DatasetInvalid(
            f"the data folder {spelled(str(data_dir))} has a name that is not UTF-8, and no answer could hold it. Rename it, "
            f"or make a link to it and name that."
        )
    if tokenizer:
        load_tokenizer(tokenizer)  # a wrong flag is an error of its own, not one of each dataset
    _tidy(store.cache, drop_old_counts)
    catalog = Catalog(data_dir, tokenizer, store)
    catalog.open(joins=joins)
    _tidy(store.cache, drop_old_notes)  # not before: what is served now may have been away for long, or the clock was wrong
    return catalog
