"""The plan: a snapshot and a spec, resolved. Everything about an epoch that is known before a single block is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

from penstock.spec import Spec
from penstock.wire import Address, Layout
from penstock_server.blocks import Blocks
from penstock_server.encode import features
from penstock_server.order import EpochOrder, IntArray, Schedule
from penstock_server.packing import sequences_per_block
from penstock_server.problems import BadParameter, SnapshotGone
from penstock_server.snapshot import Snapshot

Width = TypeVar("Width", int, int | None)

MAX_BATCH_BYTES = 1 << 30
_PLANNED_EPOCHS = 16  # each a few words a block


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of every batch: the tokens of some features, shape [batch_size, width], or their number, [batch_size].

    `longest` is the most tokens a line of it has, None for a tensor of numbers.
    """

    name: str
    dtype: str
    features: tuple[str, ...]
    longest: int | None

    def shape(self, batch_size: int, width: Width) -> tuple[int | Width, ...]:
        """The shape, where the lines of a tensor of tokens are `width` long; None is a width that varies."""
        return (batch_size,) if self.longest is None else (batch_size, width)


@dataclass(frozen=True, slots=True)
class Plan:
    """How one spec cuts one snapshot into batches. `spec` has every parameter resolved, the snapshot included."""

    dataset: str
    snapshot: Snapshot
    blocks: Blocks
    spec: Spec
    schedule: Schedule

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What a batch holds on the wire; attention masks and labels are derived from it by the client."""
        spec, dtype = self.spec, self.snapshot.token_dtype
        if spec.task == "seq2seq":
            return (
                Tensor("input_ids", dtype, ("prompt",), spec.seq_len),
                Tensor("lengths", "int32", ("prompt",), None),
                Tensor("labels", dtype, ("response",), spec.target_len),
                Tensor("label_lengths", "int32", ("response",), None),
            )
        row = features(self.snapshot.recipe)
        causal = (Tensor("input_ids", dtype, row, spec.seq_len), Tensor("lengths", "int32", row, None))
        if "prompt" in row and spec.loss == "response":
            return (*causal, Tensor("prompt_lengths", "int32", ("prompt",), None))
        return causal

    @property
    def shapes(self) -> list[tuple[int | None, ...]]:
        """The shape of each tensor, with None for a width that differs from batch to batch."""
        fixed = self.spec.pad == "seq_len"
        return [t.shape(self.spec.batch_size, t.longest if fixed else None) for t in self.tensors]

    @property
    def largest_layout(self) -> Layout:
        """The payload of a batch whose every line is as long as it can be: of every batch, if pad is seq_len."""
        size = self.spec.batch_size
        return Layout.of([(t.name, t.dtype, t.shape(size, t.longest or 0)) for t in self.tensors])

    def address(self, epoch: int, rank: int, step: int) -> Address:
        """The address that a frame of this plan carries."""
        return Address(dataset=self.dataset, snapshot=self.snapshot.fingerprint, epoch=epoch, rank=rank, step=step)

    def order(self, epoch: int) -> EpochOrder:
        """The order of an epoch; the last few are remembered."""
        spec = self.spec
        return _order(self.snapshot, spec.shuffle, spec.window, spec.seed, epoch)

    def sequences(self, epoch: int, rank: int, steps: Sequence[int]) -> tuple[IntArray, IntArray]:
        """The (block, row in the block) of each sequence of some batches, each of shape [len(steps) * batch_size].

        Raises StepOutOfRange, RankOutOfRange: the epoch has no such batch.
        """
        return self.order(epoch).sequences(self.schedule.positions(steps, rank).reshape(-1))


def make_plan(dataset: str, snapshot: Snapshot, blocks: Blocks, spec: Spec) -> Plan:
    """Resolves a spec against a snapshot.

    Raises SnapshotGone: the spec names another snapshot.
    Raises BadParameter: the parameters are sound one by one, but not together or not for this dataset.
    """
    if spec.snapshot not in (None, snapshot.fingerprint):
        raise SnapshotGone(
            f"snapshot {spec.snapshot} of {dataset} is not on this server, which has {snapshot.fingerprint}: the shards or "
            f"the recipe changed since this run began. Resume on the old shards and recipe, or start a new run."
        )
    if spec.task == "seq2seq" and snapshot.recipe.kind != "prompt_response":
        raise BadParameter(f"task=seq2seq needs prompt and response; {dataset} has only {snapshot.recipe.columns[0]!r}.")
    target_len = (spec.target_len or spec.seq_len) if spec.task == "seq2seq" else None
    resolved = replace(spec, snapshot=snapshot.fingerprint, target_len=target_len)
    num_sequences = int(sequences_per_block(snapshot.rows_per_block).sum())
    if spec.offset > num_sequences:
        raise BadParameter(f"offset={spec.offset:,} is past the epoch's end: it has {num_sequences:,} sequences.")
    schedule = Schedule(
        num_positions=num_sequences,
        batch_size=spec.batch_size,
        world_size=spec.world_size,
        offset=spec.offset,
        tail=spec.tail,
    )
    if spec.offset == 0 and schedule.num_steps == 0:
        raise BadParameter(
            f"no step fits: {dataset} has {num_sequences:,} sequences, one step takes batch_size x world_size = "
            f"{spec.batch_size * spec.world_size:,}. Lower them, or ask for tail=wrap, which fills the step from the "
            f"epoch's start."
        )
    plan = Plan(dataset, snapshot, blocks, resolved, schedule)
    if (nbytes := plan.largest_layout.nbytes) > MAX_BATCH_BYTES:
        raise BadParameter(
            f"a batch of {spec.batch_size:,} sequences of {spec.seq_len:,} tokens would be up to {nbytes:,} bytes; the limit "
            f"is {MAX_BATCH_BYTES:,}. Lower batch_size or seq_len."
        )
    return plan


@lru_cache(maxsize=_PLANNED_EPOCHS)
def _order(snapshot: Snapshot, shuffle: str, window: int, seed: int, epoch: int) -> EpochOrder:
    return EpochOrder(sequences_per_block(snapshot.rows_per_block), shuffle=shuffle, window=window, seed=seed, epoch=epoch)
