"""An item: a batch on its way to the loop, with what the frame told that it was made of."""

from __future__ import annotations

from typing import NamedTuple

from penstock.batch import count_tokens
from penstock.tensors import Batch
from penstock.wire import Frame, Told


class Item(NamedTuple):
    """A batch. The memory that its frame was received into is not held by it.

    told, number  of its frame
    num_tokens    tokens in it, without the padding
    """

    batch: Batch
    told: Told
    number: int
    num_tokens: int

    @classmethod
    def of(cls, frame: Frame, batch: Batch) -> Item:
        """The item of what was made of a frame."""
        alike, number = frame
        return cls(batch, alike.told, number, count_tokens(frame))

    @property
    def step(self) -> int:
        """The step of the batch."""
        return self.told.steps[self.number]

    @property
    def digest(self) -> str:
        """The digest of its frame."""
        return self.told.digests[self.number]
