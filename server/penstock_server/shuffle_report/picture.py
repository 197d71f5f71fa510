"""Picture of the shuffle report, in four panels.

where each sample comes from   the order
how far apart neighbours are   against the curve of a uniform shuffle
what each stretch is made of   shards, or blocks, over the epoch
in numbers                     the measures beside those of a uniform shuffle
"""

from __future__ import annotations

import io
import os
import textwrap
import threading
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock_server.order.arrays import IntArray
from penstock_server.shuffle_report.measures import Matrix
from penstock_server.shuffle_report.report import Report
from penstock_server.shuffle_report.sample import Sample
from penstock_server.shuffle_report.verdict import number, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INCHES, DOTS_PER_INCH = (12.0, 10.0), 120
_INK, _QUIET, _PALE, _MEASURED = "#1f2a33", "#73808a", "#d5dbe0", "#0b6fa4"
_COLOURS = {"uniform": "#2c8a57", "windowed": "#b7791f", "weak": "#c2452d", "none": "#c2452d", "unclear": "#73808a"}
_TIMES = ["#6d96bd", "#bfd2e2", "#f6f4ef", "#eda26d", "#b3361f"]  # 0, 1 and 3 times as often as in a uniform shuffle
_LOWEST_NAMED = 0.04  # narrower bands, as a share of the height, have no name
_NAMES = {
    "neighbour_distance": "samples between neighbours of\nthe source (median)",
    "neighbours_in_one_batch": "samples with their neighbour\nin the same global batch",
    "consecutive_distance": "share of the source between\nsamples in a row (mean)",
    "blocks_per_batch": "{unit} that a global batch\ndraws on",
    "shards_per_batch": "{unit} that a global batch\ndraws on",
    "unevenness_over_time": "samples to move for an even\nspread over the epoch",
    "unevenness_over_ranks": "samples to move for an even\nspread over ranks",
}
_drawing = threading.Lock()  # matplotlib's figures share fonts and caches


def draw_png(report: Report) -> bytes:
    """Draw the picture, as PNG."""
    # A notebook that started the server may have set it: no backend is needed, and one that is not installed would fail.
    os.environ.pop("MPLBACKEND", None)
    import matplotlib  # takes half a second, and only this function needs it
    from matplotlib.figure import Figure

    # Ignore the user's settings, and warnings about letters that the font lacks: the picture shows them.
    with _drawing, warnings.catch_warnings(action="ignore"), matplotlib.rc_context(matplotlib.rcParamsDefault):
        figure = Figure(figsize=INCHES, dpi=DOTS_PER_INCH, facecolor="white")
        grid = figure.add_gridspec(2, 2, left=0.085, right=0.97, top=0.765, bottom=0.06, hspace=0.36, wspace=0.26)
        _headline(figure, report)
        _places(figure.add_subplot(grid[0, 0]), report.sample)
        _distances(figure.add_subplot(grid[0, 1]), report)
        _stretches(figure.add_subplot(grid[1, 0]), report)
        _numbers(figure.add_subplot(grid[1, 1]), report)
        body = io.BytesIO()
        figure.savefig(body, format="png")
    return body.getvalue()


def _headline(figure: Figure, report: Report) -> None:
    plan = report.sample.plan
    spec, ranks = plan.spec, plan.spec.world_size
    chosen = {
        "shuffle": f"window of {spec.window:,}" if spec.shuffle == "window" else spec.shuffle,
        "packing": spec.packing,
        "batch": f"{spec.batch_size:,} x {ranks:,} rank{'s' if ranks > 1 else ''}",
        "seed": f"{spec.seed}",
        "epoch": f"{report.sample.epoch}",
        "mix": spec.mix,
        "length_bucket_size": f"{spec.length_bucket_size:,}" if spec.length_bucket_size else None,
    }
    line = _short(" · ".join(f"{name} {value}" for name, value in chosen.items() if value), 120)
    # Users choose the names: a $ in a name does not begin a formula.
    figure.text(0.03, 0.968, _short(plan.dataset, 45), size=19, weight="bold", color=_INK, va="center", parse_math=False)
    figure.text(0.03, 0.937, line, size=10, color=_QUIET, va="center", parse_math=False)
    badge = {"boxstyle": "round,pad=0.45", "facecolor": _COLOURS[report.grade], "edgecolor": "none"}
    figure.text(0.965, 0.966, report.grade, size=13, weight="bold", color="white", ha="right", va="center", bbox=badge)
    verdict = textwrap.fill(report.verdict, 145)
    figure.text(0.03, 0.917, verdict, size=10.5, color=_INK, va="top", linespacing=1.35, parse_math=False)


def _places(axes: Axes, sample: Sample) -> None:
    """Plot each sample at its place in the source; the height of a mixture's datasets is their share of the samples."""
    served = sample.scattered
    members, sizes = np.array([(source.member, source.num_samples) for source in sample.sources])[served.sources].T
    heights = np.bincount(members, minlength=len(sample.plan.members)) / len(members)
    starts = np.cumsum(heights) - heights
    size = float(np.clip(36_000 / len(members), 2.2, 40))
    places = starts[members] + (served.places + 0.5) / sizes * heights[members]
    axes.scatter(served.samples, places, s=size, alpha=0.55, linewidths=0, color=_MEASURED)
    axes.set(xlim=(0, sample.num_samples), ylim=(0, 1), xlabel="sample of the epoch", ylabel="place in the source")
    axes.yaxis.set_major_formatter(lambda value, _: percent(value))
    if len(heights) > 1:
        _name_bands(axes, np.append(starts, 1.0), [member.name for member in sample.plan.members])
    _title(axes, "Where each sample comes from", "an even cloud: mixed; streaks: windows; a line: as stored")
    _count_samples(axes)


