"""Watcher that reloads files when they change, such as tokens and certificates."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock_server.settings import SettingsError
from penstock_server.sources.stats import FileStat, stat_of_file

log = logging.getLogger("penstock.security")

_SECONDS = 1.0


@dataclass(slots=True)
class _Watched:
    paths: tuple[Path, ...]
    load: Callable[[], None]
    stats: list[FileStat | None]


class Watcher:
    """Thread that checks files once a second. If a changed file cannot be loaded, it logs the reason."""

    def __init__(self) -> None:
        self._watched = list[_Watched]()
        self._woken = threading.Event()

    def watch(self, paths: Sequence[Path], load: Callable[[], None]) -> None:
        """Load files now, and again after each change. Raises SettingsError: they cannot be loaded now."""
        watched = _Watched(tuple(paths), load, _stats_of(paths))
        load()
        self._watched.append(watched)

    def wake(self) -> None:
        """Reload all files soon, changed or not. A signal handler may call it."""
        self._woken.set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch in a thread."""
        stopped = threading.Event()

        def run() -> None:
            while not stopped.is_set():
                is_woken = self._woken.wait(_SECONDS)
                self._woken.clear()
                self._check(reload_all=is_woken)

        threading.Thread(target=run, name="penstock-watcher", daemon=True).start()
        try:
            yield
        finally:
            stopped.set()

    def _check(self, *, reload_all: bool) -> None:
        for watched in self._watched:
            stats = _stats_of(watched.paths)
            if not reload_all and stats == watched.stats:
                continue
            watched.stats = stats
            names = " and ".join(str(path) for path in watched.paths)
            try:
                watched.load()
                log.info("%s: reloaded", names)
            except SettingsError as error:
                log.warning("%s What was loaded before stays in use.", error)
            except Exception:  # otherwise the thread would end
                log.exception("%s cannot be loaded. What was loaded before stays in use.", names)


def _stats_of(paths: Sequence[Path]) -> list[FileStat | None]:
    return [stat_of_file(path) for path in paths]
