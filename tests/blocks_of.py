"""Blocks as tests look at them."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future

import pyarrow as pa
import pytest

from penstock_server.blocks.block import Block
from penstock_server.blocks.loader import Blocks
from penstock_server.recipes import encode


def rows_of(block: Block, feature: str = "tokens") -> list[list[int]]:
    tokens = block.features[feature].tokens
    spans = zip(tokens.starts.tolist(), tokens.lengths.tolist(), strict=True)
    return [tokens.values[start : start + length].tolist() for start, length in spans]


def loading(blocks: Blocks, indices: Sequence[int]) -> list[Future[Block]]:
    """What is asked for, none of which is mapped."""
    asked = blocks.request(indices)
    futures = [future for future in asked if isinstance(future, Future)]
    assert futures == asked
    return futures


def encoding_waits(monkeypatch: pytest.MonkeyPatch, began: threading.Event, go_on: threading.Event) -> None:
    """From now on whoever encodes rows says so, and waits until it may go on."""
    read = encode.encode

    def waiting(*args: object) -> pa.RecordBatch:
        began.set()
        assert go_on.wait(30)
        return read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(encode, "encode", waiting)
