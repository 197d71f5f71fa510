"""The packing `rows`: one row, one sequence, cut to its longest length and padded. Pure arithmetic on token lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock_server.order import IntArray


class Piece(NamedTuple):
    """A run of tokens of one row: source[start : start + length]."""

    source: npt.NDArray[np.unsignedinteger[Any]]
    start: int
    length: int


def sequences_per_block(rows_per_block: IntArray) -> IntArray:
    """How many sequences each block makes, shape [num_blocks]: as many as it has rows."""
    return rows_per_block


def truncate(pieces: Sequence[Piece], seq_len: int) -> list[Piece]:
    """The first `seq_len` tokens of the pieces, one behind the other; a piece past them has length 0."""
    kept, room = [], seq_len
    for source, start, length in pieces:
        kept.append(Piece(source, start, min(length, room)))
        room -= kept[-1].length
    return kept


def fill(out: npt.NDArray[np.unsignedinteger[Any]], sequences: Sequence[Sequence[Piece]], pad_id: int) -> None:
    """Writes sequence i, its pieces one behind the other, into out[i], shape [batch_size, width], and pads the rest."""
    for line, pieces in zip(out, sequences, strict=True):
        end = 0
        for source, start, length in pieces:
            line[end : end + length] = source[start : start + length]
            end += length
        line[end:] = pad_id
