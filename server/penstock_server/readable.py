"""A batch for people and curl: JSON with the decoded text of every sequence, a line a fact."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from penstock import wire
from penstock_server.batch import Chunk, TokenSequence, frames, gather
from penstock_server.packing import Piece
from penstock_server.plan import Plan
from penstock_server.store import Block


def as_json(chunk: Chunk, blocks: Sequence[Block]) -> list[str]:
    """Each batch of a chunk: the ids and the digest that GET serves, and the text that each sequence decodes to."""
    return [
        _batch(chunk.plan, frame, sequences)
        for frame, sequences in zip(wire.decode(frames(chunk, blocks)), gather(chunk, blocks), strict=True)
    ]


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
        "tensors": [[name, str(array.dtype), list(array.shape)] for name, array in frame.tensors.items()],
    }
    sequences = [_sequence(plan, index, sequence) for index, sequence in enumerate(batch)]
    head = "".join(f"  {json.dumps(name)}: {_dump(value)},\n" for name, value in facts.items())
    body = ",\n".join(map(_indented, sequences))
    return f'{{\n{head}  "sequences": [\n{body}\n  ]\n}}'


def _sequence(plan: Plan, index: int, sequence: TokenSequence) -> dict[str, Any]:
    facts: dict[str, Any] = {"index": index, "num_tokens": sum(piece.length for piece in sequence.pieces)}
    facts["source"] = "; ".join(f"{s.shard}, row group {s.row_group}, row {s.row}" for s in sequence.sources(plan.snapshot))
    tokenizer = plan.snapshot.recipe.tokenizer
    if tokenizer:
        whole = plan.spec.packing == "concat" or len(sequence.pieces) == 1
        texts = {"text": sequence.pieces} if whole else {piece.feature: [piece] for piece in sequence.pieces}
        facts |= {n: tokenizer.tokenizer.decode(_ids(p), skip_special_tokens=False) for n, p in texts.items()}
    for tensor in plan.tensors:
        if tensor.kind == "tokens":
            facts[tensor.name] = _ids(sequence.line(tensor))
        elif tensor.kind == "mask":
            facts[tensor.name] = [int(p.feature in tensor.features) for p in sequence.pieces for _ in range(p.length)]
        else:
            facts[tensor.name] = sequence.num_tokens(tensor)
    return facts


def _ids(pieces: Sequence[Piece]) -> list[int]:
    return [token for p in pieces for token in p.source[p.start : p.start + p.length].tolist()]


def _indented(facts: dict[str, Any]) -> str:
    # json.dumps(indent=...) would put every token id on a line of its own.
    lines = ",\n".join(f"      {json.dumps(name)}: {_dump(value)}" for name, value in facts.items())
    return f"    {{\n{lines}\n    }}"


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
