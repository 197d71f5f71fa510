"""Stats: what the training loop got, and how long it waited for it."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """What the iterations of this process have done so far.

    num_batches     batches that the loop was given
    num_tokens      tokens in them, without the padding
    num_bytes       bytes fetched, batches ahead of the loop included
    num_retries     fetches that failed, and were tried again if there was time
    num_corrupted     those among them whose answer was damaged on the way, or was not what was asked for
    wait_seconds    how long the loop waited for batches, a wait that is under way included
    compute_seconds    how long the loop worked with batches, each time until it asked for the next
    buffered_bytes  host memory of batches that are ready and wait for the loop, as they travelled
    """

    num_batches: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_retries: int = 0
    num_corrupted: int = 0
    wait_seconds: float = 0.0
    compute_seconds: float = 0.0
    buffered_bytes: int = 0

    @property
    def wait_fraction(self) -> float:
        """The share of its time that the loop waited for batches, from 0 to 1."""
        return self.wait_seconds / (self.wait_seconds + self.compute_seconds) if self.wait_seconds else 0.0

    def __repr__(self) -> str:
        amounts = (f"{f.name}={getattr(self, f.name):{',.2f' if f.type == 'float' else ','}}" for f in fields(self))
        return f"Stats(wait_fraction={self.wait_fraction:.1%}, {', '.join(amounts)})"

    def __add__(self, other: Stats) -> Stats:
        return Stats(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})
