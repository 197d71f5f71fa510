"""Gauges of a server whose processes know different things."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

from prometheus_client.core import Metric

from penstock_server.monitoring.gauges import GAUGES, Gauges, process_values


def status(slot: int, fingerprint: str, made_at: float, blocks: int, counted: int) -> dict[str, Any]:
    gauges = {
        "penstock_dataset_blocks": blocks,
        "penstock_index_counted_blocks": counted,
        "penstock_index_counting": counted > 0,
        "penstock_bad_rows": 0,
        "penstock_snapshot_timestamp_seconds": made_at,
    }
    process = dict.fromkeys(process_values({}), 1.0 + slot)
    return {
        "slot": slot, "jobs": [], "in_flight_bytes": 5, "in_flight_budget_bytes": 10,
        "datasets": {"wiki": (fingerprint, gauges)}, "process": process,
    }  # fmt: skip


def values(*statuses: dict[str, Any]) -> dict[tuple[str, ...], float]:
    catalog = Mock(datasets={}, mixtures={}, refused={})
    catalog.store.cache.used_bytes = catalog.store.cache.budget_bytes = 7
    families: list[Metric] = [*Gauges(catalog, statuses).collect()]
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_dataset_is_as_the_process_that_knows_most_says() -> None:
    seen = values(status(0, "new", 20.0, 4, 3), status(1, "new", 20.0, 4, 0), status(2, "old", 10.0, 9, 9))
    assert seen["penstock_dataset_blocks", "wiki"] == 4
    assert seen["penstock_index_counted_blocks", "wiki"] == 3
    assert seen["penstock_index_counting", "wiki"] == 1
    assert seen["penstock_in_flight_bytes",] == 15
    assert seen["penstock_cache_bytes",] == 7


def test_processes_are_named_by_their_slots() -> None:
    seen = values(status(0, "new", 20.0, 4, 0), status(2, "new", 20.0, 4, 0))  # the one between has not started yet
    assert seen["process_open_fds", "2"] == 3
    assert ("process_open_fds", "1") not in seen


def test_counters_of_a_process_go_on_from_those_before_it() -> None:
    before = {info.name: 1e6 for info in GAUGES}
    seen = process_values(before)
    assert seen["process_cpu_seconds_total"] >= 1e6
    assert seen["python_gc_collections_total"] >= 1e6
    assert 0 < seen["process_open_fds"] < 1e6
