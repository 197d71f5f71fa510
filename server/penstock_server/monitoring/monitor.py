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
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from penstock import __version__
from penstock.spec import Spec
from penstock_server.api.admission import InFlight
from penstock_server.catalog.catalog import Catalog
from penstock_server.logs import Seldom
from penstock_server.monitoring.buckets import BUCKET_SECONDS, NUM_BUCKETS, Buckets, bucket_of, summed
from penstock_server.monitoring.gauges import Gauges, dataset_values, process_values
from penstock_server.monitoring.jobs import Client, JobKey, JobRecord, Jobs, merged
from penstock_server.monitoring.metrics import all_values, slot_counters
from penstock_server.monitoring.place import Place
from penstock_server.monitoring.view import describe_job, verdict
from penstock_server.schemas.monitoring import JobsInfo
from penstock_server.security.tokens import Identity

log = logging.getLogger("penstock.monitor")

_SECONDS = 1.0
_RATES = {  # counters whose history is kept, each with labels that it must have
    "tokens": ("penstock_tokens_total", {}),
    "bytes": ("penstock_response_bytes_total", {}),
    "batches": ("penstock_batches_total", {}),
    "refusals": ("penstock_refusals_total", {}),
    "hits": ("penstock_cache_hits_total", {}),
    "misses": ("penstock_cache_misses_total", {}),
    "throttled": ("penstock_source_requests_total", {"outcome": "throttled"}),
    "failed": ("penstock_source_requests_total", {"outcome": "failed"}),
}
_OF_ALL_DATASETS = (
    *(f"{name}_per_second" for name in ("tokens", "bytes", "batches", "refusals")),
    "in_flight_bytes",
    "cache_used_bytes",
    "cache_hit_fraction",
    "source_requests_throttled",
    "source_requests_failed",
)


