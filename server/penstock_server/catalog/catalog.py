"""Catalog of the datasets below the data folder, by name, with the reason why a name cannot be served."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from penstock.errors import SpecError
from penstock.mix import Mix
from penstock.skip import spell_skip
from penstock.spec import Spec, Split, StoppingStrategy
from penstock.text import counted, did_you_mean, listed
from penstock_server.batches.plan import Plan, make_plan
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.dataset import Change, DatasetLoader, DatasetState, OpenSnapshot
from penstock_server.catalog.history import drop_old_notes
from penstock_server.catalog.scan import SETTLED_SECONDS, Scan, scan_folders
from penstock_server.files import may_exist
from penstock_server.index.index import drop_old_counts
from penstock_server.problems import BadParameter, Busy, DatasetInvalid, DatasetUnavailable, UnknownDataset
from penstock_server.recipes.config import read_toml
from penstock_server.recipes.infer import FILE_NAME
from penstock_server.recipes.tokenizer import load_tokenizer
from penstock_server.settings import Settings, SettingsError

log = logging.getLogger("penstock.catalog")

_CATCH_UP_SECONDS = 2.0  # a request waits this long, in a thread, for a poll of the folders to end
_CACHED_SPECS = 32
_JOINT = "+"  # between the fingerprints of a mixture's snapshots, in the order of the names


@dataclass(frozen=True, slots=True)
class _Names:
    """All names at one time; a change replaces it by another. `refused` has the names that are not a dataset or mixture."""

    scan: Scan = field(default_factory=Scan)
    datasets: Mapping[str, DatasetLoader] = field(default_factory=dict)
    mixtures: Mapping[str, DeclaredMixture] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    def followed_by(self, scan: Scan, loaders: Iterable[DatasetLoader]) -> _Names:
        """Return the names that follow from a scan of the folders, with these datasets."""
        datasets = {**self.datasets, **{loader.state.name: loader for loader in loaders}}
        datasets = {
            name: loader
            for name, loader in sorted(datasets.items())
            # Forget a dataset that was never served and whose folder is gone: no job waits for it.
            if name in scan.folders or loader.state.records or scan.why_unread(loader.folder)
        }
        # A mixture whose folder cannot be listed now is still served, as its datasets are.
        mixtures = {
            name: mixture for name, mixture in self.mixtures.items() if name not in datasets and scan.why_unread(mixture.folder)
        }
        refused = {name: why for name, why in scan.refused.items() if name not in datasets and name not in mixtures}
        for name, folder in scan.mixtures.items():
            if name not in datasets:
                try:
                    mixtures[name] = read_mixture(name, folder, datasets)
                except DatasetInvalid as invalid:
                    refused[name] = str(invalid)
        return _Names(scan, datasets, mixtures, refused)


class Catalog:
    """Datasets of one data folder. `tokenizer` is the default for text recipes that name no tokenizer.

    An invalid dataset does not affect the others: a half-written file must not stop jobs that train on its neighbours.
    """

    def __init__(self, data_dir: Path, tokenizer: Path | None, store: BlockStore) -> None:
        self.store = store
        self._data_dir, self._tokenizer = data_dir, tokenizer
        self._names = _Names()
        self._loading = threading.Lock()

    @property
    def datasets(self) -> dict[str, OpenSnapshot]:
        """Return the latest snapshot of each served dataset, by name, sorted by name."""
        return {name: state.opened for name, state in self.states.items() if state.opened}

    @property
    def states(self) -> dict[str, DatasetState]:
        """Return each dataset as it is now, served or not, by name, sorted by name."""
        return {name: loader.state for name, loader in self._names.datasets.items()}

    @property
    def mixtures(self) -> Mapping[str, DeclaredMixture]:
        """Return the declared mixtures, by name."""
        return self._names.mixtures

    @property
    def refused(self) -> dict[str, str]:
        """Return the names that are not served, each with the reason."""
        return {**self._names.refused, **{s.name: s.error for s in self.states.values() if s.error and not s.opened}}

    @property
    def is_serving(self) -> bool:
        """Return whether any dataset can be served, be it by an older snapshot."""
        return any(loader.state.opened or loader.state.snapshots for loader in self._names.datasets.values())

    def __contains__(self, name: object) -> bool:
        """Return whether a dataset or mixture of that name is known, served or not."""
        return name in self._names.datasets or name in self._names.mixtures

    def __getitem__(self, name: str) -> DatasetState:
        """Return the dataset of that name as it is now. Raises UnknownDataset, DatasetInvalid, BadParameter: see _loader."""
        return self._loader(name).state

    def plan(self, name: str, spec: Spec) -> Plan:
        """Resolve the spec against a dataset, or against all datasets that its mix names, this one included.

        Raises:
            BadParameter: the mix leaves it out, or `snapshot` does not name one snapshot per dataset.
            Busy: the snapshot may be in new data that a poll is reading.
            DatasetUnavailable: the folder cannot be opened now, so the server does not know whether it has the snapshot.
            SnapshotGone, DatasetInvalid, and the errors of make_plan.
        """
        try:
            spec, snapshots = self._open_snapshots(name, spec)
        except DatasetInvalid as invalid:
            if spec.snapshot is None:
                raise
            raise DatasetUnavailable(
                f"snapshot {spec.snapshot} cannot be served now: {invalid} Runs on it wait, and continue after that is fixed."
            ) from invalid
        has_files = any(opened.snapshot.split_rule == "files" for opened in snapshots)
        fingerprints = _JOINT.join(opened.snapshot.fingerprint for opened in snapshots)
        spec = _resolved(spec, fingerprints, spec.split or ("train" if has_files else "all"))
        return make_plan(name, tuple(opened.member(spec) for opened in snapshots), spec)

    def may_block(self, name: str, spec: Spec) -> bool:
        """Return whether `plan` may wait for a poll: the spec names no snapshot, or one that this server does not know."""
        _, names, fingerprints = self._members(name, spec)
        datasets = self._names.datasets
        pairs = zip(names, fingerprints, strict=False)
        return any(name in datasets and datasets[name].state.is_behind(fingerprint) for name, fingerprint in pairs)

    def open(self) -> None:
        """Open the datasets in the data folder. Raises DatasetInvalid: no dataset can be served; it lists the reasons."""
        with self._scanned() as (scan, loaders):
            for name, loader in loaders.items():
                with suppress(DatasetInvalid):  # a request for the dataset raises the error
                    loader.refresh(scan.shards[name])
        if self.is_serving:
            return
        reasons = "\n".join(f"{name}: {reason}" for name, reason in self.refused.items())
        if reasons:
            raise DatasetInvalid(f"nothing in {self._data_dir} can be served.\n{reasons}")
        raise DatasetInvalid(
            f"{self._data_dir} holds no file that ends in .parquet, nor does any folder below it. Make shards of other files "
            f"with penstock import."
        )

    def refresh(self, name: str) -> Change:
        """Load the changes in a dataset's folder at once. Raises UnknownDataset, and what DatasetLoader.refresh raises."""
        with self._loading:
            scan = scan_folders(self._data_dir)
            if name not in scan.folders:
                self._names = self._names.followed_by(scan, [])
                raise DatasetInvalid(self._report_missing(self._loader(name), scan))
            loader = self._loader_of_folder(name, scan.folders[name])
            try:
                return loader.refresh(scan.shards[name])
            finally:
                self._names = self._names.followed_by(scan, [loader])

    def poll(self) -> bool:
        """Load the changes in all folders that have settled. Return False if some folder is still changing."""
        self.store.maps.let_go()  # an idle process must not hold disk space
        with self._scanned() as (scan, loaders):
            are_settled = [loader.poll(scan.shards[name]) for name, loader in loaders.items()]
            for name, loader in self._names.datasets.items():
                if name not in scan.folders:
                    self._report_missing(loader, scan)
        return all(are_settled)

    @contextmanager
    def _scanned(self) -> Iterator[tuple[Scan, dict[str, DatasetLoader]]]:
        """Scan the data folder; afterwards the names follow the scan."""
        with self._loading:
            scan = scan_folders(self._data_dir)
            loaders = {name: self._loader_of_folder(name, folder) for name, folder in scan.folders.items()}
            yield scan, loaders
            self._names = self._names.followed_by(scan, loaders.values())

    @contextmanager
    def polling(self, poll_seconds: float) -> Iterator[None]:
        """Poll in a thread every `poll_seconds`, sooner while something changes; 0 disables polling."""
        stopped = threading.Event()
        if poll_seconds:
            threading.Thread(target=self._poll, args=(poll_seconds, stopped), name="penstock-poll", daemon=True).start()
        try:
            yield
        finally:
            stopped.set()

    def _poll(self, poll_seconds: float, stopped: threading.Event) -> None:
        wait_seconds = poll_seconds
        while not stopped.wait(wait_seconds):
            wait_seconds = poll_seconds
            try:
                if not self.poll():
                    wait_seconds = min(poll_seconds, SETTLED_SECONDS)
            except Exception:  # otherwise the thread would end, and new data would go unnoticed
                log.exception("a poll of the data folder failed; retrying in %s seconds", poll_seconds)

    def _open_snapshots(self, name: str, spec: Spec) -> tuple[Spec, list[OpenSnapshot]]:
        """Return the spec with the mix of this name filled in, and its snapshots."""
        if name in self._names.refused:  # the name may be a mixture whose datasets are unknown
            self._loader(name)  # raises the reason
        spec, names, fingerprints = self._members(name, spec)
        if name not in names and name not in self._names.mixtures:
            raise BadParameter(f"mix={spec.mix} leaves out {name}, the dataset in the URL. Use one of {', '.join(names)}.")
        if len(fingerprints) != len(names):
            raise BadParameter(
                f"snapshot {spec.snapshot} names {counted(len(fingerprints), 'snapshot')} for {counted(len(names), 'dataset')}"
                f". Name one for each, joined by +, in the order of {', '.join(names)}."
            )
        snapshots = [self._open_snapshot(member, fingerprint) for member, fingerprint in zip(names, fingerprints, strict=True)]
        if spec.stopping_strategy and not spec.mix:
            raise BadParameter(
                f"stopping_strategy={spec.stopping_strategy} is for mixtures, but {name} is not a mixture. Give a mix."
            )
        return spec, snapshots

    def _members(self, name: str, spec: Spec) -> tuple[Spec, tuple[str, ...], Sequence[str | None]]:
        """Return the spec with the name's mix filled in, its datasets, and their snapshots, None for the latest."""
        if (declared := self._names.mixtures.get(name)) and spec.mix is None:
            strategy = spec.stopping_strategy or declared.stopping_strategy
            spec = replace(spec, mix=str(declared.mix), stopping_strategy=strategy)
        mix = spec.mixed()
        names = mix.datasets if mix else (name,)
        return spec, names, spec.snapshot.split(_JOINT) if spec.snapshot else [None] * len(names)

    def _open_snapshot(self, name: str, fingerprint: str | None) -> OpenSnapshot:
        loader = self._loader(name)
        # Several processes at one address each find new data separately. Without this, the ranks of one run could begin on
        # two snapshots, and a rank on the new one could get SnapshotGone from another process.
        if loader.state.is_behind(fingerprint):
            if self._loading.acquire(timeout=_CATCH_UP_SECONDS):
                try:
                    loader.catch_up()
                finally:
                    self._loading.release()
            elif fingerprint and loader.state.is_behind(fingerprint):
                raise Busy(f"snapshot {fingerprint} of {name} is not known yet, and new data is being read. Retry.")
        return loader.open_snapshot(fingerprint)

    def _loader(self, name: str) -> DatasetLoader:
        """Return the loader of a dataset. Raises UnknownDataset, DatasetInvalid (refused) or BadParameter (a mixture)."""
        names = self._names
        if name in names.datasets:
            return names.datasets[name]
        reason = names.scan.why_unread(self._data_dir.joinpath(*name.split("."))) or names.refused.get(name)
        if reason:
            raise DatasetInvalid(reason)
        if mixture := names.mixtures.get(name):
            raise BadParameter(
                f"{name} is a mixture: rows and snapshots belong to its datasets. Use one of "
                f"{', '.join(mixture.mix.datasets)}, with mix={mixture.mix} for a row's schedule in the mixture."
            )
        refused = self.refused
        served = [other for other in (*names.datasets, *names.mixtures) if other not in refused]
        if other := names.scan.others.get(name):
            hint = f" {other} holds no .parquet file: make shards with penstock import."
        else:
            hint = did_you_mean(name, [*served, *refused])
        not_served = f" Not served, for reasons that GET /v1/datasets gives: {listed(list(refused))}." if refused else ""
        raise UnknownDataset(f"there is no dataset {name!r}.{hint} Served: {listed(served) or 'none'}.{not_served}")

    def _loader_of_folder(self, name: str, folder: Path) -> DatasetLoader:
        known = self._names.datasets.get(name)
        return known if known and known.folder == folder else DatasetLoader(name, folder, self._tokenizer, self.store)

    def _report_missing(self, loader: DatasetLoader, scan: Scan) -> str:
        """Mark a dataset whose folder has no shards any more, or cannot be listed. Return the reason."""
        folder = loader.folder
        if reason := scan.refused.get(loader.state.name) or scan.why_unread(folder):
            loader.fail(reason)
        elif scan.folders and not may_exist(folder):
            reason = f"{folder} was removed. Put it back, or restart the server to forget it."
            loader.remove(reason)
        else:  # if all folders vanish at once, the disk is gone: serve from the cache
            reason = f"{folder} holds no shards any more. Put them back, or restart the server to forget it."
            loader.fail(reason)
        return reason


