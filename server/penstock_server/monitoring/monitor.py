"""Monitor: the status of a server. Each process writes its part once a second, and any process answers for all.

reports -> Jobs, counts -> Metrics  ->  status of this process  ->  FOLDER/status-SLOT, if there are several processes
/v1/jobs, /metrics                  <-  the statuses of all processes
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgpack
from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock import __version__, wire
from penstock_server.api.service import InFlight
from penstock_server.catalog.catalog import Catalog
from penstock_server.monitoring.buckets import BUCKET_SECONDS, NUM_BUCKETS, Buckets, bucket_of, summed
from penstock_server.monitoring.jobs import Client, JobKey, JobRecord, Jobs, merged
from penstock_server.monitoring.metrics import all_values
from penstock_server.monitoring.place import Place
from penstock_server.monitoring.view import describe_job, verdict
from penstock_server.schemas import JobsInfo

log = logging.getLogger("penstock.monitor")

_SECONDS = 1.0
_RATES = ("tokens", "bytes", "batches", "refusals", "hits", "misses")  # whose history is kept


class Monitor:
    """The status of this process, and that of the whole server. `place` is None for a server of one process."""

    def __init__(self, catalog: Catalog, in_flight: InFlight, jobs: Jobs, place: Place | None = None) -> None:
        self._catalog, self._in_flight, self._jobs, self._place = catalog, in_flight, jobs, place
        self._metrics = catalog.store.metrics
        self._started_at = time.time()
        self._history = {name: Buckets() for name in (*_RATES, "cache_used_bytes")}
        self._totals: Mapping[str, float] = {}  # of `_RATES`, at the last look
        self._spent: dict[str, float] = {}  # counters of the processes before this one in its slot
        self._status: dict[str, Any] = {}
        self._looking = threading.Lock()
        # Bytes of responses that a client's host has not acknowledged. The kernel holds ranges of a slow link.
        self.unsent: Callable[[], Mapping[Client, int]] = dict
        if place and (before := _read(place.status_file)):
            self._jobs.restore(before["jobs"])
            self._history = {name: Buckets(*packed) for name, packed in before["history"].items()}
            self._spent = {name: value for name, value in before["process"].items() if _is_counter(name)}
        self.look()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Look at this process once a second, in a thread."""
        stopped = threading.Event()

        def run() -> None:
            while not stopped.wait(_SECONDS):
                try:
                    self.look()
                except Exception:  # otherwise the thread would end, and the page would show old numbers
                    log.exception("the status of this process cannot be gathered")

        threading.Thread(target=run, name="penstock-monitor", daemon=True).start()
        try:
            yield
        finally:
            stopped.set()

    def look(self) -> None:
        """Gather the status of this process, and write it for the others."""
        with self._looking:
            self._look()

    def _look(self) -> None:
        bucket, totals = bucket_of(time.time()), self._count()
        for name in _RATES:
            self._history[name].add(bucket, totals[name] - self._totals.get(name, totals[name]))
        self._history["cache_used_bytes"].set(bucket, self._catalog.store.cache.used_bytes)
        self._totals = totals
        self._status = {
            "jobs": self._jobs.pack(self.unsent()),
            "history": {name: buckets.pack() for name, buckets in self._history.items()},
            "started_at": self._started_at,
            "in_flight_bytes": self._in_flight.reserved_bytes,
            "in_flight_budget_bytes": self._in_flight.budget_bytes,
            "process": _process_values(self._spent),
        }
        if self._place:
            _write(self._place.status_file, self._status)

    def _count(self) -> dict[str, float]:
        """Return the totals of `_RATES` of this process."""
        metrics = self._metrics
        return {
            "tokens": _total(metrics.tokens),
            "bytes": _total(metrics.response_bytes),
            "batches": _total(metrics.batches),
            "refusals": _total(metrics.refusals),
            "hits": _total(metrics.cache_hits),
            "misses": _total(metrics.cache_misses),
        }

    def _statuses(self) -> list[dict[str, Any]]:
        """Return the statuses of all processes of the server."""
        if self._place is None:
            return [self._status]
        files = sorted(self._place.folder.glob("status-*[0-9]"))
        return [status for file in files if (status := _read(file))]

    def describe(self, *, history: bool) -> JobsInfo:
        """Describe all jobs and this server for /v1/jobs."""
        self.look()
        statuses, now = self._statuses(), time.time()
        jobs = merged(status["jobs"] for status in statuses)
        info: JobsInfo = {
            "verdict": verdict(jobs, now),
            "server": self._describe_server(statuses, now, history=history),
            "jobs": [describe_job(key, job, now, history=history) for key, job in _newest_first(jobs)],
        }
        return info

    def _describe_server(self, statuses: Sequence[Mapping[str, Any]], now: float, *, history: bool) -> Any:
        bucket, cache = bucket_of(now), self._catalog.store.cache
        series = {name: summed((Buckets(*s["history"][name]) for s in statuses), bucket) for name in _RATES}
        # Two whole buckets and the one under way.
        started_at = min(status["started_at"] for status in statuses)
        seconds = max(1.0, min(now - started_at, now % BUCKET_SECONDS + 2 * BUCKET_SECONDS))
        rates = {name: sum(amounts[-3:]) for name, amounts in series.items()}
        requested = rates["hits"] + rates["misses"]
        server = {
            "version": __version__,
            "time": now,
            "started_at": started_at,
            "processes": len(statuses),
            **{f"{name}_per_second": rates[name] / seconds for name in ("tokens", "bytes", "batches", "refusals")},
            "in_flight_bytes": sum(status["in_flight_bytes"] for status in statuses),
            "in_flight_budget_bytes": sum(status["in_flight_budget_bytes"] for status in statuses),
            "cache_used_bytes": cache.used_bytes,
            "cache_budget_bytes": cache.budget_bytes,
            "cache_hit_fraction": rates["hits"] / requested if requested else None,
        }
        if history:
            used = self._history["cache_used_bytes"].until(bucket)  # the cache folder is shared: not a sum
            first = max(0, NUM_BUCKETS - 1 - (bucket - bucket_of(started_at)))
            shown = {**series, "cache_used_bytes": used}
            server["history"] = {
                "seconds": BUCKET_SECONDS,
                "end": (bucket + 1) * BUCKET_SECONDS,
                **{name: [None] * first + amounts[first:] for name, amounts in shown.items()},
            }
        return server

    def metrics_text(self) -> bytes:
        """Return the metrics of all processes in the text format of Prometheus."""
        self.look()
        counters = all_values(self._place.folder) if self._place else self._metrics.registry
        gauges = CollectorRegistry()
        gauges.register(_Gauges(self._catalog, self._statuses()))
        return generate_latest(counters) + generate_latest(gauges)


