"""What the operator decides: flags of `penstock serve`, each also an environment variable PENSTOCK_<NAME>."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


class SettingsError(Exception):
    """One or more settings are wrong; the message lists them all."""


def default_cache_dir() -> Path:
    """The user's cache folder, after the XDG base directory specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Where the data is, where decoded blocks are kept, and where to listen.

    Raises SettingsError: a value is out of bounds.
    """

    data_dir: Path
    tokenizer: Path | None = None
    cache_dir: Path
    host: str = "127.0.0.1"
    port: int = 8000

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise SettingsError(f"port must be from 0 (any free port) to 65,535, not {self.port}")

    @classmethod
    def read(cls, flags: Mapping[str, str | None], environment: Mapping[str, str]) -> Settings:
        """Settings from flags, else from PENSTOCK_* variables, else the defaults. Raises SettingsError."""
        known = {f.name: f for f in fields(cls)}
        given = {
            name: value for name in known if (value := flags.get(name) or environment.get(f"PENSTOCK_{name.upper()}") or None)
        }
        if "data_dir" not in given:
            raise SettingsError("no data folder is given: penstock serve DATA_DIR, or set PENSTOCK_DATA_DIR")
        values: dict[str, Any] = {"cache_dir": default_cache_dir(), **given}
        for name in ("data_dir", "tokenizer", "cache_dir"):
            if name in values:
                values[name] = Path(values[name]).expanduser()
        if "port" in values:
            try:
                values["port"] = int(values["port"])
            except ValueError as error:
                raise SettingsError(f"port must be a whole number, not {values['port']!r}") from error
        return cls(**values)
