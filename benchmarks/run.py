"""Compares Penstock with its peers and with its own limits: `make bench`, or a short run with `make bench QUICK=1`.

    python benchmarks/run.py [--quick] [--peers NAME,NAME] [--no-ratios] [--samples N] [--rounds N] [--seconds S]

A full run, with all loaders and ratios on the default corpus, writes RESULTS.md, results.json and results.png beside this
file. Any other run writes them to work/.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import machine
import peers
import ratios
import report
from contest import Contest
from corpus import Corpus
from generate import write_corpus
from processes import ProcessFailed, run
from ratios import Ratio
from results import Results

_HERE = Path(__file__).parent
_RATIO_SECONDS = 1800
_PLANNED_BLOCKS = 1_000_000


def main() -> None:
    asked = _arguments()
    work = _HERE / "work"
    work.mkdir(exist_ok=True)
    scale = (ratios.quick if asked.quick else ratios.full)(work, asked.minutes)
    num_samples = scale.num_samples if asked.samples is None else asked.samples
    names = asked.peers or (peers.QUICK if asked.quick else peers.NAMES)
    rounds, seconds, warm_up = asked.rounds or (1 if asked.quick else 3), asked.seconds or (2 if asked.quick else 10), 2.0
    results = Results(
        date=datetime.now(UTC).date().isoformat(),
        command=f"python {' '.join(['benchmarks/run.py', *sys.argv[1:]])}",
        machine=machine.describe(),
        settings=[
            f"Batches of 32 x 1,024 tokens as int64 tensors on the CPU, from {num_samples:,} samples in a warm page cache, "
            f"one trainer; a loop reads only each batch's shape. {rounds} rounds in turn, {seconds:g} seconds each."
        ],
    )
    try:
        corpus = Corpus(work / f"corpus-{num_samples}", num_samples)
    except ValueError as error:
        sys.exit(f"--samples: {error}")
    _tell("writing the corpus")
    write_corpus(corpus)
    contest = Contest(corpus=corpus, names=names, num_rounds=rounds, seconds=seconds, warm_up_seconds=warm_up, tell=_tell)
    results.loaders = contest.run()
    if not asked.no_ratios:
        for name in ratios.NAMES:
            _add_ratio(results, name, work, asked)
        _add_planning(results, work, _PLANNED_BLOCKS // 10 if asked.quick else _PLANNED_BLOCKS)
    print(report.terminal(results))
    is_full = not (asked.quick or asked.peers or asked.no_ratios or asked.samples is not None)
    out = _HERE if is_full else work
    report.write(results, out / "results.json", out / "RESULTS.md")
    print(f"\nwritten: {out / 'RESULTS.md'}, results.json and results.png beside it")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="a small corpus, one round, and only peers that need no installation"
    )
    parser.add_argument("--peers", type=_names, metavar="NAME,NAME", help=f"only these, of {', '.join(peers.NAMES)}")
    parser.add_argument("--no-ratios", action="store_true", help="measure only the loaders")
    parser.add_argument("--samples", type=int, help="samples of the loaders' corpus")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, help="for each loader in each round")
    parser.add_argument("--minutes", type=float, help="duration of the measurement with many ranks")
    asked = parser.parse_args()
    if any(value is not None and value <= 0 for value in (asked.rounds, asked.seconds, asked.minutes)):
        parser.error("--rounds, --seconds and --minutes must be > 0")
    return asked


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in peers.NAMES]:
        raise argparse.ArgumentTypeError(f"not known: {', '.join(unknown)}; known are {', '.join(peers.NAMES)}")
    return names


def _add_ratio(results: Results, name: str, work: Path, asked: argparse.Namespace) -> None:
    _tell(f"against its limits: {name}")
    flags = ["--quick"] * asked.quick + (["--minutes", str(asked.minutes)] if asked.minutes else [])
    try:
        out = run([sys.executable, str(_HERE / "ratio.py"), name, str(work), *flags], timeout_seconds=_RATIO_SECONDS)
    except ProcessFailed as error:
        results.failures.append(f"{name}: {error}")
        return
    results.ratios += [Ratio(**row) for row in json.loads(out.splitlines()[-1])]


def _add_planning(results: Results, work: Path, num_blocks: int) -> None:
    _tell("planning an epoch")
    command = [sys.executable, str(_HERE / "planning.py"), "--blocks", str(num_blocks), "--cache-dir", str(work / "planning")]
    try:
        results.planning = run(command, timeout_seconds=_RATIO_SECONDS).splitlines()
    except ProcessFailed as error:
        results.failures.append(f"planning: {error}")


def _tell(what: str) -> None:
    print(f"[{time.perf_counter() - _BEGAN:5.0f} s] {what}", file=sys.stderr, flush=True)


def _end(number: int, _: object) -> None:
    """Exit as an error does, so that started processes are ended, too."""
    sys.exit(f"ended by {signal.Signals(number).name}")


_BEGAN = time.perf_counter()

if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    main()
