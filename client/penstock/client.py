"""Client: requests of one rank for one dataset on its servers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from typing import Any
from urllib.parse import urlencode

from penstock import wire
from penstock.access import Access
from penstock.errors import PenstockError, SpecError, VersionMismatch, WireError
from penstock.http import Buffers, HttpClient
from penstock.responses import TransientError, parse_json
from penstock.row_lengths import RowLength
from penstock.servers import Servers, parse_servers
from penstock.spec import Spec
from penstock.transport import Transport
from penstock.waits import NOTHING, Reporter
from penstock.wire.names import batches_path, dataset_path
from penstock.wire.report import Report

_LENGTHS_SECONDS = 1.0
_SAMPLED_ROWS = 64
_CACHE = "Perhaps a cache between client and server ignores the query."


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


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of one epoch, sliced as their numbers are. `spec` must be resolved."""

    spec: Spec
    epoch: int
    numbers: range

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, part: slice) -> Steps:
        return replace(self, numbers=self.numbers[part])


class Client:
    """One dataset on servers that hold the same data. Raises SpecError: an address is invalid."""

    def __init__(
        self,
        servers: str | Sequence[str],
        dataset: str,
        *,
        rank: int,
        world_size: int = 1,
        retry_seconds: float,
        access: Access | None = None,
    ) -> None:
        if not isinstance(dataset, str) or dataset in ("", ".", "..") or "/" in dataset:
            raise SpecError(f"dataset must be a name (a folder a/b is the dataset a.b), not {dataset!r}", ("dataset",))
        self.dataset = dataset
        self._access = access or Access()
        self._addresses = parse_servers(servers, self._access)
        self._rank, self._world_size = rank, world_size
        self._servers = self._new_servers()  # kept here so that epochs share which servers fail
        self._buffers = Buffers()  # kept here so that epochs share their memory
        self.unreported = NOTHING
        self._retry_seconds = retry_seconds

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of another process: clock times of the servers' health mean nothing on another machine."""
        return {**self.__dict__, "_servers": self._new_servers(), "_unreported": (0, NOTHING)}

    def _new_servers(self) -> Servers:
        return Servers(self._addresses, self._rank, self._world_size, access=self._access)

    @property
    def unreported(self) -> Report:
        """Amounts of the last iteration, which the next one reports. A fork has none: each loader worker would report them."""
        process, report = self._unreported
        return report if process == os.getpid() else NOTHING

    @unreported.setter
    def unreported(self, report: Report) -> None:
        self._unreported = (os.getpid(), report)

    def connect(
        self,
        allocate: Callable[[int], memoryview] | None = None,
        reporter: Reporter | None = None,
        *,
        first_contact: bool = False,
    ) -> Transport:
        """Return a transport for one thread of this process. Its arguments: see HttpClient and Transport."""
        return Transport(
            self._servers,
            retry_seconds=self._retry_seconds,
            first_contact=first_contact,
            allocate=allocate or self._buffers.allocate,
            reporter=reporter,
            access=self._access,
        )

    def for_rank(self, rank: int) -> Client:
        """Return a client of another rank for the same data."""
        return Client(self._addresses, self.dataset, rank=rank, retry_seconds=self._retry_seconds, access=self._access)

    def trim(self) -> None:
        """Free most of the memory for bodies: an iteration has ended."""
        self._buffers.trim()

    def resolve(self, spec: Spec) -> Resolved:
        """Resolve every parameter of a spec. Raises the PenstockError that fits the failure."""
        # All ranks ask the same server for the latest snapshot: another server may lag by some seconds.
        servers = self._servers if spec.snapshot else Servers(self._addresses, access=self._access)
        target = f"{dataset_path(self.dataset)}/spec?{_query_of(spec)}"
        retry_seconds, access = self._retry_seconds, self._access
        with closing(Transport(servers, retry_seconds=retry_seconds, first_contact=True, access=access)) as transport:
            return transport.get(target, partial(_decode_resolved, spec))

    def frames(self, transport: Transport, steps: Steps, then: Steps | None = None) -> list[wire.Frame]:
        """Fetch the frames of `steps` in order: all, or the first few, but at least one.

        `then` are the steps of the next request if all of these arrive.

        Raises ServerUnavailable, SnapshotGone, DataError: see penstock.errors.
        """
        if len(steps) > 1 or then:
            ahead = self._target(then) if then else None
            runs = transport.get_some(self._target(steps), self._decoder(steps), then=ahead)
            if runs:
                return list(chain.from_iterable(runs))
        # A late step failed, and a response that has begun cannot say why. A request for the first step alone succeeds, or its
        # refusal has the reason.
        first = steps[:1]
        decode = self._decoder(first)
        return transport.get(self._target(first), lambda body: list(chain.from_iterable(decode(body))))

    def sample_lengths(self, spec: Spec, epoch: int) -> list[RowLength]:
        """Return the uncut lengths of an epoch's first rows; empty if the server does not answer within a second."""
        # Independent of the batch size, and unsorted: length buckets would give the shortest or longest rows of a window.
        first = replace(
            spec, batch_size=_SAMPLED_ROWS, world_size=1, drop_last=False, offset=0, skip=None, length_bucket_size=0
        )
        target = f"{batches_path(self.dataset, epoch, 0)}/0/provenance?{urlencode(first.to_query())}"
        try:
            with closing(HttpClient(_LENGTHS_SECONDS, access=self._access)) as http:
                samples = decode_object(http.get(self._servers.current, target))["samples"]
            rows = [row for sample in samples for row in sample["sources"]]
            places = {(row["dataset"], row["shard"], row["row_group"], row["row"]): RowLength.of_source(row) for row in rows}
        except (TransientError, PenstockError, ValueError, KeyError, TypeError):
            return []
        return list(places.values())

    def provenance(self, transport: Transport, spec: Spec, epoch: int, step: int) -> dict[str, Any]:
        """Fetch the source rows of each sample of a batch.

        Raises ServerUnavailable, and the PenstockError that fits a refusal.
        """
        path = batches_path(self.dataset, epoch, self._rank)
        return transport.get(f"{path}/{step}/provenance?{_query_of(spec)}", decode_object)

    def _target(self, steps: Steps) -> str:
        path, numbers = batches_path(self.dataset, steps.epoch, self._rank), steps.numbers
        # A slice of a strided range may end past the epoch's last step.
        return f"{path}?start={numbers[0]}&stop={numbers[-1] + 1}&stride={numbers.step}&{_query_of(steps.spec)}"

    def _decoder(self, steps: Steps) -> Callable[[memoryview], Iterator[list[wire.Frame]]]:
        spec, numbers = steps.spec, steps.numbers
        expected = wire.Address(self.dataset, str(spec.snapshot), spec.digest, steps.epoch, self._rank, 0)

        def decode(body: memoryview) -> Iterator[list[wire.Frame]]:
            """Yield the requested frames. Raises WireError after the last valid ones."""
            missing = numbers
            for frames in wire.decode_groups(body, numbers):
                if not missing:
                    raise WireError(f"the response has more than the requested steps {numbers[0]} to {numbers[-1]}")
                address = frames[0].address
                if address != expected._replace(step=missing[0]):
                    why = "" if address.spec_digest == spec.digest else ", of other parameters"
                    raise WireError(f"expected the batch of step {missing[0]}, received another{why}. {_CACHE}")
                yield frames
                missing = missing[len(frames) :]
            if missing:
                raise WireError(f"expected the batch of step {missing[0]}, but the response ends before it")

        return decode


