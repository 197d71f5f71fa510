"""Tensors of a batch: the data of each sample, by the kind of its rows and the spec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import pyarrow as pa

from penstock.spec import Spec
from penstock_server.catalog.snapshot import Snapshot
from penstock_server.problems import BadParameter
from penstock_server.recipes.fields import is_bytes, is_text, numpy_type

Width = TypeVar("Width", int, int | None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
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


def tensors_of(snapshots: Sequence[Snapshot], spec: Spec) -> tuple[Tensor, ...]:
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
    members = [Tensor(name="dataset_index", kind="member", dtype="int64")] if spec.dataset_index else []
    if members and any(column.name == "dataset_index" for recipe in recipes for column in recipe.columns):
        raise BadParameter("dataset_index=1 makes a tensor of that name, but a column of that name travels. Rename the column.")
    if spec.task == "seq2seq":
        return (*_seq2seq(snapshots, spec, dtype), *members, *_columns(snapshots))
    tensors = []
    for feature in features:
        prefix = "" if feature == "tokens" else f"{feature}_"
        tensors.append(Tensor(name=f"{prefix}input_ids", kind="tokens", dtype=dtype, feature=feature, longest=spec.seq_len))
        if spec.packing != "concat":
            tensors.append(Tensor(name=f"{prefix}lengths", kind="count", dtype="int32", feature=feature))
        if spec.loss_on == "response" and any(recipe.has_turns for recipe in recipes):
            # One length describes a prompt before a response, but not alternating turns.
            if spec.packing == "rows" and not any(recipe.has_many_turns for recipe in recipes):
                name = f"{prefix}prompt_lengths"
                tensors.append(Tensor(name=name, kind="count", dtype="int32", feature=feature, turn="prompt"))
            else:
                name = f"{prefix}loss_mask"
                tensors.append(Tensor(name=name, kind="mask", dtype="uint8", feature=feature, longest=spec.seq_len))
    if spec.packing == "best_fit" or spec.mark_documents:
        tensors.append(Tensor(name="document_starts", kind="starts", dtype="uint8", feature=features[0], longest=spec.seq_len))
    return (*tensors, *members, *(_columns(snapshots) if spec.packing == "rows" else ()))


def _seq2seq(snapshots: Sequence[Snapshot], spec: Spec, dtype: str) -> tuple[Tensor, ...]:
    if lacking := [snapshot for snapshot in snapshots if "response" not in dict(snapshot.recipe.fields)]:
        roles = " and ".join(role for role, _ in lacking[0].recipe.fields)
        raise BadParameter(f"task=seq2seq needs prompt and response; rows of {lacking[0].name} are made of {roles}.")
    assert spec.target_seq_len  # a plan's spec is resolved
    return (
        Tensor(name="input_ids", kind="tokens", dtype=dtype, feature="tokens", turn="prompt", longest=spec.seq_len),
        Tensor(name="lengths", kind="count", dtype="int32", feature="tokens", turn="prompt", longest=spec.seq_len),
        Tensor(name="labels", kind="tokens", dtype=dtype, feature="tokens", turn="response", longest=spec.target_seq_len),
        Tensor(
            name="label_lengths", kind="count", dtype="int32", feature="tokens", turn="response", longest=spec.target_seq_len
        ),
    )


def _columns(snapshots: Sequence[Snapshot]) -> list[Tensor]:
    """Returns the passthrough columns: those that every member has, with one type."""
    found = [{column.name: _column(column.name, column.type) for column in s.recipe.columns} for s in snapshots]
    return [tensor for name, tensor in found[0].items() if all(other.get(name) == tensor for other in found)]


def _column(name: str, type_: pa.DataType) -> Tensor:
    if is_text(type_):
        return Tensor(name=name, kind="column", dtype="utf8")
    if pa.types.is_dictionary(type_):
        return _column(name, type_.value_type)
    if is_bytes(type_):
        return Tensor(name=name, kind="column", dtype="binary")
    item = (type_.list_size,) if pa.types.is_fixed_size_list(type_) else ()
    number = type_.value_type if item else type_
    dtype = "float32" if pa.types.is_float16(number) else str(numpy_type(number))
    return Tensor(name=name, kind="column", dtype=dtype, item=item)
