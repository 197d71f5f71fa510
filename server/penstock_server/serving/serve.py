"""Serving: one process with its catalog, on a listening socket, until a stop signal."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import math
import resource
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import islice

import uvicorn
from fastapi import FastAPI

from penstock import __version__
from penstock.cli.output import report
from penstock.ending import ends_at
from penstock.text import counted, printable
from penstock.urls import DATASETS, batches_path
from penstock_server.api.admission import InFlight
from penstock_server.app import create_app
from penstock_server.catalog.catalog import Catalog
from penstock_server.catalog.describe import summary
from penstock_server.logs import begin_log
from penstock_server.opening import open_data, warn
from penstock_server.serving.accepting import WorkerSlot, accept_in_turn
from penstock_server.serving.heads import BoundedHeads
from penstock_server.serving.listening import listen
from penstock_server.serving.stalled import SILENT_SECONDS, STALLED_SECONDS, cut_stalled
from penstock_server.settings import Settings

log = logging.getLogger("penstock.serve")

_STOP_SECONDS = 3.0  # for responses in progress after a stop signal
_LATEST_SECONDS = 2.0  # more, for aborted responses to end; after that they are abandoned
_GREETED = 20  # datasets listed at start
_HERE = {"127.0.0.1": "localhost", "0.0.0.0": "localhost", "::": "::1"}  # localhost may be 127.0.0.1 alone


def run(
    settings: Settings,
    listener: socket.socket,
    *,
    greet: bool = True,
    begin: Callable[[int], None] = lambda _: None,
    seat: WorkerSlot | None = None,
) -> None:
    """Serves until a stop signal, as one of `settings.processes` processes; `seat` is its slot among several.

    It calls `begin` with the cache budget when it can serve.
    Raises SettingsError, DatasetInvalid: it cannot serve.
    """
    # Modules live as long as the server. Unfrozen, each garbage collection would scan them for tens of milliseconds, a fifth
    # of the time of serving. Later objects are not frozen, since snapshots are replaced.
    gc.collect()
    gc.freeze()
    _open_many_files()
    catalog = open_data(settings)
    listen(listener, settings)
    if greet:
        warn("serve", settings, catalog.datasets.values())
        # In a thread: a full stdout pipe without a reader must not block serving.
        threading.Thread(
            target=report, args=(_greeting(catalog, settings, listener),), name="penstock-greeting", daemon=True
        ).start()
    begin(catalog.store.cache.configured_bytes)
    begin_log(tells_news=seat is None or seat.number == 0)
    app = create_app(catalog, InFlight(settings.most_inflight_bytes))
    if seat is None:
        # After shutdown, uvicorn raises the stop signal again, and this process ends. A KeyboardInterrupt would first wait for
        # threads, and one may decode for minutes, or hang forever on a failed disk.
        ends_at(signal.SIGINT)
    with catalog.polling(settings.poll_seconds):
        Server(app, seat=seat).run(sockets=[listener])
    catalog.store.close()


class Server(uvicorn.Server):
    """A uvicorn server that closes stalled and silent connections and can share its socket; see WorkerSlot.

    On stop, responses in progress have `stop_seconds`; then their connections are aborted.
    """

    def __init__(
        self,
        app: FastAPI,
        *,
        stalled_seconds: float = STALLED_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
        stop_seconds: float = _STOP_SECONDS,
        seat: WorkerSlot | None = None,
    ) -> None:
        latest = math.ceil(stop_seconds + _LATEST_SECONDS)
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedHeads,
                log_config=None,  # keep the logging set up by begin_log
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=latest,
                lifespan="off",
                ws="none",
            )
        )
        self._stalled_seconds, self._silent_seconds = stalled_seconds, silent_seconds
        self._stop_seconds, self._seat = stop_seconds, seat or WorkerSlot.alone()
        self._accepting: list[asyncio.Task[None]] = []

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until `should_exit`."""
        cutting = asyncio.create_task(cut_stalled(self.server_state.connections, self._stalled_seconds, self._silent_seconds))
        try:
            await super().serve(sockets)
        finally:
            cutting.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept connections."""
        await super().startup([])  # not sockets: uvicorn resets connections that it has no room for
        connections = self.server_state.connections
        protocol = functools.partial(
            self.config.http_protocol_class,  # type: ignore[call-arg]  # mypy takes it for a plain asyncio.Protocol
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        self._accepting = [
            asyncio.create_task(accept_in_turn(listener, self._seat, connections, protocol)) for listener in sockets or []
        ]
        for accepting in self._accepting:
            accepting.add_done_callback(self._stopped_accepting)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops accepting and closes the open connections."""
        for accepting in self._accepting:
            accepting.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)  # tasks must end before their listeners close
        self._seat.leave()
        cutting = asyncio.get_running_loop().call_later(self._stop_seconds, self._cut)
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()

    def _cut(self) -> None:
        """Aborts all connections. If uvicorn cancelled the responses, each would be a 500 with a traceback in the log."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def _stopped_accepting(self, accepting: asyncio.Task[None]) -> None:
        if not accepting.cancelled():
            log.error("no more connections are taken; this process ends", exc_info=accepting.exception())
            self.should_exit = True


def _open_many_files() -> None:
    """Raises the soft limit of open files to the hard limit: each connection is one, and the default is often 1,024."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):  # macOS allows less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _greeting(catalog: Catalog, settings: Settings, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if settings.published:
        host, _, port = settings.published.rpartition(":")
        host = host.strip("[]")
    host = _HERE.get(host, host)
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    lines = [f"penstock {__version__} serves {settings.data_dir} at {url}", ""]
    for name, dataset in islice(catalog.datasets.items(), _GREETED):
        headline, recipe = summary(dataset)
        small = _small(dataset.snapshot.num_rows)
        lines += [f"  {headline}", f"    {recipe}", f"    curl '{url}{batches_path(name, 0, 0)}/0?format=json{small}'"]
    if (more := len(catalog.datasets) - _GREETED) > 0:
        lines.append(f"  and {counted(more, 'more dataset')}, listed at {url}{DATASETS}")
    lines += [f"  {name}: a mixture, {mixture.mix}" for name, mixture in catalog.mixtures.items()]
    for name, reason in catalog.refused.items():
        lines += [f"  {name}: NOT SERVED", *(f"    {line}" for line in reason.splitlines())]
    return "\n".join(map(printable, [*lines, "", f"every URL is listed at {url}/docs; Ctrl-C stops"]))


def _small(num_rows: int) -> str:
    # The printed command must also work on a dataset of three rows.
    return "" if num_rows >= 8 else f"&batch_size={num_rows}"
