"""Answers about how well an epoch is shuffled."""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict

from penstock_server.schemas import described


@described
class QuantileAnswer(TypedDict):
    """A quantile of what is measured."""

    share: float
    """which: the share of the sample that is at most so much"""
    measured: float
    """of this order"""
    expected: float
    """of a uniform shuffle"""
    usual: list[float]
    """from where to where a uniform shuffle stays, but for one order in a million"""
    is_usual: bool
    """whether this order does"""


@described
class MeasureAnswer(TypedDict):
    """A measure of an order, beside that of an exact uniform shuffle."""

    says: str
    """what it means, in a sentence"""
    unit: str
    """the unit of its numbers"""
    measured: float
    """of this order"""
    expected: float
    """of a uniform shuffle"""
    usual: list[float]
    """from where to where a uniform shuffle stays, but for one order in a million"""
    is_usual: bool
    """whether this order does"""
    quantiles: NotRequired[list[QuantileAnswer]]
    """more of the same"""


@described
class WindowsAnswer(TypedDict):
    """The windows that a dataset is cut into, each shuffled as a whole."""

    dataset: str
    """which dataset"""
    windows: int
    """how many there are"""
    samples: int
    """samples of the average one"""
    blocks: int
    """blocks of the average one"""
    share: float
    """share of the dataset in the average one"""
    says: str
    """the same in a sentence"""


@described
class SampleAnswer(TypedDict):
    """How much was looked at."""

    samples: int
    """samples that were looked at one by one"""
    neighbours: int
    """those of them that have a neighbour in the source"""
    global_batches: int
    """global batches"""
    of_the_first: int
    """of how many samples of the epoch, from its first on"""
    of: int
    """how many the epoch has"""


@described
class ReportAnswer(TypedDict):
    """How well an order mixes the source."""

    dataset: str
    """the name in the URL"""
    snapshot: str
    """fingerprint of the data"""
    epoch: int
    """which epoch"""
    grade: str
    """none, weak, windowed or uniform; unclear where too little is there to measure"""
    verdict: str
    """what follows from the measures, and what to do"""
    measures: dict[str, MeasureAnswer]
    """each measure, by its name"""
    windows: list[WindowsAnswer]
    """of each dataset that is shuffled"""
    sample: SampleAnswer
    """how much was looked at"""
    spec: dict[str, bool | int | str | None]
    """every parameter, with its value"""
