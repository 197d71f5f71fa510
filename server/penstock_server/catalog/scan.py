"""Folders below the data folder: those with shards, and the FileStat of each shard. Nothing is opened here."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from errno import ELOOP
from pathlib import Path
from typing import NamedTuple

from penstock_server.files import spelled
from penstock_server.problems import DatasetInvalid
from penstock_server.recipes.chat import TEMPLATE_FILES
from penstock_server.recipes.config import read_toml
from penstock_server.recipes.infer import FILE_NAME
from penstock_server.recipes.tokenizer import TOKEN_FILES

QUIET_SECONDS = 2.0  # a file this old is complete: a later write would change its FileStat


class FileStat(NamedTuple):
    """Stat fields that change when a file is written to or replaced.

    `ctime_ns` is the time of the last change to the file or its inode. Archives preserve sizes and mtimes, and the file system
    reuses the inode of a removed file, but no program can set the ctime.
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


@dataclass(frozen=True, slots=True)
class Listing:
    """Direct contents of a folder: the FileStat of each shard, sorted by name, the folders, and whether it has a recipe.

    `other` is the name of a file that is neither, "" without one.
    """

    shards: Mapping[str, FileStat]
    folders: tuple[str, ...]
    has_recipe: bool
    other: str


@dataclass(frozen=True, slots=True)
class FolderState:
    """FileStats of all files of a dataset: its shards by name, and the files of its recipe by path."""

    shards: Mapping[str, FileStat]
    recipe: Mapping[str, FileStat]

    def is_settled(self) -> bool:
        """Return whether every file is settled; see the function is_settled."""
        now = time.time()
        return all(is_settled(date, now) for dates in (self.shards, self.recipe) for date in dates.values())


@dataclass(frozen=True, slots=True)
class Survey:
    """Dataset folders below the data folder, by name: the relative path, joined with dots.

    `declared` are folders with a recipe and no shards: they may declare mixtures. `refused` are invalid names, or names of
    several folders, with the reason. `unread` are folders that exist but cannot be listed, with the reason: their contents are
    unknown; `hidden` has them by name. `others` has for each folder with neither shards nor a recipe a file that it holds
    instead.
    """

    folders: dict[str, Path] = field(default_factory=dict)
    shards: dict[str, Mapping[str, FileStat]] = field(default_factory=dict)
    declared: dict[str, Path] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    unread: dict[Path, str] = field(default_factory=dict)
    hidden: dict[str, Path] = field(default_factory=dict)
    others: dict[str, Path] = field(default_factory=dict)

    def why_unread(self, folder: Path) -> str | None:
        """Return why a folder's contents are unknown: it, or a parent, cannot be listed; None if they are known."""
        return next((self.unread[path] for path in (folder, *folder.parents) if path in self.unread), None)


def list_folder(folder: Path) -> Listing:
    """List a folder; names that begin with a dot or an underscore are not data. Raises OSError."""
    shards, folders, has_recipe, other = {}, [], False, ""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name[0] in "._":
                continue
            if _is_folder(entry):
                folders.append(entry.name)
            elif entry.name.lower().endswith(".parquet"):
                shards[entry.name] = _date_of(entry)
            elif entry.name == FILE_NAME:
                has_recipe = True
            else:
                other = spelled(entry.name)
    return Listing(dict(sorted(shards.items())), tuple(sorted(folders)), has_recipe, other)


