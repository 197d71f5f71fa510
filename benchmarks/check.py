"""Checks, before a loader is timed, that it gives the corpus, and that it shuffles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from corpus import BATCH_SIZE, SEQ_LEN, Corpus, numbers_of

if TYPE_CHECKING:
    import torch

_NEAR = 2  # samples this near to their predecessor are in order: also reversed, every second one, or swapped neighbours
_MAX_IN_ORDER = 0.05


class CheckFailed(Exception):
    """A loader does not give shuffled samples of the corpus."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """The order of the first `num_samples` of an epoch.

    in_order  share of samples that are near their predecessor in the corpus
    spread    mean distance in the corpus between neighbours in the epoch, divided by that of a uniform shuffle
    """

    num_samples: int
    in_order: float
    spread: float


def check(batches: Iterable[torch.Tensor], corpus: Corpus, num_samples: int) -> Order:
    """Check the first `num_samples` of an epoch: int64 on the CPU, equal to the corpus, none twice, not in order.

    A batch is checked after the next one has arrived, so it must stay intact until then. Raises CheckFailed: a check failed.
    """
    seen: list[npt.NDArray[np.int64]] = []
    for batch, _ in pairwise(chain(batches, [None])):
        assert batch is not None
        seen.append(check_batch(batch, corpus))
        if len(seen) * BATCH_SIZE >= num_samples:
            break
    numbers = np.concatenate(seen) if seen else np.empty(0, np.int64)
    if len(numbers) < num_samples:
        raise CheckFailed(f"the epoch ended after {len(numbers):,} of {num_samples:,} samples")
    if twice := len(numbers) - len(np.unique(numbers)):
        raise CheckFailed(f"{twice:,} of {len(numbers):,} samples came twice within one epoch")
    return _order(numbers, corpus)


def check_batch(batch: torch.Tensor, corpus: Corpus) -> npt.NDArray[np.int64]:
    """Return the numbers of a batch's samples. Raises CheckFailed: the batch is not from the corpus."""
    found = f"{str(batch.dtype).removeprefix('torch.')} {list(batch.shape)} on {batch.device}"
    wanted = f"int64 {[BATCH_SIZE, SEQ_LEN]} on cpu"
    if found != wanted:
        raise CheckFailed(f"a batch is {found}, not {wanted}")
    array = batch.numpy()
    numbers = numbers_of(array)
    if (numbers >= corpus.num_samples).any() or not np.array_equal(corpus.tokens[numbers], array):
        raise CheckFailed("a batch has tokens that are not those of the corpus")
    return numbers


def _order(numbers: npt.NDArray[np.int64], corpus: Corpus) -> Order:
    steps = np.diff(numbers)
    in_order = float((np.abs(steps) <= _NEAR).mean())
    if in_order > _MAX_IN_ORDER:
        raise CheckFailed(f"{in_order:.0%} of the samples come in the order of the corpus: they are not shuffled")
    return Order(num_samples=len(numbers), in_order=in_order, spread=float(np.abs(steps).mean() / (corpus.num_samples / 3)))
