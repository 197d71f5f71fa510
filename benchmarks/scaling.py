"""Simulates large runs with costs measured on this machine, and says how many replicas they need.

    python benchmarks/scaling.py calibrate    measures the costs of the server's work
    python benchmarks/scaling.py validate     runs light ranks against real servers, and simulates the same
    python benchmarks/scaling.py size         searches for the fewest replicas of each run

Each step takes some minutes, needs the ones before, and writes its part of RESULTS.md, results.json and results.png in scale/.
The data of the measurements lies in work/.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

import machine
import ratios
from scale import ranks, sizes
from scale.calibrate import calibrate
from scale.model import Costs, Job
from scale.report import Results, draw, page
from scale.validate import validate

_HERE = Path(__file__).parent
_OUT = _HERE / "scale"
_NUM_SAMPLES, _NUM_DOCUMENTS = 1 << 19, 16_000  # samples of a GB: an epoch of a thousand ranks has more steps than a range


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in _STEPS:
        step = verbs.add_parser(verb)
        step.add_argument("--work", type=Path, default=_HERE / "work", help="folder for the data of the measurements")
        step.add_argument("--repeats", type=int, default=3, help="measurements of each figure; the median counts")
    light = verbs.add_parser("ranks", help="run light ranks in this process, as the first two steps do")
    light.add_argument("addresses")
    light.add_argument("dataset")
    light.add_argument("job", help="the fields of a Job, as JSON")
    light.add_argument("--warm-seconds", type=float, default=0.5)
    light.add_argument("--seconds", type=float, default=2.0)
    light.add_argument("--range-steps", type=int)
    light.add_argument("--server-pids", default="")
    asked = parser.parse_args()
    if asked.verb == "ranks":
        _run_ranks(asked)
        return
    asked.work.mkdir(exist_ok=True)
    results = Results.read(_OUT / "results.json")
    date = datetime.now(UTC).date().isoformat()
    results.machine[asked.verb] = [f"{date}, --repeats {asked.repeats}.", *machine.describe()]
    scale = replace(ratios.full(asked.work, None), num_samples=_NUM_SAMPLES, num_documents=_NUM_DOCUMENTS)
    _STEPS[asked.verb](results, replace(scale, num_repeats=asked.repeats))
    results.write(_OUT / "results.json")
    draw(results, _OUT / "results.png")
    (_OUT / "RESULTS.md").write_text(page(results, "results.png"))


def _calibrate(results: Results, scale: ratios.Scale) -> None:
    results.costs = calibrate(scale, _tell)


def _validate(results: Results, scale: ratios.Scale) -> None:
    results.points = list(validate(scale, _costs(results), _tell))


def _size(results: Results, _: ratios.Scale) -> None:
    costs = _costs(results)
    results.sizes = []
    for num_ranks, place in product(sizes.NUM_RANKS, sizes.PLACES):
        try:
            results.sizes.append(sizes.smallest(num_ranks, place, costs, _tell))
        except ValueError as error:
            _tell(f"not sized: {error}")


_STEPS: dict[str, Callable[[Results, ratios.Scale], None]] = {"calibrate": _calibrate, "validate": _validate, "size": _size}


def _costs(results: Results) -> Costs:
    if results.costs is None:
        sys.exit("the costs of the work are not measured: run `python benchmarks/scaling.py calibrate` first")
    return results.costs


def _run_ranks(asked: argparse.Namespace) -> None:
    run = ranks.measure(
        asked.addresses.split(","),
        asked.dataset,
        Job(**json.loads(asked.job)),
        warm_seconds=asked.warm_seconds,
        seconds=asked.seconds,
        range_steps=asked.range_steps,
        server_pids=[int(pid) for pid in asked.server_pids.split(",") if pid],
    )
    print(json.dumps(asdict(run)))


def _tell(what: str) -> None:
    print(f"[{time.perf_counter() - _BEGAN:5.0f} s] {what}", file=sys.stderr, flush=True)


_BEGAN = time.perf_counter()

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # as an error does, so that servers are ended, too
    main()