@lru_cache(maxsize=8)  # all requests of an epoch have the same spec
def _query_of(spec: Spec) -> str:
    return urlencode(spec.to_query())


def decode_object(body: memoryview) -> dict[str, Any]:
    """Decode a JSON object. Raises WireError: the body is not a JSON object."""
    try:
        value = parse_json(body)
    except ValueError as error:
        raise WireError(f"the response is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise WireError(f"the response is a JSON {type(value).__name__}, not an object")
    return value


def _decode_resolved(asked: Spec, body: memoryview) -> Resolved:
    """Decode a resolved spec.

    Raises:
        WireError: the response is for other parameters.
        VersionMismatch: the response is not a spec of this version.
    """
    try:
        answer = parse_json(body)
        size = answer["vocab_size"]
        resolved = Resolved(
            spec=Spec(**answer["spec"]),
            num_steps=int(answer["num_steps"]),
            num_samples=int(answer["num_samples"]),
            vocab_size=None if size is None else int(size),
            tensors=tuple(str(tensor["name"]) for tensor in answer["tensors"]),
            advice=tuple(map(str, answer["advice"])),
        )
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise VersionMismatch(
            f"the response is not a spec of this version of penstock ({error!r}). Does the server have the same version?"
        ) from error
    # Skips and mixes have several equal spellings. A requested None lets the server choose, except for skip.
    given = {name: value for name, value in asked.to_dict().items() if value is not None and name not in ("skip", "mix")}
    is_same = given.items() <= resolved.spec.to_dict().items() and asked.skipped() == resolved.spec.skipped()
    if not is_same or (asked.mix and asked.mixed() != resolved.spec.mixed()):
        raise WireError(f"the response is for other parameters. {_CACHE}")
    return resolved
