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
