"""Units as tasks of a Ray cluster, a bounded number at a time. Only this module imports Ray."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

from penstock.cli.output import CommandError
from penstock_server.catalog.catalog import Catalog, open_data
from penstock_server.catalog.dataset import OpenSnapshot
from penstock_server.cluster.units import MAX_ATTEMPTS, Failure, Units, patiently
from penstock_server.problems import DatasetUnavailable, Problem, SnapshotGone
from penstock_server.settings import Settings

_AHEAD = 2  # tasks in flight for each core of the cluster, so that no core waits for the driver
_POLL_SECONDS = 1.0
_LONG_SECONDS = 60.0  # at the end, a unit that takes longer is made a second time
_ENVIRONMENT = {"PENSTOCK_CORES": "1", "TOKENIZERS_PARALLELISM": "false"}  # Ray runs a process for each core


def run_on_ray(address: str, settings: Settings, units: Units, advance: Callable[[int], None]) -> list[Failure]:
    """Make units by tasks on the cluster at `address`; "" is that of RAY_ADDRESS, or a new one on this machine.

    A unit is tried three times, and made again if its node dies. Raises CommandError: Ray is missing, or does not respond.
    Raises SnapshotGone: a task sees other data. Raises OSError: the store fails.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise CommandError("Ray is not installed: pip install 'penstock[ray]'") from error
    try:
        if not ray.is_initialized():  # for the first of several datasets; Ray ends with this process
            ray.init(address or None)
    except (ConnectionError, ValueError, RuntimeError) as error:  # a wrong address, or another version of Ray or Python
        place = address or os.environ.get("RAY_ADDRESS") or "this machine"
        raise CommandError(
            f"the Ray cluster at {place} cannot be used: {error}\n"
            f"Give the address of its head node, such as HOST:6379, and use the cluster's versions of Ray and Python."
        ) from error
    return _Driver(ray, settings, units).run(advance)


class _Driver:
    """Submits units as tasks, and takes their results."""

    def __init__(self, ray: Any, settings: Settings, units: Units) -> None:
        self._ray, self._units, self._settings = ray, units, settings
        # Ray's own retries would also count the loss of a node.
        self._make = ray.remote(num_cpus=1, max_retries=0, runtime_env={"env_vars": _ENVIRONMENT})(make_unit)
        self._done = units.done()
        self._waiting = deque(unit for unit in range(len(units)) if unit not in self._done)
        self._in_flight = dict[Any, tuple[int, float]]()  # the unit of a task, and when it was submitted
        self._reasons = dict[int, list[str]]()  # of attempts that failed
        self._repeated = set[int]()
        self._longest_seconds = 0.0

    def run(self, advance: Callable[[int], None]) -> list[Failure]:
        """Run until each unit is done or has failed; see run_on_ray."""
        while self._waiting or self._in_flight:
            advance(len(self._done))
            num_cores = int(self._ray.cluster_resources().get("CPU", 1))
            while self._waiting and len(self._in_flight) < _AHEAD * num_cores:
                self._submit(self._waiting.popleft())
            if not self._waiting:
                self._repeat_long_ones()
            ready, _ = self._ray.wait([*self._in_flight], timeout=_POLL_SECONDS)
            for task in ready:
                self._take(task)
        advance(len(self._done))
        failed = sorted(self._reasons.keys() - self._done)
        return [Failure(self._units.place(unit), self._reasons[unit][-1]) for unit in failed]

    def _submit(self, unit: int) -> None:
        task = self._make.remote(self._settings, self._units.dataset, unit, self._units.names[unit])
        self._in_flight[task] = unit, time.monotonic()

    def _repeat_long_ones(self) -> None:
        """Submit a second task for each unit that takes long. The first result counts; the other task ends for nothing."""
        now, most = time.monotonic(), max(_LONG_SECONDS, 2 * self._longest_seconds)
        for unit, began_at in list(self._in_flight.values()):
            if now - began_at > most and unit not in self._repeated:
                self._repeated.add(unit)
                self._submit(unit)

    def _take(self, task: Any) -> None:
        unit, began_at = self._in_flight.pop(task)
        try:
            reason: str | None = self._ray.get(task)
        except self._ray.exceptions.NodeDiedError:
            self._waiting.append(unit)
            return
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, OSError | Problem | CommandError):
                raise error.cause from None
            raise
        except self._ray.exceptions.RayError as error:  # its process died, perhaps for its memory
            reason = str(error)
        if reason is None:
            self._longest_seconds = max(self._longest_seconds, time.monotonic() - began_at)
            self._done.add(unit)
            for other in [other for other, (same, _) in self._in_flight.items() if same == unit]:
                self._ray.cancel(other, force=True)
                del self._in_flight[other]
        elif unit not in self._done:
            reasons = self._reasons.setdefault(unit, [])
            reasons.append(reason)
            if len(reasons) < MAX_ATTEMPTS and all(other != unit for other, _ in self._in_flight.values()):
                self._waiting.append(unit)


def make_unit(settings: Settings, dataset: str, unit: int, name: str) -> str | None:
    """Make the unit of this name in a process of Ray. Return the reason if it fails.

    Raises OSError: the store fails. Raises SnapshotGone, and the errors of data or settings that cannot be opened here.
    """
    units = _opened(settings, dataset)
    if unit >= len(units) or units.name(unit) != name:
        raise SnapshotGone(
            f"row group {unit} of {dataset} is not the same on all machines. Wait until no file changes, mount the same data "
            f"and recipe everywhere, install the same version of Penstock, and run the command again."
        )
    error = units.try_to_make(unit)
    return None if error is None else units.reason(unit, error)


# A process makes many units, of several datasets.


@cache
def _opened(settings: Settings, dataset: str) -> Units:
    catalog = _catalog(settings)

    def find() -> OpenSnapshot:
        try:
            return catalog[dataset].latest
        except DatasetUnavailable:
            catalog.open(waits=True)  # at once, where a poll waits until files settle
            raise

    opened = patiently(find)
    assert opened.blocks.shared
    return Units(opened, opened.blocks.shared)


@cache
def _catalog(settings: Settings) -> Catalog:
    return open_data(settings, waits=True)