def open_data(settings: Settings) -> Catalog:
    """Return the opened catalog of the settings. Raises DatasetInvalid. Raises SettingsError: the cache folder is unusable."""
    try:
        store = BlockStore(settings.cache_dir, settings.cache_bytes, settings.num_decoders, settings.max_decoded_bytes)
    except OSError as error:
        raise SettingsError(
            f"the cache folder {settings.cache_dir} cannot be used by user {os.getuid()}: {error.strerror}. Name another with "
            f"--cache-dir."
        ) from error
    return open_catalog(settings.data_dir, settings.tokenizer, store)


def open_catalog(data_dir: Path, tokenizer: Path | None, store: BlockStore) -> Catalog:
    """Return the opened catalog of a folder. Raises DatasetInvalid: the tokenizer is invalid, or see Catalog.open."""
    if tokenizer:
        load_tokenizer(tokenizer)  # report a wrong flag once, not once per dataset
    catalog = Catalog(data_dir, tokenizer, store)
    catalog.open()
    with suppress(OSError):  # last: a served dataset may have been missing for long, or the clock was wrong
        drop_old_counts(store.cache.folder, time.time())
        drop_old_notes(store.cache.folder, time.time())
    return catalog


@dataclass(frozen=True, slots=True)
class DeclaredMixture:
    """Mixture under a name: the default mix and stopping strategy of a spec. `folder` declares it."""

    name: str
    folder: Path
    mix: Mix
    stopping_strategy: StoppingStrategy


def read_mixture(name: str, folder: Path, datasets: Collection[str]) -> DeclaredMixture:
    """Return the mixture that a folder declares. Raises DatasetInvalid: its penstock.toml is wrong, or mixes other names."""
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


@lru_cache(_CACHED_SPECS)
def _resolved(spec: Spec, snapshot: str, split: Split) -> Spec:
    """Return the spec with every parameter resolved."""
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
