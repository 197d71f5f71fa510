"""Iteration of a training loop: the batches of some steps, and how it ends."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Container, Generator, Iterable, Iterator
from contextlib import closing, suppress
from functools import partial, wraps
from inspect import GEN_CLOSED, GEN_RUNNING, GEN_SUSPENDED, getgeneratorstate
from itertools import cycle, islice, repeat
from typing import ParamSpec, TypeVar

import torch

from penstock.client import Client, Steps
from penstock.cuda import Destination, OnDevice, allocate_pinned
from penstock.errors import PenstockError
from penstock.forms import Form
from penstock.logs import log
from penstock.prefetch import Prefetch, fetch_ahead
from penstock.stats import Stats
from penstock.tensors import CPU, DEFAULT_FORM, Batch, Item, batch_of, expand
from penstock.waits import LoopClock, Reporter
from penstock.wire import Address, Frame
from penstock.wire.report import Report

P = ParamSpec("P")
T = TypeVar("T")

NOT_GIVEN = "the batch that was given last did not reach the loop"  # sent to a generator of batches
_EXECUTING = "generator already executing"  # Python's message if another thread runs the generator
_OTHER_THREAD = "another thread is taking a batch of this iteration: use one dataset per thread."


class Iteration(Iterator[Batch]):
    """The batches of a generator. After an error a generator only ends, which would pass for the epoch's end; this raises.

    It sends NOT_GIVEN to the generator if the loop does not get the last batch; the generator then ends.
    """

    def __init__(self, batches: Generator[Batch, object, None]) -> None:
        self._batches = batches
        self._take = _uncompiled(_next)  # for a loop inside of torch.compile
        self._ended_by = ""

    def __next__(self) -> Batch:
        if self._ended_by:
            raise PenstockError(
                f"this iteration was ended by {self._ended_by}, and has no more batches. To go on after those that the loop "
                f"was given, call data.load_state_dict(data.state_dict()) and begin another."
            )
        try:
            return self._take(self._batches)
        except StopIteration:
            raise
        except BaseException as error:
            if isinstance(error, ValueError) and str(error) == _EXECUTING:
                raise PenstockError(_OTHER_THREAD) from error
            self._ended_by = type(error).__name__
            if getgeneratorstate(self._batches) == GEN_SUSPENDED:  # Ctrl-C on the way from the generator to here
                with suppress(StopIteration):
                    self._batches.send(NOT_GIVEN)
            if isinstance(error, PenstockError):
                raise error.with_traceback(None) from error.__cause__  # see hide_internal_traceback
            raise

    def close(self) -> None:
        """Stop fetching, as dropping the iterator does. Raises PenstockError: another thread is taking a batch now."""
        state = getgeneratorstate(self._batches)
        if state == GEN_RUNNING:
            raise PenstockError(_OTHER_THREAD)
        if state != GEN_CLOSED:
            self._ended_by = "close()"
        self._batches.close()


class BatchIterator:
    """Iterator over the batches of some epochs' steps; with `replay`, the first `replay` of `num_batches` repeat.

    It opens connections and starts a thread; `close` ends them, and an exit of the interpreter calls it.
    Raises what Client.frames raises.
    """

    def __init__(
        self,
        client: Client,
        epochs: Iterable[Steps],
        num_batches: int,
        *,
        prefetch_bytes: int,
        destination: Destination,
        replay: int | None,
        tensors: Container[str],
        form: Form = DEFAULT_FORM,
        job: str = "",
        num_workers: int = 1,
    ) -> None:
        self._destination, self._num_steps, self._replay = destination, num_batches, replay
        self._tensors, self._form = tensors, form
        self._num_batches = self._num_tokens = 0
        self._last: Address | None = None  # of the batch that the loop was given last
        self._logged = Stats()  # at the end of the last epoch
        self._clock, self._job, self._num_workers = LoopClock(), job, num_workers
        device = destination.device
        self._client = client
        self._buffer: Prefetch[Frame] | None = None  # the thread of `_frames` makes its first report before they are set
        self._reporter = Reporter(self._clock, self._report if job else None, client.unreported)
        self._transport = client.connect(None if device == CPU else partial(allocate_pinned, device), self._reporter)
        steps = epochs if replay is None else _first(epochs, replay)
        self._frames = self._buffer = fetch_ahead(client, self._transport, steps, prefetch_bytes, self._clock.blocked)
        # Without atexit, an iterator that is still referenced is closed only when the interpreter clears modules. Daemon
        # threads no longer run then: a wait for one never ends.
        self.is_left = False
        atexit.register(self._leave)

    def __iter__(self) -> Iterator[Item]:
        items, clock = self._items(), self._clock
        waited = computed = 0.0
        asked_at = time.perf_counter()
        while True:
            clock.loop = waited, computed, asked_at, True
            try:
                item = next(items)
            except StopIteration:
                self._log_epoch()
                return
            finally:
                given_at = time.perf_counter()
                waited += given_at - asked_at
                clock.loop = waited, computed, None, False
            if self._last and item.address.epoch != self._last.epoch:
                self._log_epoch()
            self._num_batches += 1
            self._num_tokens += item.num_tokens
            self._last = item.address
            clock.loop = waited, computed, given_at, False
            yield item
            asked_at = time.perf_counter()
            computed += asked_at - given_at

    def _items(self) -> Iterator[Item]:
        device = self._destination.device
        if device == CPU:
            items = map(self._expanded, self._frames)
        else:
            items = map(next, repeat(OnDevice(self._frames, device, self._tensors, self._form)))
        if self._replay is None:
            return items
        # Copy the dict: a loop that removes tensors from its batch must find them again in the next repeat.
        again = (item._replace(batch=batch_of(item.batch, item.address)) for item in cycle(items))
        return islice(again, min(self._num_steps, sys.maxsize))

    def _expanded(self, frame: Frame) -> Item:
        # Expand as late as possible: the loop then reads from the CPU cache, and waiting batches stay as small as on the wire.
        pin_memory = self._destination.pin_memory
        return Item.of(frame, expand(frame, pin_memory=pin_memory, tensors=self._tensors, form=self._form))

    def stats(self) -> Stats:
        """Return the statistics so far. Any thread may call it, such as one that detects hangs of the loop."""
        return Stats(
            num_batches=self._num_batches,
            num_tokens=self._num_tokens,
            num_bytes=self._transport.num_bytes,
            num_retries=self._transport.num_retries,
            num_corrupted=self._transport.num_corrupted,
            wait_seconds=self._clock.wait_seconds,
            compute_seconds=self._clock.loop[1],
            buffered_bytes=self._frames.buffered_bytes,
            wait_stages=self._clock.wait_stages(),
        )

    def _log_epoch(self) -> None:
        """Log how the epoch went that ends with the last batch."""
        now = self.stats()
        stats, self._logged = now - self._logged, now
        if not self._last:
            return
        seconds = max(stats.wait_seconds + stats.compute_seconds, 1e-9)
        stages = ", ".join(f"{stage} {s / seconds:.1%}" for stage, s in stats.wait_stages.items() if s >= 0.0005 * seconds)
        log.info(
            "epoch %d is over: %s batches in %.0f s, %s tokens/s; the loop waited %.1f %% of that time%s; retries: %d",
            self._last.epoch,
            f"{stats.num_batches:,}",
            seconds,
            f"{stats.num_tokens / seconds:,.0f}",
            100 * stats.wait_seconds / seconds,
            f" ({stages})" if stages else "",
            stats.num_retries,
        )

    def _report(self) -> Report:
        return Report(
            job=self._job,
            num_workers=self._num_workers,
            epoch=self._last.epoch if self._last else 0,
            step=self._last.step if self._last else -1,
            compute_seconds=self._clock.compute_seconds,
            num_batches=self._num_batches,
            num_tokens=self._num_tokens,
            num_retries=self._transport.num_retries,
            num_corrupted=self._transport.num_corrupted,
            buffered_bytes=self._buffer.buffered_bytes if self._buffer else 0,
            wait_seconds=self._clock.wait_stages(),
        )

    def close(self) -> None:
        """Stop fetching and drop the buffer. Idempotent."""
        with closing(self._transport), closing(self._frames):
            atexit.unregister(self._leave)
        if unreported := self._reporter.end():
            self._client.unreported = unreported
        self._client.trim()

    def _leave(self) -> None:
        self.is_left = True
        self.close()


def _first(epochs: Iterable[Steps], num_batches: int) -> Iterator[Steps]:
    """Yield the first steps of some epochs."""
    for epoch in epochs:
        yield epoch[:num_batches]
        num_batches -= min(num_batches, len(epoch))
        if not num_batches:
            return


def _next(batches: Iterator[Batch]) -> Batch:
    return next(batches)


def _uncompiled(make: Callable[P, T]) -> Callable[P, T]:
    """Exclude a function from torch.compile: inductor's C++ for its work on a packed batch does not compile.

    If nothing has been compiled yet, it returns the function unchanged: the import of torch._dynamo is slow.
    """
    if "torch._dynamo" not in sys.modules:
        return make
    excluded: Callable[P, T] = torch.compiler.disable(make)  # type: ignore[no-untyped-call]
    return excluded


def hide_internal_traceback(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that a PenstockError shows its message and the call, without pages of inner frames."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except PenstockError as error:
            raise error.with_traceback(None) from error.__cause__

    return call
