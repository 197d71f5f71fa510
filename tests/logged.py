"""Lines of the client's log, as a test compares them."""

from __future__ import annotations

import re


def without_process(line: str) -> str:
    """The line without the rank and the host in it: another test of this process may have named a rank."""
    return re.sub(r"^penstock: (rank \d+ )?on \S+: ", "penstock: ", line)
