"""Catalog of the datasets below the data folder, by name, with the reason why a name cannot be served."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.dataset import Change, DatasetLoader
from penstock_server.catalog.history import drop_old_notes
from penstock_server.catalog.scan import Scan, scan_all
from penstock_server.catalog.view import CatalogView, LoadingLock, Names
from penstock_server.files import may_exist
from penstock_server.index.index import drop_old_counts
from penstock_server.problems import DatasetInvalid
from penstock_server.recipes.allowed import AllowedFiles
from penstock_server.recipes.tokenizer import load_tokenizer
from penstock_server.security.tokens import Identity
from penstock_server.settings import Settings, SettingsError, place_of
from penstock_server.sources.stats import SETTLED_SECONDS

log = logging.getLogger("penstock.catalog")


class Catalog(CatalogView):
    """Datasets of folders and sources. `tokenizer` is the default for text recipes that name no tokenizer.

    An invalid dataset does not affect the others: a half-written file must not stop jobs that train on its neighbours.
    """

    def __init__(self, places: Sequence[Path | str], tokenizer: Path | None, store: BlockStore, allowed: AllowedFiles) -> None:
        super().__init__(Names(), LoadingLock(), lambda _: True)
        self.store = store
        self._data = " and ".join(map(str, places))
        self._roots = [place if isinstance(place, Path) else store.sources.root(place) for place in places]
        copies = tuple(root.files.folder for root in self._roots if not isinstance(root, Path))
        if allowed.folders is not None:
            allowed = replace(allowed, folders=(*allowed.folders, *copies))
        self._tokenizer, self._allowed = tokenizer, allowed
        self._views: tuple[Names, dict[tuple[str, ...], CatalogView]] = self._names, {}  # by the globs of an identity

    @property
    def folders(self) -> dict[Path | str, str]:
        """Return the folders and URLs that messages may name, each with its name for callers, "" for the data folder."""
        names: dict[Path | str, str] = {self._tokenizer.parent: "the folder of --tokenizer"} if self._tokenizer else {}
        names |= dict.fromkeys(self._allowed.folders or (), "the folder of --assets")
        names[self.store.cache.folder] = "the cache folder"
        names |= dict.fromkeys((root if isinstance(root, Path) else root.files.folder for root in self._roots), "")
        return names | dict.fromkeys(self.store.sources.urls, "")

    def seen_by(self, identity: Identity) -> CatalogView:
        """Return what an identity may see now."""
        if "*" in identity.datasets:
            return self
        names, (viewed, views) = self._names, self._views
        if viewed is not names:
            views = {}
            self._views = names, views
        if identity.datasets not in views:
            visible = names.visible(identity.may_see)
            views[identity.datasets] = CatalogView(visible, self._loading, identity.may_see)
        return views[identity.datasets]

    def open(self, *, waits: bool) -> None:
        """Open the datasets in the data folder. With `waits`, a source may be away: a later poll opens its datasets.

        Raises DatasetInvalid: no dataset can be served; it lists the reasons.
        """
        with self._scanned() as (scan, loaders):
            for name, loader in loaders.items():
                with suppress(DatasetInvalid):  # a request for the dataset raises the error
                    loader.refresh(scan.shards[name])
        if self.is_serving or (waits and self._names.scan.away):
            return
        reasons = "\n".join(f"{name}: {reason}" for name, reason in self.refused.items())
        if reasons:
            raise DatasetInvalid(f"nothing in {self._data} can be served.\n{reasons}")
        raise DatasetInvalid(
            f"{self._data} holds no file that ends in .parquet, nor does any folder below it. Make shards of other files "
            f"with penstock import."
        )

    def refresh(self, name: str) -> Change:
        """Load the changes in a dataset's folder at once. Raises UnknownDataset, and what DatasetLoader.refresh raises."""
        with self._loading:
            scan = self._scan()
            if name not in scan.folders:
                self._names = self._names.followed_by(scan, [])
                raise DatasetInvalid(self._report_missing(self._loader(name), scan))
            loader = self._loader_of_folder(name, scan)
            try:
                return loader.refresh(scan.shards[name])
            finally:
                self._names = self._names.followed_by(scan, [loader])

    def poll(self) -> bool:
        """Load the changes in all folders that have settled. Return False if some folder is still changing."""
        self.store.maps.let_go()  # an idle process must not hold disk space
        self.store.encoders.let_go()
        with self._scanned() as (scan, loaders):
            are_settled = [loader.poll(scan.shards[name]) for name, loader in loaders.items()]
            for name, loader in self._names.datasets.items():
                if name not in scan.folders:
                    self._report_missing(loader, scan)
        return all(are_settled)

    def _scan(self) -> Scan:
        return scan_all(self._roots, self.store.sources, self._allowed)

    @contextmanager
    def _scanned(self) -> Iterator[tuple[Scan, dict[str, DatasetLoader]]]:
        """Scan the data folder; afterwards the names follow the scan."""
        with self._loading:
            scan = self._scan()
            loaders = {name: self._loader_of_folder(name, scan) for name in scan.folders}
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

    def _loader_of_folder(self, name: str, scan: Scan) -> DatasetLoader:
        known, folder, remote = self._names.datasets.get(name), scan.folders[name], scan.remotes.get(name)
        if known and (known.folder, known.remote) == (folder, remote):
            return known
        return DatasetLoader(name, folder, self._tokenizer, self.store, self._allowed, remote)

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


def open_data(settings: Settings, *, waits: bool = False) -> Catalog:
    """Return the opened catalog of the settings; see Catalog.open.

    Raises DatasetInvalid. Raises SettingsError: the cache folder is unusable.
    """
    try:
        shared = place_of(settings.store) if settings.store else None
        store = BlockStore(settings.cache_dir, settings.cache_bytes, settings.num_decoders, settings.max_decoded_bytes, shared)
    except OSError as error:
        raise SettingsError(
            f"the cache folder {settings.cache_dir} cannot be used by user {os.getuid()}: {error.strerror}. Name another with "
            f"--cache-dir."
        ) from error
    return open_catalog(settings.data_dir, settings.tokenizer, store, settings.allowed_files, waits=waits)


def open_catalog(
    data_dir: Path | Sequence[Path | str],
    tokenizer: Path | None,
    store: BlockStore,
    allowed: AllowedFiles | None = None,
    *,
    waits: bool = False,
) -> Catalog:
    """Return the opened catalog of a folder, or of several places.

    By default its datasets may name files inside the folders, and run no code.

    Raises DatasetInvalid: the tokenizer is invalid, or see Catalog.open.
    """
    if tokenizer:
        load_tokenizer(tokenizer)  # report a wrong flag once, not once per dataset
    places = (data_dir,) if isinstance(data_dir, Path) else tuple(data_dir)
    folders = tuple(place for place in places if isinstance(place, Path))
    catalog = Catalog(places, tokenizer, store, allowed or AllowedFiles(folders))
    catalog.open(waits=waits)
    with suppress(OSError):  # last: a served dataset may have been missing for long, or the clock was wrong
        drop_old_counts(store.cache.folder, time.time())
        drop_old_notes(store.cache.folder, time.time())
    return catalog
