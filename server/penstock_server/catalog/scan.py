"""Folders below the data folder, and the stats of their files. The only files opened here are penstock.toml."""

from __future__ import annotations

import os
import stat
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from penstock.text import as_utf8
from penstock_server.recipes.allowed import EVERYTHING, AllowedFiles
from penstock_server.recipes.infer import FILE_NAME

SETTLED_SECONDS = 2.0  # a file this old is complete: a later write would change its FileStat


class FileStat(NamedTuple):
    """Stat fields that change when a file is written to or replaced.

    Archives preserve sizes and mtimes, and file systems reuse the inode of a removed file, but no program can set the ctime.
    """

    size_bytes: int
    mtime_ns: int
    inode: int
    ctime_ns: int

    @classmethod
    def of(cls, stat: os.stat_result) -> FileStat:
        """Make a FileStat from a stat result."""
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_ctime_ns)


_ABSENT = FileStat(-1, 0, 0, 0)  # for a broken symlink; no file equals it


def is_settled(file_stat: FileStat, seconds: float) -> bool:
    """Return whether a file was last written to some time before `seconds`, in seconds since the epoch.

    An mtime in the future does not show when the file was written, so such a file is not settled.
    """
    return file_stat.mtime_ns / 1e9 + SETTLED_SECONDS <= seconds


@dataclass(frozen=True, slots=True)
class Listing:
    """Direct contents of a folder: the stats of its shards, sorted by name, and what else it holds.

    `links` are the shards, and the recipe, that are symlinks. `faults` are the reasons why others of them cannot be read.
    """

    shards: Mapping[str, FileStat]
    folders: tuple[str, ...]
    broken_links: tuple[str, ...]
    links: tuple[str, ...]
    faults: tuple[str, ...]
    has_recipe: bool
    has_others: bool


def list_folder(folder: Path) -> Listing:
    """List a folder; names that begin with a dot or an underscore are not data. Raises OSError."""
    shards: dict[str, FileStat] = {}
    folders, broken_links, links, faults, has_recipe, has_others = [], [], [], list[str](), False, False
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name[0] in "._":
                continue
            try:
                is_folder = entry.is_dir()
            except OSError:  # a symlink whose target cannot be reached, or to itself
                is_folder = False
            if is_folder:
                folders.append(entry.name)
            elif entry.name.lower().endswith(".parquet") or entry.name == FILE_NAME:
                if fault := _fault_of(entry):
                    faults.append(fault)
                elif entry.name == FILE_NAME:
                    has_recipe = True
                else:
                    shards[entry.name] = _stat_of_entry(entry)
                if entry.is_symlink():
                    links.append(entry.name)
            elif os.path.exists(entry.path):  # noqa: PTH110 - likewise
                has_others = True
            else:
                broken_links.append(entry.name)
    return Listing(
        dict(sorted(shards.items())),
        tuple(sorted(folders)),
        tuple(broken_links),
        tuple(sorted(links)),
        tuple(faults),
        has_recipe,
        has_others,
    )


def _fault_of(entry: os.DirEntry[str]) -> str | None:
    """Return why a shard or a recipe must not be opened; None if it may be, or is absent."""
    if not _is_utf8(entry.name):
        return f"{as_utf8(entry.path)} has a name that is not UTF-8. Rename it."
    with suppress(OSError):
        if not stat.S_ISREG(entry.stat().st_mode):  # to open a pipe may take forever
            return f"{entry.path} is a pipe, a socket or a device. Remove it."
    return None


def _is_utf8(name: str) -> bool:
    return as_utf8(name) == name


def _stat_of_entry(entry: os.DirEntry[str]) -> FileStat:
    try:
        return FileStat.of(entry.stat())
    except OSError:
        return _ABSENT  # list it, so that it is refused: without it the epoch would be silently shorter


