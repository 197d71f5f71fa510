"""Counts the modules that a batch passes through: in the server, warm and cold, and in the client, from socket to tensor.

python benchmarks/modules.py [--names]

A module counts if one of its functions is called. Threads are traced from their start, so each case runs in a separate process.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

from corpus import BATCH_SIZE
from servers import penstock

_SERVER = "a warm batch", "a cold batch"
_CLIENT = "from socket to tensor", "state_dict and back"
_SEQ_LEN = 64
_ROOT = Path(__file__).resolve().parents[1]
_FOLDERS = {"server": f"{_ROOT / 'server'}/", "client": f"{_ROOT / 'client'}/"}


@contextmanager
def traced(folder: str) -> Iterator[set[str]]:
    """Collect the files below a folder whose functions are called, in this thread and in threads that begin now."""
    called = set[str]()
    is_on = True

    def see(frame: FrameType, event: str, _: Any) -> None:
        if is_on and event == "call" and frame.f_code.co_name != "<module>" and frame.f_code.co_filename.startswith(folder):
            called.add(frame.f_code.co_filename.removeprefix(folder))

    threading.setprofile(see)
    sys.setprofile(see)
    try:
        yield called
    finally:
        is_on = False
        sys.setprofile(None)
        threading.setprofile(None)


def server_modules(work: Path, case: str) -> set[str]:
    """Return the server's modules that one request for a batch calls, through the app without a socket."""
    from fastapi.testclient import TestClient

    from penstock_server.api.admission import InFlight
    from penstock_server.app import create_app
    from penstock_server.blocks.store import BlockStore
    from penstock_server.catalog.catalog import open_catalog

    address = "/v1/datasets/stories/epochs/0/ranks/0/batches"
    with traced(_FOLDERS["server"]) as called:  # before the threads begin
        app = create_app(open_catalog(work / "data", None, BlockStore(work / case)), InFlight(1 << 30))
        client = TestClient(app)
        query = f"batch_size={BATCH_SIZE}&seq_len={_SEQ_LEN}&snapshot={client.get('/v1/datasets/stories').json()['snapshot']}"
        if case == "a warm batch":
            client.get(f"{address}?{query}").raise_for_status()  # the whole epoch
            client.get(f"{address}/0?{query}").raise_for_status()
            time.sleep(2.0)  # until background work has finished
        called.clear()
        client.get(f"{address}/1?{query}").raise_for_status()
        return set(called)


def client_modules(work: Path, case: str) -> set[str]:
    """Return the client's modules that a loop calls after its first batches, or that a state passes through."""
    from penstock import RemoteDataset

    with penstock(work / "data", work / "client") as server, traced(_FOLDERS["client"]) as seen:
        data = RemoteDataset(server.address, "stories", batch_size=BATCH_SIZE, seq_len=_SEQ_LEN)
        batches = iter(data)
        for _ in islice(batches, 4):
            pass
        seen.clear()
        if case == "state_dict and back":
            data.load_state_dict(data.state_dict())
        else:
            for _ in islice(batches, 16):
                pass
        return set(seen)


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the modules that a batch passes through.")
    parser.add_argument("--names", action="store_true", help="print the modules, too")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.case:
        found = (server_modules if asked.case in _SERVER else client_modules)(asked.work, asked.case)
        print("\n".join(sorted(found)))
        return
    from penstock_server.sample import write_sample

    with tempfile.TemporaryDirectory() as folder:
        for _ in write_sample(Path(folder) / "data", rows=4_000, seed=0):
            pass
        for case in (*_SERVER, *_CLIENT):
            command = [sys.executable, __file__, "--case", case, "--work", folder]
            names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
            print(f"{case}: {len(names)} modules")
            if asked.names:
                print("".join(f"    {name}\n" for name in names), end="")


if __name__ == "__main__":
    main()
