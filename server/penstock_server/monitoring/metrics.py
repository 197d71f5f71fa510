"""Metrics for Prometheus: counters and histograms that the data path increments.

Every label value is from a closed set: routes, datasets served, problem types, stages. A request cannot create a series.
Gauges are read at each scrape; see gauges.py.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, values
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from penstock.wire.report import Report

T = TypeVar("T", Counter, Histogram)

_MAX_REPORTS = 100_000  # between two flushes, a second apart
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_FILE_BYTES = 1 << 20  # for the values of a hundred datasets
_SLOW = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class MetricInfo(NamedTuple):
    """What a metric is; `labels` are the names of its labels."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...] = ()


def _remembering(metric: T) -> T:
    """Make `labels` of a metric return a series it has made without a lock: a request takes a dozen."""
    metric.labels = cache(metric.labels)  # type: ignore[method-assign]
    return metric


class Metrics:
    """The counters and histograms of one process, in a registry of their own; `infos` lists them."""

    def __init__(self) -> None:
        # Without them a scrape is the same for one process and for several.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.infos = list[MetricInfo]()
        self._reports = deque[tuple[str, Report]](maxlen=_MAX_REPORTS)

        def counter(name: str, text: str, *labels: str) -> Counter:
            self.infos.append(MetricInfo(f"penstock_{name}", "counter", text, labels))
            return _remembering(Counter(f"penstock_{name}", text, labels, registry=self.registry))

        def histogram(name: str, text: str, *labels: str, buckets: tuple[float, ...] = _SLOW) -> Histogram:
            self.infos.append(MetricInfo(f"penstock_{name}", "histogram", text, labels))
            return _remembering(Histogram(f"penstock_{name}", text, labels, registry=self.registry, buckets=buckets))

        self.requests = counter(
            "requests_total", "Requests by route, method and problem type; none is a success.", "route", "method", "problem"
        )
        self.response_bytes = counter("response_bytes_total", "Bytes of response bodies.", "route")
        self.first_byte_seconds = histogram(
            "first_byte_seconds", "Time from a request to the head of its response.", "route", buckets=_FAST
        )
        self.batches = counter("batches_total", "Batches made for trainers.", "dataset")
        self.samples = counter("samples_total", "Samples in these batches.", "dataset")
        self.tokens = counter("tokens_total", "Tokens in these batches, without padding.", "dataset")
        self.replaced_samples = counter("replaced_samples_total", "Samples that replace bad rows.", "dataset")
        self.make_seconds = histogram(
            "make_seconds", "Time to assemble a chunk of batches from its blocks.", "dataset", buckets=_FAST
        )
        self.decode_seconds = histogram("decode_seconds", "Time to decode a row group, or the needed part of it.", "dataset")
        self.tokenize_seconds = histogram(
            "tokenize_seconds", "Time to tokenize a block, or rows that a request needs together.", "dataset"
        )
        self.cache_hits = counter("cache_hits_total", "Blocks that were requested and cached.")
        self.cache_misses = counter("cache_misses_total", "Blocks that were requested and not cached.")
        self.cache_evictions = counter("cache_evictions_total", "Blocks removed to make room in the cache.")
        self.cache_corrupt_blocks = counter("cache_corrupt_blocks_total", "Cached blocks that were damaged and made again.")
        self.source_requests = counter(
            "source_requests_total",
            "Requests to object stores, the hub and web servers for shards: ok, throttled or failed, which are repeated.",
            "outcome",
        )
        self.source_bytes = counter("source_bytes_total", "Bytes of shards that these requests have read.")
        self.store_requests = counter(
            "store_requests_total",
            "Requests to the shared store (--store): hit, miss, written, known (it had the file), corrupt, failed.",
            "outcome",
        )
        self.refusals = counter("refusals_total", "Requests refused because the budget of bytes in flight was used up.")
        self.limits = counter("limits_total", "Requests, connections and responses that a limit ended, by the limit.", "limit")
        self.rank_wait_seconds = counter(
            "rank_wait_seconds_total", "Time that training loops waited, as ranks report it.", "dataset", "stage"
        )
        self.rank_compute_seconds = counter(
            "rank_compute_seconds_total", "Time that training loops worked with batches, as ranks report it.", "dataset"
        )
        self.rank_retries = counter("rank_retries_total", "Failed attempts that ranks report.", "dataset")
        self.rank_corrupted = counter(
            "rank_corrupted_responses_total", "Responses that ranks report as damaged on the way.", "dataset"
        )

    def add_report(self, report: Report, dataset: str) -> None:
        """Count the report of a rank at the next `flush`. The dataset must be a served one: its name becomes a label."""
        self._reports.append((dataset, report))

    def flush(self) -> None:
        """Count the reports so far. One after the other, they would cost each request a dozen increments."""
        totals = defaultdict[tuple[Counter, tuple[str, ...]], float](float)
        with suppress(IndexError):
            while True:
                dataset, report = self._reports.popleft()
                for stage, seconds in report.wait_seconds.items():
                    totals[self.rank_wait_seconds, (dataset, stage)] += seconds
                totals[self.rank_compute_seconds, (dataset,)] += report.compute_seconds
                # Also if it is 0: Prometheus sees no increase in the first value of a series.
                totals[self.rank_retries, (dataset,)] += report.num_retries
                totals[self.rank_corrupted, (dataset,)] += report.num_corrupted
        for (counter, labels), amount in totals.items():
            counter.labels(*labels).inc(amount)


def share_values(folder: Path, slot: int) -> None:
    """Keep the values of this process in files of a folder, for all processes of the server to read.

    A process that takes the slot of another goes on with its values. Call it before `Metrics`.
    Raises OSError: the disk is full.
    """
    for kind in ("counter", "histogram"):
        file = folder / f"{kind}_{slot}.db"
        if not file.exists():
            # The files are mapped. With holes, the first count after the disk is full would end the process by SIGBUS.
            file.write_bytes(bytes(_FILE_BYTES))
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    values.ValueClass = values.MultiProcessValue(lambda: slot)  # type: ignore[no-untyped-call]


def slot_counters(folder: Path, slot: int) -> Iterable[Metric]:
    """Return the counters of the process of a slot, with those that only the processes before it incremented."""
    return MultiProcessCollector.merge([str(folder / f"counter_{slot}.db")])  # type: ignore[no-untyped-call, no-any-return]


def all_values(folder: Path) -> CollectorRegistry:
    """Return a registry with the sums over all processes that share a folder."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))  # type: ignore[no-untyped-call]
    return registry
