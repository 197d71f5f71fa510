"""A block that was asked for: it is there, or will be."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from penstock_server.storage.block import Block


@dataclass(frozen=True, slots=True)
class There:
    """A block that is there. A future would take 1.4 KB, and a crowd that begins asks for tens of thousands."""

    block: Block

    def result(self) -> Block:
        """The block, as of a future."""
        return self.block


Soon = There | Future[Block]
