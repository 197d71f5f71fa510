"""Descriptions of datasets, mixtures and specs: a summary for people, and everything as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.text import counted, rows_kept
from penstock_server.batches.plan import Plan
from penstock_server.catalog.dataset import DatasetState, OpenSnapshot
from penstock_server.catalog.snapshot import Snapshot
from penstock_server.catalog.view import DeclaredMixture
from penstock_server.catalog.warnings import advice_on_run
from penstock_server.index.row_lengths import RowLengths
from penstock_server.schemas.datasets import DatasetInfo, MixtureInfo, SpecInfo, SplitInfo, TensorInfo


def summary(opened: OpenSnapshot) -> tuple[str, str]:
    """Describe a served snapshot in two lines for people: its size, and its recipe."""
    snapshot = opened.snapshot
    rows, shards = rows_kept(snapshot.num_rows, opened.index.num_rows), counted(len(snapshot.shards), "shard")
    return (
        f"{opened.name}: {rows} in {shards}, snapshot {snapshot.fingerprint}",
        f"recipe: {snapshot.recipe.describe()}",
    )


def describe_mixture(mixture: DeclaredMixture) -> MixtureInfo:
    """Describe a declared mixture."""
    return {
        "name": mixture.name,
        "mix": str(mixture.mix),
        "stopping_strategy": mixture.stopping_strategy,
        "datasets": list(mixture.mix.datasets),
    }


def describe_dataset(opened: OpenSnapshot) -> DatasetInfo:
    """Describe a served snapshot."""
    snapshot, index, cache, quarantine = opened.snapshot, opened.index, opened.blocks.cache, opened.blocks.quarantine
    index.lengths.read()  # report the counts of `penstock prepare` although no request needed them yet
    lengths = index.lengths.get() if index.lengths.is_ready else None
    splits, told = (_splits(lengths, snapshot), lengths.quantiles) if lengths else (None, {})
    prepared = index.prepared
    tokens = lengths.per_block("all").sums()[1] if lengths else prepared["tokens"] if prepared else None
    return {
        "name": opened.name,
        "rows": snapshot.num_rows,
        "rows_served": index.num_rows,
        "tokens": tokens,
        "row_tokens": told.get("row"),
        "prompt_tokens": told.get("prompt"),
        "response_tokens": told.get("response"),
        "split_rule": snapshot.split_rule,
        "splits": splits,
        "shards": len(snapshot.shards),
        "blocks": snapshot.num_blocks,
        "size_bytes": sum(shard.stat.size_bytes for shard in snapshot.shards),
        "blocks_bytes": int(index.bytes_per_block().sum()),
        "index": {
            "blocks_done": index.num_counted,
            "blocks": snapshot.num_blocks,
            "seconds_left": index.lengths.seconds_left,
        },
        "prepared": prepared,
        "bad_rows": {
            "known": quarantine.num_bad_rows,
            "on_bad_row": snapshot.recipe.on_bad_row,
            "refusal": quarantine.refusal,
            "unread_row_groups": quarantine.num_unread_groups,
        },
        "cache": {
            "used_bytes": cache.used_bytes,
            "budget_bytes": cache.room_bytes,
            "configured_bytes": cache.budget_bytes,
            "failure": cache.failure,
        },
        "columns": snapshot.recipe.encoded_columns,
        "recipe": snapshot.recipe.describe(),
        "unused_columns": list(snapshot.recipe.unused),
        "token_dtype": snapshot.token_dtype,
        "snapshot": snapshot.fingerprint,
    }


def _splits(lengths: RowLengths, snapshot: Snapshot) -> dict[str, SplitInfo]:
    """Describe train, validation, and the other splits that exist."""
    counts = {split: lengths.per_block(split).sums() for split in dict.fromkeys(("train", "validation", *snapshot.splits))}
    return {split: {"rows": rows, "tokens": tokens, "bad_rows": bad} for split, (rows, tokens, bad) in counts.items()}


def rows_held_out(rows: Mapping[str, int]) -> str:
    """Describe the rows of validation, and of test if it has rows, for people."""
    return ", ".join(f"{counted(n, 'row')} in split={split}" for split, n in rows.items() if n or split == "validation")


def lengths_told(quantiles: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Yield the quantiles of RowLengths as sentences, to help choose seq_len and target_seq_len."""
    for name, tokens in quantiles.items():
        yield (
            f"half of the {name}s have at most {counted(tokens['median'], 'token')}, 90% at most {tokens['p90']:,}, 99% at "
            f"most {tokens['p99']:,}, all at most {tokens['longest']:,}"
        )


def describe_state(state: DatasetState) -> DatasetInfo:
    """Describe a dataset by its latest snapshot and its state. Raises DatasetInvalid: see DatasetState.latest."""
    return {
        **describe_dataset(state.latest),
        "snapshots": [{"snapshot": r.fingerprint, "shards": len(r.shards), "rows": r.num_rows} for r in state.snapshots],
        "refresh_error": state.error,
    }


def describe_spec(plan: Plan) -> SpecInfo:
    """Describe the spec with every parameter resolved, its number of steps and the tensors of a batch."""
    tensors: list[TensorInfo] = [
        {"name": tensor.name, "dtype": tensor.dtype, "shape": [*shape]}
        for tensor, shape in zip(plan.tensors, plan.shapes, strict=True)
    ]
    return {
        "snapshot": plan.snapshot,
        "num_steps": plan.schedule.num_steps,
        "num_samples": plan.schedule.num_samples,
        "vocab_size": plan.vocab_size,
        "padding": plan.padding,
        "tensors": tensors,
        "split_rules": {member.name: member.snapshot.split_rule for member in plan.members},
        "advice": list(advice_on_run(plan)),
        "spec": plan.spec.to_dict(),
    }
