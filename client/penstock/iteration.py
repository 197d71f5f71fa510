"""An iteration as the loop has it: it ends with the epoch, or with an error that every further step meets again."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import suppress
from inspect import GEN_CLOSED, GEN_RUNNING, GEN_SUSPENDED, getgeneratorstate

from penstock.errors import PenstockError
from penstock.tensors import Batch

NOT_GIVEN = "the batch that was given last did not reach the loop"  # sent to a generator of batches
_EXECUTING = "generator already executing"  # what Python says of one that another thread runs
_OTHER_THREAD = "another thread is taking a batch of this iteration: give each a dataset of its own."


class Iteration(Iterator[Batch]):
    """The batches of a generator. After an error a generator only ends, which would pass for the epoch's end; this raises.

    Where the loop does not get the batch that the generator gave last, that is sent NOT_GIVEN, and ends.
    """

    def __init__(self, batches: Generator[Batch, object, None]) -> None:
        self._batches = batches
        self._ended_by = ""

    def __next__(self) -> Batch:
        if self._ended_by:
            raise PenstockError(
                f"this iteration was ended by {self._ended_by}, and has no more batches. To go on after those that the loop "
                f"was given, call data.load_state_dict(data.state_dict()) and begin another."
            )
        try:
            return next(self._batches)
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
                # Its message says all, and would stand below some twenty frames.
                raise error.with_traceback(None) from error.__cause__
            raise

    def close(self) -> None:
        """Stops the fetching, as dropping it does. Raises PenstockError: another thread is taking a batch just now."""
        state = getgeneratorstate(self._batches)
        if state == GEN_RUNNING:
            raise PenstockError(_OTHER_THREAD)
        if state != GEN_CLOSED:
            self._ended_by = "close()"
        self._batches.close()
