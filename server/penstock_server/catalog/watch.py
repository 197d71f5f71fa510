"""Watch: a thread that polls the data folder for changes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from penstock_server.catalog.catalog import Catalog
from penstock_server.catalog.scan import QUIET_SECONDS

log = logging.getLogger("penstock.watch")


@contextmanager
def watching(catalog: Catalog, poll_seconds: float) -> Iterator[None]:
    """Poll the catalog's folder every `poll_seconds`, sooner while something changes there; 0 disables polling."""
    stopped = threading.Event()
    if poll_seconds:
        threading.Thread(target=_watch, args=(catalog, poll_seconds, stopped), name="penstock-watch", daemon=True).start()
    try:
        yield
    finally:
        stopped.set()


def _watch(catalog: Catalog, poll_seconds: float, stopped: threading.Event) -> None:
    wait_seconds = poll_seconds
    while not stopped.wait(wait_seconds):
        wait_seconds = poll_seconds
        try:
            if not catalog.poll():
                wait_seconds = min(poll_seconds, QUIET_SECONDS)
        except Exception:  # otherwise the thread would end, and new data would go unnoticed
            log.exception("the data folder could not be looked at; it will be tried again in %s seconds", poll_seconds)
