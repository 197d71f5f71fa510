"""A batch for people and curl: JSON with the decoded text of every sequence, a line a fact; and where sequences come from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite, isnan
from typing import Any

import numpy as np

from penstock import wire
from penstock_server.batches.batch import frames
from penstock_server.batches.gather import Chunk, gather
from penstock_server.batches.plan import Plan
from penstock_server.batches.sequence import TokenSequence
from penstock_server.batches.tensor import Tensor
from penstock_server.geometry.packing import Piece
from penstock_server.storage.block import Block


def as_json(chunk: Chunk, blocks: Sequence[Block]) -> list[str]:
    """Each batch of a chunk: the ids and the digest that GET serves, and the text that each sequence decodes to."""
    return [
        _batch(chunk.plan, frame, sequences)
        for frame, sequences in zip(wire.decode(frames(chunk, blocks)), gather(chunk, blocks), strict=True)
    ]


def provenance_of(sequence: TokenSequence) -> list[dict[str, Any]]:
    """The rows that a sequence is made of, in their order; with their datasets."""
    return [{"dataset": part.member.name} | asdict(source) for part in sequence.parts for source in part.sources()]


def shown_columns(block: Block, row: int) -> dict[str, Any]:
    """What travels with a row, as JSON can say it."""
    return {name: _shown(column[row].as_py()) for name, column in block.columns.items()}


def _shown(value: Any) -> Any:
    if isinstance(value, list):
        return [_shown(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(value) if isfinite(value) else None if isnan(value) else str(value)
    return f"{len(value):,} bytes" if isinstance(value, bytes) else value


def _batch(plan: Plan, frame: wire.Frame, batch: Sequence[TokenSequence]) -> str:
    address = frame.address
    facts = {
        "dataset": address.dataset,
        "snapshot": address.snapshot,
        "epoch": address.epoch,
        "rank": address.rank,
        "step": address.step,
        "digest": frame.digest,
        "nbytes": frame.nbytes,
        "substituted": frame.substituted,
        "tensors": [[name, str(array.dtype), list(array.shape)] for name, array in frame.tensors.items()],
    }
    sequences = [_sequence(plan, index, sequence) for index, sequence in enumerate(batch)]
    head = "".join(f"  {json.dumps(name)}: {_dump(value)},\n" for name, value in facts.items())
    body = ",\n".join(map(_indented, sequences))
    return f'{{\n{head}  "sequences": [\n{body}\n  ]\n}}'


def _sequence(plan: Plan, index: int, sequence: TokenSequence) -> dict[str, Any]:
    facts: dict[str, Any] = {"index": index}
    facts["num_tokens"] = sum(piece.length for pieces in sequence.pieces.values() for piece in pieces)
    facts["source"] = "; ".join(
        ("" if plan.mixture is None else f"{s['dataset']}: ") + f"{s['shard']}, row group {s['row_group']}, row {s['row']}"
        for s in provenance_of(sequence)
    )
    tokenizer = sequence.parts[0].member.snapshot.recipe.tokenizer
    for tensor in plan.tensors:
        line = sequence.line(tensor)
        if tensor.kind == "tokens":
            if tokenizer:
                facts |= {name: tokenizer.decode(_ids(pieces)) for name, pieces in _texts(plan, tensor, line).items()}
            facts[tensor.name] = _ids(line)
        elif tensor.kind == "mask":
            facts[tensor.name] = [int(piece.learned) for piece in line for _ in range(piece.length)]
        elif tensor.kind == "count":
            facts[tensor.name] = sum(piece.length for piece in line)
        elif tensor.kind == "starts":
            facts[tensor.name] = sequence.document_starts(tensor.longest)
    names = [tensor.name for tensor in plan.tensors if tensor.kind == "column"]
    if sequence.row and names:
        columns = shown_columns(*sequence.row)
        facts["columns"] = {name: columns[name] for name in names}
    return facts


def _texts(plan: Plan, tensor: Tensor, line: list[Piece]) -> dict[str, list[Piece]]:
    """What to show of a line of tokens as text: prompt and response apart where a row is one of each."""
    prefix = tensor.name.removesuffix("input_ids")
    if tensor.turn:
        return {tensor.turn: line}
    if plan.spec.packing == "rows" and [piece.learned for piece in line] == [False, True]:
        return {f"{prefix}prompt": line[:1], f"{prefix}response": line[1:]}
    return {f"{prefix}text": line}


def _ids(pieces: Sequence[Piece]) -> list[int]:
    return [token for p in pieces for token in p.source[p.start : p.start + p.length].tolist()]


def _indented(facts: dict[str, Any]) -> str:
    # json.dumps(indent=...) would put every token id on a line of its own.
    lines = ",\n".join(f"      {json.dumps(name)}: {_dump(value)}" for name, value in facts.items())
    return f"    {{\n{lines}\n    }}"


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
