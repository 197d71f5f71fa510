"""A server in a thread of the tests' own process, whose settings and insides a test can reach."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock_server.api.service import InFlight
from penstock_server.app import create_app
from penstock_server.blocks.cache import CacheFolder
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import open_catalog
from penstock_server.serving.listener import disconnect_stalled
from penstock_server.serving.server import Server


@contextmanager
def serving(
    data_dir: Path, cache_dir: Path, in_flight: InFlight, stalled_seconds: float = 300.0, **settings: Any
) -> Iterator[str]:
    """The address of a server with these settings of Server."""
    store = BlockStore(CacheFolder(cache_dir))
    server = Server(create_app(open_catalog(data_dir, None, store), in_flight), **settings)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        disconnect_stalled(listener, stalled_seconds)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
            store.close()
