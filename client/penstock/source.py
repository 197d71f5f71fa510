"""Source: requests of one rank for one dataset on its servers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from itertools import chain
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx

from penstock import wire
from penstock.errors import SpecError, VersionMismatch, WireError
from penstock.row_lengths import RowLength
from penstock.spec import Spec
from penstock.text import without_login
from penstock.transport.probe import ask_aside
from penstock.transport.servers import Servers
from penstock.transport.transport import Transport
from penstock.urls import batches_path, dataset_path

_AT_ONCE_SECONDS = 1.0
_FEW = 64  # rows
_MAX_QUERY = 60_000  # bytes; a request may have 64 KiB in all
_SCHEMES = ("http", "https")
_CACHE = "Does a cache on the way to the server leave the query out of what it knows an answer by?"


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A spec with all parameters resolved by the server, the snapshot included, and derived values.

    num_steps      steps of an epoch, the same for every rank
    num_samples    samples of an epoch, over all ranks
    vocab_size     every token id is below it; None if unknown
    tensors        names of a batch's tensors on the wire
    advice         warnings for the run before it begins
    """

    spec: Spec
    num_steps: int
    num_samples: int
    vocab_size: int | None
    tensors: tuple[str, ...]
    advice: tuple[str, ...]


class Source:
    """One dataset on servers that hold the same data. Raises SpecError: an address is invalid."""

    def __init__(self, servers: str | Sequence[str], dataset: str, *, rank: int, retry_seconds: float) -> None:
        if not isinstance(dataset, str) or dataset in ("", ".", "..") or "/" in dataset:
            raise SpecError(f"dataset must be a name (a folder a/b is the dataset a.b), not {dataset!r}", ("dataset",))
        self.dataset = str.__str__(dataset)  # str() of a str enum's member would give another text
        self._addresses = _addresses(servers)
        self._servers = Servers(self._addresses, rank)  # kept here so that epochs share which servers fail
        self._rank = rank
        self._retry_seconds = retry_seconds

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the servers' health: its clock times mean nothing on another machine."""
        return {**self.__dict__, "_servers": Servers(self._addresses, self._rank)}

    def connect(self, allocate: Callable[[int], memoryview] | None = None, *, is_awaited: bool = True) -> Transport:
        """Return a transport for one thread of this process. `allocate`: see Connection; `is_awaited`: see Transport."""
        return Transport(self._servers, retry_seconds=self._retry_seconds, is_awaited=is_awaited, allocate=allocate)

    def resolve(self, spec: Spec) -> Resolved:
        """Resolve every parameter of a spec. Raises the PenstockError that fits the failure."""
        # All ranks ask the same server for the latest snapshot: another server may lag by some seconds.
        servers = self._servers if spec.snapshot else Servers(self._addresses)
        target = f"{dataset_path(self.dataset)}/spec?{_query_of(spec)}"
        with closing(Transport(servers, retry_seconds=self._retry_seconds, first_contact=True)) as transport:
            resolved = transport.get(target, partial(_decode_resolved, spec))
        self._servers.learn_from(servers)
        return resolved

    def frames(self, transport: Transport, spec: Spec, epoch: int, steps: range, then: range = range(0)) -> list[wire.Frame]:
        """Fetch the frames of `steps` in order: all, or the first few, but at least one. `spec` must be resolved.

        `then` are the steps of the next request if all of these arrive.

        Raises ServerUnavailable, SnapshotGone, DataError: see penstock.errors.
        """
        path = batches_path(self.dataset, epoch, self._rank)
        if len(steps) > 1 or then:
            ahead = path + _query(spec, then) if then else None
            alike = transport.get_some(path + _query(spec, steps), self._decoder(spec, epoch, steps), then=ahead)
            if alike:
                return list(chain.from_iterable(alike))
        # Only a late step may fail, and a response that has begun can no longer carry a reason. A request for the first step
        # alone delivers the steps before the failing one, and its refusal carries the reason.
        decode = self._decoder(spec, epoch, steps[:1])
        return transport.get(path + _query(spec, steps[:1]), lambda body: list(chain.from_iterable(decode(body))))

    def some_lengths(self, spec: Spec, epoch: int) -> list[RowLength]:
        """Return the uncut lengths of an epoch's first rows; empty if the server does not answer within a second."""
        # Independent of the batch size, and unsorted: length buckets would give the shortest or longest rows of a window.
        few = replace(spec, batch_size=_FEW, world_size=1, drop_last=False, offset=0, skip=None, length_bucket_size=0)
        target = f"{batches_path(self.dataset, epoch, 0)}/0/provenance?{urlencode(few.to_query())}"
        try:
            answer = ask_aside(self._servers.current + target, _AT_ONCE_SECONDS).raise_for_status().json()
            rows = [row for sample in answer["samples"] for row in sample["sources"]]
            places = {(row["dataset"], row["shard"], row["row_group"], row["row"]): RowLength.of_source(row) for row in rows}
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return []
        return list(places.values())

    def provenance(self, transport: Transport, spec: Spec, epoch: int, step: int) -> dict[str, Any]:
        """Fetch the source rows of each sample of a batch.

        Raises ServerUnavailable, and the PenstockError that fits a refusal.
        """
        path = batches_path(self.dataset, epoch, self._rank)
        return transport.get(f"{path}/{step}/provenance?{_query_of(spec)}", decode_object)

    def _decoder(self, spec: Spec, epoch: int, steps: range) -> Callable[[memoryview], Iterator[list[wire.Frame]]]:
        own = (self.dataset, spec.snapshot, spec.digest, epoch, self._rank)

        def decode(body: memoryview) -> Iterator[list[wire.Frame]]:
            """Yield the requested frames. Raises WireError after the last valid ones."""
            missing = steps
            for frames in wire.decode_alike(body, steps):
                if not missing:
                    raise WireError(f"steps {steps[0]} to {steps[-1]} were asked for, and more came")
                if frames[0].address != (*own, missing[0]):
                    why = "" if frames[0].address.spec_digest == spec.digest else ", of other parameters"
                    raise WireError(f"the batch of step {missing[0]} was asked for, but another came{why}. {_CACHE}")
                yield frames
                missing = missing[len(frames) :]
            if missing:
                raise WireError(f"the batch of step {missing[0]} was asked for, but the answer ends before it")

        return decode


