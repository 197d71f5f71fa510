"""Lists of token ids, one per row, and their turns: alternating runs of ids without and with loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock_server.order.arrays import IntArray, begins_run, concatenated_ranges, find, starts_of


@dataclass(frozen=True, slots=True)
class Lists:
    """One list per row, end to end: all values, and the length of each list; likewise the lengths of its turns, if it has any.

    Turns are runs of tokens, the first without loss, the second with loss, and so on: prompt, response, prompt, ...
    `documents` are the lengths of the documents in each row, in the form of `turns`; None where each row is one document.
    """

    values: npt.NDArray[np.integer[Any]]
    lengths: npt.NDArray[np.int64]
    turns: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None
    documents: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None


def every(ids: list[int], num_rows: int) -> Lists:
    """Return the same ids for every row."""
    return Lists(np.tile(np.array(ids, np.int64), num_rows), np.full(num_rows, len(ids)))


def joined(features: Sequence[Lists]) -> Lists:
    """Concatenate the ids of each row's features."""
    some = [feature for feature in features if len(feature.values)]
    if len(some) == 1:
        return some[0]
    sizes = np.stack([feature.lengths for feature in features], axis=1)
    starts = starts_of(sizes.reshape(-1))[:-1].reshape(sizes.shape)
    values = np.empty(sizes.sum(), np.int64)
    for number, feature in enumerate(features):
        values[concatenated_ranges(starts[:, number], feature.lengths)] = feature.values
    return Lists(values, sizes.sum(axis=1))


def with_turns(turns: Sequence[Lists]) -> Lists:
    """Concatenate the ids of each row's turns, and keep the lengths of the turns."""
    lists = joined(turns)
    lengths = np.stack([turn.lengths for turn in turns], axis=1)
    return Lists(lists.values, lists.lengths, (lengths.reshape(-1), np.full(len(lengths), len(turns))))


def turns_where(lists: Lists, in_loss: npt.NDArray[np.bool_]) -> Lists:
    """Return the lists with turns that follow from a mask of their ids."""
    borders = starts_of(lists.lengths)
    begins = np.zeros(len(in_loss) + 1, np.bool_)
    begins[1:-1] = in_loss[1:] != in_loss[:-1]
    begins[borders] = True
    starts = np.flatnonzero(begins[:-1])
    first = np.searchsorted(starts, borders)  # the first piece of each list, then the number of pieces
    opens = np.zeros(len(lists.lengths), np.bool_)
    some = lists.lengths > 0
    opens[some] = in_loss[borders[:-1][some]]
    # The first turn never has loss: insert an empty turn before one that has.
    turns: IntArray = np.insert(np.diff(starts, append=len(in_loss)), first[:-1][opens], 0)
    return replace(lists, turns=(turns, np.diff(first) + opens))


def first_marked(marks: npt.NDArray[np.bool_], lengths: IntArray) -> Iterator[tuple[int, int]]:
    """Yield for each list with a marked id: (its number, index of its first marked id among all ids)."""
    at = np.flatnonzero(marks)
    rows = find(starts_of(lengths), at)
    first = begins_run(rows)
    yield from zip(rows[first].tolist(), at[first].tolist(), strict=True)
