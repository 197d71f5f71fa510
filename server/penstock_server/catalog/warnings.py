"""Warnings, a sentence each: a command prints them when it opens datasets, a run before its first step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from penstock_server.batches.member import Member
from penstock_server.batches.plan import Plan, advice_on_room
from penstock_server.catalog.dataset import OpenSnapshot
from penstock_server.catalog.scan import list_folder
from penstock_server.problems import DatasetInvalid, Problem
from penstock_server.recipes.config import read_toml
from penstock_server.recipes.infer import FILE_NAME

_DROPPED_SHARE = 0.1  # of an epoch's samples
_SPLITS = {"train": "train", "validation": "validation", "test": "test", "none": "no split"}


def warn(tell: Callable[[str], None], places: Iterable[Path | str], datasets: Iterable[OpenSnapshot]) -> None:
    """Pass warnings about the data folders and these datasets to `tell`, before they are read."""
    for sentence in (*advice_on_folders(places), *advice_on_data(datasets)):
        tell(sentence)


def advice_on_folders(places: Iterable[Path | str]) -> Iterator[str]:
    """Yield the warnings about a recipe directly in a data folder, which has no effect unless it names shards."""
    for data_dir in places:
        if isinstance(data_dir, Path) and _has_recipe_alone(data_dir):
            yield (
                f"{data_dir / FILE_NAME} is not used: no shard is beside it. Move it into the folder of a dataset's shards, "
                f"or, for a mixture, into its own folder below {data_dir}."
            )


def _has_recipe_alone(folder: Path) -> bool:
    with suppress(OSError, DatasetInvalid):  # opening the datasets reports the error
        listing = list_folder(folder)
        return listing.has_recipe and not listing.shards and "shards" not in read_toml(folder / FILE_NAME)
    return False


def advice_on_data(datasets: Iterable[OpenSnapshot]) -> Iterator[str]:
    """Yield the warnings about each dataset's recipe and columns, and about too many bad rows."""
    warnings: list[str | None] = []
    for opened in datasets:
        warnings += [_of_splits(opened, "split=train is the default"), *_of_recipe(opened), _of_missing_separator(opened)]
        warnings.append(opened.blocks.quarantine.refusal)
    yield from filter(None, warnings)


def advice_on_run(plan: Plan) -> Iterator[str]:
    """Yield the warnings about a run and its datasets."""
    warnings = [
        advice_on_room(plan),
        _of_packed_rows(plan),
        _of_dropped_samples(plan),
    ]
    for member in plan.members:
        warnings += [_of_splits(member, f"this run has split={member.order_key.split}"), *_of_recipe(member)]
        if plan.spec.task != "seq2seq":
            warnings.append(_of_missing_separator(member))
    yield from filter(None, warnings)


def describe_splits(shard_splits: Sequence[str]) -> str:
    """Describe the number of shards in each split, for people."""
    numbers = Counter(shard_splits)
    return ", ".join(f"{name} {numbers[split]:,}" for split, name in _SPLITS.items() if split in numbers)


def _of_missing_separator(dataset: OpenSnapshot | Member) -> str | None:
    """Warn of responses that directly follow their prompt."""
    with suppress(Problem, ValueError):  # the first batch reports a shard that cannot be read
        if dataset.blocks.lacks_separator:
            prompt, response = (source.text for _, source in dataset.snapshot.recipe.fields)
            template = response if "{" in response else f"{{{response}}}"
            return (
                f"{dataset.name}: no blank separates {prompt} and {response} in the first rows, so the last word of a prompt "
                f"runs into the first word of its response. If the model expects a blank or a line break, set "
                f'response = " {template}" in {dataset.snapshot.folder / FILE_NAME}.'
            )
    return None


