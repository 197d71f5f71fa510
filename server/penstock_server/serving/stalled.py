"""Stalled readers: a connection whose reader takes nothing for minutes is cut, since what it holds is held from others.

A reader that is slow stays. Whether it takes anything only the kernel can tell: it buffers megabytes for a connection, and asks
for more once a good part of them is gone.

Silent ones, which send no request, are closed, too: each keeps a file open, of which a process may have so many and no more.
uvicorn closes a connection only between two requests.
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
SILENT_SECONDS = 60.0  # for the whole head of a request
_LOOKS = 10  # in that time

# Of each transport the bytes that are still to be sent, here and in the kernel, and since when they have been the same.
_Unread = dict[asyncio.Transport, tuple[tuple[int, int], float]]
# Of each connection on which nothing is asked the last that was asked, if any, and since when it has been the last.
_Silent = dict[Any, tuple[Any, float]]


async def cut_stalled(connections: Collection[Any], stalled_seconds: float, silent_seconds: float) -> None:
    """For ever: cuts those of uvicorn's connections whose reader has taken nothing for so long, or that were silent for so."""
    unread, silent = _Unread(), _Silent()
    while True:
        await asyncio.sleep(min(stalled_seconds, silent_seconds) / _LOOKS)
        unread = _look([connection.transport for connection in list(connections)], unread, stalled_seconds)
        silent = _close_silent(list(connections), silent, silent_seconds)


def _look(transports: Collection[asyncio.Transport], known: _Unread, stalled_seconds: float) -> _Unread:
    """Cuts what has stalled; the others that have something to send, for the next look."""
    now, found = time.monotonic(), _Unread()
    for transport in transports:
        num_bytes = transport.get_write_buffer_size()
        if not num_bytes:  # one that is being closed may have something left, and a reader that never takes it
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
    """Closes what has been silent for so long; the others on which nothing is asked, for the next look."""
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
            connection.transport.close()  # what is left of an answer is sent before
    return found


def _in_kernel(transport: asyncio.Transport) -> int:
    """The bytes that the kernel has for the reader and that have not arrived; 0 where it does not tell."""
    try:
        answer = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):  # it was closed just now
        return 0
    return int.from_bytes(answer, sys.byteorder)
