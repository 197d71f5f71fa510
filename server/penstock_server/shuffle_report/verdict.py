"""Verdict of the shuffle report: the meaning of its measures for training in this order, and advice.

uniform   no visible difference from an exact uniform shuffle
windowed  mixed, but not over the whole epoch
weak      mixed so little that a global batch comes from few places in the source
none      in storage order
unclear   the epoch is too short to tell
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from penstock_server.order.length_buckets import MAX_WINDOW
from penstock_server.shuffle_report.extent import num_served, num_windows_of
from penstock_server.shuffle_report.measures import Measure
from penstock_server.shuffle_report.sample import Sample

_FEWEST = 30  # samples needed for a verdict
_MAX_MEETING = 0.05  # share of neighbours in one global batch beyond chance; it shrinks the effective batch by that share
_MIN_PLACES = 1 / 16  # blocks in a global batch, relative to a uniform shuffle
_GLOBAL = "use shuffle=global, which needs the whole dataset in the block cache"


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Division of a dataset into windows; samples and blocks are those of an average window."""

    dataset: str
    windows: int
    samples: int
    blocks: int
    share: float

    @property
    def says(self) -> str:
        """Describe the windows in a sentence for people."""
        if self.windows == 1:
            return f"All {number(self.samples)} samples of {self.dataset} are shuffled together."
        return (
            f"{self.dataset} is shuffled in {self.windows:,} windows of about {number(self.samples)} samples, "
            f"{number(self.blocks)} block{'s' * (self.blocks != 1)} or {percent(self.share)} of it each."
        )


def windows_of(sample: Sample) -> tuple[Window, ...]:
    """Return the windows of each dataset in the sample; none without a shuffle."""
    found = {}
    for source in sample.sources if sample.plan.spec.shuffle != "none" else ():
        count = num_windows_of(source.order)
        found[source.member] = Window(
            dataset=sample.plan.members[source.member].name,
            windows=count,
            samples=round(source.num_samples / count),
            blocks=max(1, round(source.num_pools / count)),
            share=1 / count,
        )
    return tuple(window for _, window in sorted(found.items()))


def grade(sample: Sample, measures: Mapping[str, list[Measure]], following: float) -> str:
    """Return one of the words above. `following` is the share of samples directly followed by their neighbour in the source."""
    if sample.num_samples < _FEWEST:
        return "unclear"
    if all(measure.is_usual for values in measures.values() for measure in values):
        return "uniform"
    if following > 0.5:
        return "none"
    [blocks] = measures["blocks_per_batch"]
    few_places = blocks.measured < min(max(2.0, blocks.expected * _MIN_PLACES), blocks.expected / 2)
    meet = measures.get("neighbours_in_one_batch", [])
    return "weak" if few_places or any(m.measured > m.expected + _MAX_MEETING for m in meet) else "windowed"


def verdict(sample: Sample, grade: str, measures: Mapping[str, list[Measure]]) -> str:
    """Explain the grade and give advice, in a few sentences."""
    spec = sample.plan.spec
    text = _text(sample, grade, measures)
    if (measured := sample.num_samples) < (all_samples := num_served(sample.plan)):
        text += f" Only the beginning of the epoch was measured: {number(measured)} of {number(all_samples)} samples."
    if spec.length_bucket_size:
        text += (
            f" Samples of similar length are side by side on purpose (length_bucket_size={spec.length_bucket_size:,}); what "
            f"was "
            f"measured is where they come from, not how long they are."
        )
    return text


