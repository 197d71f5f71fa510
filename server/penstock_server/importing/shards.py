"""Writer of shards: row groups and files of bounded size, in a hidden place until the last row is written."""

from __future__ import annotations

import os
import shutil
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.syncing import sync_folder
from penstock_server.catalog.scan import list_folder
from penstock_server.importing.schema import ImportRefused
from penstock_server.monitoring.metrics import Metrics
from penstock_server.problems import DatasetInvalid
from penstock_server.settings import check_is_here
from penstock_server.sources.objects import ObjectStore
from penstock_server.sources.registry import open_source
from penstock_server.sources.remote import RemoteFolder, Retryable

_REQUESTS = 16  # at a time


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


def write_shards(
    groups: Iterable[pa.Table],
    folder: Path,
    schema: pa.Schema,
    shape: Shape,
    finish: Callable[[Path], object] = lambda _: None,
) -> Written:
    """Write row groups as part-00000.parquet and so on. Call `finish` with each file when it is complete.

    Raises OSError: the disk is full, or the folder cannot be written to. Raises ImportRefused: Parquet has no such type.
    """
    num_rows = num_groups = num_shards = data_bytes = file_bytes = 0
    lists = {field.name: (0, 0) for field in schema if pa.types.is_list(field.type)}
    try:
        for number, shard in groupby(_numbered(groups, shape.shard_bytes), itemgetter(0)):
            path = folder.absolute() / f"part-{number:05}.parquet"
            with pq.ParquetWriter(path, schema, compression="zstd", write_page_checksum=True) as writer:
                for _, group in shard:
                    writer.write_table(group, row_group_size=group.num_rows)
                    num_rows, num_groups = num_rows + group.num_rows, num_groups + 1
                    data_bytes += group.nbytes
                    for name, (total, longest) in lists.items():
                        lengths = pc.list_value_length(group[name])
                        lists[name] = total + (pc.sum(lengths).as_py() or 0), max(longest, pc.max(lengths).as_py() or 0)
            num_shards, file_bytes = num_shards + 1, file_bytes + path.stat().st_size
            finish(path)
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
        num_shards=num_shards,
        data_bytes=data_bytes,
        file_bytes=file_bytes,
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


def check_output(out_dir: Path | str, *, overwrite: bool) -> None:
    """Raise ImportRefused if shards cannot be written to a folder or a URL: it holds some, is a file, or is not valid."""
    if isinstance(out_dir, Path):
        old_shards(out_dir, overwrite=overwrite)
        return
    if overwrite:
        raise ImportRefused(f"{out_dir}: --overwrite replaces shards in folders only. Name another URL, or delete the objects.")
    with _uploading(out_dir) as store:
        _check_is_empty(store)


@contextmanager
def output(out_dir: Path | str, *, overwrite: bool) -> Iterator[tuple[Path, Callable[[Path], object]]]:
    """Yield a folder for shards, and a function to call with each complete one; see `staged` and `_staged_objects`."""
    if isinstance(out_dir, Path):
        with staged(out_dir, overwrite=overwrite) as folder:
            yield folder, lambda _: None
    else:
        with _uploading(out_dir) as store, _staged_objects(store) as staging:
            yield staging


# Object stores -----------------------------------------------------------------------------------------------------------


@contextmanager
def _uploading(url: str) -> Iterator[ObjectStore]:
    try:
        store = open_source(url, Metrics())
        if not isinstance(store, ObjectStore):
            raise ImportRefused(f"{url}: shards can be written to folders and to URLs such as s3://BUCKET/PREFIX. Name one.")
        with closing(store):
            yield store
    except DatasetInvalid as error:
        raise ImportRefused(str(error)) from error
    except OSError as error:
        reason = error.strerror or error
        raise ImportRefused(f"{url} cannot be written: {reason}. Check the URL, the network and the credentials.") from error


def _check_is_empty(store: ObjectStore) -> None:
    if old := next(iter(RemoteFolder(store).shards()), None):
        raise ImportRefused(f"{store.url} holds Parquet files already, such as {old}. Name another URL, or delete the objects.")


@contextmanager
def _staged_objects(store: ObjectStore) -> Iterator[tuple[Path, Callable[[Path], None]]]:
    """Yield a temporary folder, and a function that moves a shard to the store, under a key that servers ignore.

    When the block ends, the store copies these objects to their places. An exception in the block leaves no object.
    """
    prefix, names = f".import-{token_hex(4)}", list[str]()

    def upload(path: Path) -> None:
        names.append(path.name)
        store.attempt(lambda: store.upload(f"{prefix}/{path.name}", path))
        path.unlink()

    def copy(name: str) -> None:
        store.attempt(lambda: store.copy(f"{prefix}/{name}", name))

    def delete(key: str) -> None:
        with suppress(OSError, Retryable):
            store.delete(key)

    try:
        with TemporaryDirectory(prefix="penstock-") as folder:
            yield Path(folder), upload
        _check_is_empty(store)
        try:
            _at_once(copy, names)
        except BaseException:
            _at_once(delete, names)
            raise
    finally:
        _at_once(delete, [f"{prefix}/{name}" for name in names])


def _at_once(request: Callable[[str], None], keys: Iterable[str]) -> None:
    """Make a request for each key, several at a time; when this returns or raises, none is under way."""
    with ThreadPoolExecutor(_REQUESTS) as threads:
        deque(threads.map(request, keys), maxlen=0)


# Folders -----------------------------------------------------------------------------------------------------------------


def old_shards(out_dir: Path, *, overwrite: bool) -> list[Path]:
    """Return the shards in a folder that new ones will replace; the folder need not exist.

    Raises ImportRefused: shards exist and may not be replaced, or the path is a file.
    Raises CommandError: the path is a URL with one slash.
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
