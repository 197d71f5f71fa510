"""Folders below the data folder, and the stats of their files. The only files opened here are penstock.toml."""

from __future__ import annotations

import os
import stat
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from penstock.text import as_utf8
from penstock_server.problems import DatasetInvalid, DatasetUnavailable
from penstock_server.recipes.allowed import EVERYTHING, AllowedFiles
from penstock_server.recipes.config import read_toml
from penstock_server.recipes.infer import FILE_NAME
from penstock_server.sources.recipe_files import SUFFIXES
from penstock_server.sources.registry import RemoteRoot, Sources
from penstock_server.sources.remote import Away, RemoteFolder, is_shard
from penstock_server.sources.stats import FileStat, is_settled
from penstock_server.sources.urls import is_url

_ABSENT = FileStat(-1, 0, 0, 0)  # for a broken symlink; no file equals it


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
                    continue
                if entry.name == FILE_NAME:
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


def list_shards(folder: Path | RemoteFolder) -> Mapping[str, FileStat]:
    """Return the shards directly in a folder, by name. Raises OSError."""
    return list_folder(folder).shards if isinstance(folder, Path) else folder.shards()


def _stat_of_entry(entry: os.DirEntry[str]) -> FileStat:
    try:
        return FileStat.of(entry.stat())
    except OSError:
        return _ABSENT  # list it, so that it is refused: without it the epoch would be silently shorter


class Found(NamedTuple):
    """A folder that may be a dataset or a mixture, its shards, and where these lie, if elsewhere."""

    folder: Path
    shards: Mapping[str, FileStat]
    remote: RemoteFolder | None = None


@dataclass(frozen=True, slots=True)
class Scan:
    """Folders below the data folder, by dataset name: the relative path, joined with dots.

    folders   the folder of each dataset; `shards` has the stats of its shards
    mixtures  folders with a recipe and no shards
    others    folders with other files only
    remotes   where the shards of a dataset lie, if not in its folder, which has copies of the recipe's files then
    refused   names that cannot be served, with the reason
    unread    folders whose contents are unknown, with the reason: they cannot be listed, or are broken symlinks
    away      those of them whose source does not respond for now
    """

    folders: dict[str, Path] = field(default_factory=dict)
    shards: dict[str, Mapping[str, FileStat]] = field(default_factory=dict)
    mixtures: dict[str, Path] = field(default_factory=dict)
    others: dict[str, Path] = field(default_factory=dict)
    remotes: dict[str, RemoteFolder] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    unread: dict[Path, str] = field(default_factory=dict)
    away: set[Path] = field(default_factory=set)
    roots: tuple[Path, ...] = ()

    def why_unknown(self, name: str) -> str | None:
        """Return why it is unknown whether a dataset exists: its folder would be below one that cannot be read."""
        reasons = (self.why_unread(root.joinpath(*name.split("."))) for root in self.roots)
        return next(filter(None, reasons), None)

    def is_away(self, name: str) -> bool:
        """Return whether a dataset may exist in a source that does not respond for now."""
        paths = (root.joinpath(*name.split(".")) for root in self.roots)
        return any(not self.away.isdisjoint((path, *path.parents)) for path in paths)

    def why_unread(self, folder: Path) -> str | None:
        """Return why the contents of a folder, or of a parent, are unknown; None if they are known."""
        return next((self.unread[path] for path in (folder, *folder.parents) if path in self.unread), None)


def scan_all(roots: Sequence[Path | RemoteRoot], sources: Sources, allowed: AllowedFiles = EVERYTHING) -> Scan:
    """Find the datasets of several folders and sources."""
    folders = tuple(root if isinstance(root, Path) else root.files.folder for root in roots)
    scan, named = Scan(roots=folders), defaultdict[str, list[Found]](list)
    for root in roots:
        if isinstance(root, Path):
            _scan_folders(root, sources, allowed, scan, named)
        else:
            _scan_remote(root, scan, named)
    for name, [found, *others] in named.items():
        if others:  # a.b is the name of a/b and of a folder a.b
            places = " and ".join(str(each.remote or each.folder) for each in (found, *others))
            scan.refused[name] = f"{places} would both be the dataset {name!r}. Rename one of the folders."
        elif found.shards:
            scan.folders[name], scan.shards[name] = found.folder, found.shards
            if found.remote:
                scan.remotes[name] = found.remote
        else:
            scan.mixtures[name] = found.folder
    return scan