def survey(data_dir: Path) -> Survey:
    """Find shards in a folder and all below it; costs a listing and two stats per folder, and a stat per shard.

    A folder with a second name through a symlink is a dataset under each name. Symlinks below a symlink are not followed:
    folders that link to each other would have too many names to list.
    """
    found = Survey()
    by_name: dict[str, list[Path]] = {}
    pending: list[tuple[Path, bool, frozenset[tuple[int, int]]]] = [(data_dir, False, frozenset())]
    while pending:
        folder, is_by_link, above = pending.pop()
        name = ".".join(folder.relative_to(data_dir).parts) or spelled(data_dir.resolve().name)
        if spelled(name) != name:
            found.refused[spelled(name)] = (
                f"{spelled(str(folder))} has a name that is not UTF-8, and no URL could hold it. Rename it."
            )
            continue
        try:
            status = folder.stat()
            identity = (status.st_dev, status.st_ino)
            if identity in above:  # a symlink to a parent
                continue
            listing = list_folder(folder)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and folder != data_dir:  # removed after its parent was listed
                continue
            reason = f"{spelled(str(error.filename or folder))} cannot be read: {error.strerror}. Mend that, or move it away."
            found.refused[name] = reason
            if not isinstance(error, FileNotFoundError):
                found.unread[folder], found.hidden[name] = reason, folder
            continue
        for child in (folder / below for below in reversed(listing.folders)):
            is_link = _is_link(child)
            if not (is_by_link and is_link):
                pending.append((child, is_by_link or is_link, above | {identity}))
        if listing.shards:
            by_name.setdefault(name, []).append(folder)
            found.folders[name], found.shards[name] = folder, listing.shards
        elif listing.has_recipe and folder != data_dir:
            by_name.setdefault(name, []).append(folder)
            found.declared[name] = folder
        elif listing.other:
            found.others[name] = folder / listing.other
    _refuse_shared_names(found, by_name)
    return found


def _refuse_shared_names(found: Survey, by_name: Mapping[str, list[Path]]) -> None:
    """Refuse names of several folders: a.b is the name of a/b and of a folder a.b."""
    for name, folders in by_name.items():
        if len(folders) > 1:
            for of_one in (found.folders, found.shards, found.declared):
                of_one.pop(name, None)
            listed = " and ".join(map(str, folders))
            found.refused[name] = f"{listed} would both be the dataset {name!r}. Rename one of the folders."


def look(folder: Path, shards: Mapping[str, FileStat], default_tokenizer: Path | None) -> FolderState:
    """Return the state of a folder whose shards have these FileStats."""
    recipe = folder / FILE_NAME
    try:
        texts = list(_texts(read_toml(recipe)))
        # "clean:strip" is a function in clean.py.
        named = [folder / name for text in texts for name in (text, f"{text.partition(':')[0]}.py")]
    except DatasetInvalid:  # no recipe, or reading it as a recipe reports the error
        named = []
    if default_tokenizer:
        named.append(default_tokenizer)
    tokenizers = [path for path in named if path.suffix == ".json" or path == default_tokenizer]
    paths = [recipe, *named, *(path.parent / name for path in tokenizers for name in (*TEMPLATE_FILES, *TOKEN_FILES))]
    return FolderState(shards, {str(path): date for path in paths if (date := _date_of_file(path))})


def is_settled(date: FileStat, seconds: float) -> bool:
    """Return whether a file was last written to some time before `seconds`, in seconds since the epoch.

    An mtime in the future does not show when the file was written, so such a file is not settled.
    """
    return date.mtime_ns / 1e9 + QUIET_SECONDS <= seconds


def _texts(document: object) -> Iterator[str]:
    """Yield every text in a TOML document, since some are file names; the others match no file."""
    pending = [document]  # no recursion: a key of thousands of parts makes thousands of nested tables
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            pending += value.values() if isinstance(value, dict) else value


def _date_of_file(path: Path) -> FileStat | None:
    try:
        found = path.stat()
    except (OSError, ValueError):  # a text that is not a file name may be too long, or contain a null character
        return None
    return FileStat.of(found) if stat.S_ISREG(found.st_mode) else None


def _is_link(path: Path) -> bool:
    try:
        return path.is_symlink()
    except OSError:  # such as a missing mount: listing it reports the error
        return False


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno == ELOOP:
            return False  # a symlink to itself: `ln -s stories latest`, run twice, makes one in stories
        if entry.name == FILE_NAME or entry.name.lower().endswith(".parquet"):  # without it: another dataset
            raise
        return True  # the symlink's target cannot be reached: listing it reports the error for it alone


def _date_of(entry: os.DirEntry[str]) -> FileStat:
    try:
        return FileStat.of(entry.stat())
    except OSError:
        return _ABSENT  # list it, so that it is refused: without it the epoch would be silently shorter
