"""Prints the results as tables, and writes them as a page with explanations.

python benchmarks/report.py benchmarks/results.json     writes RESULTS.md and results.png beside it
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten

from plot import draw
from ratios import Ratio
from results import Figure, Loader, Results

_LOADER_HEAD = (
    "loader",
    "tokens/s",
    "low to high",
    "trainer CPU, ms per M tokens",
    "server CPU",
    "first batch",
    "spread",
    "shuffle",
)
_REASON_WIDTH = 60  # in the table; the whole reason is below it
_RATIO_HEAD = ("what", "ours", "against", "theirs", "ratio")


def terminal(results: Results) -> str:
    """Return both tables and the failures, for a terminal."""
    parts = [_aligned([_LOADER_HEAD, *map(_loader_row, results.by_speed())])]
    if results.ratios:
        parts.append(_aligned([_RATIO_HEAD, *map(_ratio_row, results.ratios)]))
    return "\n\n".join([*parts, "\n".join([*results.planning, *_failures(results)])])


def page(results: Results, picture: str) -> str:
    """Return RESULTS.md."""
    lines = [
        "# Results",
        "",
        f"Measured on {results.date} with `{results.command}`. " + " ".join(results.machine),
        "",
        "## Loaders",
        "",
        *markdown([_LOADER_HEAD, *map(_loader_row, results.by_speed())]),
        "",
        " ".join(results.settings),
        "Figures are medians. CPU is that of the trainer's process and its loader workers; the server's is separate. First "
        "batch is the time to create the loader and get a batch, with all servers running. In brackets is the best number of "
        "loader workers, if several were tried. Spread is the mean distance in the corpus between neighbours in the epoch; it "
        "is 1 in a uniform shuffle.",
        "",
        f"![tokens a second, and CPU of the trainer]({picture})",
        "",
        *_settings(results.loaders),
        *_not_first(results),
    ]
    if results.ratios:
        lines += ["", "## Penstock against its limits", "", *markdown([_RATIO_HEAD, *map(_ratio_row, results.ratios)])]
        lines += [""] + [f"- {ratio.what}: {ratio.note}." for ratio in results.ratios if ratio.note]
    if results.planning:
        lines += ["", "## Planning", "", *(f"- {line}" for line in results.planning)]
    if failures := _failures(results):
        lines += ["", "## Not measured", "", *(f"- {line}" for line in failures)]
    return "\n".join(lines) + "\n"


def _loader_row(loader: Loader) -> tuple[str, ...]:
    rate, trainer, server, first = loader.tokens_per_second, loader.trainer_cpu, loader.server_cpu, loader.first_batch
    if not rate or not trainer:
        reason = loader.failures[0] if loader.failures else "not measured"
        return (loader.name, f"failed: {shorten(reason, _REASON_WIDTH)}", *[""] * (len(_LOADER_HEAD) - 3), loader.shuffle)
    return (
        loader.name,
        f"{_millions(rate.median)}{_workers(loader, rate)}",
        f"{_millions(rate.low)} to {_millions(rate.high)}",
        f"{trainer.median * 1e9:.2f}{_workers(loader, trainer)}",
        f"{server.median * 1e9:.2f}" if server else "",
        _quantity(first.median, "s") if first else "",
        f"{loader.spread:.2f}" if loader.spread is not None else "",
        loader.shuffle,
    )


def _ratio_row(ratio: Ratio) -> tuple[str, ...]:
    theirs = "" if ratio.theirs is None else _quantity(ratio.theirs, ratio.unit)
    relation = "" if ratio.theirs is None else f"{ratio.ours / ratio.theirs:.2f}"
    return (ratio.what, _quantity(ratio.ours, ratio.unit), ratio.against, theirs, relation)


def _settings(loaders: Sequence[Loader]) -> list[str]:
    return ["How each was set up:", "", *(f"- {each.name} ({each.versions}): reads {each.reads}." for each in loaders)]


def _not_first(results: Results) -> list[str]:
    """Return a paragraph for each loader that is ahead of Penstock."""
    ours = results.ours()
    if not ours:
        return []
    paragraphs = [text for loader in results.by_speed() if (text := _ahead(loader, ours))]
    if not paragraphs:
        return ["", "Of the loaders measured here Penstock gives the most tokens a second, and takes the least CPU."]
    return ["", "## Where Penstock is not first", "", "\n\n".join(paragraphs)]


def _ahead(loader: Loader, ours: Loader) -> str:
    if not (loader.ahead and loader.samples):
        return ""
    said = []
    if (rate := _relation(loader.tokens_per_second, ours.tokens_per_second)) > 1:
        said.append(f"gives {rate:.1f} times the tokens a second")
    if (trainer := _relation(loader.trainer_cpu, ours.trainer_cpu)) < 1:
        said.append(f"takes {trainer:.2f} of the trainer's CPU")
    if (all_cpu := _relation(loader.cpu, ours.cpu)) < 1:
        said.append(f"takes {all_cpu:.2f} of the CPU of trainer and server together")
    return f"**{loader.name}** {', '.join(said)}: {loader.ahead}" if said else ""


def _relation(theirs: Figure | None, ours: Figure | None) -> float:
    assert theirs
    assert ours
    return theirs.median / ours.median


def _failures(results: Results) -> list[str]:
    return [f"{loader.name}: {reason}" for loader in results.loaders for reason in loader.failures] + results.failures


def _workers(loader: Loader, figure: Figure) -> str:
    several = len({sample.num_workers for sample in loader.samples}) > 1
    return f" ({figure.num_workers})" if several else ""


def _quantity(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"
    if unit == "B":
        return f"{value / 1e6:.0f} MB"
    return f"{value / 1e6:.1f} MB/s" if unit == "B/s" else f"{_millions(value)} {unit}"


def _millions(value: float) -> str:
    return f"{value / 1e6:.1f} M"


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def markdown(rows: Sequence[tuple[str, ...]]) -> list[str]:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


def write(results: Results, json_path: Path, page_path: Path) -> None:
    """Write the results as JSON, as a picture beside it, and as a page."""
    picture = json_path.with_suffix(".png")
    results.write(json_path)
    draw(results, picture)
    page_path.write_text(page(results, picture.name))


if __name__ == "__main__":
    path = Path(sys.argv[1])
    write(Results.read(path), path, path.with_name("RESULTS.md"))