class Monitor:
    """The status of this process, and that of the whole server. `place` is None for a server of one process."""

    def __init__(self, catalog: Catalog, in_flight: InFlight, jobs: Jobs, place: Place | None = None) -> None:
        self._catalog, self._in_flight, self._jobs, self._place = catalog, in_flight, jobs, place
        self._metrics = catalog.store.metrics
        self._started_at = time.time()
        self._history = {name: Buckets() for name in (*_RATES, "cache_used_bytes")}
        self._totals: Mapping[str, float] = {}  # of `_RATES`, at the last look
        self._process_before: Mapping[str, float] = {}  # values of the process before this one in its slot
        self._status: dict[str, Any] = {}
        self._looking = threading.Lock()
        # Bytes of responses that a client's host has not acknowledged. The kernel holds ranges of a slow link.
        self.unsent: Callable[[], Mapping[Client, int]] = dict
        if place and (before := _read(place.status_file)):
            self._started_at = before["started_at"]
            self._jobs.restore(before["jobs"])
            self._history = {name: Buckets(*packed) for name, packed in before["history"].items()}
            self._process_before = before["process"]
        self.look()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Look at this process once a second, in a thread."""
        stopped, failures = threading.Event(), Seldom()

        def run() -> None:
            while not stopped.wait(_SECONDS):
                try:
                    self.look()
                except Exception:  # otherwise the thread would end, and the page would show old numbers
                    if failures.is_due():  # not each second, if its folder is removed
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
        self._metrics.flush()
        bucket, totals = bucket_of(time.time()), self._count()
        for name in _RATES:
            self._history[name].add(bucket, totals[name] - self._totals.get(name, totals[name]))
        self._history["cache_used_bytes"].set(bucket, self._catalog.store.cache.used_bytes)
        self._totals = totals
        self._status = {
            "slot": self._place.slot if self._place else 0,
            "jobs": self._jobs.pack(self.unsent()),
            "history": {name: buckets.pack() for name, buckets in self._history.items()},
            "started_at": self._started_at,
            "in_flight_bytes": self._in_flight.reserved_bytes,
            "in_flight_budget_bytes": self._in_flight.budget_bytes,
            "datasets": dataset_values(self._catalog),
            "process": process_values(self._process_before),
        }
        if self._place:
            _write(self._place.status_file, self._status)

    def _count(self) -> dict[str, float]:
        """Return the totals of `_RATES` of this process and those before it in its slot."""
        place = self._place
        families = slot_counters(place.folder, place.slot) if place else self._metrics.registry.collect()
        samples = [sample for family in families for sample in family.samples]
        return {
            name: sum(s.value for s in samples if s.name == counter and labels.items() <= s.labels.items())
            for name, (counter, labels) in _RATES.items()
        }

    def _statuses(self) -> list[dict[str, Any]]:
        """Return the statuses of all processes of the server."""
        if self._place is None:
            return [self._status]
        files = sorted(self._place.folder.glob("status-*[0-9]"))
        return [status for file in files if (status := _read(file))]

    def describe(self, identity: Identity, *, history: bool) -> JobsInfo:
        """Describe the jobs that a caller may see, and this server, for /v1/jobs."""
        self.look()
        statuses, now = self._statuses(), time.time()
        shows = self._shows(identity)
        jobs = {
            key: job
            for key, job in merged(status["jobs"] for status in statuses).items()
            if all(map(shows, [key.dataset, *_mixed(job)]))
        }
        info: JobsInfo = {
            "caller": identity.name,
            "verdict": verdict(jobs, now),
            "server": self._describe_server(statuses, now, identity, history=history),
            "jobs": [describe_job(key, job, now, history=history) for key, job in _newest_first(jobs)],
        }
        return info

    def _describe_server(self, statuses: Sequence[Mapping[str, Any]], now: float, identity: Identity, *, history: bool) -> Any:
        """Describe the server. Numbers of all datasets together are null if the caller may not see all of them."""
        sees_all = self._catalog.seen_by(identity) is self._catalog
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
            "source_requests_throttled": round(rates["throttled"]),
            "source_requests_failed": round(rates["failed"]),
        }
        if not sees_all:
            server |= dict.fromkeys(_OF_ALL_DATASETS)
        if history:
            used = self._history["cache_used_bytes"].until(bucket)  # the cache folder is shared: not a sum
            first = max(0, NUM_BUCKETS - 1 - (bucket - bucket_of(started_at)))
            shown = {**series, "cache_used_bytes": used}
            server["history"] = {
                "seconds": BUCKET_SECONDS,
                "end": (bucket + 1) * BUCKET_SECONDS,
                **{name: [None] * first + amounts[first:] if sees_all else [] for name, amounts in shown.items()},
            }
        return server

    def metrics_text(self, identity: Identity) -> bytes:
        """Return the metrics of all processes that a caller may see, in the text format of Prometheus."""
        self.look()
        counters = all_values(self._place.folder) if self._place else self._metrics.registry
        gauges = CollectorRegistry()
        gauges.register(Gauges(self._catalog, self._statuses()))
        shows = self._shows(identity)
        return b"".join(generate_latest(_Visible(registry, shows)) for registry in (counters, gauges))

    def _shows(self, identity: Identity) -> Callable[[str], bool]:
        """Return a function that says whether a caller may see a dataset or mixture."""
        view = self._catalog.seen_by(identity)
        return (lambda _: True) if view is self._catalog else view.__contains__


class _Visible(CollectorRegistry):
    """The samples of a registry without those of datasets that a caller may not see."""

    def __init__(self, registry: CollectorRegistry, shows: Callable[[str], bool]) -> None:
        super().__init__()
        self._of_all, self._shows = registry, shows

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        for family in self._of_all.collect():
            family.samples = [s for s in family.samples if "dataset" not in s.labels or self._shows(s.labels["dataset"])]
            yield family


def _mixed(job: JobRecord) -> Sequence[str]:
    """Return the datasets of a job's mix, if it has one."""
    mix = Spec(mix=job.spec["mix"]).mixed()
    return mix.datasets if mix else ()


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
