"""Gauges: what a server is at the moment of a scrape, read from the statuses of its processes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock import __version__, wire
from penstock_server.catalog.catalog import Catalog
from penstock_server.monitoring.jobs import merged
from penstock_server.monitoring.metrics import MetricInfo

Samples = dict[tuple[str, ...], float]  # of one metric, by the values of its labels

_OF_DATASETS = (
    MetricInfo("penstock_dataset_blocks", "gauge", "Blocks of the latest snapshot.", ("dataset",)),
    MetricInfo("penstock_index_counted_blocks", "gauge", "Blocks of the latest snapshot with counted tokens.", ("dataset",)),
    MetricInfo("penstock_index_counting", "gauge", "1 while the tokens of the latest snapshot are counted.", ("dataset",)),
    MetricInfo("penstock_bad_rows", "gauge", "Rows of the latest snapshot that are known to be unusable.", ("dataset",)),
    MetricInfo("penstock_snapshot_timestamp_seconds", "gauge", "Time when the snapshot became the latest.", ("dataset",)),
)
_OF_PROCESSES = (
    MetricInfo("process_resident_memory_bytes", "gauge", "Resident memory of a server process.", ("process",)),
    MetricInfo("process_cpu_seconds_total", "counter", "CPU time of a server process and its predecessors.", ("process",)),
    MetricInfo("process_open_fds", "gauge", "Open file descriptors of a server process.", ("process",)),
    MetricInfo("process_start_time_seconds", "gauge", "Start of a server process.", ("process",)),
    MetricInfo("python_gc_collections_total", "counter", "Garbage collections, likewise.", ("process",)),
)
GAUGES = (
    MetricInfo("penstock_build_info", "gauge", "Versions of the server and of the wire format; always 1.", ("version", "wire")),
    MetricInfo("penstock_processes", "gauge", "Server processes."),
    MetricInfo("penstock_active_ranks", "gauge", "Ranks that reported lately.", ("dataset",)),
    MetricInfo(
        "penstock_rank_wait_fraction_max", "gauge", "Recent wait fraction of the rank that waits most, 0 to 1.", ("dataset",)
    ),
    MetricInfo("penstock_in_flight_bytes", "gauge", "Bytes of responses that clients have not read yet."),
    MetricInfo("penstock_in_flight_budget_bytes", "gauge", "Most bytes that such responses may take."),
    MetricInfo("penstock_cache_bytes", "gauge", "Bytes of the cached blocks."),
    MetricInfo("penstock_cache_budget_bytes", "gauge", "Most bytes that cached blocks may take."),
    MetricInfo("penstock_refused_datasets", "gauge", "Datasets that cannot be served."),
    *_OF_DATASETS,
    *_OF_PROCESSES,
)

_process, _collections = ProcessCollector(registry=None), GCCollector(registry=CollectorRegistry())


class Gauges(Collector):
    """The metrics of GAUGES, from the statuses of all processes."""

    def __init__(self, catalog: Catalog, statuses: Sequence[Mapping[str, Any]]) -> None:
        self._catalog, self._statuses = catalog, statuses

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, in the order of GAUGES."""
        samples = self._of_server() | self._of_ranks() | self._of_datasets() | self._of_processes()
        for info in GAUGES:
            kind = CounterMetricFamily if info.kind == "counter" else GaugeMetricFamily
            family = kind(info.name, info.text, labels=info.labels)
            for labels, value in samples[info.name].items():
                family.add_metric(labels, value)
            yield family

    def _of_server(self) -> dict[str, Samples]:
        cache = self._catalog.store.cache
        return {
            "penstock_build_info": {(__version__, str(wire.VERSION)): 1.0},
            "penstock_processes": {(): len(self._statuses)},
            "penstock_in_flight_bytes": {(): sum(status["in_flight_bytes"] for status in self._statuses)},
            "penstock_in_flight_budget_bytes": {(): sum(status["in_flight_budget_bytes"] for status in self._statuses)},
            "penstock_cache_bytes": {(): cache.used_bytes},
            "penstock_cache_budget_bytes": {(): cache.budget_bytes},
            "penstock_refused_datasets": {(): len(self._catalog.refused)},
        }

    def _of_ranks(self) -> dict[str, Samples]:
        now, names = time.time(), (*self._catalog.datasets, *self._catalog.mixtures)
        running = {name: list[float]() for name in names}
        for key, job in merged(status["jobs"] for status in self._statuses).items():
            if key.dataset in running:
                running[key.dataset] += [rank.wait_fraction or 0.0 for rank in job.ranks.values() if rank.is_running(now)]
        return {
            "penstock_active_ranks": {(name,): len(fractions) for name, fractions in running.items()},
            "penstock_rank_wait_fraction_max": {(name,): max(fractions, default=0.0) for name, fractions in running.items()},
        }

    def _of_datasets(self) -> dict[str, Samples]:
        known = dict[str, list[tuple[str, dict[str, float]]]]()  # fingerprint and values, as each process knows them
        for status in self._statuses:
            for name, snapshot in status["datasets"].items():
                known.setdefault(name, []).append(snapshot)
        samples: dict[str, Samples] = {info.name: {} for info in _OF_DATASETS}
        for name, snapshots in known.items():
            latest, _ = max(snapshots, key=lambda snapshot: snapshot[1]["penstock_snapshot_timestamp_seconds"])
            for info in _OF_DATASETS:
                # One process counts tokens or meets a bad row, and the others learn of it later.
                samples[info.name][name,] = max(values[info.name] for fingerprint, values in snapshots if fingerprint == latest)
        return samples

    def _of_processes(self) -> dict[str, Samples]:
        return {
            info.name: {(str(status["slot"]),): status["process"][info.name] for status in self._statuses}
            for info in _OF_PROCESSES
        }


def dataset_values(catalog: Catalog) -> dict[str, tuple[str, dict[str, float]]]:
    """Return the fingerprint and the gauges of each dataset's latest snapshot, as this process knows them."""
    found = {}
    for name, state in catalog.states.items():
        if opened := state.opened:
            fingerprint, index = opened.snapshot.fingerprint, opened.index
            record = state.records.get(fingerprint)
            values = {
                "penstock_dataset_blocks": opened.snapshot.num_blocks,
                "penstock_index_counted_blocks": index.num_counted,
                "penstock_index_counting": index.is_counting,
                "penstock_bad_rows": opened.blocks.quarantine.num_bad_rows,
                "penstock_snapshot_timestamp_seconds": record.made_at_ns / 1e9 if record else 0.0,
            }
            found[name] = (fingerprint, {gauge: float(value) for gauge, value in values.items()})
    return found


def process_values(before: Mapping[str, float]) -> dict[str, float]:
    """Return the values of this process. Counters go on from `before`, the last values of the process before it in its slot."""
    values = {info.name: before.get(info.name, 0.0) if info.kind == "counter" else 0.0 for info in _OF_PROCESSES}
    for family in (*_process.collect(), *_collections.collect()):
        for sample in family.samples:
            if sample.name in values:
                values[sample.name] += sample.value
    return values
