"""Report of a rank: one request header, sent with each range, that says how long the loop waited, and for what.

    Penstock-Report: {"job": "train.py ann@gpu7", "workers": 1, "epoch": 0, "step": 812, "compute_seconds": 1.9,
                      "batches": 8, "tokens": 65536, "retries": 0, "corrupted": 0, "buffered_bytes": 0,
                      "wait_seconds": {"tokenize": 0.8}}

It is one line of JSON. All amounts are those since the rank's last report. The header is not a part of the URL: caches share
URLs. The server replies with the standard header Server-Timing: what the time to the first byte was spent on, in milliseconds.

    Server-Timing: read;dur=0.1, tokenize;dur=801.2, make;dur=3.4
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter

from penstock.text import as_utf8

HEADER = "Penstock-Report"
TIMING_HEADER = "Server-Timing"

# What a waiting rank waits for, in the order of a request.
STAGES: Mapping[str, str] = {
    "connect": "connecting to the server",
    "queue": "waiting for a free thread of the server",
    "budget": "waiting for room in the server's budget of bytes in flight",
    "index": "waiting until the server has counted tokens",
    "read": "reading cached blocks from the server's disk",
    "decode": "decoding Parquet",
    "tokenize": "tokenizing",
    "make": "assembling batches from blocks",
    "network": "the rest of the time to the first byte: the network, or a proxy",
    "receive": "receiving the body",
    "retry": "pausing after failed attempts",
    "client": "checks and tensors in the trainer's process",
}
SERVER_STAGES = ("queue", "index", "read", "decode", "tokenize", "make")

_NAMES = "job workers epoch step compute_seconds batches tokens retries corrupted buffered_bytes wait_seconds".split()
_values_of = itemgetter(*_NAMES)
_MAX_BYTES = 4096
_MAX_JOB = 200  # characters
_MAX_AMOUNT = float(1 << 53)
_TIMING = re.compile(r"([a-z]+);dur=([0-9]{1,12}(?:\.[0-9]{0,6})?)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a rank's loop did since its last report, and where it is.

    job              name of the run
    num_workers      processes that report for the rank, each its own time: loader workers, or 1
    epoch, step      those of the last batch that the loop was given; step -1: none yet
    compute_seconds  time that the loop worked with batches
    num_batches      batches that the loop was given
    num_tokens       tokens in the batches that the loop was given, without padding
    num_retries      failed attempts
    num_corrupted    those whose response arrived, but was damaged
    buffered_bytes   bytes that are ready and wait for the loop now
    wait_seconds     time that the loop waited, by stage
    """

    job: str
    num_workers: int = 1
    epoch: int = 0
    step: int = -1
    compute_seconds: float = 0.0
    num_batches: int = 0
    num_tokens: int = 0
    num_retries: int = 0
    num_corrupted: int = 0
    buffered_bytes: int = 0
    wait_seconds: Mapping[str, float] = field(default_factory=dict)

    def to_header(self) -> str:
        """Return the value of the header: one line of ASCII."""
        waits = {stage: round(seconds, 4) for stage, seconds in self.wait_seconds.items() if seconds >= 5e-5}
        place, seconds = (self.num_workers, self.epoch, self.step), round(self.compute_seconds, 4)
        counts = (self.num_batches, self.num_tokens, self.num_retries, self.num_corrupted, self.buffered_bytes)
        return json.dumps(dict(zip(_NAMES, (self.job[:_MAX_JOB], *place, seconds, *counts, waits), strict=True)))

    @classmethod
    def from_header(cls, text: str) -> Report | None:
        """Parse the value of the header. None if it is missing or invalid: a report never makes a request fail."""
        if not text or len(text) > _MAX_BYTES:
            return None
        try:
            job, workers, epoch, step, *amounts, waits = _values_of(json.loads(text))
            known = {stage: float(waits[stage]) for stage in STAGES if stage in waits}
            workers, epoch, step = int(workers), int(epoch), int(step)
            amounts = [float(amount) for amount in amounts]
            seconds, batches, tokens, retries, corrupted, buffered = amounts
            numbers = (workers - 1, epoch, step + 1, *amounts, *known.values())
            total = sum(numbers)  # a NaN with a NaN among them: a comparison with it is false
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None
        if not (isinstance(job, str) and 0 < len(job) <= _MAX_JOB and min(numbers) >= 0 and total <= _MAX_AMOUNT):
            return None
        return cls(
            job=as_utf8(job),  # the environment's job name may hold bytes that no JSON can
            num_workers=workers,
            epoch=epoch,
            step=step,
            compute_seconds=seconds,
            num_batches=int(batches),
            num_tokens=int(tokens),
            num_retries=int(retries),
            num_corrupted=int(corrupted),
            buffered_bytes=int(buffered),
            wait_seconds=known,
        )

    def since(self, last: Report) -> Report:
        """Return the report with the amounts since the last report; both have those since the start."""
        return replace(
            self,
            compute_seconds=self.compute_seconds - last.compute_seconds,
            num_batches=self.num_batches - last.num_batches,
            num_tokens=self.num_tokens - last.num_tokens,
            num_retries=self.num_retries - last.num_retries,
            num_corrupted=self.num_corrupted - last.num_corrupted,
            wait_seconds={
                stage: self.wait_seconds.get(stage, 0.0) - last.wait_seconds.get(stage, 0.0)
                for stage in {**self.wait_seconds, **last.wait_seconds}
            },
        )


def format_timing(seconds: Mapping[str, float]) -> str:
    """Return the value of Server-Timing for the seconds of each of the server's stages."""
    return ", ".join(f"{stage};dur={1000 * spent:.3f}" for stage, spent in seconds.items())


def parse_timing(text: str) -> dict[str, float]:
    """Return the seconds of each of the server's stages in Server-Timing; other entries, as of proxies, are left out."""
    return {stage: float(duration) / 1000 for stage, duration in _TIMING.findall(text) if stage in SERVER_STAGES}
