"""What a process that tokenizes runs; see `encoders`. It has one thread, since it forks."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import string
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any

import msgpack
import pyarrow as pa

from penstock_server.problems import DatasetInvalid, LibraryError
from penstock_server.recipes import encode, text
from penstock_server.recipes.config import recipe_of
from penstock_server.recipes.encoders import LOADING_SECONDS, MEMORY_BYTES, OUT_OF_MEMORY, nursery
from penstock_server.recipes.recipe import Recipe, Rows

# For its first array, pyarrow imports pandas, if it is installed: a third of a second. Forks share what is imported here.
pa.array([])

_PR_SET_PDEATHSIG = 1
# Runs of one character show most tokenizers that take exponential time or memory, before a row does.
_TRIED = [*(64 * character + end for character in string.printable for end in ("!", "\n!")), string.printable, "é水🙂" * 16]


def fork_nursery() -> None:
    """Fork the nursery from this process, which must have one thread: a fork copies the locks that other threads hold.

    Without this call it starts when a tokenizer is opened, as a new process that imports the libraries for a second.
    """
    nursery.fork_here(_main_of_fork)


def _main_of_fork(descriptor: int) -> None:
    """Run `main` without the open files of the server, and with descriptor 3 for the socket."""
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    if descriptor != 3:
        os.dup2(descriptor, 3)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    main(3)


def main(descriptor: int) -> None:
    """Fork a loader for each socket that arrives. A loader loads the recipe that it is sent, and forks workers likewise.

    Each of these processes ends here.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; these end with the server
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pa.set_memory_pool(pa.system_memory_pool())  # the others reserve address space ahead
    os.dup2(0, 2)  # /dev/null, for what a library writes when its process is ended
    if connection := _fork_on_request(Connection(descriptor)):
        recipe = _load(connection)
        if recipe and (connection := _fork_on_request(connection)):
            # In a thread, which allocates from an arena of its own. The heap of the main thread has the fragments of all
            # imports: tokenizers, which spend half of their time in malloc, take half as long again there.
            worker = threading.Thread(target=_work, args=(connection, recipe))
            worker.start()
            worker.join()
    os._exit(0)  # Python's own exit would touch, and so copy, all memory shared with the parent: a third of a second


def _fork_on_request(parent: Connection) -> Connection | None:
    """Fork for each socket that the parent sends, and return the socket in the new process; None after the parent closes."""
    while True:
        try:
            request = msgpack.unpackb(parent.recv_bytes())
        except (EOFError, OSError):
            return None
        if request != "fork":
            _, status = os.waitpid(request, 0)
            parent.send_bytes(msgpack.packb(os.waitstatus_to_exitcode(status)))
            continue
        descriptor = recv_handle(parent)
        if pid := os.fork():
            os.close(descriptor)
            parent.send_bytes(msgpack.packb(pid))
            continue
        parent.close()
        _end_with_parent()
        return Connection(descriptor)


def _end_with_parent() -> None:
    """Have the kernel end this process when its parent ends, even in the middle of a row."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _limit_seconds(seconds: int) -> None:
    """Have the kernel end this process after this CPU time from now on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _lower(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + seconds)


def _limit_memory() -> None:
    """Limit the address space of this process and its workers."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY_BYTES)


def _lower(limit: int, most: int) -> None:
    """Set a soft limit, within the hard one."""
    hard = resource.getrlimit(limit)[1]
    resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else hard if most < 0 else min(most, hard), hard))


def _load(connection: Connection) -> Recipe | None:
    """Load the recipe that the server sends, try its tokenizer on short texts, and reply its identity; "" if it is invalid."""
    folder, declared, schema, tokenizer = msgpack.unpackb(connection.recv_bytes())
    _limit_seconds(LOADING_SECONDS)
    _limit_memory()
    recipe, identity = None, ""
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(schema))
        recipe = recipe_of(Path(folder), json.loads(declared), schema, Path(tokenizer) if tokenizer else None)
        assert recipe.tokenizer
        identity = recipe.encoding_identity
        with suppress(LibraryError):  # it may lack a token for some text
            recipe.tokenizer.decode(recipe.tokenizer.encode(_TRIED, lambda *_: None)[0].tolist())
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except (DatasetInvalid, ValueError, RecursionError):  # the server meets the error when it reads the recipe
        pass
    _lower(resource.RLIMIT_CPU, resource.RLIM_INFINITY)
    connection.send_bytes(msgpack.packb(identity))
    return recipe


def _work(connection: Connection, recipe: Recipe) -> None:
    """Call functions for the server until it closes the connection. Replies are [error or null, result, seconds of CPU]."""
    assert recipe.tokenizer
    functions: dict[str, Callable[..., Any]] = {
        "encoded": _encoded,
        "lacks_separator": lambda recipe, rows: text.lacks_separator(Rows(_rows(rows), recipe)),
        "decode": lambda recipe, ids: recipe.tokenizer.decode(ids),
        "token_texts": lambda recipe, ids: recipe.tokenizer.token_texts(ids),
    }
    while True:
        try:
            function, seconds, *arguments = msgpack.unpackb(connection.recv_bytes())
            _limit_seconds(seconds)
            began = time.process_time()
            error, result = None, functions[function](recipe, *arguments)
        except (EOFError, OSError):
            return
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except Exception as failure:
            is_of_data = isinstance(failure, ValueError | pa.ArrowException | LibraryError)
            error, result = str(failure) if is_of_data else repr(failure), None
        connection.send_bytes(msgpack.packb([error, result, time.process_time() - began]))


def _rows(stream: bytes) -> pa.RecordBatch:
    with pa.ipc.open_stream(stream) as opened:
        return opened.read_next_batch()


def _encoded(recipe: Recipe, stream: bytes, bound: int) -> tuple[list[tuple[int, str]], dict[str, list[bytes | None]]]:
    """Return the number and the reason of each bad row, and the token lists of each feature, packed."""
    rows = Rows(_rows(stream), recipe)
    features = encode.features_of(rows, bound)
    reasons = [(row, reason) for row, reason in enumerate(rows.reasons) if reason is not None]
    return reasons, {name: lists.packed() for name, lists in features.items()}
