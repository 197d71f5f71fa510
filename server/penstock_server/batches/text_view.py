"""Batches for people and curl: JSON with the decoded text of every sample, one field per line; and provenance."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from math import isfinite, isnan
from typing import Any

import numpy as np

from penstock import wire
from penstock.text import counted
from penstock.wire.names import IGNORED
from penstock_server.batches.assemble import Chunk, chunks, gather, load
from penstock_server.batches.plan import Plan, TensorSpec
from penstock_server.batches.samples import Origin, Samples
from penstock_server.batches.writer import frames
from penstock_server.blocks.block import Block, Turn
from penstock_server.problems import BadParameter
from penstock_server.recipes.recipe import Recipe

_MAX_TOKENS = 1 << 21  # per batch
_MAX_SAMPLES = 1 << 14  # over all batches of a request
_ORIGIN = [field.name for field in fields(Origin)]
_MAX_TEXT_BYTES = 64 << 20  # of a batch's frame, which is made for its digest, with padding
_MAX_PARTS = 1 << 14  # parts of rows in a provenance response: 4 MB as text, and a second of CPU


def check_text(plan: Plan, num_steps: int) -> None:
    """Checks that batches may be made as text, before their rows are read. Raises BadParameter: they are too large."""
    num_samples = num_steps * plan.spec.batch_size
    if num_samples > _MAX_SAMPLES:
        raise BadParameter(
            f"{num_samples:,} samples in {counted(num_steps, 'batch', 'batches')} are too many for "
            f"format=json: the limit is {_MAX_SAMPLES:,}. Lower batch_size, request fewer steps, or leave format=json out."
        )
    if plan.step_nbytes > _MAX_TEXT_BYTES:
        raise BadParameter(
            f"a batch of {plan.step_nbytes:,} bytes is too large for format=json: the limit is {_MAX_TEXT_BYTES:,}, padding "
            f"included. Lower batch_size or seq_len, use pad=longest, or leave format=json out."
        )


def as_json(
    chunk: Chunk, blocks: Sequence[Block], before_each: Callable[[], None] = lambda: None, *, has_token_texts: bool = False
) -> list[str]:
    """Returns the JSON of each batch of a chunk: its ids, its digest, and the decoded text of each sample.

    Calls `before_each` before each sample; an exception from it ends the work.

    Raises BadParameter: too many samples, or too many tokens in a batch, to be read.
    """
    check_text(chunk.plan, len(chunk.steps))
    samples, size = gather(chunk, blocks), chunk.plan.spec.batch_size
    num_tokens = sum(int(samples.runs(tensor).lengths.sum()) for tensor in chunk.plan.tensors if tensor.kind == "tokens")
    if num_tokens > _MAX_TOKENS * len(chunk.steps):
        raise BadParameter(
            f"a batch of {num_tokens // len(chunk.steps):,} tokens is too large for format=json: the limit is {_MAX_TOKENS:,}. "
            f"Lower batch_size, or leave format=json out."
        )
    return [
        _batch(chunk.plan, frame, samples, range(number * size, (number + 1) * size), before_each, has_token_texts)
        for number, frame in enumerate(wire.decode(frames(chunk, blocks)))
    ]


def provenance(plan: Plan, epoch: int, step: int, rank: int) -> dict[str, Any]:
    """Returns the source rows of each sample of a batch, as in ProvenanceInfo.

    Raises:
        StepOutOfRange, RankOutOfRange: the batch does not exist.
        BadParameter: the epoch does not exist, or the batch has too many parts of rows to be read.
        What an unreadable block raises.
    """
    plan.check(epoch, step, rank)
    if plan.spec.batch_size > _MAX_PARTS:  # before its rows are read
        raise BadParameter(_too_many_parts(plan.spec.batch_size))
    [chunk] = chunks(plan, epoch, rank, range(step, step + 1))
    samples = gather(chunk, load(chunk))
    if (num_parts := len(samples.documents.rows)) > _MAX_PARTS:
        raise BadParameter(_too_many_parts(num_parts))
    lines = [{"index": i, "sources": [_origin(source) for source in samples.sources(i)]} for i in range(samples.count)]
    return {"step": step, "rank": rank, "samples": lines}


def _origin(source: Origin) -> dict[str, Any]:
    return {name: getattr(source, name) for name in _ORIGIN}  # asdict takes half of the time of a response


def _too_many_parts(count: int) -> str:
    return (
        f"the provenance of a batch of {count:,} rows, or parts of rows, is too large: the limit is {_MAX_PARTS:,}. Lower "
        f"batch_size."
    )


def shown_columns(block: Block, row: int) -> dict[str, Any]:
    """Returns the passthrough columns of a row as JSON values."""
    return {name: _shown(column[row].as_py()) for name, column in block.columns.items()}


def _shown(value: Any) -> Any:
    if isinstance(value, list):
        return [_shown(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(value) if isfinite(value) else None if isnan(value) else str(value)
    return f"{len(value):,} bytes" if isinstance(value, bytes) else value


def _batch(
    plan: Plan, frame: wire.Frame, samples: Samples, batch: range, before_each: Callable[[], None], has_token_texts: bool
) -> str:
    address = frame.address
    facts = {
        "dataset": address.dataset,
        "snapshot": address.snapshot,
        "epoch": address.epoch,
        "rank": address.rank,
        "step": address.step,
        "digest": frame.digest,
        "nbytes": frame.nbytes,
        "replaced": frame.replaced,
        "tensors": [[name, str(array.dtype), list(array.shape)] for name, array in frame.tensors.items()],
    }
    head = "".join(f"  {json.dumps(name)}: {_dump(value)},\n" for name, value in facts.items())
    lines = list[str]()
    for index, number in enumerate(batch):
        before_each()
        lines.append(_indented({"index": index} | _sample(plan, samples, number, has_token_texts)))
    body = ",\n".join(lines)
    return f'{{\n{head}  "samples": [\n{body}\n  ]\n}}'


def _sample(plan: Plan, samples: Samples, number: int, has_token_texts: bool) -> dict[str, Any]:
    sources = samples.sources(number)
    facts: dict[str, Any] = {
        "num_tokens": sum(samples.num_tokens(tensor, number) for tensor in plan.tensors if tensor.kind == "tokens"),
        "source": "; ".join(
            ("" if plan.mixture is None else f"{s.dataset}: ") + f"{s.shard}, row group {s.row_group}, row {s.row}"
            for s in sources
        ),
    }
    recipe = samples.member(number).snapshot.recipe
    has_texts = recipe.tokenizer is not None
    for tensor in plan.tensors:
        if tensor.kind in ("column", "member"):
            continue
        line = samples.line(tensor, number)
        if tensor.kind == "tokens":
            texts = _texts(plan, tensor, line)
            if has_texts:
                facts |= {name: recipe.decode(_ids(pieces)) for name, pieces in texts.items()}
            # The text alone does not show the rows and turns of its tokens, and without a tokenizer it does not exist.
            if len(line) > 1 and (len(texts) == 1 or not has_texts):
                name = f"{tensor.name.removesuffix('input_ids')}pieces"
                facts[name] = [_piece(plan, recipe, piece) for piece in line]
            facts[tensor.name] = _ids(line)
            if has_texts and has_token_texts:
                name = tensor.name.replace("input_ids", "token_texts").replace("labels", "label_texts")
                facts[name] = recipe.token_texts(_ids(line))
            if not tensor.turn:  # a seq2seq batch contains its labels
                facts[tensor.name.removesuffix("input_ids") + "labels"] = _labels(plan, line)
        elif tensor.kind == "mask":
            facts[tensor.name] = [int(in_loss) for ids, in_loss in line for _ in ids]
        elif tensor.kind == "count":
            facts[tensor.name] = len(_ids(line))
        elif tensor.kind == "starts":
            facts[tensor.name] = starts = _starts(samples, number, len(_ids(line)), tensor.longest)
            facts |= _by_document(facts["labels"], starts)
    facts |= {tensor.name: int(samples.member_numbers[number]) for tensor in plan.tensors if tensor.kind == "member"}
    names = [tensor.name for tensor in plan.tensors if tensor.kind == "column"]
    if names:
        columns = shown_columns(*samples.row(number))
        facts["columns"] = {name: columns[name] for name in names}
    return facts


def _labels(plan: Plan, line: list[Turn]) -> list[int]:
    """Returns the labels that the trainer gets: IGNORED for tokens without loss."""
    is_masked = any(tensor.kind == "mask" or tensor.turn == "prompt" for tensor in plan.tensors)
    return [token if in_loss or not is_masked else IGNORED for ids, in_loss in line for token in ids]


def _by_document(labels: list[int], starts: list[int]) -> dict[str, list[int]]:
    """Returns labels and position ids with marked documents: positions restart, and the first token has no loss."""
    sizes = np.diff([*(start for start in starts if start < len(labels)), len(labels)]).tolist()
    positions = [position for size in sizes for position in range(size)]
    return {
        "labels": [token if position else IGNORED for token, position in zip(labels, positions, strict=True)],
        "position_ids": positions,
    }


def _starts(samples: Samples, number: int, length: int, width: int) -> list[int]:
    """Returns the starts of the documents in a sample, then that of the padding."""
    starts = samples.begins_of(number)
    return [*starts, length] if length < width else starts


def _texts(plan: Plan, tensor: TensorSpec, line: list[Turn]) -> dict[str, list[Turn]]:
    """Returns the parts of a sample to show as text; prompt and response separately if the row has one of each."""
    prefix = tensor.name.removesuffix("input_ids")
    if tensor.turn:
        return {tensor.turn: line}
    if plan.spec.packing == "rows" and [in_loss for _, in_loss in line] == [False, True]:
        return {f"{prefix}prompt": line[:1], f"{prefix}response": line[1:]}
    return {f"{prefix}text": line}


def _piece(plan: Plan, recipe: Recipe, turn: Turn) -> dict[str, Any]:
    """Returns one turn of one row, cut to the sample, as JSON values."""
    ids, in_loss = turn
    text = {"text": recipe.decode(ids)} if recipe.tokenizer else {}
    return {"num_tokens": len(ids), "in_loss": in_loss or plan.spec.loss_on == "all"} | text


def _ids(line: Sequence[Turn]) -> list[int]:
    return [token for ids, _ in line for token in ids]


def _indented(facts: dict[str, Any]) -> str:
    # json.dumps(indent=...) would put every token id on a separate line.
    lines = ",\n".join(f"      {json.dumps(name)}: {_dump(value)}" for name, value in facts.items())
    return f"    {{\n{lines}\n    }}"


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
