"""The folders below the data folder: which hold shards, and the date of each. Nothing is opened here."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from errno import ELOOP
from pathlib import Path

from penstock_server.files import spelled
from penstock_server.problems import DatasetInvalid
from penstock_server.recipes.chat_files import FILES_BESIDE_TOKENIZER
from penstock_server.recipes.declaration import FILE_NAME, read_toml
from penstock_server.snapshots.shard import FileStat

QUIET_SECONDS = 2.0  # a file this old is whole, and was not written to after a look at it without a change of its date
_ABSENT = FileStat(-1, 0, 0, 0)  # of a link to nothing; no file is like it


@dataclass(frozen=True, slots=True)
class Listing:
    """What is directly in a folder: the date of each shard by its name, in the order of names, the folders, and a recipe.

    `other` is the name of a file that is neither, "" if there is none.
    """

    shards: Mapping[str, FileStat]
    folders: tuple[str, ...]
    has_recipe: bool
    other: str


@dataclass(frozen=True, slots=True)
class FolderState:
    """The dates of all that a dataset is made of: of its shards by name, and of the files of its recipe by path."""

    shards: Mapping[str, FileStat]
    recipe: Mapping[str, FileStat]

    def is_settled(self) -> bool:
        """Whether every file is; see is_settled below."""
        now = time.time()
        return all(is_settled(date, now) for dates in (self.shards, self.recipe) for date in dates.values())


@dataclass(frozen=True, slots=True)
class Survey:
    """The dataset folders below the data folder, by name: the path below it, joined with dots.

    `declared` are folders with a recipe and no shards: they may declare mixtures. `refused` are names that stand for no folder,
    or for more than one, with the reason. `unread` are the folders that are there and cannot be looked into, with the reason:
    of what is below them nothing is known; `hidden` gives them by name. `others` gives of folders with neither a file that is
    there instead.
    """

    folders: dict[str, Path] = field(default_factory=dict)
    shards: dict[str, Mapping[str, FileStat]] = field(default_factory=dict)
    declared: dict[str, Path] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    unread: dict[Path, str] = field(default_factory=dict)
    hidden: dict[str, Path] = field(default_factory=dict)
    others: dict[str, Path] = field(default_factory=dict)

    def why_unread(self, folder: Path) -> str | None:
        """Why nothing is known of a folder: it, or one that it lies in, cannot be looked into."""
        return next((self.unread[path] for path in (folder, *folder.parents) if path in self.unread), None)


def list_folder(folder: Path) -> Listing:
    """Looks into a folder; names that begin with a dot or an underscore are not data. Raises OSError."""
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
    """Looks for shards in a folder and all below it; costs a listing and two stats a folder, and a stat a shard.

    A folder that a link gives a second name is a dataset under each; links below a link are not followed, or folders that link
    to each other would have more names than can be listed.
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
            if identity in above:  # a link that leads back
                continue
            listing = list_folder(folder)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and folder != data_dir:  # removed since its parent was listed
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
    """A name that is of several folders, as a.b is of a/b and of a folder a.b, stands for none of them."""
    for name, folders in by_name.items():
        if len(folders) > 1:
            for of_one in (found.folders, found.shards, found.declared):
                of_one.pop(name, None)
            listed = " and ".join(map(str, folders))
            found.refused[name] = f"{listed} would both be the dataset {name!r}. Rename one of the folders."


def look(folder: Path, shards: Mapping[str, FileStat], default_tokenizer: Path | None) -> FolderState:
    """The sight of a folder whose shards have these dates."""
    recipe = folder / FILE_NAME
    try:
        texts = list(_texts(read_toml(recipe)))
        # "clean:strip" is a function of clean.py.
        named = [folder / name for text in texts for name in (text, f"{text.partition(':')[0]}.py")]
    except DatasetInvalid:  # there is none, or reading it as a recipe will say what is wrong with it
        named = []
    if default_tokenizer:
        named.append(default_tokenizer)
    tokenizers = [path for path in named if path.suffix == ".json" or path == default_tokenizer]
    paths = [recipe, *named, *(path.parent / name for path in tokenizers for name in FILES_BESIDE_TOKENIZER)]
    return FolderState(shards, {str(path): date for path in paths if (date := _date_of_file(path))})


def is_settled(date: FileStat, seconds: float) -> bool:
    """Whether a file was last written to some time before `seconds`, since the epoch.

    A date in the future says nothing of when the file was written, so such a file is not quiet.
    """
    return date.mtime_ns / 1e9 + QUIET_SECONDS <= seconds


def _texts(document: object) -> Iterator[str]:
    """Every text in a TOML document, of which those that are names of files are; the others are names of none."""
    pending = [document]  # and no recursion: a key of thousands of parts is as many tables, each in the next
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            pending += value.values() if isinstance(value, dict) else value


def _date_of_file(path: Path) -> FileStat | None:
    try:
        found = path.stat()
    except (OSError, ValueError):  # what is no file's name may be too long for one, or hold a null
        return None
    return FileStat.of(found) if stat.S_ISREG(found.st_mode) else None


def _is_link(path: Path) -> bool:
    try:
        return path.is_symlink()
    except OSError:  # as of a mount that is away: looking into it tells why
        return False


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno == ELOOP:
            return False  # a link to itself: `ln -s stories latest`, given twice, leaves one in stories
        if entry.name == FILE_NAME or entry.name.lower().endswith(".parquet"):  # without it the folder would be another dataset
            raise
        return True  # a link to what cannot be reached: to look into it tells why, and of it alone


def _date_of(entry: os.DirEntry[str]) -> FileStat:
    try:
        return FileStat.of(entry.stat())
    except OSError:
        return _ABSENT  # listed, to be refused: left out, it would be a silently shorter epoch
