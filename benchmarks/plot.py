"""Draws tokens per second and the trainer's CPU of each loader."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from results import Figure, Loader, Results

_OURS, _THEIRS = "#0b6e75", "#b8bcc2"
_SECONDS_TO_MS_PER_MILLION = 1e9


def draw(results: Results, path: Path) -> None:
    """Write a PNG, without the loaders that have no figures."""
    loaders = [loader for loader in reversed(results.by_speed()) if loader.samples]
    picture = Picture(figsize=(11, 1.2 + 0.36 * len(loaders)), dpi=120, layout="constrained")
    left, right = picture.subplots(1, 2, sharey=True)
    _bars(left, loaders, [loader.tokens_per_second for loader in loaders], 1e-6)
    _bars(right, loaders, [loader.trainer_cpu for loader in loaders], _SECONDS_TO_MS_PER_MILLION)
    left.set_title("million tokens a second (more is better)", fontsize=10)
    right.set_title("trainer CPU, ms per million tokens (less is better)", fontsize=10)
    picture.suptitle(f"batches of 32 x 1,024 tokens, shuffled, {results.date}", fontsize=10)
    picture.savefig(path)


def _bars(axes: Axes, loaders: list[Loader], figures: list[Figure | None], scale: float) -> None:
    values = [figure.median * scale if figure else 0.0 for figure in figures]
    bars = axes.barh(
        [loader.name for loader in loaders], values, color=[_OURS if each.is_ours else _THEIRS for each in loaders]
    )
    axes.bar_label(bars, [f"{value:.3g}" for value in values], padding=3, fontsize=8)
    axes.set_xscale("log")  # they are two orders of magnitude apart
    axes.margins(x=0.12)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
