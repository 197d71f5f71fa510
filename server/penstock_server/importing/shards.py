"""Writer of shards: row groups and files of bounded size, in a hidden folder until the last row is written."""

from __future__ import annotations

import os
import shutil
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from secrets import token_hex

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.syncing import sync_folder
from penstock_server.catalog.scan import list_folder
from penstock_server.importing.schema import ImportRefused
from penstock_server.settings import check_is_here


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Size limits of shards and row groups; only a single row may exceed them.

    shard_bytes  data of a shard, neither encoded nor compressed
    group_bytes  data of a row group, at most that of a shard; encoded, the default stays below the 8 MiB that
                 the server turns into one block
    group_rows   rows of a row group
    """

    shard_bytes: int = 256 * 10**6
    group_bytes: int = 15 << 19
    group_rows: int = 65_536

    def holds(self, table: pa.Table) -> bool:
        """Return whether a table fits into a row group."""
        return bool(table.num_rows <= self.group_rows and table.nbytes <= min(self.group_bytes, self.shard_bytes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """Totals of the written shards.

    data_bytes  of the rows, neither encoded nor compressed
    file_bytes  of the shards
    lists       for each column of lists: (number of values in all lists, number in the longest list)
    streams     files of token ids without document borders
    """

    schema: pa.Schema
    num_rows: int
    num_groups: int
    num_shards: int
    data_bytes: int
    file_bytes: int
    lists: Mapping[str, tuple[int, int]]
    streams: Sequence[Path] = ()


def row_groups(tables: Iterable[pa.Table], shape: Shape) -> Iterator[pa.Table]:
    """Yield the rows of tables of one schema, in their order, a non-empty row group at a time."""
    held: list[pa.Table] = []
    num_rows = nbytes = 0
    for table in tables:
        held.append(table)
        num_rows, nbytes = num_rows + table.num_rows, nbytes + table.nbytes
        if num_rows > shape.group_rows or nbytes > min(shape.group_bytes, shape.shard_bytes):
            rest = pa.concat_tables(held).combine_chunks()
            while rest.num_rows > 1 and not shape.holds(rest):
                count = _rows_within(rest, shape)
                yield rest.slice(0, count)
                rest = rest.slice(count)
            held, num_rows, nbytes = [rest], rest.num_rows, rest.nbytes
    if num_rows:
        yield pa.concat_tables(held)


def _rows_within(table: pa.Table, shape: Shape) -> int:
    too_many = bisect_left(range(1, table.num_rows + 1), True, key=lambda count: not shape.holds(table.slice(0, count)))
    return max(1, too_many)


def write_shards(groups: Iterable[pa.Table], folder: Path, schema: pa.Schema, shape: Shape) -> Written:
    """Write row groups as part-00000.parquet and so on.

    Raises OSError: the disk is full, or the folder cannot be written to. Raises ImportRefused: Parquet has no such type.
    """
    num_rows = num_groups = data_bytes = 0
    lists = {field.name: (0, 0) for field in schema if pa.types.is_list(field.type)}
    paths = list[Path]()
    try:
        for number, shard in groupby(_numbered(groups, shape.shard_bytes), itemgetter(0)):
            paths.append(folder.absolute() / f"part-{number:05}.parquet")
            with pq.ParquetWriter(paths[-1], schema, compression="zstd") as writer:
                for _, group in shard:
                    writer.write_table(group, row_group_size=group.num_rows)
                    num_rows, num_groups = num_rows + group.num_rows, num_groups + 1
                    data_bytes += group.nbytes
                    for name, (total, longest) in lists.items():
                        lengths = pc.list_value_length(group[name])
                        lists[name] = total + (pc.sum(lengths).as_py() or 0), max(longest, pc.max(lengths).as_py() or 0)
    except pa.ArrowException as error:
        if isinstance(error, MemoryError):
            raise
        raise ImportRefused(
            f"Parquet cannot hold a column: {error}. Nothing was written. Choose others with --columns."
        ) from error
    return Written(
        schema=schema,
        num_rows=num_rows,
        num_groups=num_groups,
        num_shards=len(paths),
        data_bytes=data_bytes,
        file_bytes=sum(path.stat().st_size for path in paths),
        lists=lists,
    )


def _numbered(groups: Iterable[pa.Table], shard_bytes: int) -> Iterator[tuple[int, pa.Table]]:
    """Yield row groups with the numbers of their shards."""
    number = held = 0
    for group in groups:
        if held and held + group.nbytes > shard_bytes:
            number, held = number + 1, 0
        held += group.nbytes
        yield number, group


def old_shards(out_dir: Path, *, overwrite: bool) -> list[Path]:
    """Return the shards in a folder that new ones will replace; the folder need not exist.

    Raises ImportRefused: shards exist and may not be replaced, or the path is a file. Raises CommandError: it is a URL.
    """
    check_is_here(out_dir)
    if out_dir.is_file():
        raise ImportRefused(f"{out_dir} is a file, not a folder. The last name given is the folder to write to.")
    old = [out_dir / name for name in list_folder(out_dir).shards] if out_dir.exists() else []
    if old and not overwrite:
        raise ImportRefused(
            f"{out_dir} holds Parquet files already, such as {old[0].name}. Name another folder, or replace them: --overwrite."
        )
    return old


@contextmanager
def staged(out_dir: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a hidden folder; when the block ends, its files are synced and replace the shards in `out_dir`.

    An exception in the block leaves `out_dir` unchanged. Raises ImportRefused: as `old_shards`, or the disk fails or is full.
    """
    try:
        home = out_dir if out_dir.exists() else out_dir.parent
        home.mkdir(parents=True, exist_ok=True)
        staging = home / f".import-{token_hex(4)}"  # the server ignores hidden folders
        staging.mkdir()
        try:
            yield staging
            for path in staging.iterdir():
                with path.open("r+b") as file:
                    os.fsync(file.fileno())  # a full disk may report its error only here
            sync_folder(staging)
            if home is out_dir:
                _exchange(old_shards(out_dir, overwrite=overwrite), staging, out_dir)
            else:
                staging.rename(out_dir)
            sync_folder(home)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ImportRefused(
            f"{out_dir} cannot be written: {reason}. Free some disk space, check the folder, or name another."
        ) from error


def _exchange(old: list[Path], staging: Path, out_dir: Path) -> None:
    """Move old shards away and new ones in, or leave all as it was.

    Raises ImportRefused: that stopped halfway and could not be undone; the message names the folder with the old shards.
    """
    new = sorted(staging.iterdir())
    for path in new:
        path.touch()  # a server that watches the folder waits until its files are older
    aside = staging.with_name(f"{staging.name}-old")
    aside.mkdir()
    moves = [(path, aside / path.name) for path in old] + [(path, out_dir / path.name) for path in new]
    begun: list[tuple[Path, Path]] = []
    try:
        for source, target in moves:
            begun.append((source, target))
            source.rename(target)
    except BaseException as error:
        try:
            for source, target in reversed(begun):
                if not source.exists():
                    target.rename(source)
            aside.rmdir()
        except OSError:
            raise ImportRefused(
                f"{out_dir}: replacing its shards stopped halfway ({error!r}). The old ones are in {aside}, and new ones "
                f"may be in their place. Repair the disk and import again with --overwrite; then delete {aside}."
            ) from error
        raise
    shutil.rmtree(aside, ignore_errors=True)