def _text(sample: Sample, grade: str, measures: Mapping[str, list[Measure]]) -> str:
    windows = windows_of(sample)
    if grade == "unclear":
        return f"Too short to tell: with {sample.num_samples} samples, any order is about as good as another."
    if grade == "uniform":
        looked_at = len(sample.scattered.samples)
        of = f" of {number(sample.num_samples)}" if looked_at < sample.num_samples else ""
        return f"As good as uniform: {number(looked_at)}{of} samples show no difference from an exact uniform shuffle."
    if windows and all(window.windows == 1 for window in windows):
        return _uneven(sample, measures)
    if grade == "none":
        return (
            "Not shuffled: what stands side by side in the source is served side by side, one shard after the other. That "
            "suits an evaluation. To train, use shuffle=window, the default, or shuffle=global."
        )
    size = f"{number(sample.plan.spec.window)} samples or more of each dataset"
    if len(windows) == 1:
        size = f"about {number(windows[0].samples)} samples, {percent(windows[0].share)} of the epoch"
    opening = "Weakly mixed" if grade == "weak" else "Mixed"
    text = f"{opening} within windows of {size}: {_shown(sample, measures)}."
    if grade == "weak":
        lumps = "A batch then holds much of what is alike in the source, and the next batch something else"
        return f"{text} {lumps}: {_advice(sample, 0.5)}."
    return (
        f"{text} That is enough if the source is in no particular order. If its parts differ, by language, date or "
        f"difficulty, {_advice(sample, 4)}."
    )


def _uneven(sample: Sample, measures: Mapping[str, list[Measure]]) -> str:
    """Return the verdict on an order that should be uniform, since one window holds all samples, but is not."""
    if sample.plan.spec.length_bucket_size:
        return f"Mixed over the whole epoch, but lengths differ from place to place in the source: {_shown(sample, measures)}."
    unusual = " and ".join(name for name, values in measures.items() if not all(value.is_usual for value in values))
    return (
        f"Not what shuffle={sample.plan.spec.shuffle} promises where one window holds the whole epoch: {unusual} differ from "
        f"an exact uniform shuffle by more than chance explains. That is a fault of penstock: report it, with this answer."
    )


def _shown(sample: Sample, measures: Mapping[str, list[Measure]]) -> str:
    [blocks] = measures["blocks_per_batch"]
    drawn = number(blocks.measured)
    shown = f"a global batch draws on {drawn} block{'s' * (drawn != '1')} (uniform: {number(blocks.expected)})"
    if "neighbour_distance" not in measures:
        return shown
    median, [meet] = measures["neighbour_distance"][0], measures["neighbours_in_one_batch"]
    near = f"half of the neighbours in the source are served within {samples(median.measured, sample)} of each other"
    return f"{near}, {percent(meet.measured)} of them in one global batch, and {shown}"


def _advice(sample: Sample, blocks_per_sample: float) -> str:
    """Recommend a window: at least a hundred global batches, and `blocks_per_sample` blocks for each sample of one."""
    per_block = max(source.num_samples / max(source.num_pools, 1) for source in sample.sources)
    wanted = max(sample.samples_per_step * max(100.0, blocks_per_sample * per_block), 2.0 * sample.plan.spec.window)
    power = 1 << int(np.ceil(np.log2(wanted)))
    if sample.plan.spec.length_bucket_size:
        return f"raise window= to {min(power, MAX_WINDOW):,}"
    if power >= max(source.num_samples for source in sample.sources):
        return _GLOBAL
    return f"raise window= to {power:,} or more, or {_GLOBAL}"


def samples(count: float, sample: Sample) -> str:
    """Format a number of samples, with the number of steps."""
    steps = count / sample.samples_per_step
    lasting = "less than a step" if steps < 1 else f"{number(steps)} step{'s' if steps > 1 else ''}"
    return f"{number(count)} sample{'s' if count > 1 else ''} ({lasting})"


def number(value: float) -> str:
    """Format a number for people, to three digits."""
    rounded = float(f"{value:.3g}")
    if rounded >= 1e15:  # only an epoch of a mixture that never ends is this long
        return "more than a quadrillion"
    for unit, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if rounded >= unit:
            return f"{rounded / unit:.3g} {name}"
    if value == round(value) and value < 100_000:
        return f"{value:,.0f}"
    return f"{value:.2g}" if value < 10 else f"{rounded:,.0f}"


def percent(share: float) -> str:
    """Format a share for people."""
    if 0 < share < 1e-5:
        return "< 0.001 %"
    return f"{100 * share:.3g} %" if share >= 0.1 else f"{100 * share:.2g} %"
