"""A finding of `penstock doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, what was found, and what to do where it is not well.

    ok    as it should be
    warn  jobs run, but slower or otherwise than they could
    fail  jobs do not run
    """

    level: Literal["ok", "warn", "fail"]
    name: str
    text: str
    fix: str = ""


def size(num_bytes: float) -> str:
    """Bytes as people say them."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:,.1f} {unit}"
    return f"{num_bytes / 1e3:,.1f} kB"
