"""The plan: a snapshot and a spec, resolved. Everything about an epoch that is known before a single block is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple, TypeVar

from penstock.spec import Spec
from penstock.wire import Address, Layout
from penstock_server.blocks import Blocks
from penstock_server.encode import features
from penstock_server.index import Index
from penstock_server.order import EpochOrder, Schedule, key
from penstock_server.packing import Concat, Packing, Rows, Spans
from penstock_server.problems import BadParameter, SnapshotGone
from penstock_server.snapshot import Snapshot

Width = TypeVar("Width", int, int | None)

MAX_BATCH_BYTES = 1 << 30
_PLANNED_EPOCHS = 16  # each a few words a block


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of every batch, made of the tokens of some features.

    tokens   the tokens themselves, shape [batch_size, width]; a line has at most `longest`
    mask     1 where the token is of these features, shape [batch_size, width]
    count    the number of tokens, shape [batch_size]
    """

    name: str
    kind: Literal["tokens", "mask", "count"]
    dtype: str
    features: tuple[str, ...]
    longest: int = 0

    def shape(self, batch_size: int, width: Width) -> tuple[int | Width, ...]:
        """The shape, where the lines of a tensor of tokens are `width` long; None is a width that varies."""
        return (batch_size,) if self.kind == "count" else (batch_size, width)


@dataclass(frozen=True)
class Plan:
    """How one spec cuts one snapshot into batches. `spec` has every parameter resolved, the snapshot included."""

    dataset: str
    snapshot: Snapshot
    blocks: Blocks
    index: Index
    spec: Spec
    schedule: Schedule

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """What a batch holds on the wire; attention masks and labels are derived from it by the client."""
        spec, dtype = self.spec, self.snapshot.token_dtype
        if spec.task == "seq2seq":
            assert spec.target_len  # a plan's spec is resolved
            return (
                Tensor("input_ids", "tokens", dtype, ("prompt",), spec.seq_len),
                Tensor("lengths", "count", "int32", ("prompt",)),
                Tensor("labels", "tokens", dtype, ("response",), spec.target_len),
                Tensor("label_lengths", "count", "int32", ("response",)),
            )
        row = features(self.snapshot.recipe)
        ids = Tensor("input_ids", "tokens", dtype, row, spec.seq_len)
        masks_prompts = "prompt" in row and spec.loss == "response"
        if spec.packing == "concat":
            return (ids, Tensor("loss_mask", "mask", "uint8", ("response",), spec.seq_len)) if masks_prompts else (ids,)
        lengths = Tensor("lengths", "count", "int32", row)
        return (ids, lengths, Tensor("prompt_lengths", "count", "int32", ("prompt",))) if masks_prompts else (ids, lengths)

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether every batch has the same shapes, and so the same length in bytes."""
        return self.spec.pad == "seq_len" or self.spec.packing == "concat"

    @property
    def shapes(self) -> list[tuple[int | None, ...]]:
        """The shape of each tensor, with None for a width that differs from batch to batch."""
        fixed = self.has_fixed_shapes
        return [t.shape(self.spec.batch_size, t.longest if fixed else None) for t in self.tensors]

    @cached_property
    def largest_layout(self) -> Layout:
        """The payload of a batch whose every line is as long as it can be: of every batch, if shapes are fixed."""
        size = self.spec.batch_size
        return Layout.of([(t.name, t.dtype, t.shape(size, t.longest)) for t in self.tensors])

    def address(self, epoch: int, rank: int, step: int) -> Address:
        """The address that a frame of this plan carries."""
        return Address(dataset=self.dataset, snapshot=self.snapshot.fingerprint, epoch=epoch, rank=rank, step=step)

    def epoch(self, epoch: int) -> tuple[Packing, EpochOrder]:
        """How blocks become sequences in an epoch, and in what order; the last few epochs are remembered."""
        return _epoch(self.snapshot, self.index, _order_of(self.spec), epoch)

    def read_ahead(self, epoch: int, rank: int, step: int) -> None:
        """Has the blocks of the window behind this step's loaded in the background, if the cache has room for both."""
        _, order = self.epoch(epoch)
        window = order.window(int(self.schedule.positions([step], rank)[0, 0]))
        job = (self.snapshot, _order_of(self.spec), epoch)
        self.blocks.read_ahead(job, window, lambda: order.blocks_of_window(window + 1).tolist())

    def spans(self, epoch: int, rank: int, steps: Sequence[int]) -> Spans:
        """What the sequences of some batches are made of; sequence i is index i % batch_size of step i // batch_size.

        Raises StepOutOfRange, RankOutOfRange: the epoch has no such batch.
        """
        positions = self.schedule.positions(steps, rank).reshape(-1)
        packing, order = self.epoch(epoch)
        return packing.spans(*order.sequences(positions))


