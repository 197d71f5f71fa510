"""Prepares, checks, times or serves one loader in a separate process, which run.py starts.

    python benchmarks/loader.py prepare|serve PEER CORPUS
    python benchmarks/loader.py check PEER CORPUS --workers N [--address A] --samples N
    python benchmarks/loader.py time PEER CORPUS --workers N [--address A --server-pid P] --seconds S --warm-up S
    python benchmarks/loader.py pass PEER CORPUS --workers N [--address A | --url URL]

The last printed line is the result, as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import corpus as corpora
from check import check, check_batch
from peers import Peer, Setup, load
from processes import adopt_orphans, cpu_seconds, end_below

if TYPE_CHECKING:
    from torch import Tensor

_KEPT_SECONDS = 0.25  # between batches that are kept, and checked after the timing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("prepare", "serve", "check", "time", "pass"))
    parser.add_argument("peer")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--address", default="")
    parser.add_argument("--url", default="")
    parser.add_argument("--server-pid", type=int, default=0)
    parser.add_argument("--samples", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--warm-up", type=float, default=0)
    asked = parser.parse_args()
    adopt_orphans()
    warnings.simplefilter("ignore")  # of the peers' libraries
    peer = load(asked.peer)
    corpus = corpora.Corpus.open(asked.corpus)
    folder = asked.corpus / asked.peer
    setup = Setup(folder=folder, url=asked.url, corpus=corpus, num_workers=asked.workers, address=asked.address)
    if asked.verb == "serve":
        assert peer.serve
        peer.serve(corpus, folder)
        return
    try:
        if asked.verb == "prepare":
            result = _prepare(peer, corpus, folder)
        elif asked.verb == "check":
            result = asdict(check(peer.batches(setup), corpus, asked.samples))
        elif asked.verb == "pass":
            result = first_pass(peer.batches(setup), corpus)
        else:
            for path in [folder] if any(folder.iterdir()) else [corpus.parquet, corpus.tokens_file]:
                corpora.warm(path)
            result, kept = timed(peer.batches(setup), asked.seconds, asked.warm_up, asked.server_pid)
            for batch in kept:
                check_batch(batch, corpus)
        print("\n" + json.dumps(result), flush=True)
        status = 0
    except Exception:
        traceback.print_exc()
        status = 1
    end_below(os.getpid())
    # Skip the cleanup of libraries at exit: it is not measured, and some of them never finish.
    os._exit(status)


def first_pass(batches: Iterator[Tensor], corpus: corpora.Corpus) -> dict[str, Any]:
    """Consume as many batches as the corpus has. Return the seconds, and those until the first batch."""
    began = time.perf_counter()
    kept = [next(batches)]
    first = time.perf_counter() - began
    for _, batch in zip(range(corpus.num_samples // corpora.BATCH_SIZE - 1), batches, strict=False):
        kept[1:] = [batch]
    took = time.perf_counter() - began
    for batch in kept:
        check_batch(batch, corpus)
    return {"seconds": took, "first_batch_seconds": first}


def timed(
    batches: Iterator[Tensor], seconds: float, warm_up_seconds: float, server_pid: int
) -> tuple[dict[str, Any], list[Tensor]]:
    """Consume batches for a while, reading only their shape. Return the figures, and some batches to check.

    CPU time is that of this process and its descendants since the start of the measurement, with the server's apart.
    """
    began = time.perf_counter()
    next(batches)
    first = time.perf_counter() - began
    warm = began + first + warm_up_seconds  # the first batch waits until a shuffle buffer is full
    while time.perf_counter() < warm:
        next(batches)
    cpu, server, start = cpu_seconds(os.getpid()), _server_seconds(server_pid), time.perf_counter()
    tokens, end = 0, start + seconds
    kept: list[Tensor] = []
    for batch in batches:
        lines, width = batch.shape
        tokens += lines * width
        if (now := time.perf_counter()) >= start + _KEPT_SECONDS * len(kept):
            kept.append(batch)
        if now >= end:
            break
    took = time.perf_counter() - start
    result = {
        "tokens": tokens,
        "seconds": took,
        "trainer_cpu_seconds": cpu_seconds(os.getpid()) - cpu,
        "server_cpu_seconds": _server_seconds(server_pid) - server if server_pid else None,
        "first_batch_seconds": first,
    }
    return result, kept


def _server_seconds(pid: int) -> float:
    return cpu_seconds(pid) if pid else 0.0


def _prepare(peer: Peer, corpus: corpora.Corpus, folder: Path) -> dict[str, Any]:
    """Write the peer's data once. A file beside it marks it as complete."""
    done = folder.with_suffix(".prepared")
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        peer.prepare(corpus, folder)
        folder.mkdir(exist_ok=True)
        done.touch()
    return {"versions": ", ".join(f"{name} {version(name)}" for name in peer.packages)}


if __name__ == "__main__":
    main()