def _distances(axes: Axes, report: Report) -> None:
    """Plot the share of neighbours in the source that are served within a distance."""
    pairs, marks = report.sample.pairs, {"a global batch": (report.sample.samples_per_step, "-")}
    if len(report.windows) == 1 and report.windows[0].windows > 1:
        marks["a window"] = (report.windows[0].samples, ":")
    most = max(at for at, _ in marks.values())
    axes.set_xscale("log")
    for label, distances, style, width, colour in (
        ("this order", pairs.distances, "-", 3.2, _MEASURED),
        ("a uniform shuffle", pairs.uniform, "--", 1.4, _INK),
    ):
        ordered = np.concatenate([[1], np.sort(distances)])
        axes.step(ordered, np.linspace(0, 1, len(ordered)), where="post", ls=style, lw=width, color=colour, label=label)
        most = max(most, int(ordered[-1]))
    for label, (at, style) in marks.items():
        axes.axvline(at, ls=style, lw=1.4, color=_PALE if style == "-" else _QUIET, zorder=0, label=label)
    axes.set(xlim=(0.8, 1.25 * most), ylim=(0, 1.02), xlabel="samples between the two, or fewer", ylabel="share of neighbours")
    axes.yaxis.set_major_formatter(lambda value, _: percent(value))
    axes.legend(loc="upper left", bbox_to_anchor=(0.02, 1), frameon=False, fontsize=9, labelcolor=_INK)
    hint = "the farther right, the better; on the dashed curve: as good as uniform"
    _title(axes, "How far apart source neighbours are served", hint)
    _count_samples(axes)


def _stretches(axes: Axes, report: Report) -> None:
    """Plot the frequency of each part of the source in each stretch of the epoch, relative to a uniform shuffle."""
    from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm

    spread, length = report.over_time, report.sample.num_samples
    times = np.divide(spread.counted, spread.expected, out=np.ones_like(spread.counted), where=spread.expected > 0)
    colours = LinearSegmentedColormap.from_list("times", _TIMES)
    extent = (0.0, float(length), 0.0, float(len(times)))
    image = axes.imshow(times, cmap=colours, norm=TwoSlopeNorm(1, 0, 3), aspect="auto", origin="lower", extent=extent)
    bar = axes.figure.colorbar(image, cax=axes.inset_axes((1.02, 0, 0.03, 1)), ticks=[0, 1, 2, 3])
    bar.ax.set_yticklabels(["absent", "as uniform", "2 x", "3 x, more"])
    bar.ax.tick_params(labelsize=8, length=0, colors=_QUIET)
    bar.outline.set_visible(False)
    borders = np.flatnonzero(np.diff(spread.members, prepend=-1, append=-1))
    axes.set(xlabel="sample of the epoch", ylabel=f"{spread.kind} of the source", yticks=[])
    if len(borders) > 2:
        names = [report.sample.plan.members[member].name for member in spread.members[borders[:-1]].tolist()]
        _name_bands(axes, borders.astype(np.float64), names)
    hint = f"a row is a run of {spread.kind}; pale: as much of them as everywhere"
    _title(axes, "What each stretch of the epoch is made of", hint)
    _count_samples(axes)


def _numbers(axes: Axes, report: Report) -> None:
    """Print the measures beside those of a uniform shuffle."""
    axes.axis("off")
    axes.set(xlim=(0, 1), ylim=(0, 1))
    for x, head in ((0.7, "this order"), (1.0, "a uniform shuffle")):
        axes.text(x, 0.97, head, size=9, color=_QUIET, ha="right", va="center")
    for row, finding in enumerate(report.findings):
        y = 0.88 - row * 0.133
        is_usual = all(measure.is_usual for measure in finding.measures)
        colour = _COLOURS["uniform" if is_usual else report.grade]
        shown = percent if finding.unit.startswith("share") else number
        name = _NAMES[finding.name].format(unit=finding.unit)
        axes.text(0, y, name, size=9.5, color=_INK, va="center", linespacing=1.25)
        axes.text(0.7, y, shown(finding.measure.measured), size=13, weight="bold", color=colour, ha="right", va="center")
        axes.text(1, y, shown(finding.measure.expected), size=11, color=_QUIET, ha="right", va="center")
        axes.plot([0, 1], [y - 0.066, y - 0.066], color=_PALE, lw=0.7)
    _title(axes, "In numbers", "green: as a uniform shuffle shows it, luck included")


def _name_bands(axes: Axes, edges: Matrix | IntArray, names: Sequence[str]) -> None:
    """Draw lines between the bands [edges[i], edges[i + 1]), and label bands that are high enough, in place of ticks."""
    axes.hlines(edges[1:-1], *axes.get_xlim(), color=_INK, lw=0.8)
    high = np.diff(edges) >= _LOWEST_NAMED * edges[-1]
    named = [_short(names[band], 12) for band in np.flatnonzero(high).tolist()]
    axes.set_yticks((edges[:-1] + np.diff(edges) / 2)[high], named, parse_math=False)
    axes.set_ylabel("")


def _title(axes: Axes, title: str, hint: str) -> None:
    axes.set_title(title, size=12, weight="bold", color=_INK, loc="left", pad=20)
    axes.text(0, 1.025, hint, size=9, color=_QUIET, transform=axes.transAxes, va="bottom")
    axes.tick_params(colors=_QUIET, labelsize=8.5, which="both", length=3)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=_QUIET, size=9)
    for spine in axes.spines.values():
        spine.set(color=_PALE)


def _count_samples(axes: Axes) -> None:
    if axes.get_xscale() == "linear":
        axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(lambda value, _: number(value).replace(" million", " M").replace(" billion", " B"))


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