def make_plan(dataset: str, snapshot: Snapshot, blocks: Blocks, index: Index, spec: Spec) -> Plan:
    """Resolves a spec against a snapshot.

    Raises SnapshotGone: the spec names another snapshot.
    Raises BadParameter: the parameters are sound one by one, but not together or not for this dataset.
    Raises IndexNotReady, and what else Index.tokens_per_block raises: the packing needs token counts.
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
    if spec.packing == "concat":
        if spec.task == "seq2seq":
            raise BadParameter("packing=concat makes one stream of tokens; task=seq2seq has two. Use packing=rows.")
        num_sequences = int(index.tokens_per_block().sum()) // spec.seq_len
    else:
        num_sequences = snapshot.num_rows
    if spec.offset > num_sequences:
        raise BadParameter(f"offset={spec.offset:,} is past the epoch's end: it has {num_sequences:,} sequences.")
    schedule = Schedule(
        num_positions=num_sequences,
        batch_size=spec.batch_size,
        world_size=spec.world_size,
        offset=spec.offset,
        tail=spec.tail,
    )
    if num_sequences == 0:
        raise BadParameter(f"{dataset} has fewer than seq_len={spec.seq_len:,} tokens in all. Lower seq_len.")
    if spec.offset == 0 and schedule.num_steps == 0:
        raise BadParameter(
            f"no step fits: {dataset} has {num_sequences:,} sequences, one step takes batch_size x world_size = "
            f"{spec.batch_size * spec.world_size:,}. Lower them, or ask for tail=wrap, which fills the step from the "
            f"epoch's start."
        )
    plan = Plan(dataset, snapshot, blocks, index, resolved, schedule)
    if (nbytes := plan.largest_layout.nbytes) > MAX_BATCH_BYTES:
        raise BadParameter(
            f"a batch of {spec.batch_size:,} sequences of {spec.seq_len:,} tokens would be up to {nbytes:,} bytes; the limit "
            f"is {MAX_BATCH_BYTES:,}. Lower batch_size or seq_len."
        )
    return plan


class _OrderKey(NamedTuple):
    """What of a spec decides which sequence stands where. `seq_len` is 0 where it does not."""

    packing: str
    seq_len: int
    shuffle: str
    window: int
    seed: int


def _order_of(spec: Spec) -> _OrderKey:
    seq_len = spec.seq_len if spec.packing == "concat" else 0
    return _OrderKey(spec.packing, seq_len, spec.shuffle, spec.window, spec.seed)


@lru_cache(maxsize=_PLANNED_EPOCHS)
def _epoch(snapshot: Snapshot, index: Index, of: _OrderKey, epoch: int) -> tuple[Packing, EpochOrder]:
    packing: Packing
    if of.packing == "concat":
        packing = Concat(index.tokens_per_block(), of.seq_len, key(of.seed, epoch, "shift") % of.seq_len)
    else:
        packing = Rows(snapshot.rows_per_block)
    counts = packing.sequences_per_block
    groups = snapshot.blocks_per_group
    return packing, EpochOrder(counts, groups, shuffle=of.shuffle, window=of.window, seed=of.seed, epoch=epoch)
