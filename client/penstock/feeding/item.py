"""An item: a batch on its way to the loop, with what its frame told."""

from __future__ import annotations

from typing import NamedTuple

from penstock.batch import count_tokens
from penstock.tensors import Batch
from penstock.wire import Frame


class Item(NamedTuple):
    """A batch, the step and digest of its frame, and its tokens without the padding. It does not hold the frame's memory."""

    batch: Batch
    step: int
    digest: str
    num_tokens: int

    @classmethod
    def of(cls, frame: Frame, batch: Batch) -> Item:
        """Build the item of a frame and the batch made from it."""
        return cls(batch, frame.step, frame.digest, count_tokens(frame))
