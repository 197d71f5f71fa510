"""An item: a batch on its way to the loop, with the step, digest and size of the frame that it was made of."""

from __future__ import annotations

from typing import NamedTuple

from penstock.batch import count_tokens
from penstock.prefetch import OBJECT_BYTES
from penstock.tensors import Batch, nbytes
from penstock.wire import Frame


class Item(NamedTuple):
    """A batch, or what one will be made of.

    num_tokens    tokens in it, without the padding
    frame_nbytes  what travelled for it
    """

    batch: Batch
    step: int
    digest: str
    num_tokens: int
    frame_nbytes: int

    @classmethod
    def of(cls, frame: Frame, batch: Batch) -> Item:
        """The item of what was made of a frame."""
        return cls(batch, frame.step, frame.digest, count_tokens(frame), frame.nbytes)

    @property
    def nbytes(self) -> int:
        """About the host memory that it takes while it waits, and as much as travelled for it at least."""
        # Else, where few columns are kept of each batch, a whole epoch would be fetched ahead.
        return max(nbytes(self.batch), self.frame_nbytes) + OBJECT_BYTES
