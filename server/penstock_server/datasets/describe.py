"""What is told of datasets, mixtures and specs, as JSON."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from penstock_server.batches.plan import Plan
from penstock_server.batches.room import advice
from penstock_server.datasets.declared import DeclaredMixture
from penstock_server.datasets.held import Held, Served
from penstock_server.recipes.declaration import FILE_NAME


def describe_mixture(mixture: DeclaredMixture) -> dict[str, Any]:
    """A mixture that is declared."""
    return {"name": mixture.name, "mix": str(mixture.mix), "mix_stop": mixture.mix_stop, "datasets": list(mixture.mix.datasets)}


def describe_dataset(served: Served) -> dict[str, Any]:
    """A snapshot that is served. `tokens`, and with a filter `rows_served`, are null until they are counted.

    The cache is that of all datasets; `blocks_bytes` is about what the blocks of this one take there.
    """
    snapshot, index, cache, quarantine = served.snapshot, served.index, served.blocks.cache, served.blocks.quarantine
    index.lengths.read()  # what `penstock prepare` has counted is told before anybody needs it
    tokens = int(index.lengths.get().per_block("all")[1].sum()) if index.lengths.is_ready else None
    token_bytes = np.dtype(snapshot.token_dtype).itemsize
    return {
        "name": served.name,
        "rows": snapshot.num_rows,
        "rows_served": index.num_rows,
        "tokens": tokens,
        "shards": len(snapshot.shards),
        "blocks": snapshot.num_blocks,
        "size_bytes": sum(shard.size_bytes for shard in snapshot.shards),
        "blocks_bytes": served.blocks.expected_bytes(snapshot.nbytes) if tokens is None else tokens * token_bytes,
        "index": dict(zip(("blocks_done", "blocks"), index.progress(), strict=True)),
        "bad_rows": {
            "known": quarantine.num_bad_rows,
            "on_bad_row": snapshot.recipe.on_bad_row,
            "refusal": quarantine.refusal,
            "unread_row_groups": quarantine.num_unread_groups,
        },
        "cache": {"used_bytes": cache.used_bytes, "budget_bytes": cache.budget_bytes, "asked_bytes": cache.configured_bytes},
        "columns": list(snapshot.recipe.token_columns),
        "recipe": snapshot.recipe.describe(),
        "unused_columns": list(snapshot.recipe.unused),
        "token_dtype": snapshot.token_dtype,
        "snapshot": snapshot.fingerprint,
    }


def describe_unused(served: Served) -> str | None:
    """What follows from columns of masks or labels that nothing is made of; None if there is none."""
    if not (unused := served.snapshot.recipe.unused):
        return None
    return (
        f"{served.name}: {', '.join(unused)} of its shards {'is' if len(unused) == 1 else 'are'} not used: every id of "
        f"{served.snapshot.recipe.token_columns[0]} is learned, prompts and padding, too. Leave padding out of the rows; to "
        f"learn only responses, let the rows be text, with prompt and response, or messages."
    )


def describe_unsaid_bos(served: Served) -> str | None:
    """What follows from a tokenizer that opens texts, where the recipe says nothing of it; None if there is none."""
    recipe = served.snapshot.recipe
    if not (recipe.tokenizer and recipe.unsaid_bos) or recipe.fields[0][1].text.startswith(recipe.unsaid_bos):
        return None
    return (
        f"{served.name}: {recipe.tokenizer.path} puts {recipe.unsaid_bos} before a text, and here nothing does. If models know "
        f'its texts by that, say bos = "{recipe.unsaid_bos}" in {served.snapshot.folder / FILE_NAME}, and else bos = false.'
    )


def describe_tight_cache(budget_bytes: int, datasets: Collection[Served]) -> str | None:
    """What follows from a cache that has no room for even one block of some datasets; None if it has."""
    tight = [served for served in datasets if served.snapshot.largest_block_bytes > budget_bytes]
    if not tight:
        return None
    largest = max(served.snapshot.largest_block_bytes for served in tight)
    together = sum(served.snapshot.nbytes for served in datasets)
    return (
        f"the budget of the block cache, {budget_bytes:,} bytes, is too small for even one of the larger blocks of "
        f"{', '.join(served.name for served in tight)}, of up to about {largest:,} bytes. They are not kept, but decoded and "
        f"tokenized again for every batch that needs them, which is very slow. Raise --cache-bytes (all blocks together take "
        f"about {together:,} bytes), or name a folder on a larger disk with --cache-dir."
    )


def describe_held(held: Held) -> dict[str, Any]:
    """The snapshots of a dataset that are held, newest first, and what keeps new data out."""
    snapshots = [{"snapshot": r.fingerprint, "shards": len(r.shards), "rows": r.num_rows} for r in held.snapshots]
    return {"snapshots": snapshots, "refresh_error": held.error}


def describe_spec(plan: Plan) -> dict[str, Any]:
    """The spec with every parameter resolved, the number of steps and the tensors of a batch."""
    tensors = [
        {"name": tensor.name, "dtype": tensor.dtype, "shape": shape}
        for tensor, shape in zip(plan.tensors, plan.shapes, strict=True)
    ]
    return {
        "snapshot": plan.snapshot,
        "num_steps": plan.schedule.num_steps,
        "num_sequences": plan.schedule.num_positions,
        "vocab_size": plan.vocab_size,
        "padding": plan.padding,
        "tensors": tensors,
        "advice": advice(plan),
        "spec": plan.spec.to_dict(),
    }
