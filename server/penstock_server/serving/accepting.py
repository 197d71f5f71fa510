"""Accepting: processes share a socket, and each accepts only while no other has clearly fewer connections.

Otherwise an idle process would accept most of them, and all ranks of a run would wait for the ranks on that process.
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

_LEAD = 1 / 16  # allowed excess of connections over another process: a busy process accepts late
_LOOK_SECONDS = 0.001  # polling interval while another process should accept
_MAX_LOOKS = 20  # then this process accepts, although another has fewer: that one is alive, but slow
_TELL_SECONDS = 0.25  # interval of heartbeats while no client connects
_HUNG_SECONDS = 1.0  # without a heartbeat for this long, a process is not waited for
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_NO_ROOM_SECONDS = 1.0  # pause that lets the other processes accept
_SAY_AGAIN_SECONDS = 60.0  # interval of the log line about missing room


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """Slot of one process among those that share a socket; each sees the connection counts of the others."""

    number: int
    _counts: MutableSequence[int]  # connections of each process, in shared memory
    _told_at: MutableSequence[float]  # time of its last heartbeat, in shared memory

    @staticmethod
    def of(num_processes: int) -> list[WorkerSlot]:
        """Makes one slot per process, to pass to it at its start."""
        context = multiprocessing.get_context("spawn")
        counts, told_at = context.RawArray("q", num_processes), context.RawArray("d", num_processes)
        return [WorkerSlot(number, counts, told_at) for number in range(num_processes)]

    @staticmethod
    def alone() -> WorkerSlot:
        """Makes the slot of a single process."""
        return WorkerSlot(0, [0], [0.0])

    def tell(self, num_connections: int) -> bool:
        """Publishes the number of connections. Returns whether it may accept: no live process has clearly fewer."""
        now = time.monotonic()
        self._counts[self.number], self._told_at[self.number] = num_connections, now
        alive = [count for count, at in zip(self._counts, self._told_at, strict=True) if now - at < _HUNG_SECONDS]
        return num_connections <= min(alive) * (1 + _LEAD)

    @property
    def told_at(self) -> float:
        """Time of the last heartbeat, by the monotonic clock; minus infinity after `leave`."""
        return self._told_at[self.number]

    def leave(self) -> None:
        """Lets the others stop waiting for this process until its next heartbeat."""
        self._told_at[self.number] = -math.inf


async def accept_in_turn(
    listener: socket.socket, seat: WorkerSlot, connections: Collection[object], protocol: Callable[[], asyncio.Protocol]
) -> None:
    """Accepts connections forever, with one protocol each. `connections` are the open ones."""
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
            pause = 0.0  # no connection is waiting
        except OSError as error:  # the client has gone, or this process can hold no more
            if error.errno in _NO_ROOM:
                if time.monotonic() - said_at >= _SAY_AGAIN_SECONDS:
                    said_at = time.monotonic()
                    log.warning(
                        "no connection can be taken: %s. Those that wait are taken later, or by another process if there is "
                        "one. If this lasts, raise the limit of open files (ulimit -Hn), or add a server.", error,
                    )  # fmt: skip
                seat.leave()
                pause = _NO_ROOM_SECONDS
        # Concurrently: each turn of a busy loop takes long, and many clients may wait.
        await asyncio.gather(*opening, asyncio.sleep(pause), return_exceptions=True)
        await _readable(listener, _TELL_SECONDS)


async def _readable(listener: socket.socket, seconds: float) -> None:
    """Waits for a connection, at most `seconds`."""
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
