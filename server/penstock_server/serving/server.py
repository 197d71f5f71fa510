"""One server process with its catalog, on a listening socket, until a stop signal."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import logging
import math
import resource
import signal
import socket
import ssl
import struct
import termios
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice
from types import FrameType

import uvicorn
from fastapi import FastAPI

from penstock import __version__
from penstock.ending import ends_at
from penstock.text import counted, printable
from penstock.wire.names import DATASETS, batches_path
from penstock_server.api.admission import InFlight
from penstock_server.api.service import Service
from penstock_server.app import create_app
from penstock_server.catalog.catalog import Catalog, open_data
from penstock_server.catalog.describe import summary
from penstock_server.catalog.warnings import warn
from penstock_server.logs import complain_at_start, greet, log, log_events
from penstock_server.monitoring.place import Place
from penstock_server.security.tls import Certificates
from penstock_server.security.tokens import Tokens
from penstock_server.security.watcher import Watcher
from penstock_server.serving.connections import Connections, protocol_of
from penstock_server.serving.listener import listen
from penstock_server.settings import MAX_CONNECTIONS, Settings

_STOP_SECONDS = 3.0  # for responses in progress after a stop signal
_KEEP_ALIVE_SECONDS = 60  # longer than a slow client reads what the kernel holds of a response
_HANDSHAKE_SECONDS = 10.0  # of TLS: until then a connection takes a descriptor, and does not count
_ABORT_SECONDS = 2.0  # for aborted responses to end; after that they are abandoned
_OTHER_FILES = 256  # that a process opens beside its connections
_GREETED = 20  # datasets listed at start
_HERE = {"127.0.0.1": "localhost", "0.0.0.0": "localhost", "::": "::1"}  # localhost may be 127.0.0.1 alone


def run(
    settings: Settings,
    listener: socket.socket,
    *,
    is_first: bool = True,
    ready: Callable[[int], None] | None = None,
    place: Place | None = None,
) -> None:
    """Serve until a stop signal, as one of `settings.processes` processes; `place` is where they share their status.

    The first one prints the greeting and logs changes of datasets. Each calls `ready` with its cache budget when it can serve.
    Raises SettingsError, DatasetInvalid: it cannot serve.
    """
    # Modules live as long as the server. Unfrozen, each garbage collection would scan them for tens of milliseconds, a fifth
    # of the time of serving. Later objects are not frozen, since snapshots are replaced.
    gc.collect()
    gc.freeze()
    _raise_file_limit()
    watcher, tokens, certificates = Watcher(), None, None
    if settings.tokens:
        tokens = Tokens(settings.tokens)
        watcher.watch([settings.tokens], tokens.load)
    if settings.tls_cert:
        certificates = Certificates(settings)
        watcher.watch(certificates.paths, certificates.load)
    if settings.tokens or settings.tls_cert:
        signal.signal(signal.SIGHUP, lambda *_: watcher.wake())
    catalog = open_data(settings, waits=settings.poll_seconds > 0)
    listen(listener, settings)
    if not ready:
        # After shutdown, uvicorn raises the stop signal again, and this process ends. A KeyboardInterrupt would first wait for
        # threads, and one may decode for minutes, or hang forever on a failed disk.
        ends_at(signal.SIGINT)
    if is_first:
        tell = partial(complain_at_start, settings.log_format, level=logging.WARNING)
        warn(tell, settings.data_dir, catalog.datasets.values())
        # In a thread: a full stdout pipe without a reader must not block serving.
        text = greeting(catalog, settings, listener)
        threading.Thread(target=greet, args=(settings.log_format, text), name="penstock-greeting", daemon=True).start()
    log_events(is_first=is_first)
    if ready:
        ready(catalog.store.cache.budget_bytes)
    in_flight, is_guarded = InFlight(settings.most_inflight_bytes), bool(settings.tokens or settings.insecure)
    app = create_app(catalog, in_flight, place, tokens, for_this_machine=not is_guarded)
    with catalog.polling(settings.poll_seconds), app.state.monitor.running(), watcher.running():
        tls = certificates.context if certificates else None
        server = Server(
            app,
            drain_seconds=settings.drain_seconds,
            tls=tls,
            trusted_proxy=settings.trusted_proxy,
            max_connections=most_connections(settings),
        )
        app.state.monitor.unsent = server.unsent
        server.run(sockets=[listener])
    catalog.store.close()


class Server(uvicorn.Server):
    """A uvicorn server. SIGTERM drains it for `drain_seconds`: it serves on, but tells clients to leave. Then it stops.

    Ctrl-C or a second signal stops it at once. On stop, responses in progress have `stop_seconds`; then their connections are
    aborted.

    `tls` encrypts the connections. X-Forwarded-For and X-Forwarded-Proto are believed from the proxies in `trusted_proxy` only.
    """

    def __init__(
        self,
        app: FastAPI,
        *,
        drain_seconds: float = 0.0,
        stop_seconds: float = _STOP_SECONDS,
        tls: ssl.SSLContext | None = None,
        trusted_proxy: str = "",
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._service: Service = app.state.service
        self._drain_seconds, self._stop_seconds = drain_seconds, stop_seconds
        self._stop_at = math.inf  # monotonic time
        config = uvicorn.Config(
            app,
            http=protocol_of(Connections(max_connections, self._service.metrics)),  # type: ignore[arg-type]
            log_config=None,  # keep the logging set up by begin_log
            log_level="warning",
            access_log=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=math.ceil(stop_seconds + _ABORT_SECONDS),
            proxy_headers=bool(trusted_proxy),  # uvicorn's default believes any program of this machine
            forwarded_allow_ips=trusted_proxy,
            lifespan="off",
            ws="none",
        )
        config.load()
        config.ssl = tls
        super().__init__(config)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain, or stop."""
        if sig == signal.SIGTERM and self._drain_seconds and not self._service.is_draining:
            self._captured_signals.append(sig)  # at the end uvicorn raises it again
        else:
            super().handle_exit(sig, frame)
            self.force_exit = False  # a second Ctrl-C would cut responses, and log a traceback for each
        self._service.is_draining = True

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop. Called ten times a second."""
        if self._service.is_draining and not self.should_exit:
            if self._stop_at == math.inf:
                self._stop_at = time.monotonic() + self._drain_seconds
                log.info("SIGTERM: serves for another %g seconds, then stops", self._drain_seconds)
            if time.monotonic() >= self._stop_at:
                self.should_exit = True
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections."""
        if self.config.ssl:  # uvicorn does not pass a limit of the handshake on
            loop = asyncio.get_running_loop()
            loop.create_server = partial(loop.create_server, ssl_handshake_timeout=_HANDSHAKE_SECONDS)  # type: ignore[method-assign]
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting and close the open connections."""
        # Responses that uvicorn cancels would each be a 500 with a traceback in the log.
        aborting = asyncio.get_running_loop().call_later(self._stop_seconds, self._abort)
        try:
            await super().shutdown(sockets)
        finally:
            aborting.cancel()

    def unsent(self) -> dict[tuple[str, int], int]:
        """Return the bytes that each client's host has not acknowledged, by its address and port."""
        queued = dict[tuple[str, int], int]()
        for connection in list(self.server_state.connections):
            with suppress(OSError, AttributeError, ValueError, TypeError):  # it is being closed
                opened = connection.transport.get_extra_info("socket")
                [nbytes] = struct.unpack("i", fcntl.ioctl(opened.fileno(), termios.TIOCOUTQ, bytes(4)))
                host, port = connection.transport.get_extra_info("peername")[:2]
                queued[host, port] = nbytes
        return queued

    def _abort(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def most_connections(settings: Settings) -> int:
    """Return the largest number of connections of one process: the setting's, or fewer if it may open fewer files."""
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(1, min(settings.max_connections // settings.processes, most_files - _OTHER_FILES))


def _raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit: each connection is one, and the default is often 1,024."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):  # macOS allows less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def greeting(catalog: Catalog, settings: Settings, listener: socket.socket) -> str:
    """Return the text that lists the datasets, each with a command that shows a batch."""
    host, port = listener.getsockname()[:2]
    if settings.published:
        host, _, port = settings.published.rpartition(":")
        host = host.strip("[]")
    host = _HERE.get(host, host)
    url = f"{'https' if settings.tls_cert else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
    lines = [f"penstock {__version__} serves {settings.data} at {url}", ""]
    curl = """curl -H "Authorization: Bearer $PENSTOCK_TOKEN\"""" if settings.tokens else "curl"
    for name, dataset in islice(catalog.datasets.items(), _GREETED):
        headline, recipe = summary(dataset)
        small = _small(dataset.snapshot.num_rows)
        lines += [f"  {headline}", f"    {recipe}", f"    {curl} '{url}{batches_path(name, 0, 0)}/0?format=json{small}'"]
    if (more := len(catalog.datasets) - _GREETED) > 0:
        lines.append(f"  and {counted(more, 'more dataset')}, listed at {url}{DATASETS}")
    lines += [f"  {name}: a mixture, {mixture.mix}" for name, mixture in catalog.mixtures.items()]
    for name, reason in catalog.refused.items():
        lines += [f"  {name}: NOT SERVED", *(f"    {line}" for line in reason.splitlines())]
    lines += ["", f"open {url} to watch runs and to look at batches; every URL is listed at {url}/docs; Ctrl-C stops"]
    return "\n".join(map(printable, lines))


def _small(num_rows: int) -> str:
    # The printed command must also work on a dataset of three rows.
    return "" if num_rows >= 8 else f"&batch_size={num_rows}"
