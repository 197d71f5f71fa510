"""Files that a dataset may consist of and name, and whether its code may run.

A user who can write to the data folder decides what is served. Without these checks, a dataset could show any file that the
server's user can read, and run any code.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from penstock_server.problems import DatasetInvalid


@dataclass(frozen=True, slots=True)
class AllowedFiles:
    """Rule for the files of datasets: those below `folders` are allowed, and every file if that is None.

    The real path of a file counts, or with `follow_symlinks` the path that names it. A file is checked before it is read: a
    process that replaces it with a symlink in between is not stopped.

    transforms  whether the code of transforms may run
    sources     beginnings of URLs that recipes may name for their shards
    """

    folders: tuple[Path, ...] | None = None
    follow_symlinks: bool = False
    transforms: bool = False
    sources: tuple[str, ...] = ()

    def check(self, path: Path) -> None:
        """Raise DatasetInvalid: the file is not allowed."""
        if reason := self.why_not(path):
            raise DatasetInvalid(reason)

    def why_not(self, path: Path) -> str | None:
        """Return why a file or a folder is not allowed; None if it is."""
        named = Path(os.path.normpath(path.absolute()))
        if self.folders is None:
            return None
        if not any(named.is_relative_to(folder) for folder in map(os.path.abspath, self.folders)):
            return (
                f"{path} is outside the data folder. Put it into the data folder, or name its folder with --assets DIR: "
                f"datasets may name files there, too."
            )
        try:
            if self.follow_symlinks or any(path.resolve().is_relative_to(folder.resolve()) for folder in self.folders):
                return None
        except (OSError, RuntimeError):  # the reader of the file raises the reason
            return None
        return (
            f"{path} is reached by a symlink out of the data folder. To follow such symlinks, use --follow-symlinks. A "
            f"snapshots folder of a Hugging Face cache needs it: its files are symlinks to blobs beside it."
        )

    def check_source(self, folder: Path, url: str) -> None:
        """Raise DatasetInvalid: the recipe of a folder may not name this URL."""
        is_below = any(f"{url}/".startswith(f"{allowed.rstrip('/')}/") for allowed in self.sources)
        if self.folders is not None and (not is_below or ".." in url):
            raise DatasetInvalid(
                f"{folder}: its recipe reads shards from {url}. Start with --allow-sources and the beginnings of URLs that "
                f"recipes may name, such as --allow-sources {url}."
            )

    def check_transforms(self, folder: Path) -> None:
        """Raise DatasetInvalid: code in the data folder may not run."""
        if not self.transforms:
            raise DatasetInvalid(
                f"{folder}: its recipe has a transform, which is code in the data folder. Use --allow-transforms if you trust "
                f"everyone who can write there, or remove transform from the recipe."
            )


EVERYTHING = AllowedFiles(transforms=True)
