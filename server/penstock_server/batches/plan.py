"""The plan: a dataset and a spec, resolved; everything about an epoch that is known before a block is read.

    (step, rank) --Schedule--> positions --Mixture--> members' own positions --EpochOrder--> samples --Packing--> spans

A plain dataset is a mixture of one member.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, pairwise
from typing import Literal, TypeVar

import numpy as np
import pyarrow as pa

from penstock.spec import MAX_COUNT, Spec
from penstock.text import counted
from penstock.wire import VERSION, Address, Layout
from penstock_server.batches.member import Member
from penstock_server.catalog.snapshot import Snapshot
from penstock_server.lru import LruCache
from penstock_server.order.arrays import IntArray, by_value, distinct
from penstock_server.order.length_buckets import MAX_WINDOW
from penstock_server.order.mixture import Mixture, mixture_of
from penstock_server.order.packing import Spans
from penstock_server.order.schedule import Schedule
from penstock_server.problems import BadParameter
from penstock_server.recipes.fields import is_bytes, is_nested, is_text, numpy_type

MAX_BATCH_BYTES = 1 << 30
_MAX_BATCH_SPANS = 1 << 22  # some 300 bytes each while the batch is made
PLANS_KEPT, _PLANS_BYTES = 256, 256 << 20  # each keeps its snapshots in memory, even after the folder has changed
_LARGE_PERIODS = 100_000  # samples of a mix's phases; larger mixes take seconds to make
_PLAN_BYTES = 16 << 10
_SMALL_WINDOW = 1000  # samples; fewer mix too little to be recommended
_ROUGHLY = 1.1  # estimates are accurate to about 10 %: blocks that may just fit are not refused
Width = TypeVar("Width", int, int | None)


@dataclass(frozen=True, slots=True)
class MemberSpans:
    """Blocks and spans that some batches take from one member; `spans.samples` counts over all members."""

    member: Member
    blocks: list[int]
    spans: Spans


@dataclass(frozen=True, eq=False)
class Plan:
    """How one spec cuts one or several datasets into batches.

    `spec` has every parameter resolved, including the snapshot. `sizes` is the number of samples per epoch of each member.
    """

    dataset: str
    members: tuple[Member, ...]
    sizes: tuple[int, ...]
    mixture: Mixture | None
    spec: Spec
    schedule: Schedule

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Tensors of a batch on the wire; the client derives attention masks and labels from them."""
        return tensors_of([member.snapshot for member in self.members], self.spec)

    @cached_property
    def identity(self) -> str:
        """A string that identifies this plan."""
        return json.dumps([VERSION, self.dataset, self.spec.to_dict()])

    @property
    def nbytes(self) -> int:
        """Estimated bytes of memory beside those of its members."""
        return _PLAN_BYTES + (self.mixture.nbytes if self.mixture else 0) + 64 * len(self.schedule.skipped)

    @property
    def has_fixed_widths(self) -> bool:
        """Whether every sample has the full width, with padding if needed."""
        return self.spec.pad == "seq_len" or self.spec.packing != "rows"

    @cached_property
    def has_fixed_shapes(self) -> bool:
        """Whether every batch has the same shapes, and so the same number of bytes."""
        return self.has_fixed_widths and not any(tensor.is_ragged for tensor in self.tensors)

    @property
    def shapes(self) -> list[tuple[int | None, ...]]:
        """Shape of each tensor; None stands for a width that differs between batches."""
        fixed = self.has_fixed_widths
        return [t.shape(self.spec.batch_size, t.longest if fixed and not t.is_ragged else None) for t in self.tensors]

    @cached_property
    def step_nbytes(self) -> int:
        """Estimated bytes of a batch; for passthrough text, from the average bytes of a row in the shards."""
        if not any(tensor.is_ragged for tensor in self.tensors):
            return self.largest_layout.nbytes
        snapshots = [member.snapshot for member in self.members]
        per_row = max(snapshot.nbytes // max(1, snapshot.num_rows) for snapshot in snapshots)
        return self.largest_layout.nbytes + self.spec.batch_size * per_row

    @cached_property
    def step_stored(self) -> int:
        """Estimated bytes that the rows of a batch take in the shards."""
        snapshots = [member.snapshot for member in self.members]
        per_row = max(snapshot.nbytes / max(1, snapshot.num_rows) for snapshot in snapshots)
        return max(1, int(per_row * self.step_spans))

    @cached_property
    def step_spans(self) -> float:
        """Estimated spans of a batch: rows, and parts of rows."""
        return self.spec.batch_size * max(member.spans_per_sample for member in self.members)

    @cached_property
    def largest_layout(self) -> Layout:
        """Payload of a batch with every sample at full width; for passthrough texts, only their frame."""
        size = self.spec.batch_size
        return Layout.of([(t.name, t.dtype, t.shape(size, t.longest)) for t in self.tensors])

    def is_named_by(self, requested: Spec) -> bool:
        """Returns whether the requested spec pins the snapshot, and the mix if any, so that it always means the same data."""
        return requested.snapshot is not None and (requested.mix is not None or self.spec.mix is None)

    @property
    def snapshot(self) -> str:
        """The fingerprint of the data."""
        assert self.spec.snapshot  # a plan's spec is resolved
        return self.spec.snapshot

    @property
    def vocab_size(self) -> int | None:
        """Upper bound of the token ids, exclusive; None if unknown."""
        sizes = [member.snapshot.vocab_size for member in self.members]
        return None if None in sizes else max(size for size in sizes if size is not None)

    @property
    def padding(self) -> float | None:
        """Fraction of padding in an epoch's samples.

        None with packing=rows, where it depends on rows that are not counted, and for a mixture that is not concatenated.
        """
        if self.spec.packing == "concat":
            return 0.0
        if self.spec.packing == "rows" or self.mixture:
            return None
        num_tokens = int(self.members[0].index.tokens_per_block(self.members[0].order_key.split).sum())
        return 1 - num_tokens / (self.sizes[0] * self.spec.sample_len)

    @property
    def pad_id(self) -> int:
        """Token id that pads a sample."""
        return self.members[0].snapshot.recipe.pad_id

    def address(self, epoch: int, rank: int) -> Address:
        """Returns the address in the frames of an epoch and rank; each frame replaces the step 0."""
        return Address(self.dataset, self.snapshot, self.spec.digest, epoch, rank, step=0)

    def check(self, epoch: int, step: int, rank: int) -> None:
        """Checks that the batch exists. Raises StepOutOfRange, RankOutOfRange, BadParameter: it does not."""
        self.schedule.check(step, rank)
        self.check_epoch(epoch)

    def check_epoch(self, epoch: int) -> None:
        """Checks that the epoch exists. Raises BadParameter: it does not."""
        if self.spec.stopping_strategy == "never" and epoch:
            raise BadParameter(f"epoch {epoch} does not exist: with stopping_strategy=never epoch 0 does not end.")
        if self.mixture and (epoch + 1) * self.schedule.num_samples > MAX_COUNT:
            last = MAX_COUNT // self.schedule.num_samples - 1
            raise BadParameter(f"epoch {epoch:,} does not exist: samples of this mixture are counted up to epoch {last:,}.")

    def spans(self, epoch: int, rank: int, steps: Sequence[int]) -> list[MemberSpans]:
        """Returns the spans of the samples of some batches; sample i is index i % batch_size of steps[i // batch_size].

        Raises StepOutOfRange, RankOutOfRange: the epoch has no such batch.
        """
        spans_of_members = []
        for number, member_epoch, lines, positions in self.by_member(epoch, self.schedule.positions(steps, rank).reshape(-1)):
            member = self.members[number]
            packing, order = member.epoch(member_epoch)
            spans = packing.spans(*order.samples(positions))
            spans = spans._replace(samples=lines[spans.samples])
            spans_of_members.append(MemberSpans(member, distinct(spans.blocks).tolist(), spans))
        return spans_of_members

    def read_ahead(self, epoch: int, step: int) -> None:
        """Loads the blocks after this step of all ranks in the background, if the cache has room for them."""
        last_rank = self.schedule.positions([step], self.schedule.world_size - 1)[0]
        for number, member_epoch, _, positions in self.by_member(epoch, last_rank):
            self.members[number].read_ahead(member_epoch, int(positions.max()), self.schedule.world_size * self.spec.batch_size)

    def positions_of(self, member: int, epoch: int, positions: IntArray, member_epoch: int, count: int) -> IntArray:
        """Maps positions of a member's epoch to positions of an epoch; returns the first `count` that it shows, in order."""
        if self.mixture is None:
            shown_at = (positions[:, None] * self.spec.repeat + np.arange(self.spec.repeat)).reshape(-1)
            return self.schedule.earliest(shown_at if member_epoch == epoch else shown_at[:0], count)
        numbers = member_epoch * self.sizes[member] + np.sort(positions)
        begin, size = epoch * self.schedule.num_samples, self.schedule.num_samples
        shown_first = int(self.schedule.positions([0], 0)[0, 0]) if self.schedule.num_steps else 0
        wrap = int(np.searchsorted(numbers, self.mixture.num_before(member, begin + shown_first)))
        # A member's samples come in order from the epoch's start, then wrap around. Skipped samples take no position.
        most = len(numbers) if self.schedule.skipped else count
        start = int(np.searchsorted(numbers, self.mixture.num_before(member, begin)))
        nearest = np.concatenate([numbers[wrap : wrap + most], numbers[start : min(wrap, start + most)]])
        samples = [self.mixture.sample(member, number) for number in nearest.tolist()]
        shown = [sample - begin for sample in samples if sample is not None and begin <= sample < begin + size]
        return self.schedule.earliest(np.array(shown, np.int64), count)

    def own_epochs(self, member: int, epoch: int) -> Iterable[int]:
        """Returns the epochs of a member that an epoch shows, whole or in part; that of its first step comes first."""
        if self.mixture is None:
            return range(epoch, epoch + 1)
        begin, end = epoch * self.schedule.num_samples, (epoch + 1) * self.schedule.num_samples
        shown = begin + int(self.schedule.positions([0], 0)[0, 0]) if self.schedule.num_steps else begin
        first, at, last = (self.mixture.num_before(member, sample) // self.sizes[member] for sample in (begin, shown, end))
        return chain(range(at, last + 1), range(first, at))  # a wrapped last step shows the epoch's start again

    def by_member(self, epoch: int, positions: IntArray) -> list[tuple[int, int, IntArray, IntArray]]:
        """Groups positions by member and member epoch: (member, its epoch, indices into `positions`, positions there)."""
        if self.mixture is None:
            return [(0, epoch, np.arange(len(positions)), positions // self.spec.repeat)]
        datasets, numbers = self.mixture.locate(epoch * self.schedule.num_samples + positions)
        parts = []
        for member, lines in by_value(datasets):
            epochs, of_member = np.divmod(numbers[lines], self.sizes[member])
            parts += [(member, member_epoch, lines[mine], of_member[mine]) for member_epoch, mine in by_value(epochs)]
        return parts


def is_large_mix(spec: Spec) -> bool:
    """Whether the mixture of a spec takes long to make, and much memory."""
    mix = spec.mixed()
    return mix is not None and sum(sum(phase.shares) for phase in mix.phases) > _LARGE_PERIODS


def make_plan(dataset: str, members: tuple[Member, ...], spec: Spec) -> Plan:
    """Returns a plan as `_make_plan` makes it, one of those used last if possible."""
    return _plans.get((dataset, members, spec), partial(_make_plan, dataset, members, spec))


def _make_plan(dataset: str, members: tuple[Member, ...], spec: Spec) -> Plan:
    """Makes the plan of a resolved spec for the members that it names, or for the dataset as the only member.

    Raises BadParameter: the parameters are valid one by one, but not together or not for this data.
    Raises IndexNotReady, and what Index raises: the packing needs counts.
    """
    if spec.length_bucket_size and spec.window > MAX_WINDOW:
        raise BadParameter(
            f"length_bucket_size sorts the samples of a window; window={spec.window:,} is above its limit, {MAX_WINDOW:,}."
        )
    _check_tokenizers(members)
    tensors_of([member.snapshot for member in members], spec)  # refuses a spec without batches before counting starts
    mix = spec.mixed()
    mixture = mixture_of(mix) if mix else None
    sizes = tuple(member.num_samples for member in members)
    if empty := [member for member, size in zip(members, sizes, strict=True) if not size]:
        raise BadParameter(_no_sample(empty[0], spec))
    num_samples = mixture.epoch_length(sizes, spec.stopping_strategy or "first_exhausted") if mixture else sizes[0]
    if num_samples is None:
        raise BadParameter(
            f"with stopping_strategy={spec.stopping_strategy} an epoch of mix={spec.mix} never ends: a dataset has no weight "
            f"in the last phase. Use stopping_strategy=first_exhausted or stopping_strategy=never, or give that dataset a "
            f"weight."
        )
    num_samples *= spec.repeat
    if num_samples > MAX_COUNT:
        raise BadParameter(
            f"an epoch of mix={spec.mix} with stopping_strategy={spec.stopping_strategy} would have {num_samples:,} "
            f"samples; the limit is 2^53. Use stopping_strategy=first_exhausted or stopping_strategy=never, or weights that "
            f"are closer together."
        )
    if spec.offset > num_samples:
        raise BadParameter(f"offset={spec.offset:,} is past the epoch's end: it has {counted(num_samples, 'sample')}.")
    schedule = Schedule.of(spec, num_samples)
    if not schedule.num_kept:
        raise BadParameter(f"skip leaves out the whole epoch: all of its {counted(num_samples, 'sample')}. Skip fewer.")
    if spec.offset == 0 and schedule.num_steps == 0:
        raise BadParameter(_no_step(dataset, spec, num_samples))
    plan = Plan(dataset, members, sizes, mixture, spec, schedule)
    if (nbytes := plan.largest_layout.nbytes) > MAX_BATCH_BYTES:
        raise BadParameter(
            f"a batch of {spec.batch_size:,} samples of {spec.seq_len:,} tokens would be up to {nbytes:,} bytes; the limit "
            f"is {MAX_BATCH_BYTES:,}. Lower batch_size or seq_len."
        )
    if plan.step_spans > _MAX_BATCH_SPANS:
        raise BadParameter(
            f"a batch of {spec.batch_size:,} samples of {spec.seq_len:,} tokens would be made of some "
            f"{int(plan.step_spans):,} rows; the limit is {_MAX_BATCH_SPANS:,}. Lower batch_size or seq_len."
        )
    return plan


_plans = LruCache[Plan](_PLANS_BYTES, lambda plan: plan.nbytes, most=PLANS_KEPT)


def _check_tokenizers(members: Sequence[Member]) -> None:
    """Raises BadParameter: an id means different text in two members. Members without a tokenizer cannot be checked."""
    known = [(member.name, tokenizer) for member in members if (tokenizer := member.snapshot.recipe.tokenizer)]
    for (name, one), (other_name, other) in pairwise(known):
        if one.digest != other.digest:
            raise BadParameter(
                f"{name} is tokenized by {one.path} ({one.vocab_size:,} ids) and {other_name} by "
                f"{other.path} ({other.vocab_size:,} ids): an id would mean two things in one batch. Name one "
                f"tokenizer for both, in their penstock.toml or with --tokenizer."
            )


def _no_step(dataset: str, spec: Spec, num_samples: int) -> str:
    """Returns the message for an epoch that is too short for one step."""
    split = "" if spec.split == "all" else f", split={spec.split},"
    skipped = " after skip" if spec.skip else ""
    may_split = spec.cuts_rows and spec.task == "causal"
    more = "make several samples of long rows with overflow=split or packing=concat, " if may_split else ""
    return (
        f"no step fits: {dataset}{split} has {counted(num_samples, 'sample')}{skipped}, and one step takes batch_size x "
        f"world_size = {spec.samples_per_step:,}. Lower one of these, {more}or use drop_last=false, which fills the step from "
        f"the epoch's start."
    )


def _no_sample(member: Member, spec: Spec) -> str:
    """Returns the message for a dataset without a single sample."""
    name, recipe = member.name, member.snapshot.recipe
    where, ways = "", ""
    if (split := member.order_key.split) != "all":
        where = f" in split={split}"
        snapshot = member.snapshot
        ways = f"raise the split's share (by validation in penstock.toml, now {snapshot.validation:g}), use split=all, or "
        if snapshot.split_rule == "files" or split == "test":
            known = ", ".join(["all", *snapshot.splits])
            ways = f"use one of its splits ({known}), name shards such as {split}-00000-of-00001.parquet, or "
    if spec.packing == "concat" and member.index.tokens_per_block(split).any():
        ways = (ways + "lower seq_len").capitalize()
        return f"{name} has fewer than seq_len={spec.seq_len:,} tokens{where or ' in all'}. {ways}."
    kept, cause = ("is kept by its filter and can be used", "filter or the data") if recipe.filter else ("can be used", "data")
    return f"{name} has no row{where} that {kept}. {(ways + f'mend the {cause}').capitalize()}."


def check_room(plan: Plan) -> None:
    """Checks that the cache has room for all blocks with shuffle=global.

    Raises BadParameter: it has no room; the message gives both numbers.  Raises what Index.bytes_per_block raises.
    """
    if plan.spec.shuffle != "global":
        return
    needed = sum(int(member.index.bytes_per_block(sampled=True).sum()) for member in plan.members)
    budget = plan.members[0].blocks.cache.budget_bytes
    are_counted = all(member.index.lengths.is_ready for member in plan.members)
    if needed > (1 if are_counted else _ROUGHLY) * budget:
        raise BadParameter(
            f"shuffle=global needs every block in the cache at once: {plan.dataset} takes about {needed:,} bytes there, "
            f"and the budget is {budget:,}. Each batch would decode most of its rows anew. Raise --cache-bytes, or use "
            f"shuffle=window: with the largest window that fits it mixes nearly as well."
        )


def advice_on_room(plan: Plan) -> str | None:
    """Returns advice for a cache without room for a window; None if it has room."""
    cache = plan.members[0].blocks.cache
    if cache.failure:
        return (
            f"the server cannot store blocks in {cache.folder}: {cache.failure}. Blocks are decoded and tokenized again for "
            f"nearly every batch. Let the server write there, or name another folder with --cache-dir."
        )
    room = cache.room_bytes
    largest = max(int(member.index.bytes_per_block().max()) for member in plan.members)
    if plan.spec.shuffle == "none":
        if largest <= room:
            return None
        return (
            f"a block of {plan.dataset} takes up to about {largest:,} bytes in the server's block cache, which has room for "
            f"{room:,}: blocks are decoded and tokenized again for nearly every batch. {cache.remedy}."
        )
    needed = sum(member.window_bytes for member in plan.members)
    if needed <= room:
        return None
    # Room for a window and the next, which is loaded ahead; a window consists of whole blocks.
    fits = min(plan.spec.window, sum(plan.sizes)) * room // needed // 2
    is_window = plan.spec.shuffle == "window" and fits >= _SMALL_WINDOW and 8 * largest <= room
    or_less = f", or use smaller windows: window={fits}" if is_window else ""
    return (
        f"{plan.dataset} is shuffled in windows that take about {needed:,} bytes each in the server's block cache, "
        f"which has room for {room:,}: blocks are decoded and tokenized again for nearly every batch. {cache.remedy}{or_less}."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """A tensor of every batch, from one feature of the rows or a passthrough column.

    tokens   the tokens themselves, shape [batch_size, width]; a line has at most `longest`
    mask     1 where a token has loss, shape [batch_size, width]
    count    the number of tokens, shape [batch_size]
    starts   one bit per token, lowest bit of a byte first, set at the start of a document or the padding, shape
             [batch_size, width / 8 rounded up]
    member   number of each sample's dataset in the mixture, shape [batch_size]
    column   a passthrough column, shape [batch_size, *item]; for texts and bytes see penstock.wire

    `turn` selects the tokens of the prompt, or those of the response; None selects all.
    """

    name: str
    kind: Literal["tokens", "mask", "count", "starts", "member", "column"]
    dtype: str
    feature: str = ""
    turn: Literal["prompt", "response"] | None = None
    longest: int = 0
    item: tuple[int, ...] = ()

    @property
    def has_lines(self) -> bool:
        """Whether the tensor has one value per token, in lines that may be padded."""
        return self.kind in ("tokens", "mask")

    @property
    def is_ragged(self) -> bool:
        """Whether its size in bytes differs between batches, whatever the padding."""
        return self.dtype in ("utf8", "binary")

    def shape(self, batch_size: int, width: Width) -> tuple[int | Width, ...]:
        """Returns the shape for lines of `width` tokens, or texts of `width` bytes in all; None varies."""
        if self.has_lines:
            return (batch_size, width)
        if self.kind == "starts":
            return (batch_size, -(-self.longest // 8))
        return (batch_size, width) if self.is_ragged else (batch_size, *self.item)


def tensors_of(snapshots: Sequence[Snapshot], spec: Spec) -> tuple[TensorSpec, ...]:
    """Returns the tensors of a batch on the wire, for all members of a mixture.

    Raises BadParameter: the members, or the packing, are not compatible.
    """
    recipes = [snapshot.recipe for snapshot in snapshots]
    features = recipes[0].features
    if any(recipe.features != features for recipe in recipes):
        raise BadParameter("preference pairs and single samples cannot be mixed: they make other tensors. Mix one kind.")
    if spec.packing != "rows" and len(features) > 1:
        raise BadParameter(f"packing={spec.packing} makes one stream of tokens; preference pairs have two. Use packing=rows.")
    if spec.overflow == "split" and len(features) > 1:
        raise BadParameter("overflow=split cuts one stream of tokens; preference pairs have two. Use overflow=truncate.")
    dtype = str(np.result_type(*(snapshot.token_dtype for snapshot in snapshots)))
    members = [TensorSpec(name="dataset_index", kind="member", dtype="int64")] if spec.dataset_index else []
    if members and any(column.name == "dataset_index" for recipe in recipes for column in recipe.columns):
        raise BadParameter("dataset_index=1 makes a tensor of that name, but a column of that name travels. Rename the column.")
    if spec.task == "seq2seq":
        return (*_seq2seq(snapshots, spec, dtype), *members, *_columns(snapshots))
    tensors = []
    for feature in features:
        prefix = "" if feature == "tokens" else f"{feature}_"
        tensors.append(
            TensorSpec(name=f"{prefix}input_ids", kind="tokens", dtype=dtype, feature=feature, longest=spec.sample_len)
        )
        if spec.packing != "concat":
            tensors.append(TensorSpec(name=f"{prefix}lengths", kind="count", dtype="int32", feature=feature))
        if spec.loss_on == "response" and any(recipe.has_turns for recipe in recipes):
            # One length describes a prompt before a response, but not alternating turns.
            if spec.packing == "rows" and not any(recipe.has_many_turns for recipe in recipes):
                name = f"{prefix}prompt_lengths"
                tensors.append(TensorSpec(name=name, kind="count", dtype="int32", feature=feature, turn="prompt"))
            else:
                name = f"{prefix}loss_mask"
                tensors.append(TensorSpec(name=name, kind="mask", dtype="uint8", feature=feature, longest=spec.sample_len))
    if spec.packing == "best_fit" or spec.mark_documents:
        tensors.append(
            TensorSpec(name="document_starts", kind="starts", dtype="uint8", feature=features[0], longest=spec.sample_len)
        )
    return (*tensors, *members, *(_columns(snapshots) if spec.packing == "rows" else ()))


def _seq2seq(snapshots: Sequence[Snapshot], spec: Spec, dtype: str) -> tuple[TensorSpec, ...]:
    if lacking := [snapshot for snapshot in snapshots if "response" not in dict(snapshot.recipe.fields)]:
        roles = " and ".join(role for role, _ in lacking[0].recipe.fields)
        raise BadParameter(f"task=seq2seq needs prompt and response; rows of {lacking[0].name} are made of {roles}.")
    assert spec.target_seq_len  # a plan's spec is resolved
    prompt = partial(TensorSpec, feature="tokens", turn="prompt", longest=spec.seq_len)
    response = partial(TensorSpec, feature="tokens", turn="response", longest=spec.target_seq_len)
    return (
        prompt(name="input_ids", kind="tokens", dtype=dtype),
        prompt(name="lengths", kind="count", dtype="int32"),
        response(name="labels", kind="tokens", dtype=dtype),
        response(name="label_lengths", kind="count", dtype="int32"),
    )


def _columns(snapshots: Sequence[Snapshot]) -> list[TensorSpec]:
    """Returns the passthrough columns: those that every member has, with one type."""
    found = [{column.name: _column(column.name, column.type) for column in s.recipe.columns} for s in snapshots]
    return [tensor for name, tensor in found[0].items() if all(other.get(name) == tensor for other in found)]


def _column(name: str, type_: pa.DataType) -> TensorSpec:
    if is_text(type_) or is_nested(type_):
        return TensorSpec(name=name, kind="column", dtype="utf8")
    if pa.types.is_dictionary(type_):
        return _column(name, type_.value_type)
    if is_bytes(type_):
        return TensorSpec(name=name, kind="column", dtype="binary")
    item = (type_.list_size,) if pa.types.is_fixed_size_list(type_) else ()
    number = type_.value_type if item else type_
    dtype = "float32" if pa.types.is_float16(number) else str(numpy_type(number))
    return TensorSpec(name=name, kind="column", dtype=dtype, item=item)
