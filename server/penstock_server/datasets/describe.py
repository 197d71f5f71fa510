"""What is told of datasets, mixtures and specs: a summary for people, and all of it as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.wording import counted, rows_kept
from penstock_server.answers.datasets import DatasetAnswer, MixtureAnswer, SpecAnswer, SplitAnswer, TensorAnswer
from penstock_server.batches.plan import Plan
from penstock_server.counts.lengths import RowLengths
from penstock_server.datasets.advice import advice_on_run
from penstock_server.datasets.declared import DeclaredMixture
from penstock_server.datasets.held import Held, Served


def summary(served: Served) -> tuple[str, str]:
    """A snapshot that is served in two lines, for people: how much it is, and its recipe."""
    snapshot = served.snapshot
    rows, shards = rows_kept(snapshot.num_rows, served.index.num_rows), counted(len(snapshot.shards), "shard")
    return (
        f"{served.name}: {rows} in {shards}, snapshot {snapshot.fingerprint}",
        f"recipe: {snapshot.recipe.describe()}",
    )


def describe_mixture(mixture: DeclaredMixture) -> MixtureAnswer:
    """A mixture that is declared."""
    return {"name": mixture.name, "mix": str(mixture.mix), "mix_stop": mixture.mix_stop, "datasets": list(mixture.mix.datasets)}


def describe_dataset(served: Served) -> DatasetAnswer:
    """A snapshot that is served."""
    snapshot, index, cache, quarantine = served.snapshot, served.index, served.blocks.cache, served.blocks.quarantine
    index.lengths.read()  # what `penstock prepare` has counted is told before anybody needs it
    lengths = index.lengths.get() if index.lengths.is_ready else None
    splits, told = (_splits(lengths), lengths.quantiles) if lengths else (None, {})
    tokens = sum(split["tokens"] for split in splits.values()) if splits else None
    return {
        "name": served.name,
        "rows": snapshot.num_rows,
        "rows_served": index.num_rows,
        "tokens": tokens,
        "row_tokens": told.get("row"),
        "prompt_tokens": told.get("prompt"),
        "response_tokens": told.get("response"),
        "splits": splits,
        "shards": len(snapshot.shards),
        "blocks": snapshot.num_blocks,
        "size_bytes": sum(shard.date.size_bytes for shard in snapshot.shards),
        "blocks_bytes": int(index.bytes_per_block().sum()),
        "index": {"blocks_done": index.num_counted, "blocks": snapshot.num_blocks},
        "bad_rows": {
            "known": quarantine.num_bad_rows,
            "on_bad_row": snapshot.recipe.on_bad_row,
            "refusal": quarantine.refusal,
            "unread_row_groups": quarantine.num_unread_groups,
        },
        "cache": {
            "used_bytes": cache.used_bytes,
            "budget_bytes": cache.budget_bytes,
            "asked_bytes": cache.configured_bytes,
            "failure": cache.failure,
        },
        "columns": snapshot.recipe.encoded_columns,
        "recipe": snapshot.recipe.describe(),
        "unused_columns": list(snapshot.recipe.unused),
        "token_dtype": snapshot.token_dtype,
        "snapshot": snapshot.fingerprint,
    }


def _splits(lengths: RowLengths) -> dict[str, SplitAnswer]:
    """What is in each split. Of the train split it is what remains: to count it takes a look at all rows."""
    every, held_out = (lengths.per_block(split).sums() for split in ("all", "validation"))
    counts = {"train": [a - b for a, b in zip(every, held_out, strict=True)], "validation": held_out}
    return {split: {"rows": rows, "tokens": tokens, "bad_rows": bad} for split, (rows, tokens, bad) in counts.items()}


def lengths_told(quantiles: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """The quantiles of RowLengths in sentences: what a seq_len is chosen by, and a target_len."""
    for name, tokens in quantiles.items():
        yield (
            f"half of the {name}s have at most {counted(tokens['median'], 'token')}, 90% at most {tokens['p90']:,}, 99% at "
            f"most {tokens['p99']:,}, all at most {tokens['longest']:,}"
        )


def describe_held(held: Held) -> DatasetAnswer:
    """A dataset by its latest snapshot, and what is held of it. Raises DatasetRefused: see Held.opened."""
    return {
        **describe_dataset(held.opened()),
        "snapshots": [{"snapshot": r.fingerprint, "shards": len(r.shards), "rows": r.num_rows} for r in held.snapshots],
        "refresh_error": held.error,
    }


def describe_spec(plan: Plan) -> SpecAnswer:
    """The spec with every parameter resolved, the number of steps and the tensors of a batch."""
    tensors: list[TensorAnswer] = [
        {"name": tensor.name, "dtype": tensor.dtype, "shape": [*shape]}
        for tensor, shape in zip(plan.tensors, plan.shapes, strict=True)
    ]
    return {
        "snapshot": plan.snapshot,
        "num_steps": plan.schedule.num_steps,
        "num_sequences": plan.schedule.num_positions,
        "vocab_size": plan.vocab_size,
        "padding": plan.padding,
        "tensors": tensors,
        "advice": list(advice_on_run(plan)),
        "spec": plan.spec.to_dict(),
    }
