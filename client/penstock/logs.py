"""The client's log. Each line names this host, and this process's rank where a job has several: ranks often share one log."""

from __future__ import annotations

import logging
import socket

log = logging.getLogger("penstock")

_PREFIX = "penstock: "


class _ProcessName(logging.Filter):
    """Puts the name of this process in front of each line."""

    rank: int | None = None  # None: the only rank, or not known

    def filter(self, record: logging.LogRecord) -> bool:
        process = f"on {socket.gethostname()}" if self.rank is None else f"rank {self.rank} on {socket.gethostname()}"
        record.msg, record.args = f"{_PREFIX}{process}: {record.getMessage().removeprefix(_PREFIX)}", ()
        return True


_process_name = _ProcessName()  # one rank trains in a process
log.addFilter(_process_name)


def name_rank(rank: int, world_size: int) -> None:
    """From now on lines name this rank of the process. A dataset of one rank, as for an evaluation, changes nothing."""
    if world_size > 1:
        _process_name.rank = rank
