"""JSON of the shuffle report."""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict

from penstock_server.schemas import described


@described
class MeasureAnswer(TypedDict):
    """A measure of the order, and its range in an exact uniform shuffle."""

    value: float
    """The value in this order."""
    unit: str
    """The unit of `value`, `expected`, `low` and `high`."""
    expected: float
    """The mean value in an exact uniform shuffle."""
    low: float
    """A uniform shuffle is below this in less than one order of a million."""
    high: float
    """A uniform shuffle is above this in less than one order of a million."""
    is_uniform: bool
    """Whether `value` is in the range from `low` to `high`."""


@described
class MeasuresAnswer(TypedDict):
    """Measures of an order."""

    neighbour_distance_p1: NotRequired[MeasureAnswer]
    """Neighbours in the source: the distance at which the dataset's order serves them. 1 % of the pairs are at most this close.

    Missing if no dataset has two samples, like the next three."""
    neighbour_distance_p10: NotRequired[MeasureAnswer]
    """10 % of the pairs are at most this close."""
    neighbour_distance_median: NotRequired[MeasureAnswer]
    """Half of the pairs are at most this close."""
    neighbour_distance_p90: NotRequired[MeasureAnswer]
    """90 % of the pairs are at most this close."""
    neighbours_in_one_batch: MeasureAnswer
    """Samples whose successor in the source is in the same global batch."""
    blocks_per_batch: MeasureAnswer
    """Blocks that a global batch draws on; with packing=best_fit, pools of blocks. Few blocks mean that a batch is alike."""
    shards_per_batch: MeasureAnswer
    """Shards that a global batch draws on."""
    unevenness_over_time: MeasureAnswer
    """Samples to move until each stretch of the epoch shows the same share of every part of the source."""
    unevenness_over_ranks: NotRequired[MeasureAnswer]
    """Samples to move until each rank sees the same share of every part of the source. Missing with one rank."""


@described
class SampledAnswer(TypedDict):
    """How much of the epoch was measured."""

    samples: int
    """Samples looked up one by one, at most 16,384."""
    global_batches: int
    """Global batches looked up, with at most 16,384 samples together."""
    of_first: int
    """They are spread over this many samples from the epoch's start. It is less than `of_epoch` where more would need more
    than 128 plans: in a mixture that repeats small datasets, or with many windows to sort by length."""
    of_epoch: int
    """Samples of the epoch."""


@described
class ReportAnswer(TypedDict):
    """How well the order of an epoch mixes the source."""

    dataset: str
    """The name in the URL."""
    snapshot: str
    """The fingerprint of the data."""
    epoch: int
    """The epoch."""
    measures: MeasuresAnswer
    """The measures by name."""
    sampled: SampledAnswer
    """The number of samples looked up."""
    spec: dict[str, bool | int | str | None]
    """Every parameter of the spec with its value."""
