"""A feed: the batches of some steps, fetched ahead of the loop. Each knows the frame that it was made of."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

from penstock import wire
from penstock.prefetch import Prefetch
from penstock.source import Source
from penstock.spec import Spec
from penstock.stats import Stats
from penstock.tensors import Batch, count_tokens, expand, nbytes


class Recorder(Protocol):
    """What is told of every batch that the loop is given."""

    def record(self, address: wire.Address, digest: str) -> None:
        """The batch of this address, of which these bytes came, is handed over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A batch and the frame that it was made of; `num_tokens` are those in it, without the padding."""

    batch: Batch
    address: wire.Address
    digest: str
    num_tokens: int


class Feed:
    """Iterates over the batches of `steps`, once. Raises what Source.frames raises.

    Its connections and its thread begin here, and end with `close`.
    """

    def __init__(self, source: Source, spec: Spec, epoch: int, steps: range, *, prefetch_bytes: int, pin_memory: bool) -> None:
        self._source, self._spec, self._epoch = source, spec, epoch
        self._pin_memory = pin_memory
        self._num_batches = self._num_tokens = 0
        self._busy_seconds = 0.0
        self._transport = source.connect()
        self._items = Prefetch(
            self._fetch,
            steps,
            nbytes=lambda item: nbytes(item.batch),
            budget_bytes=prefetch_bytes,
            interrupt=self._transport.interrupt,
        )

    def __iter__(self) -> Iterator[Item]:
        for item in self._items:
            self._num_batches += 1
            self._num_tokens += item.num_tokens
            began = time.perf_counter()
            yield item
            self._busy_seconds += time.perf_counter() - began

    def stats(self) -> Stats:
        """What this feed has done so far."""
        return Stats(
            num_batches=self._num_batches,
            num_tokens=self._num_tokens,
            num_retries=self._transport.num_retries,
            wait_seconds=self._items.wait_seconds,
            busy_seconds=self._busy_seconds,
            buffered_bytes=self._items.buffered_bytes,
        )

    def close(self) -> None:
        """Stops the fetching and drops what is buffered. Idempotent."""
        with closing(self._transport), closing(self._items):
            pass

    def _fetch(self, steps: range) -> Sequence[Item]:
        frames = self._source.frames(self._transport, self._spec, self._epoch, steps)
        return [
            Item(
                batch=expand(frame, pin_memory=self._pin_memory),
                address=frame.address,
                digest=frame.digest,
                num_tokens=count_tokens(frame),
            )
            for frame in frames
        ]
