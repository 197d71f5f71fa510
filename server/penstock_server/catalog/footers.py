"""Cache of the footers of one folder's shards: read in parallel, once; a cached shard is not opened again.

The key of a shard is its FileStat: size, mtime, inode and ctime. As in git's index, a file with a very young FileStat is not
cached, since a later write might not change it (git's documentation calls it racy).
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import Field, dataclass, field, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock_server.catalog.notes import read_note, write_note
from penstock_server.catalog.scan import FileStat, is_settled
from penstock_server.catalog.shard import Shard, being_written, numbers, read_schema, read_shard
from penstock_server.problems import DatasetInvalid
from penstock_server.recipes.recipe import Recipe

_FORMAT = 2  # of the note: raise it when a field of Shard changes its meaning
_THREADS = 16  # waiting for disks, not for cores
# All fields are stored, in their order; a note with other fields or other types is dropped.
_FIELDS = tuple(f for f in fields(Shard) if f.name != "path")
_VERSION = (_FORMAT, FileStat._fields, tuple((f.name, str(f.type)) for f in _FIELDS))


class Footers:
    """Cached footers of one folder's shards; with a `note`, they outlive a restart.

    The cache is for one recipe at a time: a shard's facts are about the recipe's columns. Not thread-safe.
    """

    def __init__(self, folder: Path, note: Path | None = None) -> None:
        self._folder, self._note = folder, note
        self._known = self._kept = _load(folder, note) if note else _Known()

    def schema(self, dates: Mapping[str, FileStat]) -> pa.Schema:
        """Return the columns of the first readable shard. Raises DatasetInvalid: no shard is readable, with the reasons."""
        failures, began = [], time.time()
        for name, date in dates.items():
            known = self._known.schema
            if known and known[:2] == (name, date):
                return known[2]
            try:
                schema = read_schema(self._folder / name)
            except DatasetInvalid as refusal:  # a broken first shard must not hide the errors of the others
                failures.append(str(refusal))
                continue
            if is_settled(date, began):
                self._known = replace(self._known, schema=(name, date, schema))
            return schema
        raise DatasetInvalid("\n".join(failures[:10]) or f"{self._folder} holds no shard.")

    def read(
        self, dates: Mapping[str, FileStat], recipe: Recipe, *, settled: bool = False
    ) -> dict[str, Shard | DatasetInvalid]:
        """Return the shards of these names, or the error of a refused one, in the same order; forget all others.

        A shard with a cached FileStat is not opened. A shard whose FileStat differs from the given one is refused: the next
        poll reads it. `settled` says that the FileStats have not changed for a while.
        """
        key, began = _key(recipe), time.time()
        known = self._known.shards if key == self._known.recipe else {}
        remembered = {name: known[name] for name, date in dates.items() if name in known and known[name].date == date}
        missing = [name for name in dates if name not in remembered]
        with ThreadPoolExecutor(_THREADS) as threads:
            tried = threads.map(lambda name: _try_read(self._folder / name, dates[name], recipe), missing)
            read = dict(zip(missing, tried, strict=True))
        found = {name: remembered.get(name) or read[name] for name in dates}
        remembered |= {
            name: shard
            for name, shard in read.items()
            if isinstance(shard, Shard) and (settled or is_settled(shard.date, began))
        }
        self._known = replace(self._known, recipe=key, shards=remembered)
        if self._note and self._known != self._kept:
            _store(self._note, self._known)
            self._kept = self._known
        return found


@dataclass(frozen=True, slots=True)
class _Known:
    """Cached facts: `shards` under the recipe of this key, `schema` of the shard of this name and FileStat."""

    recipe: str = ""
    shards: Mapping[str, Shard] = field(default_factory=dict)
    schema: tuple[str, FileStat, pa.Schema] | None = None


def _load(folder: Path, note: Path) -> _Known:
    kept = read_note(note)
    if kept is None or kept["version"] != _VERSION:
        return _Known()
    shards = {name: Shard(folder / name, *map(_unpacked, _FIELDS, values)) for name, values in kept["shards"].items()}
    schema = None
    if kept["schema"]:
        name, date, serialized = kept["schema"]
        schema = (name, FileStat(*date), pa.ipc.read_schema(pa.py_buffer(serialized)))
    return _Known(kept["recipe"], shards, schema)


def _store(note: Path, known: _Known) -> None:
    schema = known.schema
    content = {
        "version": _VERSION,
        "recipe": known.recipe,
        "shards": {
            name: [_packed(getattr(shard, f.name)) for f in _FIELDS]
            for name, shard in known.shards.items()
            if _can_be_noted(shard.date)
        },
        "schema": (*schema[:2], schema[2].serialize().to_pybytes()) if schema and _can_be_noted(schema[1]) else None,
    }
    write_note(note, content)


def _can_be_noted(date: FileStat) -> bool:
    """Return whether msgpack can hold a FileStat: some file systems have times outside the years 1678 to 2554."""
    return all(-(2**63) <= number < 2**64 for number in date)


def _packed(value: Any) -> Any:
    return value.tobytes() if isinstance(value, array) else value


def _unpacked(field: Field[Any], value: Any) -> Any:
    if field.type == "FileStat":
        return FileStat(*value)
    return numbers(memoryview(value).cast("q")) if isinstance(value, bytes) else value


def _key(recipe: Recipe) -> str:
    identity = recipe.identity
    if recipe.first:  # the columns of the first shard decide whether a shard is refused
        identity["first"] = recipe.first.key
    if recipe.split_type:  # likewise
        identity["split_type"] = str(recipe.split_type)
    return blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16).hexdigest()


def _try_read(path: Path, date: FileStat, recipe: Recipe) -> Shard | DatasetInvalid:
    try:
        shard = read_shard(path, recipe)
    except DatasetInvalid as refusal:
        return refusal
    # If the folder's symlink changes meanwhile, some shards would be of the new target, and the next poll would miss it.
    return shard if shard.date == date else being_written(path)
