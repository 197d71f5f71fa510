"""Stalled connections: aborts those whose client reads nothing for minutes, since they hold memory that others need.

A slow client stays connected. Only the kernel knows whether a client reads: it buffers megabytes per connection, and takes
more only after a good part has been read.

Silent connections, without a request, are closed, too: each takes one of a limited number of file descriptors. uvicorn closes
a connection only between two requests.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import sys
import termios
import time
from collections.abc import Collection
from typing import Any

log = logging.getLogger("penstock.stalled")

STALLED_SECONDS = 300.0
SILENT_SECONDS = 60.0  # for the complete head of a request
_LOOKS = 10  # checks in that time

# By transport: the unsent bytes, (here, in the kernel), and the time since they are unchanged.
_Unread = dict[asyncio.Transport, tuple[tuple[int, int], float]]
# By connection without a request in progress: its last request, if any, and the time since that is unchanged.
_Silent = dict[Any, tuple[Any, float]]


async def cut_stalled(connections: Collection[Any], stalled_seconds: float, silent_seconds: float) -> None:
    """Forever: aborts connections that read nothing for `stalled_seconds`, closes those silent for `silent_seconds`."""
    unread, silent = _Unread(), _Silent()
    while True:
        await asyncio.sleep(min(stalled_seconds, silent_seconds) / _LOOKS)
        unread = _look([connection.transport for connection in list(connections)], unread, stalled_seconds)
        silent = _close_silent(list(connections), silent, silent_seconds)


def _look(transports: Collection[asyncio.Transport], known: _Unread, stalled_seconds: float) -> _Unread:
    """Aborts stalled transports; returns the others with unsent bytes, for the next check."""
    now, found = time.monotonic(), _Unread()
    for transport in transports:
        num_bytes = transport.get_write_buffer_size()
        if not num_bytes:  # not skipped if closing: it may have unsent bytes that the client never reads
            continue
        unread = num_bytes, _in_kernel(transport)
        before, since = known.get(transport, (unread, now))
        if before != unread:
            since = now
        if now - since < stalled_seconds:
            found[transport] = unread, since
            continue
        peer = transport.get_extra_info("peername")
        log.warning("%s has read nothing for %.0f seconds; its connection is cut, it may ask again", peer, now - since)
        transport.abort()
    return found


def _close_silent(connections: Collection[Any], known: _Silent, silent_seconds: float) -> _Silent:
    """Closes silent connections; returns the others without a request in progress, for the next check."""
    now, found = time.monotonic(), _Silent()
    for connection in connections:
        last = connection.cycle
        if (last and not last.response_complete) or connection.transport.is_closing():
            continue
        before, since = known.get(connection, (last, now))
        if before is not last:
            since = now
        if now - since < silent_seconds:
            found[connection] = last, since
        else:
            connection.transport.close()  # sends the rest of a response first
    return found


def _in_kernel(transport: asyncio.Transport) -> int:
    """Returns the bytes in the kernel that the client has not received; 0 if unknown."""
    try:
        answer = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):  # it was closed just now
        return 0
    return int.from_bytes(answer, sys.byteorder)
