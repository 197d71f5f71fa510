"""Batches for a benchmark, epoch after epoch: as a training loop gets them, or as they come over the wire."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from penstock.batch import IGNORED, SIDES, count_tokens
from penstock.errors import PenstockError, SpecError
from penstock.feeding.ranges import PREFETCH_BYTES, fetch_ahead
from penstock.source import Resolved, Source
from penstock.spec import Spec
from penstock.transport.transport import Transport
from penstock.wire import Frame

_RETRY_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """What is in one batch: tokens, and positions, which are tokens and padding."""

    num_tokens: int
    num_positions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Supply:
    """Endless supply of batches; `num_bytes` and `num_retries` count the cost so far.

    spec           with every parameter resolved, the snapshot included
    num_steps      steps of an epoch
    memory         location of batches, as a text
    makes_tensors  builds tensors as for a loop, which costs some of the loop's time per batch
    """

    spec: Spec
    num_steps: int
    memory: str
    makes_tensors: bool
    batches: Generator[Any, None, None]
    count: Callable[[Any], Count]
    num_bytes: Callable[[], int]
    num_retries: Callable[[], int]


def tensors(server: str, dataset: str, query: Mapping[str, str], rank: int, epoch: int) -> Supply:
    """RemoteDataset's batches. Raises PenstockError: there is no torch; and what RemoteDataset raises."""
    try:
        import torch

        from penstock.dataset import RemoteDataset
    except ImportError as error:
        raise PenstockError(
            f"RemoteDataset needs torch, which is not installed here ({error}): pip install 'penstock[torch]'. Or measure "
            f"what comes over the wire alone, with --no-tensors."
        ) from error
    spec = _spec(query)
    chosen: dict[str, Any] = {name: value for name, value in spec.to_dict().items() if name != "offset"}
    data = RemoteDataset(server, dataset, rank=rank, retry_seconds=_RETRY_SECONDS, **chosen)
    _check_steps(data.steps_per_epoch, data.spec)

    def batches() -> Generator[Any, None, None]:
        for number in count(epoch):
            data.set_epoch(number)
            yield from data

    return Supply(
        spec=data.spec,
        num_steps=data.steps_per_epoch,
        memory="tensors in pinned memory" if torch.cuda.is_available() else "tensors in ordinary memory (no GPU)",
        makes_tensors=True,
        batches=batches(),
        count=partial(_count_tensors, data.spec.task == "seq2seq"),
        num_bytes=lambda: data.stats().num_bytes,
        num_retries=lambda: data.stats().num_retries,
    )


def frames(server: str, dataset: str, query: Mapping[str, str], rank: int, epoch: int) -> Supply:
    """Frames that are fetched ahead and checked, nothing more. Raises what Source raises."""
    source = Source(server, dataset, rank=rank, retry_seconds=_RETRY_SECONDS)
    resolved = source.resolve(_spec(query))
    _check_steps(resolved.num_steps, resolved.spec)
    used: list[Transport] = []

    def batches() -> Generator[Frame, None, None]:
        for number in count(epoch):
            used.append(source.connect())
            yield from _epoch(source, used[-1], resolved, number)

    return Supply(
        spec=resolved.spec,
        num_steps=resolved.num_steps,
        memory="frames as they came, without tensors",
        makes_tensors=False,
        batches=batches(),
        count=_count_frame,
        num_bytes=lambda: sum(transport.num_bytes for transport in used),
        num_retries=lambda: sum(transport.num_retries for transport in used),
    )


def _epoch(source: Source, transport: Transport, resolved: Resolved, epoch: int) -> Iterator[Frame]:
    ahead = fetch_ahead(source, transport, resolved.spec, epoch, range(resolved.num_steps), PREFETCH_BYTES)
    with closing(transport), closing(ahead):
        yield from ahead


def _spec(query: Mapping[str, str]) -> Spec:
    spec = Spec.from_query(query.items())
    if spec.offset:
        raise SpecError("bench begins at an epoch's first sample: leave offset out", ("offset",))
    return spec


def _check_steps(num_steps: int, spec: Spec) -> None:
    if not num_steps:
        raise SpecError(
            f"an epoch has no step: it has fewer samples than batch_size={spec.batch_size} times "
            f"world_size={spec.world_size}. Lower them, or give --drop-last false.",
            ("batch_size",),
        )


def _count_tensors(is_seq2seq: bool, batch: Mapping[str, Any]) -> Count:
    masks = [batch[f"{side}attention_mask"] for side in SIDES if f"{side}attention_mask" in batch]
    if is_seq2seq:  # labels hold separate tokens, those of the response
        masks.append(batch["labels"] != IGNORED)
    return Count(num_tokens=sum(int(mask.sum()) for mask in masks), num_positions=sum(mask.numel() for mask in masks))


def _count_frame(frame: Frame) -> Count:
    tensors = frame.tensors
    ids = (*(f"{side}input_ids" for side in SIDES), "labels")
    return Count(num_tokens=count_tokens(frame), num_positions=sum(tensors[name].size for name in ids if name in tensors))
