"""An item: a batch on its way to the loop, with what is to be known of the frame that it was made of."""

from __future__ import annotations

from dataclasses import dataclass

from penstock import wire
from penstock.tensors import Batch, count_tokens, nbytes

OBJECT_BYTES = 2048  # of Python's and torch's objects for one batch, about


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A batch, or what one will be made of.

    num_tokens  tokens in it, without the padding
    nbytes      about the host memory that it takes while it waits, and as much as travelled for it at least
    """

    batch: Batch
    address: wire.Address
    digest: str
    num_tokens: int
    nbytes: int

    @classmethod
    def of(cls, frame: wire.Frame, batch: Batch) -> Item:
        """The item of what was made of a frame."""
        num_tokens = count_tokens(frame)
        size = max(nbytes(batch), frame.nbytes) + OBJECT_BYTES  # so that little of a batch is not a whole epoch ahead
        return cls(batch=batch, address=frame.address, digest=frame.digest, num_tokens=num_tokens, nbytes=size)
