"""Sequences: the lines of a batch before they are written, still in their blocks; and where each comes from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from penstock_server.batches.member import Member
from penstock_server.batches.tensor import Tensor
from penstock_server.geometry.packing import Piece
from penstock_server.storage.block import Block


@dataclass(frozen=True, slots=True)
class Source:
    """The row of a sequence. `row` counts from the start of its row group; [start, stop) are the row's tokens in it."""

    shard: str
    row_group: int
    row: int
    start: int
    stop: int


class Part(NamedTuple):
    """Tokens [start, stop) of the stream of block `block_index` of a member; see Block.stream."""

    member: Member
    block: Block
    block_index: int
    start: int
    stop: int

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """The rows that the part runs over, each with its tokens [first, last) in it; a bad row has none."""
        stream = self.block.stream
        for row in range(int(np.searchsorted(stream, self.start, side="right")) - 1, self.block.num_rows):
            begin, end = stream[row : row + 2].tolist()
            if begin >= self.stop:
                return
            first, last = max(self.start, begin) - begin, min(self.stop, end) - begin
            if last > first:
                yield row, first, last

    def sources(self) -> Iterator[Source]:
        """Its rows, as they lie in the shard."""
        at = self.member.snapshot.block(self.block_index)
        for row, first, last in self.rows():
            number = at.first_row + int(self.block.rows[row])
            yield Source(at.shard.path.name, at.row_group, number, first, last)


@dataclass(slots=True)
class TokenSequence:
    """One line of a batch before it is written: its tokens, still in their blocks, and the parts they come from.

    pieces       of each feature
    row          block and row whose columns travel; None where a sequence is made of several rows
    substituted  whether it stands in for a row that cannot be used
    """

    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    row: tuple[Block, int] | None = None
    substituted: bool = False

    def line(self, tensor: Tensor) -> list[Piece]:
        """The pieces that a line of this tensor is made of, or counts."""
        pieces = self.pieces.get(tensor.feature, [])
        if tensor.turn:
            pieces = [piece for piece in pieces if piece.learned == (tensor.turn == "response")]
            # Spans are cut already, but a turn of them has a length of its own.
            return _cut(pieces, tensor.longest) if tensor.longest else pieces
        return pieces

    def document_starts(self, width: int) -> list[int]:
        """Where in its tokens a document begins, or the rest of one, and where the padding does."""
        starts, end = [], 0
        for part in self.parts:
            for _, first, last in part.rows():
                starts.append(end)
                end += last - first
        return [*starts, end] if end < width else starts


def _cut(pieces: Sequence[Piece], longest: int) -> list[Piece]:
    """The first `longest` tokens of the pieces, one behind the other."""
    kept, room = [], longest
    for piece in pieces:
        if room <= 0:
            break
        kept.append(piece if piece.length <= room else piece._replace(length=room))
        room -= piece.length
    return kept