def _of_splits(dataset: OpenSnapshot | Member, split: str) -> str | None:
    """Warn that shard names, not the recipe, give the splits."""
    snapshot = dataset.snapshot
    if snapshot.split_rule == "hash" or snapshot.recipe.splits:
        return None
    return (
        f"{dataset.name}: the names of its shards give its splits ({describe_splits(snapshot.shard_splits)}), and {split}. "
        f'Only split=all has the rows of every shard. If this is right, set splits = "files" in {snapshot.folder / FILE_NAME}; '
        f'to ignore the names, set splits = "hash".'
    )


def _of_recipe(dataset: OpenSnapshot | Member) -> Iterator[str]:
    """Warn of a recipe that may train on something other than was meant."""
    recipe, path = dataset.snapshot.recipe, dataset.snapshot.folder / FILE_NAME
    if recipe.unused:
        columns = ", ".join(recipe.unused)
        yield (
            f"{dataset.name}: the recipe does not use {columns}: columns of such names usually select the tokens with loss. If "
            f'they should, name them in {path}, such as response = "completion" or filter = "label = true". If not, say so, '
            f'such as text = "text", columns = ["label"], tools = false or loss_mask = false.'
        )
    tokenizer, chat = recipe.tokenizer, recipe.chat
    if tokenizer and recipe.unsaid_bos and not recipe.fields[0][1].text.startswith(recipe.unsaid_bos):
        yield (
            f"{dataset.name}: {tokenizer.path} puts {recipe.unsaid_bos} before each text, but here nothing does. If the model "
            f'expects it, set bos = "{recipe.unsaid_bos}" in {path}; if not, set bos = false.'
        )
    if tokenizer and recipe.guessed_eos:
        first, *others = recipe.guessed_eos
        yield (
            f"{dataset.name}: its rows end with {first}, but {tokenizer.path} also has {', '.join(others)}. Put the model's "
            f'tokenizer_config.json beside it, or set eos = "{first}" or another in {path}.'
        )
    if recipe.kind == "prompt":
        return
    if chat and chat.leaves_end_out and not recipe.adds_eos_to_chats:
        yield (
            f"{dataset.name}: its chat template writes the end of an answer after {{% endgeneration %}}. It has no loss there, "
            f"so nothing teaches a model to stop. Move {{% endgeneration %}} after it."
        )
    elif chat and not chat.closes and recipe.eos_id is None:
        yield (
            f"{dataset.name}: its chat template writes no token after an answer, so nothing teaches a model to stop. Write the "
            f'token that ends a turn into the template, or, for chats of one answer, set eos = "<the token>" in {path}.'
        )
    if chat and chat.drops_system:
        yield (
            f"{dataset.name}: its chat template drops system messages, so their chats have loss without them. Use a template "
            f"that writes them, or move their text into the first user message with a transform."
        )


def _of_dropped_samples(plan: Plan) -> str | None:
    """Warn that drop_last=true drops a large part of each epoch."""
    schedule, spec = plan.schedule, plan.spec
    num_dropped = schedule.num_kept - schedule.num_steps * spec.samples_per_step
    if not spec.drop_last or spec.offset or num_dropped <= _DROPPED_SHARE * schedule.num_kept:
        return None
    return (
        f"{plan.dataset}: drop_last=true leaves out {num_dropped:,} of the {schedule.num_kept:,} samples of each epoch, "
        f"which do not fill a step of batch_size x world_size = {spec.samples_per_step:,}. Choose a batch_size that divides "
        f"them more evenly, or use drop_last=false, which fills the last step from the epoch's start."
    )


def _of_packed_rows(plan: Plan) -> str | None:
    """Warn of rows of several documents in batches that do not mark documents."""
    packed = [member.name for member in plan.members if member.snapshot.recipe.has_documents]
    if not packed or any(tensor.kind == "starts" for tensor in plan.tensors):
        return None
    return (
        f"{', '.join(packed)}: its rows hold several documents each, and batches of packing={plan.spec.packing} do not mark "
        f"where these begin: tokens attend to earlier documents, and positions continue. Use packing=best_fit, or "
        f"packing=concat with mark_documents=true."
    )
