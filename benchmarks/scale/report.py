"""Results of the simulation and its validation: to JSON and back, as a page, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from report import markdown
from scale import figures
from scale.model import Costs, Outcome
from scale.sizes import MAX_WAITS, Size
from scale.validate import Point

_COLORS = "#0b6e75", "#d08a2d", "#7a4f9a"
_COSTS = {
    "request": ("a request", 1e3, "ms"),
    "batch": ("a batch", 1e6, "µs"),
    "sample": ("a sample", 1e6, "µs"),
    "byte": ("a GB served", 1e9, "s"),
    "stored_byte": ("a GB of blocks from a shared folder", 1e9, "s"),
    "decoded_byte": ("a GB of ids from zstd Parquet", 1e9, "s"),
    "token": ("a million tokens of text", 1e6, "s"),
}


@dataclass(kw_only=True, slots=True)
class Results:
    """What each step of scaling.py found. `machine` has the sentences of each step about its machine."""

    machine: dict[str, list[str]] = field(default_factory=dict)
    costs: Costs | None = None
    points: list[Point] = field(default_factory=list)
    sizes: list[Size] = field(default_factory=list)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Results:
        """Return what `write` saved; nothing if it saved nothing yet."""
        if not path.exists():
            return cls()
        told: dict[str, Any] = json.loads(path.read_text())
        return cls(
            machine=told["machine"],
            costs=Costs(**told["costs"]) if told["costs"] else None,
            points=[Point(**point) for point in told["points"]],
            sizes=[Size(**{**size, "outcome": Outcome(**size["outcome"])}) for size in told["sizes"]],
        )


def page(results: Results, picture: str) -> str:
    """Return RESULTS.md."""
    lines = ["# Large runs", "", "Written by `python benchmarks/scaling.py`. docs/guides/sizing.md explains how to use it.", ""]
    lines += [f"- {step}: {' '.join(said)}" for step, said in results.machine.items()]
    if results.costs:
        lines += ["", "## Costs of the work", "", *_costs(results.costs)]
    lines += ["", "## Measured and simulated", ""]
    lines += _points(results.points) if results.points else ["Not measured yet: run `validate` on a quiet machine."]
    if results.sizes:
        lines += ["", "## What large runs need", "", *_sizes(results.sizes)]
    return "\n".join([*lines, "", f"![throughput, and cores of large runs]({picture})"]) + "\n"


def _costs(costs: Costs) -> list[str]:
    rows = [(what, f"{getattr(costs, name) * factor:.3g} {unit}") for name, (what, factor, unit) in _COSTS.items()]
    return [*markdown([("work of the server", "time of a core"), *rows])]


def _points(points: Sequence[Point]) -> list[str]:
    eager = [point for point in points if not point.pace]
    error = median(abs(point.simulated_bytes / point.measured_bytes - 1) for point in eager)
    worst = max(eager, key=lambda point: abs(point.simulated_bytes / point.measured_bytes - 1))
    waits = median(abs(point.simulated_waits - point.measured_waits) for point in points if point.pace)
    head = ("ranks", "replicas", "demand", "measured", "simulated", "error", "waits measured", "simulated")
    scaling = [
        (
            str(count),
            *(f"{_speed_up(eager, count, name):.2f}" for name in ("measured_bytes", "simulated_bytes", "own_cores_bytes")),
        )
        for count in sorted({point.num_replicas for point in eager})
    ]
    return [
        "Light ranks take batches of 4 x 1,024 tokens from one to three servers of one process. All blocks are cached. Ranks "
        "and servers share the cores of one machine. The demand is that of the ranks over the simulated throughput; without "
        "one, a step takes no time. Each figure is the median of `--repeats` runs. Before each run, a fixed one measures the "
        "speed of the machine, and the simulation scales its costs by that.",
        "",
        f"The simulated throughput differs from the measured one by {error:.0%} in the median, and by "
        f"{abs(worst.simulated_bytes / worst.measured_bytes - 1):.0%} at most ({worst.num_ranks:,} ranks, {worst.num_replicas} "
        f"replicas). The waits of paced ranks differ by {waits * 100:.1f} percentage points in the median.",
        "",
        *markdown([head, *map(_point, points)]),
        "",
        "Throughput over that of one replica, median of all numbers of ranks:",
        "",
        *markdown(
            [("replicas", "measured, shared cores", "simulated, shared cores", "simulated, a core for each replica"), *scaling]
        ),
    ]


def _speed_up(points: Sequence[Point], num_replicas: int, name: str) -> float:
    """Return the median of a figure over that of one replica with as many ranks."""
    one = {point.num_ranks: getattr(point, name) for point in points if point.num_replicas == 1}
    return float(median(getattr(point, name) / one[point.num_ranks] for point in points if point.num_replicas == num_replicas))


def _point(point: Point) -> tuple[str, ...]:
    return (
        f"{point.num_ranks:,}",
        str(point.num_replicas),
        f"{point.pace:.0%}" if point.pace else "",
        f"{point.measured_bytes / 1e6:.1f} MB/s",
        f"{point.simulated_bytes / 1e6:.1f} MB/s",
        f"{point.simulated_bytes / point.measured_bytes - 1:+.0%}",
        f"{point.measured_waits:.1%}" if point.pace else "",
        f"{point.simulated_waits:.1%}" if point.pace else "",
    )


def _sizes(sizes: Sequence[Size]) -> list[str]:
    head = ("ranks", "blocks", "tokens/s", "replicas", "disk each", "busy cores", "network", "first step after", "waits")
    money = ("ranks", "blocks", "run", "cores", "requests to the store", "replicas cost", "store costs")
    return [
        f"{figures.RUN_TOKENS:.0e} tokens, {figures.TOKENS_PER_SECOND:,.0f} a second for each rank. The cheapest replicas with "
        f"which ranks wait for under {MAX_WAITS:.1%} of the time, although one replica dies without a word for two minutes. "
        "`stored`: `penstock prepare` has filled the shared store. `text`: the replicas tokenize during the run.",
        "",
        *markdown([head, *map(_size, sizes)]),
        "",
        *markdown([money, *map(_money, sizes)]),
    ]


def _size(size: Size) -> tuple[str, ...]:
    outcome = size.outcome
    return (
        f"{size.num_ranks:,}",
        size.place,
        f"{size.num_ranks * figures.TOKENS_PER_SECOND / 1e6:,.2f} M",
        f"{size.num_replicas} x {size.cores} cores",
        f"{size.disk_bytes / 1e9:,.0f} GB",
        f"{outcome.core_fraction:.1%}",
        f"{outcome.network_fraction:.1%}",
        f"{outcome.start_seconds:.1f} s",
        f"{outcome.wait_fraction:.3%}",
    )


def _money(size: Size) -> tuple[str, ...]:
    return (
        f"{size.num_ranks:,}",
        size.place,
        f"{size.run_hours:,.0f} h" if size.run_hours < 1_000 else f"{size.run_hours / 24:,.0f} days",
        str(size.num_cores),
        f"{(size.num_gets + size.num_puts * (size.place == 'text')) / 1e6:,.1f} M",
        f"${size.compute_dollars:,.0f}",
        f"${size.store_dollars:,.0f}",
    )


def draw(results: Results, path: Path) -> None:
    """Write a PNG: throughput on this machine, measured and simulated, and the cores of large runs; those that are known."""
    panels = [panel for panel, known in ((_draw_points, results.points), (_draw_sizes, results.sizes)) if known]
    picture = Picture(figsize=(5.5 * max(1, len(panels)), 4.2), dpi=120, layout="constrained")
    for number, panel in enumerate(panels, start=1):
        panel(picture.add_subplot(1, len(panels), number), results)
    picture.savefig(path)


def _draw_points(axes: Axes, results: Results) -> None:
    eager = [point for point in results.points if not point.pace]
    for count, color in zip(sorted({point.num_replicas for point in eager}), _COLORS, strict=False):
        points = [point for point in eager if point.num_replicas == count]
        ranks = [point.num_ranks for point in points]
        axes.plot(ranks, [point.simulated_bytes / 1e6 for point in points], color=color, label=f"{count} replicas, simulated")
        axes.plot(
            ranks, [point.measured_bytes / 1e6 for point in points], "o", color=color, label=f"{count} replicas, measured"
        )
    _finish(axes, "MB/s on the cores of one machine")
    axes.set_ylim(bottom=0)


def _draw_sizes(axes: Axes, results: Results) -> None:
    for place, color in zip(("stored", "text"), _COLORS, strict=False):
        sizes = [size for size in results.sizes if size.place == place]
        axes.plot([size.num_ranks for size in sizes], [size.num_cores for size in sizes], "o-", color=color, label=place)
    axes.set_yscale("log")
    _finish(axes, "cores of all replicas, waits under 0.1 %")


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xscale("log")
    axes.set_xlabel("ranks", fontsize=9)
    axes.legend(fontsize=7)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
