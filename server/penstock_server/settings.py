"""Settings of the operator: flags of `penstock serve`, each also an environment variable PENSTOCK_<NAME>."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, Literal, get_args

from penstock.cli.output import CommandError
from penstock_server.machine import memory_bytes, num_cores
from penstock_server.recipes.allowed import AllowedFiles
from penstock_server.sources.urls import is_url

LogFormat = Literal["human", "json"]

MAX_CONNECTIONS = 16_384  # a thousand ranks with four loader workers need 8,000; one address may have half
_MAX_PROCESSES = 256
_DECODED_SHARE = 8
_INFLIGHT_SHARE = 4  # the rest is for decoding, for counts, and for the page cache
_DECODING_SHARE, _DECODER_BYTES = 2, 128 << 20  # a thread that tokenizes blocks of 7 MB takes some 140 MB


class SettingsError(CommandError):
    """One or more invalid settings; the message lists them all."""


def default_cache_dir() -> Path:
    """Return the user's cache folder by the XDG base directory specification; ~ is expanded later."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "penstock"


def _said(name: str, environment: Mapping[str, str]) -> str | None:
    """Read a variable; skips the address that Kubernetes puts into PENSTOCK_PORT for a service named penstock."""
    value = environment.get(f"PENSTOCK_{name.upper()}")
    return None if value and value.startswith("tcp://") else value


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of a server: data, cache folder, budgets, and address to listen on.

    data_dir        folders, and URLs of sources; as a text, one a line
    store           folder or URL of a store that servers share; "" for none
    cache_bytes     budget of the cache folder; None is half of the free space on its disk
    inflight_bytes  budget of responses in memory until clients read them; None is a quarter of the memory
    decoded_bytes   budget of decoded text that waits in memory to be tokenized; None is an eighth of the memory
    processes       number of server processes; they share the bytes in flight equally
    max_connections connections of all processes; one address may have half of them
    poll_seconds    interval of checks for changes in the data folder; 0 is never
    drain_seconds   time from SIGTERM to the stop; meanwhile requests are served, and trainers go to other servers
    log_format      human, or json for one object a line
    tokens          file with the tokens that callers need; None lets every caller in
    insecure        let other machines connect without tokens; no effect with tokens
    tls_cert        PEM file of the server's certificate chain; None serves plain HTTP
    tls_key         PEM file of its key; None if tls_cert contains the key
    tls_client_ca   PEM file of the authorities of client certificates, which tokens lists; None requests no certificate
    trusted_proxy   addresses or networks of proxies whose X-Forwarded-For and -Proto are believed; "" for none
    assets          second folder whose files datasets may name, besides the data folder
    follow_symlinks, allow_transforms  what files of the data folder may do; see AllowedFiles
    allow_sources   beginnings of URLs that recipes may name for their shards, separated by spaces
    published       HOST:PORT to print instead of the listener's address, if a container's port is published elsewhere
    """

    data_dir: tuple[Path | str, ...]
    tokenizer: Path | None = None
    cache_dir: Path
    store: str = ""
    cache_bytes: int | None = None
    inflight_bytes: int | None = None
    decoded_bytes: int | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    processes: int = 1
    max_connections: int = MAX_CONNECTIONS
    poll_seconds: float = 30.0
    drain_seconds: float = 5.0
    log_format: LogFormat = "human"
    tokens: Path | None = None
    insecure: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    trusted_proxy: str = ""
    assets: Path | None = None
    follow_symlinks: bool = False
    allow_transforms: bool = False
    allow_sources: str = ""
    published: str = ""

    @classmethod
    def read(cls, flags: Mapping[str, str | None], environment: Mapping[str, str]) -> Settings:
        """Read settings from flags, else from PENSTOCK_* variables, else the defaults. Raises SettingsError."""
        names = [f.name for f in fields(cls)]
        given = {name: value for name in names if (value := flags.get(name) or _said(name, environment))}
        values: dict[str, Any] = {"cache_dir": default_cache_dir(), **given}
        problems = []
        if "data_dir" not in given:
            problems.append("no data folder or URL is given: name it after the command, or set PENSTOCK_DATA_DIR")
        values["data_dir"] = tuple(map(place_of, values.get("data_dir", "").splitlines()))
        for name in ("tokenizer", "assets", "cache_dir", "tokens", "tls_cert", "tls_key", "tls_client_ca"):
            if name in values:
                values[name] = Path(values[name]).expanduser()
        if {"tls_key", "tls_client_ca"} & given.keys() and "tls_cert" not in given:
            problems.append("--tls-key and --tls-client-ca need --tls-cert, the certificate of this server")
        if "tls_client_ca" in given and "tokens" not in given:
            problems.append("--tls-client-ca needs --tokens, the file that says what each client certificate may do")
        for name, (parse, wanted) in _PARSED.items():
            if name in given:
                values[name] = parse(given[name])
                if values[name] is None:
                    said = f"--{name.replace('_', '-')}" if flags.get(name) else f"PENSTOCK_{name.upper()}"
                    problems.append(f"{said} must be {wanted}, not {given[name]!r}")
        if problems:
            raise SettingsError("\n".join(problems))
        return cls(**values)

    def check_guard(self) -> None:
        """Raises SettingsError: other machines could read every dataset without a token."""
        if self.tokens or self.insecure or _is_loopback(self.host):
            return
        raise SettingsError(
            f"--host {self.host} lets other machines connect, and without tokens they could read every dataset. Create a token "
            f"with penstock token create NAME --tokens FILE, and serve with --tokens FILE; or let everyone in with --insecure."
        )

    def absolute(self) -> Settings:
        """Return these settings with absolute paths, for a process in another working folder."""

        def absolute(place: Any) -> Any:
            return place.absolute() if isinstance(place, Path) else place

        values = {f.name: absolute(getattr(self, f.name)) for f in fields(self)}
        store = f"{absolute(place_of(self.store))}" if self.store else ""
        return Settings(**values | {"data_dir": tuple(map(absolute, self.data_dir)), "store": store})

    @property
    def allowed_files(self) -> AllowedFiles:
        """What files of the data folder may do."""
        folders = (*(place for place in self.data_dir if isinstance(place, Path)), *([self.assets] if self.assets else []))
        return AllowedFiles(folders, self.follow_symlinks, self.allow_transforms, tuple(self.allow_sources.split()))

    @property
    def data(self) -> str:
        """The folders and URLs, for messages."""
        return " and ".join(map(str, self.data_dir))

    @property
    def most_inflight_bytes(self) -> int:
        """Budget of bytes in flight of one process, from the setting or the available memory."""
        total = memory_bytes() // _INFLIGHT_SHARE if self.inflight_bytes is None else self.inflight_bytes
        return total // self.processes

    @property
    def max_decoded_bytes(self) -> int:
        """Budget of decoded text of one process, from the setting or the available memory."""
        total = memory_bytes() // _DECODED_SHARE if self.decoded_bytes is None else self.decoded_bytes
        return total // self.processes

    @property
    def num_decoders(self) -> int:
        """Number of decoding threads of one process, from the cores and the available memory."""
        affordable = memory_bytes() // _DECODING_SHARE // _DECODER_BYTES
        return max(1, min(num_cores(), affordable) // self.processes)


def place_of(text: str) -> Path | str:
    """Return a URL as it is, and the path of a folder."""
    return text if is_url(text) else Path(text).expanduser()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name, which may lead anywhere
        return False


def byte_count(text: str) -> int | None:
    """Parse a number of bytes such as 500000000 or 200GB; None if the text is invalid."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?)B?", text.strip(), re.IGNORECASE | re.ASCII)
    return int(float(found[1]) * 1000 ** " KMGT".index(found[2].upper() or " ")) if found else None


