"""Reader of a folder: its current recipe and shards, and whether they can be served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from penstock.batch import IGNORED
from penstock.text import counted
from penstock_server.catalog.footers import Footers
from penstock_server.catalog.scan import FileStat
from penstock_server.catalog.shard import Shard
from penstock_server.catalog.snapshot import Snapshot
from penstock_server.problems import DatasetInvalid
from penstock_server.recipes.config import read_recipe
from penstock_server.recipes.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Reading:
    """Contents of a folder: the recipe, the readable shards by name, and the errors of the others by name."""

    name: str
    folder: Path
    recipe: Recipe
    shards: Mapping[str, Shard]
    failures: Mapping[str, str]

    def snapshot(self) -> Snapshot:
        """Return the snapshot of all shards.

        Raises DatasetInvalid: a shard is truncated or no Parquet, shards disagree, there is no row, or rows are already
        known to be unusable. The message lists every invalid shard, up to ten.
        """
        if self.failures:
            more = [f"... and {len(self.failures) - 10} more"] if len(self.failures) > 10 else []
            raise DatasetInvalid("\n".join([*islice(self.failures.values(), 10), *more]))
        snapshot = Snapshot(self.folder, list(self.shards.values()), self.recipe, name=self.name)
        _check_rows(snapshot)
        return snapshot


def read_folder(
    folder: Path,
    dates: Mapping[str, FileStat],
    default_tokenizer: Path | None,
    footers: Footers,
    *,
    name: str,
    settled: bool = False,
) -> Reading:
    """Read a folder's recipe, and the footers of shards that are not cached.

    `name` is as in Snapshot, `settled` as in Footers.read.

    Raises DatasetInvalid: the recipe is wrong, or no shard can be read to find the columns.
    """
    recipe = read_recipe(folder, footers.schema(dates), default_tokenizer)
    read = footers.read(dates, recipe, settled=settled)
    shards = {name: found for name, found in read.items() if isinstance(found, Shard)}
    failures = {name: str(found) for name, found in read.items() if isinstance(found, DatasetInvalid)}
    return Reading(name, folder, recipe, shards, failures)


def _check_rows(snapshot: Snapshot) -> None:
    """Check the rows by footers. Raises DatasetInvalid: rows cannot be used, and the recipe does not replace bad rows."""
    if snapshot.num_rows == 0:
        raise DatasetInvalid(f"{snapshot.folder} holds {counted(len(snapshot.shards), 'shard')} and not one row.")
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
            bounds = f"be from 0 to {bound - 1:,}" if high >= bound else "not be below 0"
            advice = "set the right vocab_size" if high >= bound else 'set on_bad_row = "replace"'
            padding = f" Where {IGNORED} is padding, cut it off with a transform." if low == IGNORED else ""
            columns = " or ".join(map(repr, recipe.token_columns))
            raise DatasetInvalid(
                f"{shard.path}: column {columns} holds token ids from {low:,} to {high:,}, but ids must "
                f"{bounds}. Mend the shard, or {advice} in penstock.toml.{padding}"
            )


def _check_nulls(snapshot: Snapshot) -> None:
    recipe, shards = snapshot.recipe, snapshot.shards
    groups = ((shard, number, nulls) for shard in shards for number, nulls in enumerate(shard.null_rows) if nulls)
    if first := next(groups, None):
        shard, number, nulls = first
        are = f"{counted(nulls, 'row')} {'is' if nulls == 1 else 'are'}"
        too_many = sum(sum(each.null_rows) for each in shards) > recipe.max_bad_share * snapshot.num_rows
        limit = f" and a max_bad_share above {recipe.max_bad_share:g}" if too_many else ""
        raise DatasetInvalid(
            f"{shard.path}, row group {number}: {are} null in {' or '.join(recipe.token_columns)}. Remove "
            f"them, or say in penstock.toml {recipe.filter_of_missing} "
            f'to leave them out, or on_bad_row = "replace"{limit} to serve a neighbour in their place.'
        )
