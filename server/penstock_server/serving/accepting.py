"""Accepting: processes take connections from the socket that they share, each only while none has clearly fewer.

Otherwise whoever is idle takes what comes, and the ranks of a run all go at the pace of those whose process has most.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import multiprocessing
import select
import socket
import time
from collections.abc import Callable, Collection, Coroutine, MutableSequence
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("penstock.accepting")

_LEAD = 1 / 16  # by which one may have more than another: one that is busy comes to its turn late
_LOOK_SECONDS = 0.001  # while one waits that another is to take
_MAX_LOOKS = 20  # then a connection is taken though another has fewer: it is alive, but slow
_TELL_SECONDS = 0.25  # while nobody connects
_HUNG_SECONDS = 1.0  # after which one that tells nothing is not waited for
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_NO_ROOM_SECONDS = 1.0  # in which the others take what it cannot
_SAY_AGAIN_SECONDS = 60.0  # that there is no room


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """The place of one process among those that share a socket, where each sees how many connections the others have."""

    number: int
    _counts: MutableSequence[int]  # the connections of each process,
    _told_at: MutableSequence[float]  # and when it last told them; this memory all processes share

    @staticmethod
    def of(num_processes: int) -> list[WorkerSlot]:
        """One for each process, to be given to it when it is started."""
        context = multiprocessing.get_context("spawn")
        counts, told_at = context.RawArray("q", num_processes), context.RawArray("d", num_processes)
        return [WorkerSlot(number, counts, told_at) for number in range(num_processes)]

    @staticmethod
    def alone() -> WorkerSlot:
        """That of the only process."""
        return WorkerSlot(0, [0], [0.0])

    def tell(self, num_connections: int) -> bool:
        """Tells the others how many this process has. Whether it may have one more: of those alive none has clearly fewer."""
        now = time.monotonic()
        self._counts[self.number], self._told_at[self.number] = num_connections, now
        alive = [count for count, at in zip(self._counts, self._told_at, strict=True) if now - at < _HUNG_SECONDS]
        return num_connections <= min(alive) * (1 + _LEAD)

    @property
    def told_at(self) -> float:
        """When this process last told the others, by the monotonic clock; minus infinity once it has left."""
        return self._told_at[self.number]

    def leave(self) -> None:
        """Tells the others to wait for this process no more, until it tells them something."""
        self._told_at[self.number] = -math.inf


async def accept_in_turn(
    listener: socket.socket, seat: WorkerSlot, connections: Collection[object], protocol: Callable[[], asyncio.Protocol]
) -> None:
    """For ever: takes connections from a socket, a protocol each. `connections` are those that are open."""
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    num_looks, said_at = 0, -math.inf
    while True:
        opening = list[Coroutine[Any, Any, Any]]()
        pause = _LOOK_SECONDS
        try:
            while seat.tell(len(connections) + len(opening)) or num_looks >= _MAX_LOOKS:
                num_looks = 0
                accepted, _ = listener.accept()
                opening.append(loop.connect_accepted_socket(protocol, accepted))
            num_looks += 1
        except BlockingIOError:
            pause = 0.0  # nobody waits any more
        except OSError as error:  # of some who connect and go, or this process can hold no more
            if error.errno in _NO_ROOM:
                if time.monotonic() - said_at >= _SAY_AGAIN_SECONDS:
                    said_at = time.monotonic()
                    log.warning(
                        "no connection can be taken: %s. Those that wait are taken later, or by another process if there is "
                        "one. If this lasts, raise the limit of open files (ulimit -Hn), or add a server.", error,
                    )  # fmt: skip
                seat.leave()
                pause = _NO_ROOM_SECONDS
        # Both at a time: of a busy process each turn of the loop takes long, and a crowd waits.
        await asyncio.gather(*opening, asyncio.sleep(pause), return_exceptions=True)
        await _readable(listener, _TELL_SECONDS)


async def _readable(listener: socket.socket, seconds: float) -> None:
    """Returns once a connection waits, or after so long."""
    inline = select.poll()
    inline.register(listener, select.POLLIN)
    if inline.poll(0):
        return
    loop = asyncio.get_running_loop()
    connects = asyncio.Event()
    loop.add_reader(listener, connects.set)
    try:
        async with asyncio.timeout(seconds):
            await connects.wait()
    except TimeoutError:
        pass
    finally:
        loop.remove_reader(listener)