def _whole_number(text: str) -> int:
    """Parse digits; `int` alone takes signs, blanks and underscores, too. Raises ValueError."""
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


def _yes_or_no(text: str) -> bool | None:
    return {"yes": True, "no": False}.get(text)


def _log_format(text: str) -> str | None:
    return text if text in get_args(LogFormat) else None


def _networks(text: str) -> str | None:
    with suppress(ValueError):
        return ",".join(str(ip_network(item.strip())) for item in text.split(","))
    return None


def _within(least: float, most: float, parse: Callable[[str], float]) -> Callable[[str], float | None]:
    def parse_within(text: str) -> float | None:
        with suppress(ValueError):
            return number if least <= (number := parse(text)) <= most else None
        return None

    return parse_within


# Settings with a parser, which returns None for invalid text, and the expected value in messages.
_PARSED: Mapping[str, tuple[Callable[[str], float | str | None], str]] = {
    "port": (_within(0, 65_535, _whole_number), "a whole number from 0 (any free port) to 65,535"),
    "cache_bytes": (byte_count, "a number such as 500000000 or 200GB"),
    "inflight_bytes": (byte_count, "a number such as 500000000 or 200GB"),
    "decoded_bytes": (byte_count, "a number such as 500000000 or 200GB"),
    "processes": (_within(1, _MAX_PROCESSES, _whole_number), f"a whole number from 1 to {_MAX_PROCESSES}"),
    "max_connections": (_within(2, 1 << 20, _whole_number), f"a whole number from 2 to {1 << 20:,}"),
    "poll_seconds": (_within(0, threading.TIMEOUT_MAX, float), "a number such as 30, or 0 for never"),
    "drain_seconds": (_within(0, threading.TIMEOUT_MAX, float), "a number such as 5, or 0 to stop at once"),
    "trusted_proxy": (_networks, "addresses or networks, such as 10.0.0.5,10.1.0.0/16"),
    **dict.fromkeys(("insecure", "follow_symlinks", "allow_transforms"), (_yes_or_no, "yes or no")),
    "log_format": (_log_format, " or ".join(get_args(LogFormat))),
}


def check_is_here(path: Path) -> None:
    """Check an output folder. Raises CommandError: its path is a URL."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):  # Path keeps only one of the two slashes
        raise CommandError(f"{path} is a URL: name a folder of this machine, and copy it from there.")
