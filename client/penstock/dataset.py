"""RemoteDataset: the batches of one rank as a torch IterableDataset. Its whole state is a few integers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

import torch
import torch.distributed
from torch.utils.data import IterableDataset, get_worker_info

from penstock import wire
from penstock.errors import PenstockError, SpecError, StateMismatch, WireError
from penstock.prefetch import Prefetch
from penstock.spec import Spec
from penstock.tensors import Batch, expand, nbytes
from penstock.transport import Transport

_STATE_VERSION = 1
_ORDER = ("snapshot", "seed", "shuffle", "window", "packing")  # what decides which sample stands where in an epoch


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """What this process's iterations have done so far; `wait_seconds` is the time the loop spent waiting for a batch."""

    num_batches: int = 0
    num_retries: int = 0
    wait_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cursor:
    """How far an epoch is consumed: `step` of `num_steps` steps, counted behind the first `offset` samples."""

    offset: int
    num_steps: int
    step: int


class RemoteDataset(IterableDataset[Batch]):
    """The batches of one rank and epoch, pulled from Penstock servers ahead of the training loop.

    servers          address of a server, "http://host:8000", or of several that hold the same data
    dataset          its name on the server
    rank, world_size which slice of the epoch; default: torch.distributed, else RANK and WORLD_SIZE, else 0 of 1
    prefetch_bytes   host memory for batches fetched ahead, in bytes
    retry_seconds    how long to try when no server answers, in seconds
    the others       the spec; see penstock.Spec

    A batch is a dict of int64 tensors: input_ids, attention_mask and labels; see penstock.tensors.expand. With CUDA they
    lie in pinned memory. `len(data)` is the exact number of batches that the next iteration gives, `steps_per_epoch` that of
    a whole epoch; token ids are below `vocab_size`.

    Use it as it is, or as DataLoader(data, batch_size=None, num_workers=N): the order is the same for every N. It fetches
    ahead in a thread, so workers gain nothing.

    Raises SpecError: a parameter is wrong.  Raises UnknownDataset: the server has no such dataset.
    Raises SnapshotGone: the server has not the snapshot asked for.  Raises ServerUnavailable: no server answers.
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        dataset: str,
        *,
        batch_size: int = 8,
        seq_len: int = 1024,
        seed: int = 0,
        shuffle: str = "window",
        window: int = 262_144,
        packing: str = "rows",
        pad: str = "seq_len",
        task: str = "causal",
        target_len: int | None = None,
        loss: str = "response",
        tail: str = "drop",
        snapshot: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        prefetch_bytes: int = 64 << 20,
        retry_seconds: float = 600.0,
    ) -> None:
        self._servers = _addresses(servers)
        self._path = f"/v1/datasets/{quote(dataset, safe='')}"
        self.dataset = dataset
        self.rank, self.world_size = _place(rank, world_size)
        self._prefetch_bytes, self._retry_seconds = prefetch_bytes, retry_seconds
        spec = Spec(
            batch_size=batch_size,
            seq_len=seq_len,
            world_size=self.world_size,
            seed=seed,
            shuffle=shuffle,
            window=window,
            packing=packing,
            pad=pad,
            task=task,
            target_len=target_len,
            loss=loss,
            tail=tail,
            snapshot=snapshot,
        )
        answer = self._resolve(spec)
        self.spec = Spec(**answer["spec"])
        self.steps_per_epoch = int(answer["num_steps"])
        self.vocab_size = int(answer["vocab_size"])
        # In shared memory, so that loader workers that outlive an epoch see set_epoch, and the main process sees them.
        self._shared = torch.zeros(2, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._cursor = self._start()
        self._cursor_is_next = True
        self._stats = Stats()

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration gives."""
        return int(self._shared[0])

    @property
    def snapshot(self) -> str:
        """Fingerprint of the data that this run is bound to."""
        assert self.spec.snapshot  # resolved by the server
        return self.spec.snapshot

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch. Another epoch starts at its first step; the same one keeps its place."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise SpecError(f"epoch must be a whole number from 0, not {epoch!r}", ("epoch",))
        if epoch != self.epoch:
            self._shared[0] = epoch
            self._cursor, self._cursor_is_next = self._start(), True

    def __len__(self) -> int:
        """Batches of the next iteration: an epoch's, or what is left of it after load_state_dict."""
        return self._cursor.num_steps - self._cursor.step if self._cursor_is_next else self.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        """One epoch from its first step, or from where load_state_dict put it. Leaving the loop stops the fetching.

        Raises ServerUnavailable, SnapshotGone, DataError: see penstock.errors.
        """
        if not self._cursor_is_next:
            self._cursor = self._start()
        self._cursor_is_next = False
        cursor, epoch = self._cursor, self.epoch
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        if worker:
            self._shared[1] = 1
        steps = range(cursor.step + first, cursor.num_steps, stride)
        spec = replace(self.spec, offset=cursor.offset)
        # Torch's pinned memory belongs to the process that has the GPU; a DataLoader pins what its workers send.
        pin_memory = worker is None and torch.cuda.is_available()
        transport = Transport(self._servers, retry_seconds=self._retry_seconds)
        before = self._stats

        def fetch(run: range) -> list[Batch]:
            frames = self._fetch(transport, spec, epoch, run)
            return [expand(frame, pin_memory=pin_memory) for frame in frames]

        batches = Prefetch(fetch, steps, nbytes=nbytes, budget_bytes=self._prefetch_bytes, interrupt=transport.interrupt)
        with closing(transport), closing(batches):
            for step, batch in zip(steps, batches, strict=True):
                self._cursor = replace(cursor, step=step + 1)
                self._stats = Stats(
                    num_batches=self._stats.num_batches + 1,
                    num_retries=before.num_retries + transport.num_retries,
                    wait_seconds=before.wait_seconds + batches.wait_seconds,
                )
                yield batch

    def stats(self) -> Stats:
        """Batches, retries and waiting of all iterations in this process."""
        return self._stats

    def state_dict(self) -> dict[str, Any]:
        """Where the training loop is: what it was given, not what was fetched ahead. Plain integers and strings.

        Raises PenstockError: loader workers iterate, and they run ahead of the loop, so this process cannot know.
        """
        if self._shared[1] and get_worker_info() is None:
            raise PenstockError(
                "state_dict cannot count what the loop consumed: DataLoader workers iterated over this dataset, and they run "
                "ahead of it. Iterate over the dataset itself, or with num_workers=0: it fetches ahead in a thread anyway."
            )
        spec = self.spec.to_dict()
        return {
            "version": _STATE_VERSION,
            "dataset": self.dataset,
            "epoch": self.epoch,
            "step": self._cursor.step,
            "offset": self._cursor.offset,
            "batch_size": spec["batch_size"],
            "world_size": spec["world_size"],
            **{name: spec[name] for name in _ORDER},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts the next iteration where state_dict was taken. Another world_size or batch_size goes on at the same sample.

        Raises StateMismatch: the state is of other data or of another order; the message lists what differs.
        """
        if state.get("version") != _STATE_VERSION:
            raise StateMismatch(f"this is no state of a RemoteDataset of version {_STATE_VERSION}: {dict(state)!r}")
        here = {"dataset": self.dataset, **{name: self.spec.to_dict()[name] for name in _ORDER}}
        differing = [f"{n}: {state.get(n)!r} then, {value!r} now" for n, value in here.items() if state.get(n) != value]
        if differing:
            raise StateMismatch(
                f"this state belongs to another order of samples ({'; '.join(differing)}); going on with it would repeat some "
                f"and skip others. Make the dataset with the same values, or start the epoch anew without the state."
            )
        offset, step = int(state["offset"]), int(state["step"])
        per_step = int(state["batch_size"]) * int(state["world_size"])
        if per_step != self.spec.batch_size * self.spec.world_size:
            offset, step = offset + step * per_step, 0
        self._shared[0] = int(state["epoch"])
        self._cursor, self._cursor_is_next = self._start(offset, step), True

    def _start(self, offset: int = 0, step: int = 0) -> _Cursor:
        num_steps = self.steps_per_epoch
        if offset:
            num_steps = int(self._resolve(replace(self.spec, offset=offset))["num_steps"])
        return _Cursor(offset=offset, num_steps=num_steps, step=step)

    def _resolve(self, spec: Spec) -> dict[str, Any]:
        """The server's word on a spec: every parameter resolved, the snapshot included, and the number of steps."""
        transport = Transport(self._servers, retry_seconds=self._retry_seconds)
        with closing(transport):
            return transport.get(f"{self._path}/spec", spec.to_query(), _decode_spec)

    def _fetch(self, transport: Transport, spec: Spec, epoch: int, steps: range) -> list[wire.Frame]:
        path = f"{self._path}/epochs/{epoch}/ranks/{self.rank}/batches"
        # A slice of a strided range may end past the epoch's last step.
        query = {"start": str(steps[0]), "stop": str(steps[-1] + 1), "stride": str(steps.step), **spec.to_query()}

        def decode(body: bytes) -> list[wire.Frame]:
            frames = list(wire.decode(body))
            expected = [
                wire.Address(dataset=self.dataset, snapshot=self.snapshot, epoch=epoch, rank=self.rank, step=step)
                for step in steps
            ]
            if [frame.address for frame in frames] != expected:
                raise WireError(f"steps {steps[0]} to {steps[-1]} were asked for, other batches came")
            return frames

        return transport.get(path, query, decode)


def _decode_spec(body: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(body)
        Spec(**answer["spec"]), int(answer["num_steps"]), int(answer["vocab_size"])
    except (ValueError, KeyError, TypeError) as error:
        raise WireError(f"the answer is no spec of this version of penstock: {error}") from error
    return dict(answer)


def _addresses(servers: str | Sequence[str]) -> tuple[str, ...]:
    given = (servers,) if isinstance(servers, str) else tuple(servers)
    if not given or not all(address.startswith(("http://", "https://")) for address in given):
        raise SpecError(f'servers must be addresses such as "http://localhost:8000", not {servers!r}', ("servers",))
    return tuple(address.rstrip("/") for address in given)


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise SpecError("give both rank and world_size, or neither", ("rank", "world_size"))
    if rank is None or world_size is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        else:
            rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if not 0 <= rank < world_size:
        raise SpecError(f"rank must be from 0 to {world_size - 1} (world_size={world_size}), not {rank}", ("rank",))
    return rank, world_size
