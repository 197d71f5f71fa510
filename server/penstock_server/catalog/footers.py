"""Recipe and shards of a folder, from the footers of its files. A footer is read once.

The key of a cached footer is the FileStat of its file. As in git's index, a file with a very young FileStat is not cached,
since a later write might not change it (git's documentation calls it racy).
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.text import counted
from penstock_server.catalog.history import read_note, write_note
from penstock_server.catalog.scan import FolderState
from penstock_server.catalog.shard import Shard, being_written, numbers, read_schema, read_shard
from penstock_server.catalog.snapshot import Snapshot, recipe_key
from penstock_server.problems import DatasetInvalid
from penstock_server.recipes.allowed import EVERYTHING, AllowedFiles
from penstock_server.recipes.chat import TEMPLATE_FILES
from penstock_server.recipes.config import read_recipe, read_toml
from penstock_server.recipes.encoders import Encoders
from penstock_server.recipes.infer import FILE_NAME
from penstock_server.recipes.recipe import Recipe
from penstock_server.recipes.tokenizer import TOKEN_FILES
from penstock_server.sources.remote import RemoteFolder, RemotePath
from penstock_server.sources.stats import FileStat, is_settled, stat_of_file

_FORMAT = 4  # of the note: raise it when a field of Shard changes its meaning
_THREADS, _REMOTE_THREADS = 16, 64  # waiting for disks or the network, not for cores
_MAX_FAILURES = 10  # in one message


@dataclass(frozen=True, slots=True)
class FolderContents:
    """Contents of a folder: its recipe, the readable shards by name, and the errors of the others by name."""

    name: str
    folder: Path
    recipe: Recipe
    recipe_files: Mapping[str, FileStat]
    shards: Mapping[str, Shard]
    failures: Mapping[str, str]

    def snapshot(self) -> Snapshot:
        """Return the snapshot of all shards. Raises DatasetInvalid: a shard is, no row exists, or one is known to be bad."""
        if self.failures:
            raise DatasetInvalid(_listed(self.failures.values()))
        snapshot = Snapshot(self.folder, list(self.shards.values()), self.recipe, name=self.name)
        _check_rows(snapshot)
        return snapshot


class FolderReader:
    """Reads the recipe and the shards of one folder. Footers are cached; with a `note`, they outlive a restart.

    The cache is for one recipe at a time: a shard's facts are about the recipe's columns. Not thread-safe.
    """

    def __init__(
        self,
        folder: Path,
        default_tokenizer: Path | None = None,
        note: Path | None = None,
        name: str | None = None,
        encoders: Encoders | None = None,
        allowed: AllowedFiles = EVERYTHING,
        remote: RemoteFolder | None = None,
    ) -> None:
        self._place: Path | RemoteFolder = remote or folder  # of the shards
        self.folder, self.name = folder, name or folder.name
        self._tokenizer, self._note = default_tokenizer, note
        self._encoders, self._allowed = encoders, allowed
        self._before: FolderContents | None = None
        self._recipe, self._shards = "", dict[str, Shard]()
        content = read_note(note) if note else None
        if isinstance(content, tuple) and content[0] == _FORMAT:
            _, self._recipe, shards = content
            self._shards = {name: _unpacked(self._place / name, *packed) for name, packed in shards.items()}

    def state(self, shards: Mapping[str, FileStat]) -> FolderState:
        """Return the state of the folder, whose shards have these stats."""
        recipe = self.folder / FILE_NAME
        try:
            texts = [value for value in read_toml(recipe).values() if isinstance(value, str)]
        except DatasetInvalid:  # no recipe, or reading it as a recipe reports the error
            texts = []
        # Some texts are file names, and "clean:strip" is a function in clean.py; the others match no file.
        named = [self.folder / name for text in texts for name in (text, f"{text.partition(':')[0]}.py")]
        if self._tokenizer:
            named.append(self._tokenizer)
        tokenizers = [path for path in named if path.suffix == ".json" or path == self._tokenizer]
        paths = [recipe, *named, *(path.parent / name for path in tokenizers for name in (*TEMPLATE_FILES, *TOKEN_FILES))]
        return FolderState(shards, {str(path): file_stat for path in paths if (file_stat := stat_of_file(path))})

    def read(self, state: FolderState, *, settled: bool = False) -> FolderContents:
        """Read the recipe, and the footers of shards that are not cached. An unchanged recipe keeps its object.

        `settled` says that the state has not changed for a while.

        Raises DatasetInvalid: the recipe is wrong or being written, or no shard can be read to find the columns.
        """
        schema = _schema_of(self._place, state.shards)
        recipe = read_recipe(self.folder, schema, self._tokenizer, self._encoders, state.recipe, self._allowed)
        read = self._read_shards(state.shards, recipe, settled=settled)
        if self.state(state.shards).recipe != state.recipe:  # the next poll would miss it
            raise being_written(f"the recipe of {self.folder}")
        before = self._before
        if before and before.recipe_files == state.recipe and recipe_key(before.recipe, ()) == recipe_key(recipe, ()):
            recipe = before.recipe
        shards = {name: shard for name, shard in read.items() if isinstance(shard, Shard)}
        failures = {name: str(error) for name, error in read.items() if isinstance(error, DatasetInvalid)}
        self._before = FolderContents(self.name, self.folder, recipe, state.recipe, shards, failures)
        return self._before

    def _read_shards(
        self, stats: Mapping[str, FileStat], recipe: Recipe, *, settled: bool
    ) -> dict[str, Shard | DatasetInvalid]:
        """Return the shards of these names, or the error of an invalid one, in the same order; forget all others.

        A shard with a cached FileStat is not opened. A shard with another FileStat than expected is an error: the next poll
        reads it.
        """
        key, began = _key(recipe), time.time()
        known = self._shards if key == self._recipe else {}
        cached = {name: known[name] for name, stat in stats.items() if name in known and known[name].stat == stat}
        missing = [name for name in stats if name not in cached]
        with ThreadPoolExecutor(_THREADS if isinstance(self._place, Path) else _REMOTE_THREADS) as threads:
            results = threads.map(lambda name: _try_read(self._place / name, stats[name], recipe), missing)
            read = dict(zip(missing, results, strict=True))
        shards = cached | {
            name: shard
            for name, shard in read.items()
            if isinstance(shard, Shard) and (settled or is_settled(shard.stat, began))
        }
        if self._note and (key, shards) != (self._recipe, self._shards):
            write_note(self._note, (_FORMAT, key, {name: _packed(shard) for name, shard in shards.items()}))
        self._recipe, self._shards = key, shards
        return {name: cached.get(name) or read[name] for name in stats}


def _packed(shard: Shard) -> tuple[Any, ...]:
    arrays = [values.tobytes() for values in (shard.rows_per_group, shard.bytes_per_group, shard.null_rows)]
    return shard.stat, shard.digest, arrays, shard.token_range


def _unpacked(path: Path | RemotePath, stat: Iterable[Any], digest: str, arrays: Iterable[bytes], token_range: Any) -> Shard:
    rows, nbytes, nulls = (numbers(memoryview(values).cast("q")) for values in arrays)
    return Shard(path, FileStat(*stat), digest, rows, nbytes, nulls, token_range)


def _key(recipe: Recipe) -> str:
    # The columns of the first shard decide whether a shard is refused.
    identity = [recipe.identity, recipe.first and recipe.first.key, str(recipe.split_type)]
    return blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16).hexdigest()


def _try_read(path: Path | RemotePath, stat: FileStat, recipe: Recipe) -> Shard | DatasetInvalid:
    try:
        shard = read_shard(path, stat, recipe)
    except DatasetInvalid as error:
        return error
    # If the folder's symlink changes meanwhile, some shards would be of the new target, and the next poll would miss it.
    return shard if shard.stat == stat else being_written(f"{path}")


def _schema_of(folder: Path | RemoteFolder, shards: Mapping[str, FileStat]) -> pa.Schema:
    """Return the columns of the first readable shard. Raises DatasetInvalid: no shard is readable, with the reasons."""
    failures = []
    for name, stat in shards.items():
        try:
            return read_schema(folder / name, stat)
        except DatasetInvalid as error:  # a broken first shard must not hide the errors of the others
            failures.append(str(error))
    raise DatasetInvalid(_listed(failures) or f"{folder} holds no shard.")


def _listed(errors: Collection[str]) -> str:
    more = [f"... and {len(errors) - _MAX_FAILURES} more"] if len(errors) > _MAX_FAILURES else []
    return "\n".join([*islice(errors, _MAX_FAILURES), *more])


def _check_rows(snapshot: Snapshot) -> None:
    """Check the rows by footers. Raises DatasetInvalid: rows cannot be used, and the recipe does not replace bad rows."""
    if snapshot.num_rows == 0:
        raise DatasetInvalid(f"{snapshot.folder} holds {counted(len(snapshot.shards), 'shard')} without rows.")
    if snapshot.recipe.on_bad_row == "fail":
        _check_ids(snapshot)
        _check_nulls(snapshot)


def _check_ids(snapshot: Snapshot) -> None:
    recipe, bound = snapshot.recipe, snapshot.token_bound
    if recipe.filter or "attention_mask" in dict(recipe.masks):  # these may leave such ids out
        return
    for shard in snapshot.shards:
        low, high = shard.token_range or (0, 0)
        if low < 0 or high >= bound:
            raise DatasetInvalid(
                f"{shard.path}: column {' or '.join(recipe.token_columns)} holds ids from {low:,} to {high:,}; ids must be >= "
                f'0 and < {bound:,}. Correct the shard, or set vocab_size or on_bad_row = "replace" in penstock.toml.'
            )


def _check_nulls(snapshot: Snapshot) -> None:
    columns = snapshot.recipe.token_columns
    for shard in snapshot.shards:
        for number, nulls in enumerate(shard.null_rows):
            if nulls:
                present = " and ".join(f"{name} is not null" for name in columns)
                raise DatasetInvalid(
                    f"{shard.path}, row group {number}: {' or '.join(columns)} is null in {counted(nulls, 'row')}. Remove "
                    f'these rows, or set in penstock.toml filter = "{present}" to leave them out, or '
                    f'on_bad_row = "replace", with a max_bad_share above their share, to serve a neighbour instead.'
                )
