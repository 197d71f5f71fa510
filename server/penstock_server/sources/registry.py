"""The sources of a server, by URL: each is opened once."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from penstock_server.monitoring.metrics import Metrics
from penstock_server.problems import DatasetInvalid
from penstock_server.sources.hub import Hub
from penstock_server.sources.objects import SCHEMES, ObjectStore
from penstock_server.sources.recipe_files import RecipeFiles
from penstock_server.sources.remote import RemoteFolder, Source
from penstock_server.sources.web import WebList

_FOLDER = "sources"  # in the cache folder


@dataclass(frozen=True, slots=True)
class RemoteRoot:
    """A source that the operator named, with copies of the recipes' files."""

    remote: RemoteFolder
    files: RecipeFiles

    def __str__(self) -> str:
        return str(self.remote)

    @property
    def name(self) -> str:
        """Return the name of the dataset directly in the root."""
        return re.sub(r"@[^/]*|\.txt$", "", self.remote.source.url).rpartition("/")[2]


class Sources:
    """Sources by URL. The copies of recipes' files are in the cache folder."""

    def __init__(self, cache_folder: Path, metrics: Metrics) -> None:
        self._folder, self._metrics = cache_folder / _FOLDER, metrics
        self._opened = dict[str, Source]()
        self._lock = threading.Lock()

    def folder(self, url: str) -> RemoteFolder:
        """Return the root of a source. Raises DatasetInvalid: the URL is not valid."""
        with self._lock:
            if url not in self._opened:
                self._opened[url] = open_source(url, self._metrics)
            return RemoteFolder(self._opened[url])

    def root(self, url: str) -> RemoteRoot:
        """Return a source that the operator named. Raises DatasetInvalid: the URL is not valid."""
        remote = self.folder(url)
        copies = self._folder / blake2b(remote.source.url.encode(), digest_size=16).hexdigest()
        return RemoteRoot(remote, RecipeFiles(remote.source, copies))

    @property
    def urls(self) -> list[str]:
        """Return the URLs of the sources that are in use."""
        return [source.url for source in self._opened.values()]

    def close(self) -> None:
        """End the threads of all sources."""
        for source in self._opened.values():
            source.close()


def open_source(url: str, metrics: Metrics) -> Source:
    """Return the source at a URL; nothing is requested yet. Raises DatasetInvalid: the URL is not valid."""
    scheme = url.partition("://")[0].lower()
    if "@" in url.split("/")[2] and scheme != "hf":
        raise DatasetInvalid(
            f"the URL of {url.rpartition('@')[2]} has a password in it. Give credentials by environment variables."
        )
    if scheme in SCHEMES:
        return ObjectStore(url, metrics)
    if scheme == "hf":
        return Hub(url, metrics)
    if scheme in ("http", "https"):
        return WebList(url, metrics)
    known = ", ".join(f"{each}://" for each in (*SCHEMES, "hf", "https"))
    raise DatasetInvalid(f"{url}: the scheme {scheme} is not supported. Supported: {known}, and folders.")