class _Gauges(Collector):
    """The gauges, as one scrape reads them."""

    def __init__(self, catalog: Catalog, statuses: list[dict[str, Any]]) -> None:
        self._catalog, self._statuses = catalog, statuses

    def collect(self) -> Iterator[Metric]:
        cache = self._catalog.store.cache
        yield InfoMetricFamily("penstock_build", "Version of the server.", {"version": __version__, "wire": str(wire.VERSION)})
        yield GaugeMetricFamily("penstock_processes", "Server processes that answer.", len(self._statuses))
        yield GaugeMetricFamily("penstock_cache_bytes", "Bytes of the cached blocks.", cache.used_bytes)
        yield GaugeMetricFamily("penstock_cache_budget_bytes", "Most bytes that cached blocks may take.", cache.budget_bytes)
        for name, text in (
            ("in_flight_bytes", "Bytes of responses that clients have not read yet."),
            ("in_flight_budget_bytes", "Most bytes that such responses may take."),
        ):
            yield GaugeMetricFamily(f"penstock_{name}", text, sum(status[name] for status in self._statuses))
        yield from self._of_datasets()
        yield from self._of_ranks()
        yield from self._of_processes()

    def _of_datasets(self) -> Iterator[Metric]:
        blocks, counted, changed, bad = (
            GaugeMetricFamily(f"penstock_{name}", text, labels=["dataset"])
            for name, text in (
                ("dataset_blocks", "Blocks of the latest snapshot."),
                ("index_counted_blocks", "Blocks of the latest snapshot whose tokens are counted."),
                ("snapshot_timestamp_seconds", "When the latest snapshot was made; it changes with the data."),
                ("bad_rows", "Rows of the latest snapshot that are known to be unusable."),
            )
        )
        refused = GaugeMetricFamily("penstock_refused_datasets", "Datasets that cannot be served.", len(self._catalog.refused))
        for name, opened in self._catalog.datasets.items():
            blocks.add_metric([name], opened.snapshot.num_blocks)
            counted.add_metric([name], opened.index.num_counted)
            bad.add_metric([name], opened.blocks.quarantine.num_bad_rows)
            with suppress(Exception):
                changed.add_metric([name], next(iter(self._catalog[name].records.values())).made_at_ns / 1e9)
        yield from (blocks, counted, changed, bad, refused)

    def _of_ranks(self) -> Iterator[Metric]:
        active, worst = (
            GaugeMetricFamily(f"penstock_{name}", text, labels=["dataset"])
            for name, text in (
                ("active_ranks", "Ranks that reported lately."),
                ("rank_wait_fraction_max", "Wait fraction of the rank that waits most, 0 to 1."),
            )
        )
        now, served = time.time(), self._catalog
        running = dict[str, list[float]]()
        for key, job in merged(status["jobs"] for status in self._statuses).items():
            if key.dataset in served.datasets or key.dataset in served.mixtures:
                fractions = [rank.wait_fraction or 0.0 for rank in job.ranks.values() if rank.is_running(now)]
                running.setdefault(key.dataset, []).extend(fractions)
        for dataset in (*served.datasets, *served.mixtures):
            active.add_metric([dataset], len(running.get(dataset, [])))
            worst.add_metric([dataset], max(running.get(dataset, []), default=0.0))
        yield from (active, worst)

    def _of_processes(self) -> Iterator[Metric]:
        """Yield the values of each process, such as its memory and its garbage collections, by its slot."""
        families = dict[str, Metric]()
        for slot, status in enumerate(self._statuses):
            for name, value in status["process"].items():
                family = families.get(name)
                if family is None:
                    kind = CounterMetricFamily if _is_counter(name) else GaugeMetricFamily
                    family = families[name] = kind(name, _PROCESS_TEXTS[name], labels=["process"])
                family.add_metric([str(slot)], value)  # type: ignore[attr-defined]
        yield from families.values()