def _query(spec: Spec, steps: range) -> str:
    # A slice of a strided range may end past the epoch's last step.
    return f"?start={steps[0]}&stop={steps[-1] + 1}&stride={steps.step}&{_query_of(spec)}"


@lru_cache(maxsize=8)  # all requests of an epoch have the same spec
def _query_of(spec: Spec) -> str:
    """Encode a spec as a query. Raises SpecError: it is longer than servers accept."""
    query = urlencode(spec.to_query())
    if len(query) > _MAX_QUERY:
        raise SpecError(
            f"skip and mix make URLs of {len(query):,} bytes, and servers take {_MAX_QUERY:,}: skip longer ranges, or "
            f"change weights less often.",
            ("skip", "mix"),
        )
    return query


def decode_object(body: memoryview) -> dict[str, Any]:
    """Decode a JSON object. Raises WireError: the body is not a JSON object."""
    try:
        found = json.loads(bytes(body))
    except ValueError as error:
        raise WireError(f"the answer is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise WireError(f"the answer is not a JSON object, but a {type(found).__name__}")
    return found


def _decode_resolved(asked: Spec, body: memoryview) -> Resolved:
    """Decode a resolved spec.

    Raises:
        WireError: the response is for other parameters.
        VersionMismatch: the response is not a spec of this version.
    """
    try:
        answer = json.loads(bytes(body))
        size = answer["vocab_size"]
        resolved = Resolved(
            spec=Spec(**answer["spec"]),
            num_steps=int(answer["num_steps"]),
            num_samples=int(answer["num_samples"]),
            vocab_size=None if size is None else int(size),
            tensors=tuple(str(tensor["name"]) for tensor in answer["tensors"]),
            advice=tuple(map(str, answer["advice"])),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise VersionMismatch(
            f"the answer is not a spec of this version of penstock ({error!r}). Is this a penstock server of the same version?"
        ) from error
    if others := _unlike(asked, resolved.spec):
        raise WireError(f"the answer is for other parameters, {', '.join(others)}. {_CACHE}")
    return resolved


def _unlike(asked: Spec, resolved: Spec) -> list[str]:
    """Return resolved parameters that differ from the requested ones. Skips and mixes have several equal spellings.

    A requested None lets the server choose, except for skip: None means that nothing is skipped.
    """
    is_same = {"skip": asked.skipped() == resolved.skipped(), "mix": asked.mixed() == resolved.mixed()}
    found = {field.name: getattr(resolved, field.name) for field in fields(Spec)}
    given = {name: getattr(asked, name) for name in found if name == "skip" or getattr(asked, name) is not None}
    return [f"{name}={found[name]}" for name, value in given.items() if not is_same.get(name, value == found[name])]


def _addresses(servers: str | Sequence[str]) -> tuple[str, ...]:
    """Normalize and deduplicate server addresses; http:// may be omitted."""
    if isinstance(servers, set | frozenset):
        raise SpecError("servers must be a list: a set has no order, by which ranks are spread over servers", ("servers",))
    try:
        named = [address.strip() for address in ((servers,) if isinstance(servers, str) else servers)]
        given = [address if "://" in address else f"http://{address}" for address in named]
        sound = bool(given) and all(map(is_address, given))
    except (TypeError, AttributeError):
        sound = False
    if not sound:
        wrong = without_login(servers)
        raise SpecError(f'servers must be addresses such as "http://localhost:8000", not {wrong}', ("servers",))
    parts = [address.rstrip("/").partition("://") for address in given]
    return tuple(dict.fromkeys(f"{scheme.lower()}://{rest}" for scheme, _, rest in parts))


def is_address(text: str) -> bool:
    """Whether a text is a server address: a socket can be opened to it, and a path appended to it."""
    try:
        url = httpx.URL(text)
        is_host = bool(url.host.encode("idna"))
        port = urlsplit(text).port  # not httpx's: it accepts digits of any script
        is_named_twice = url.host in _SCHEMES and port is None  # http:/host and http://http://host
    except (httpx.InvalidURL, ValueError):  # for example a host with empty labels, a..b
        return False
    # The socket truncates a port to 16 bits: the request would go to another server.
    is_port = url.port is None or 0 < url.port < 1 << 16
    is_open = not any(letter in "?#" or letter.isspace() for letter in text)
    return url.scheme in _SCHEMES and is_host and is_port and is_open and not is_named_twice
