"""A finding of `penstock doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check: its subject, the finding, and the remedy.

    ok    no problem
    warn  jobs run, but slower than possible, or differently
    fail  jobs do not run
    """

    level: Literal["ok", "warn", "fail"]
    name: str
    text: str
    fix: str = ""