_process, _collections = ProcessCollector(registry=None), GCCollector(registry=CollectorRegistry())
_PROCESS_TEXTS = {
    "process_resident_memory_bytes": "Resident memory of a server process.",
    "process_cpu_seconds_total": "CPU time of a server process, and of those before it in its place.",
    "process_open_fds": "Open file descriptors of a server process.",
    "process_start_time_seconds": "Start of a server process.",
    "python_gc_collections_total": "Garbage collections of a server process, and of those before it in its place.",
}


def _process_values(spent: Mapping[str, float]) -> dict[str, float]:
    """Return the values of this process; counters go on from those of the processes before it."""
    values = dict.fromkeys(_PROCESS_TEXTS, 0.0)
    for family in (*_process.collect(), *_collections.collect()):
        for sample in family.samples:
            if sample.name in values:
                values[sample.name] += sample.value
    return {name: value + spent.get(name, 0.0) for name, value in values.items()}


def _is_counter(name: str) -> bool:
    return name.endswith("_total")


def _total(counter: Any) -> float:
    return float(sum(s.value for family in counter.collect() for s in family.samples if s.name.endswith("_total")))


def _newest_first(jobs: Mapping[JobKey, JobRecord]) -> list[tuple[JobKey, JobRecord]]:
    return sorted(jobs.items(), key=lambda item: item[1].last_seen, reverse=True)


def _read(path: Path) -> dict[str, Any] | None:
    """Return a process's status; None if it has none yet."""
    with suppress(OSError, ValueError):
        status: dict[str, Any] = msgpack.unpackb(path.read_bytes(), use_list=False, strict_map_key=False)
        return status
    return None


def _write(path: Path, status: Mapping[str, Any]) -> None:
    temporary = path.with_suffix(".new")
    try:
        temporary.write_bytes(msgpack.packb(status))
        temporary.replace(path)
    except OSError as error:  # a full disk stops no job
        log.debug("%s cannot be written: %s", path, error)
