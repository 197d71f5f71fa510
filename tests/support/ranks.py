"""Training loops in threads of a test."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from penstock import RemoteDataset
from support.processes import until
from support.recorded import contents


class Rank:
    """A loop in a thread, until its data or `end` ends it. `seen` are its batches."""

    def __init__(self, data: RemoteDataset, step_seconds: float = 0.02) -> None:
        self.data, self.step_seconds = data, step_seconds
        self.seen: list[bytes] = []
        self.is_over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        for batch in self.data:
            self.seen.append(contents(batch))
            if self.is_over:
                return
            time.sleep(self.step_seconds)

    def end(self) -> None:
        """Stop after the next batch."""
        self.is_over = True
        self.join()

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join(60)
        assert not self._thread.is_alive()


def go_on(ranks: Sequence[Rank]) -> None:
    """Wait until each rank has made some steps more."""
    before = [len(rank.seen) for rank in ranks]
    until(lambda: all(len(rank.seen) > past + 5 for rank, past in zip(ranks, before, strict=True)))
