"""`penstock serve` and `penstock prepare` as separate processes, as a user runs them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from processes import Server, run, serving

_PENSTOCK = [sys.executable, "-m", "penstock"]


def serve_command(data_dir: Path | str, cache_dir: Path) -> list[str]:
    """Return the command `penstock serve` on a free port."""
    flags = ["--poll-seconds", "0", "--drain-seconds", "0", "--port", "0"]
    return [*_PENSTOCK, "serve", str(data_dir), "--cache-dir", str(cache_dir), *flags]


def penstock(
    data_dir: Path | str, cache_dir: Path, *flags: str, environment: Mapping[str, str] | None = None
) -> AbstractContextManager[Server]:
    """Run a server on a folder of datasets, with additional environment variables."""
    return serving([*serve_command(data_dir, cache_dir), *flags], environment=environment)


def prepare(data_dir: Path, cache_dir: Path, *flags: str) -> None:
    """Fill the cache and count tokens. Raises ProcessFailed: `penstock prepare` failed."""
    run([*_PENSTOCK, "prepare", str(data_dir), "--cache-dir", str(cache_dir), *flags], timeout_seconds=1800)
