"""The address on a command line: a server, a dataset on it, and of a batch's URL also which batch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from penstock.errors import SpecError
from penstock.source import is_address
from penstock.text import without_login
from penstock.urls import DATASETS

_BATCHES = re.compile(r"epochs/(\d{1,16})/ranks/(\d{1,16})/batches(?:/(\d{1,16})(?:/provenance)?)?")
_WITHOUT_BATCH = ("", "spec", "shuffle-report", "quarantine")
_NO_SPEC = ("format", "start", "stop", "stride", "epoch")  # parameters of URLs that say nothing of a batch's bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """What an address names; None and no query where it says nothing.

    server  "http://host:8000", maybe with a path after it where the service stands behind a gateway
    query   the parameters of the spec in it, as they are spelled
    """

    server: str
    dataset: str | None = None
    epoch: int | None = None
    rank: int | None = None
    step: int | None = None
    query: tuple[tuple[str, str], ...] = ()


def parse_address(text: str) -> Address:
    """Reads http://host:8000, http://host:8000/stories, or a URL of the service as curl takes it; http:// may be left out.

    Raises SpecError: it is no address.
    """
    text = text.strip()
    try:
        split = urlsplit(text if "://" in text else f"http://{text}")
        sound = is_address(f"{split.scheme}://{split.netloc}")
    except ValueError:  # of a bracket that is not closed
        sound = False
    if not sound:
        raise SpecError(f"{without_login(text)} is not an address. One looks like http://localhost:8000/stories", ("address",))
    root = f"{split.scheme}://{split.netloc}"
    before, api, behind = split.path.partition(DATASETS)
    if not api or (behind and not behind.startswith("/")):
        before, _, name = split.path.rstrip("/").rpartition("/")
        return Address(server=root + before, dataset=unquote(name) or None, query=_spec_of(split.query))
    name, _, rest = behind.strip("/").partition("/")
    found = _BATCHES.fullmatch(rest)
    if not found and rest not in _WITHOUT_BATCH:
        raise SpecError(f"{text} shows no batch. Give the server and the dataset, or the URL of a batch.", ("address",))
    epoch, rank, step = (None if number is None else int(number) for number in found.groups()) if found else (None,) * 3
    pairs = dict(parse_qsl(split.query))
    return Address(
        server=root + before,
        dataset=unquote(name) or None,
        epoch=_number(pairs.get("epoch")) if epoch is None else epoch,
        rank=rank,
        step=_number(pairs.get("start")) if step is None else step,
        query=_spec_of(split.query),
    )


def url(server: str, path: str, query: dict[str, str]) -> str:
    """A URL that can be pasted, with the commas and colons of a mix left as they are."""
    return f"{server}{path}" + (f"?{urlencode(query, safe=':,;@')}" if query else "")


def _spec_of(query: str) -> tuple[tuple[str, str], ...]:
    return tuple(pair for pair in parse_qsl(query, keep_blank_values=True) if pair[0] not in _NO_SPEC)


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() else None