def _scan_remote(root: RemoteRoot, scan: Scan, named: dict[str, list[Found]]) -> None:
    """Add the datasets of a source: each prefix up to a slash is a folder. Costs a listing of its objects."""
    shards, recipes = defaultdict[str, dict[str, FileStat]](dict), dict[str, FileStat]()
    mirror, remote = root.files.folder, root.remote
    try:
        for key, stat in remote.source.objects():
            folder, _, name = key.rpartition("/")
            # Without empty and dotted parts, no copy of a recipe's file can leave the folder of the copies.
            if not all(part and part[0] not in "._" for part in key.split("/")):
                continue
            if is_shard(name):
                shards[folder][name] = stat
            elif key.endswith(SUFFIXES):
                recipes[key] = stat
            else:
                scan.others.setdefault(_dotted(folder) or root.name, mirror / folder)
        root.files.update(recipes)
    except OSError as error:
        scan.refused[root.name] = scan.unread[mirror] = _cannot_be_read(remote, error)
        if isinstance(error, Away):
            scan.away.add(mirror)
        return
    folders = {*shards, *(key.rpartition("/")[0] for key in recipes if key.endswith(f"/{FILE_NAME}"))}
    for folder in sorted(folders):
        place = RemoteFolder(remote.source, f"{folder}/" if folder else "")
        found = Found(mirror / folder, dict(sorted(shards[folder].items())), place if shards[folder] else None)
        named[_dotted(folder) or root.name].append(found)


def _dotted(folder: str) -> str:
    return folder.replace("/", ".")


def _scan_folders(data_dir: Path, sources: Sources, allowed: AllowedFiles, scan: Scan, named: dict[str, list[Found]]) -> None:
    """Find shards in a folder and all below it; costs a listing and two stats per folder, and a stat per shard.

    The recipe of a folder without shards may name where they lie, which costs a listing there.

    A folder with a second name through a symlink is a dataset under each name. Symlinks below a symlink are not followed:
    folders that link to each other would have too many names to list.
    """
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
        elif listing.shards or listing.has_recipe:
            try:
                found = Found(folder, listing.shards) if listing.shards else _shards_elsewhere(folder, sources, allowed)
            except (DatasetInvalid, DatasetUnavailable) as problem:
                scan.refused[name] = scan.unread[folder] = str(problem)
                if isinstance(problem, DatasetUnavailable):
                    scan.away.add(folder)
                continue
            if found.shards or folder != data_dir:
                named[name].append(found)
        elif listing.has_others:
            scan.others[name] = folder


def _shards_elsewhere(folder: Path, sources: Sources, allowed: AllowedFiles) -> Found:
    """Return the shards that the recipe of a folder without shards names.

    Raises DatasetInvalid: they cannot be listed. Raises DatasetUnavailable: for now.
    """
    try:
        url = read_toml(folder / FILE_NAME).get("shards")
    except DatasetInvalid:  # reading it as a mixture reports the error
        url = None
    if url is None:
        return Found(folder, {})
    if not isinstance(url, str) or not is_url(url):
        raise DatasetInvalid(f'{folder / FILE_NAME}: shards must be a URL such as "s3://bucket/folder", not {url!r}.')
    allowed.check_source(folder, url)
    remote = sources.folder(url)
    try:
        if shards := remote.shards():
            return Found(folder, shards, remote)
    except OSError as error:
        problem = DatasetUnavailable if isinstance(error, Away) else DatasetInvalid
        raise problem(f"{folder}: {_cannot_be_read(remote, error)}") from None
    raise DatasetInvalid(f"{folder}: {remote} holds no file that ends in .parquet. Correct shards in {FILE_NAME}.")


def _cannot_be_read(remote: RemoteFolder, error: OSError) -> str:
    return f"{remote} cannot be read: {error.strerror or error}. Check the address, the network and the credentials."


@dataclass(frozen=True, slots=True)
class FolderState:
    """Stats of all files of a dataset: its shards by name, and the files of its recipe by path."""

    shards: Mapping[str, FileStat]
    recipe: Mapping[str, FileStat]

    def is_settled(self) -> bool:
        """Return whether every file is settled; see the function is_settled."""
        now = time.time()
        return all(is_settled(file_stat, now) for stats in (self.shards, self.recipe) for file_stat in stats.values())
