"""`penstock serve` and `penstock prepare` as processes of their own, as a user runs them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from processes import Server, run, serving

_PENSTOCK = [sys.executable, "-m", "penstock"]


def serve_command(data_dir: Path, cache_dir: Path) -> list[str]:
    """`penstock serve` on any free port."""
    return [*_PENSTOCK, "serve", str(data_dir), "--cache-dir", str(cache_dir), "--poll-seconds", "0", "--port", "0"]


def penstock(
    data_dir: Path, cache_dir: Path, *flags: str, environment: Mapping[str, str] | None = None
) -> AbstractContextManager[Server]:
    """A server on a folder of datasets, with these variables beside those of this process."""
    return serving([*serve_command(data_dir, cache_dir), *flags], environment=environment)


def prepare(data_dir: Path, cache_dir: Path, *flags: str) -> None:
    """Fills the cache, and counts. Raises ProcessFailed: it could not."""
    run([*_PENSTOCK, "prepare", str(data_dir), "--cache-dir", str(cache_dir), *flags], timeout_seconds=1800)
