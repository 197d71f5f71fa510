"""A feed: the batches of some steps, fetched ahead of the loop. Each knows the frame that it was made of."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Container, Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import cycle, islice

import torch

from penstock.device import CPU, Destination, OnDevice, pack
from penstock.item import Item
from penstock.prefetch import OWN_THREADS, Prefetch
from penstock.runs import RUN_BYTES, fetch_runs
from penstock.source import Source
from penstock.spec import Spec
from penstock.stats import Stats
from penstock.tensors import expand
from penstock.wire import Frame

_MOST_ITEMS = 64  # that are handed over at a time


class Feed:
    """Iterates over the batches of `steps`, once; or over the first `replay` of them, again and again, for as many steps.

    Its connections and its threads begin here, and end with `close`, which an exit of the interpreter calls, too.
    Raises what Source.frames raises.
    """

    def __init__(
        self,
        source: Source,
        spec: Spec,
        epoch: int,
        steps: range,
        *,
        prefetch_bytes: int,
        destination: Destination,
        replay: int | None,
        columns: Container[str],
    ) -> None:
        self._source, self._spec, self._epoch = source, spec, epoch
        self._destination, self._num_steps, self._replay = destination, len(steps), replay
        self._columns = columns
        self._num_batches = self._num_tokens = 0
        self._busy_seconds = 0.0
        self._transport = source.connect()
        self._group_bytes = int(min(RUN_BYTES, prefetch_bytes // 4))
        with ExitStack() as unwound:  # if no more threads may be started, or by Ctrl-C
            unwound.callback(self._transport.close)
            # One thread fetches and another makes tensors, so that the server works on while this side does.
            self._frames = Prefetch(
                fetch_runs(self._fetch, steps[:replay], self._group_bytes),
                nbytes=lambda frame: frame.nbytes,
                budget_bytes=self._group_bytes,
                interrupt=self._transport.interrupt,
                name=f"{OWN_THREADS}fetch",
            )
            unwound.callback(self._frames.close)
            self._prefetch = Prefetch(
                self._made(),
                nbytes=lambda item: item.nbytes,
                budget_bytes=prefetch_bytes,
                interrupt=self._frames.close,
                name=f"{OWN_THREADS}prefetch",
            )
            unwound.pop_all()
        # An iterator that is still referenced is only closed when modules are taken apart. Daemon threads run no more then:
        # who waits for one, or for a lock that it holds, waits for ever.
        atexit.register(self._close)

    def __iter__(self) -> Iterator[Item]:
        for item in self._items():
            self._num_batches += 1
            self._num_tokens += item.num_tokens
            began = time.perf_counter()
            yield item
            self._busy_seconds += time.perf_counter() - began

    def _items(self) -> Iterator[Item]:
        device = self._destination.device
        items: Iterator[Item] = self._prefetch if device == CPU else OnDevice(self._prefetch, device, self._columns)
        if self._replay is None:
            return items
        # A loop that takes something out of its batch must find it there again.
        again = (replace(item, batch=dict(item.batch)) for item in cycle(items))
        return islice(again, self._num_steps)

    def stats(self) -> Stats:
        """What this feed has done so far."""
        return Stats(
            num_batches=self._num_batches,
            num_tokens=self._num_tokens,
            num_bytes=self._transport.num_bytes,
            num_retries=self._transport.num_retries,
            num_damaged=self._transport.num_damaged,
            wait_seconds=self._prefetch.wait_seconds,
            busy_seconds=self._busy_seconds,
            buffered_bytes=self._prefetch.buffered_bytes,
        )

    def close(self) -> None:
        """Stops the fetching and drops what is buffered. Idempotent.

        Python may collect an iterator that was dropped in whichever thread runs just then. One of this package cannot wait for
        its own end, and may hold what closing needs: there another thread is given the work, and nobody waits.
        """
        if threading.current_thread().name.startswith(OWN_THREADS):
            threading.Thread(target=self._close, name=f"{OWN_THREADS}close", daemon=True).start()
        else:
            self._close()

    def _close(self) -> None:
        with closing(self._transport), closing(self._prefetch):
            atexit.unregister(self._close)

    def _fetch(self, steps: range) -> list[Frame]:
        return self._source.frames(self._transport, self._spec, self._epoch, steps)

    def _made(self) -> Generator[list[Item], None, None]:
        """The items, in groups of a few: to hand each over would cost as much as to make it."""
        gpu = self._destination.pinned_for
        make = partial(expand if self._destination.device == CPU else pack, pin_memory=gpu >= 0, columns=self._columns)
        if gpu >= 0:
            # A thread begins on GPU 0, and the first to pin memory there would take some of GPU 0's for every rank.
            torch.cuda.set_device(gpu)
        group: list[Item] = []
        nbytes = 0
        try:
            for frame in self._frames:
                group.append(Item.of(frame, make(frame)))
                nbytes += group[-1].nbytes
                if not self._frames.has_next or nbytes >= self._group_bytes or len(group) == _MOST_ITEMS:
                    yield group
                    group, nbytes = [], 0
        except Exception:
            if group:
                yield group  # what was made before it
            raise
