"""Files to import: on this machine, or objects of a store or the hub, which are read by ranges."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TypeAlias

import pyarrow as pa

from penstock_server.importing.schema import ImportRefused
from penstock_server.monitoring.metrics import Metrics
from penstock_server.problems import DatasetInvalid
from penstock_server.sources.registry import open_source
from penstock_server.sources.remote import RemoteFolder, RemotePath, Source
from penstock_server.sources.remote_file import RemoteFile
from penstock_server.sources.stats import FileStat

_COPIED_TOGETHER = 8 << 20
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True, slots=True)
class Object:
    """Path in a listing of a source; "" is its root. The object need not exist."""

    source: Source
    stats: Mapping[str, FileStat] = field(compare=False)
    key: str = ""

    def __truediv__(self, name: str | PurePosixPath) -> Object:
        return Object(self.source, self.stats, f"{self.key}/{name}".lstrip("/"))

    def __str__(self) -> str:
        return f"{self.source.url}/{self.key}".rstrip("/")

    @property
    def name(self) -> str:
        """Return the last part of the key."""
        return PurePosixPath(self.key).name

    @property
    def suffix(self) -> str:
        """Return the ending of the name, with its dot."""
        return PurePosixPath(self.key).suffix

    def with_name(self, name: str) -> Object:
        """Return the path of an object beside this one."""
        return Object(self.source, self.stats, str(PurePosixPath(self.key).with_name(name)))

    def exists(self) -> bool:
        """Return whether the source has listed the object."""
        return self.key in self.stats

    def is_file(self) -> bool:
        """Return whether the source has listed the object."""
        return self.exists()

    def opened(self) -> RemoteFile:
        """Open the version that was listed. Raises FileNotFoundError: there is none."""
        if not self.exists():
            raise FileNotFoundError(f"{self} does not exist")
        return RemoteFile(RemotePath(RemoteFolder(self.source), self.key), self.stats[self.key])


Input: TypeAlias = Path | Object


class Inputs:
    """Files and folders by their paths and URLs. A source is opened and listed once."""

    def __init__(self) -> None:
        self._listings = dict[str, Object]()

    def find(self, place: Path | str) -> list[Input]:
        """Return the file or the folder at a path or a URL, or the objects that match a pattern such as s3://bucket/raw/*.csv.

        Raises ImportRefused: the URL is not valid, cannot be listed, or no object matches.
        """
        if isinstance(place, Path):
            return [place]
        parent, _, name = place.rstrip("/").rpartition("/")
        try:
            folder = self._listed(place) if "*" not in name else None
            if folder and folder.stats:
                return [folder]
            beside = self._listed(parent) if parent.count("/") > 1 else None
        except (DatasetInvalid, OSError) as error:
            reason = (isinstance(error, OSError) and error.strerror) or error
            raise ImportRefused(f"{place} cannot be read: {reason}. Check the URL, the network and the credentials.") from error
        keys = [key for key in beside.stats if "/" not in key and (key == name or fnmatchcase(key, name))] if beside else []
        if not keys or beside is None:
            raise ImportRefused(f"{place}: there is no such object. Correct the URL.")
        return [beside / key for key in sorted(keys)]

    def close(self) -> None:
        """End the threads of the sources."""
        for listing in self._listings.values():
            listing.source.close()

    def _listed(self, url: str) -> Object:
        if url not in self._listings:
            source, stats = open_source(url, Metrics()), dict[str, FileStat]()
            with suppress(FileNotFoundError):
                stats = dict(source.objects())
            self._listings[url] = Object(source, stats)
        return self._listings[url]


def open_file(path: Input) -> pa.NativeFile:
    """Open a binary file for reading, from its start on. Raises OSError."""
    if isinstance(path, Path):
        return pa.memory_map(str(path))
    file = path.opened()
    file.read_ahead()
    return pa.PythonFile(file)


def open_text(path: Input) -> pa.NativeFile:
    """Open a text file for reading, decompressed if its name ends with .gz or .zst. Raises OSError."""
    if isinstance(path, Path):
        return pa.input_stream(str(path))
    return pa.input_stream(open_file(path), compression=_COMPRESSIONS.get(path.suffix.lower()))


@contextmanager
def on_disk(path: Input) -> Iterator[Path]:
    """Yield a file of this machine; of an object, a copy that is removed when the block ends. Raises OSError."""
    if isinstance(path, Path):
        yield path
        return
    with TemporaryDirectory(prefix="penstock-") as folder:
        copy = Path(folder, path.name)
        with open_file(path) as source, copy.open("wb") as file:
            shutil.copyfileobj(source, file, _COPIED_TOGETHER)
        yield copy
