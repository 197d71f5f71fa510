"""Copies of the small files that a dataset's recipe consists of: libraries open tokenizers by a path of this machine."""

from __future__ import annotations

import posixpath
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from penstock_server.files import TEMPORARY
from penstock_server.problems import DatasetInvalid
from penstock_server.recipes.chat import TEMPLATE_FILES
from penstock_server.recipes.config import read_toml
from penstock_server.recipes.infer import FILE_NAME
from penstock_server.recipes.tokenizer import TOKEN_FILES
from penstock_server.sources.remote import Source
from penstock_server.sources.stats import FileStat

SUFFIXES = (".toml", ".json", ".jinja", ".py")
_MAX_BYTES = 64 << 20  # of one file; tokenizers have up to 20 MB


class RecipeFiles:
    """Copies of the recipes of a source in a folder, at the same relative paths."""

    def __init__(self, source: Source, folder: Path) -> None:
        self._source, self.folder = source, folder
        self._copied = dict[str, FileStat]()

    def update(self, files: Mapping[str, FileStat]) -> None:
        """Copy the recipes among these files and the files that they name; remove those that are gone. Raises OSError."""
        needed = {key: stat for key, stat in files.items() if posixpath.basename(key) == FILE_NAME}
        for key, stat in needed.items():
            self._copy(key, stat)
        named = {key: files[key] for recipe in needed for key in self._named_by(recipe) if key in files}
        for key, stat in named.items():
            self._copy(key, stat)
        for key in self._copied.keys() - needed.keys() - named.keys():
            (self.folder / key).unlink(missing_ok=True)
            del self._copied[key]

    def _named_by(self, recipe: str) -> Iterator[str]:
        """Yield the keys that a copied recipe may name, and those beside its tokenizer."""
        parent = posixpath.dirname(recipe)
        with suppress(DatasetInvalid):  # reading it as a recipe reports the error
            for text in read_toml(self.folder / recipe).values():
                if isinstance(text, str):
                    for name in (text, f"{text.partition(':')[0]}.py"):
                        key = posixpath.normpath(posixpath.join(parent, name))
                        yield key
                        if key.endswith(".json"):
                            yield from (
                                posixpath.join(posixpath.dirname(key), name) for name in (*TEMPLATE_FILES, *TOKEN_FILES)
                            )

    def _copy(self, key: str, stat: FileStat) -> None:
        path = self.folder / key
        if self._copied.get(key) == stat and path.exists():
            return
        if stat.size_bytes > _MAX_BYTES:
            raise OSError(
                f"{self._source.url}/{key} has {stat.size_bytes:,} bytes; the limit of a recipe's file is {_MAX_BYTES:,}"
            )
        content = bytes(self._source.read(key, stat, 0, stat.size_bytes)) if stat.size_bytes else b""
        if not path.is_file() or path.read_bytes() != content:  # another process may have copied it
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f"{uuid.uuid4().hex}{TEMPORARY}")
            temporary.write_bytes(content)
            temporary.replace(path)
        self._copied[key] = stat
