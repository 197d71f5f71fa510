"""What the files of a data folder may do: which files a dataset may consist of and name, and whether its code may run.

Whoever may write into the data folder decides what is served. Without this, a dataset could show any file that the server's
user can read, and run any code.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from penstock_server.problems import DatasetInvalid


@dataclass(frozen=True, slots=True)
class AllowedFiles:
    """Files below `folders` are allowed, by their real path; with `follow_symlinks`, by the path that names them.

    Without folders, every file is allowed. The check precedes the reading: it does not stop a process that replaces a file by
    a symlink at that moment.
    """

    folders: tuple[Path, ...] = ()
    follow_symlinks: bool = False
    transforms: bool = False

    def check(self, path: Path) -> None:
        """Raise DatasetInvalid: the file is not allowed."""
        if reason := self.why_not(path):
            raise DatasetInvalid(reason)

    def why_not(self, path: Path) -> str | None:
        """Return why a file or a folder is not allowed; None if it is."""
        named = Path(os.path.normpath(path.absolute()))
        if not self.folders:
            return None
        if not any(named.is_relative_to(folder) for folder in map(os.path.abspath, self.folders)):
            return (
                f"{path} is outside the data folder. Put it into the data folder, or start with --assets DIR, the folder of "
                f"files that datasets may name."
            )
        try:
            if self.follow_symlinks or any(path.resolve().is_relative_to(folder.resolve()) for folder in self.folders):
                return None
        except (OSError, RuntimeError):  # reading it raises the reason
            return None
        return (
            f"{path} is reached by a symlink out of the data folder. Start with --follow-symlinks if symlinks may lead "
            f"anywhere: a snapshots folder of a Hugging Face cache needs it, since its files are symlinks to blobs beside it."
        )

    def check_transforms(self, folder: Path) -> None:
        """Raise DatasetInvalid: no code of the data folder may run."""
        if not self.transforms:
            raise DatasetInvalid(
                f"{folder}: its recipe has a transform, which is code of the data folder. Start with --allow-transforms if you "
                f"trust all who can write there, or remove transform."
            )


EVERYTHING = AllowedFiles(transforms=True)