@dataclass(frozen=True, slots=True)
class Scan:
    """Folders below the data folder, by dataset name: the relative path, joined with dots.

    folders   the folder of each dataset; `shards` has the stats of its shards
    mixtures  folders with a recipe and no shards
    others    folders with other files only
    refused   names that cannot be served, with the reason
    unread    folders whose contents are unknown, with the reason: they cannot be listed, or are broken symlinks
    """

    folders: dict[str, Path] = field(default_factory=dict)
    shards: dict[str, Mapping[str, FileStat]] = field(default_factory=dict)
    mixtures: dict[str, Path] = field(default_factory=dict)
    others: dict[str, Path] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    unread: dict[Path, str] = field(default_factory=dict)

    def why_unread(self, folder: Path) -> str | None:
        """Return why the contents of a folder, or of a parent, are unknown; None if they are known."""
        return next((self.unread[path] for path in (folder, *folder.parents) if path in self.unread), None)


def scan_folders(data_dir: Path, allowed: AllowedFiles = EVERYTHING) -> Scan:
    """Find shards in a folder and all below it; costs a listing and two stats per folder, and a stat per shard.

    A folder with a second name through a symlink is a dataset under each name. Symlinks below a symlink are not followed:
    folders that link to each other would have too many names to list.
    """
    scan = Scan()
    named = defaultdict[str, list[tuple[Path, Mapping[str, FileStat]]]](list)
    pending: list[tuple[Path, bool, frozenset[tuple[int, int]]]] = [(data_dir, False, frozenset())]
    while pending:
        folder, is_by_link, above = pending.pop()
        name = ".".join(folder.relative_to(data_dir).parts) or data_dir.resolve().name
        try:
            status = folder.stat()
            identity = (status.st_dev, status.st_ino)
            if identity in above:  # a symlink to a parent
                continue
            listing = list_folder(folder)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and folder != data_dir:  # removed after its parent was listed
                continue
            reason = f"{error.filename or folder} cannot be read: {error.strerror}. Fix that, or move it away."
            scan.refused[name] = scan.unread[folder] = reason
            continue
        links = [*([folder] if is_by_link else []), *(folder / link for link in listing.links)]
        if outside := list(filter(None, map(allowed.why_not, links))):
            scan.refused[name] = scan.unread[folder] = outside[0]
            continue
        for child in (folder / below for below in reversed(listing.folders)):
            if not _is_utf8(child.name):
                dataset = as_utf8(".".join(child.relative_to(data_dir).parts))
                scan.refused[dataset] = f"{as_utf8(str(child))} has a name that is not UTF-8. Rename it."
                continue
            is_link = os.path.islink(child)  # noqa: PTH114 - is_symlink raises for a missing mount
            if not (is_by_link and is_link):
                pending.append((child, is_by_link or is_link, above | {identity}))
        for link in (folder / below for below in listing.broken_links):
            scan.unread[link] = f"{link} is a broken symlink. Bring back its target, or remove the symlink."
        if listing.faults:
            scan.refused[name] = listing.faults[0]
        elif listing.shards or (listing.has_recipe and folder != data_dir):
            named[name].append((folder, listing.shards))
        elif listing.has_others:
            scan.others[name] = folder
    for name, [(folder, shards), *others] in named.items():
        if others:  # a.b is the name of a/b and of a folder a.b
            paths = " and ".join(str(path) for path, _ in named[name])
            scan.refused[name] = f"{paths} would both be the dataset {name!r}. Rename one of the folders."
        elif shards:
            scan.folders[name], scan.shards[name] = folder, shards
        else:
            scan.mixtures[name] = folder
    return scan


@dataclass(frozen=True, slots=True)
class FolderState:
    """Stats of all files of a dataset: its shards by name, and the files of its recipe by path."""

    shards: Mapping[str, FileStat]
    recipe: Mapping[str, FileStat]

    def is_settled(self) -> bool:
        """Return whether every file is settled; see the function is_settled."""
        now = time.time()
        return all(is_settled(file_stat, now) for stats in (self.shards, self.recipe) for file_stat in stats.values())


def stat_of_file(path: Path) -> FileStat | None:
    """Return the stat of a regular file, or None."""
    try:
        status = path.stat()
    except (OSError, ValueError):  # a text that is not a file name may be too long, or contain a null character
        return None
    return FileStat.of(status) if stat.S_ISREG(status.st_mode) else None
