"""Serving: one process with its catalog, on a socket that listens, until it is told to stop."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from urllib.parse import quote

import uvicorn
from fastapi import FastAPI

from penstock import __version__
from penstock_server.app import create_app
from penstock_server.datasets.catalog import Catalog, open_catalog
from penstock_server.datasets.describe import describe_tight_cache
from penstock_server.datasets.held import Served
from penstock_server.datasets.watch import watching
from penstock_server.inflight import InFlight
from penstock_server.listening import listen
from penstock_server.settings import Settings, SettingsError
from penstock_server.stalled import STALLED_SECONDS, cut_stalled
from penstock_server.storage.cache import CacheFolder
from penstock_server.storage.store import BlockStore

_LOCAL = ("127.0.0.1", "0.0.0.0", "::1", "::")


def run(
    settings: Settings, listener: socket.socket, *, greet: bool = True, begin: Callable[[int], None] = lambda _: None
) -> None:
    """Serves until a signal says stop, as one of so many processes as the settings say.

    `begin` is called once it can, with the budget of the cache. Raises SettingsError, DatasetRefused: it cannot.
    """
    store = BlockStore(open_cache(settings), settings.num_decoders)
    catalog = open_catalog(settings.data_dir, settings.tokenizer, store)
    listen(listener, settings)
    if greet:
        warn("serve", store.cache, catalog.datasets.values())
        print(_greeting(catalog, settings, listener))
        sys.stdout.flush()
    begin(store.cache.configured_bytes)
    app = create_app(catalog, InFlight(settings.most_inflight_bytes))
    with watching(catalog, settings.poll_seconds), suppress(KeyboardInterrupt):
        Server(app).run(sockets=[listener])  # has shut down when it raises KeyboardInterrupt once more
    store.close()


class Server(uvicorn.Server):
    """Uvicorn over an application; it cuts connections whose reader takes nothing."""

    def __init__(self, app: FastAPI, *, stalled_seconds: float = STALLED_SECONDS) -> None:
        super().__init__(
            uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=3, lifespan="off")
        )
        self._stalled_seconds = stalled_seconds

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Until `should_exit`."""
        cutting = asyncio.create_task(cut_stalled(self.server_state.connections, self._stalled_seconds))
        try:
            await super().serve(sockets)
        finally:
            cutting.cancel()


def open_cache(settings: Settings) -> CacheFolder:
    """The cache folder of the settings. Raises SettingsError: it cannot be used."""
    try:
        return CacheFolder(settings.cache_dir, settings.cache_bytes)
    except OSError as error:
        raise SettingsError(
            f"the cache folder {settings.cache_dir} cannot be used: {error.strerror}. Name another with --cache-dir."
        ) from error


def warn(command: str, cache: CacheFolder, datasets: Collection[Served]) -> None:
    """Tells where the cache has no room for what these datasets need at a time."""
    if warning := describe_tight_cache(cache.budget_bytes, datasets):
        print(f"penstock {command}: {warning}", file=sys.stderr)


def _greeting(catalog: Catalog, settings: Settings, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    host = "localhost" if host in _LOCAL else host
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    lines = [f"penstock {__version__} serves {settings.data_dir} at {url}", ""]
    for name, dataset in catalog.datasets.items():
        snapshot = dataset.snapshot
        lines += [
            f"  {name}: {snapshot.num_rows:,} rows in {len(snapshot.shards):,} shards, snapshot {snapshot.fingerprint}",
            f"    recipe: {snapshot.recipe.describe()}",
            f"    curl '{url}/v1/datasets/{quote(name, safe='')}/epochs/0/ranks/0/batches/0?format=json"
            f"{_small(snapshot.num_rows)}'",
        ]
    lines += [f"  {name}: a mixture, {mixture.mix}" for name, mixture in catalog.mixtures.items()]
    for name, reason in catalog.refused.items():
        lines += [f"  {name}: NOT SERVED", *(f"    {line}" for line in reason.splitlines())]
    return "\n".join([*lines, "", f"every URL is listed at {url}/docs; Ctrl-C stops"])


def _small(num_rows: int) -> str:
    # The line that is printed must work on a dataset of three rows, too.
    return "" if num_rows >= 8 else f"&batch_size={num_rows}"
