"""Warnings, a sentence each: a command prints them when it opens datasets, a run before its first step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from penstock.spec import Spec
from penstock.text import listed
from penstock_server.batches.member import Member
from penstock_server.batches.plan import Plan, advice_on_room
from penstock_server.catalog.held import Served
from penstock_server.catalog.scan import list_folder
from penstock_server.problems import Problem
from penstock_server.recipes.infer import FILE_NAME, MASKS, MASKS_OF_LOSS

_DROPPED_SHARE = 0.1  # of an epoch's samples


def advice_on_folder(data_dir: Path) -> Iterator[str]:
    """Yield the warning about a recipe directly in a data folder, which has no effect."""
    with suppress(OSError):  # opening the datasets reports the error
        listing = list_folder(data_dir)
        if listing.has_recipe and not listing.shards:
            yield (
                f"{data_dir / FILE_NAME} is not used: no shard is beside it. A recipe stands in the folder of its dataset's "
                f"shards, and that of a mixture in a folder of its own below {data_dir}."
            )


def advice_on_data(datasets: Collection[Served], budget_bytes: int) -> Iterator[str]:
    """Yield the warnings about datasets.

    They are about a cache too small for a block, each dataset's recipe and columns, and too many bad rows.
    """
    found = [_of_tight_cache(budget_bytes, datasets)]
    found += [told(served) for served in datasets for told in (*_OF_EACH, _of_bare_borders)]
    found += [served.blocks.quarantine.refusal for served in datasets]
    yield from filter(None, found)


def advice_on_run(plan: Plan) -> Iterator[str]:
    """Yield the warnings about a run.

    They are about a cache too small for its windows, sorting by length without effect, skipped steps that no epoch has, prompts
    left open, packed documents that are not marked, many dropped samples, and each of its datasets.
    """
    of_members = [told(member) for member in plan.members for told in _OF_EACH]
    if plan.spec.task != "seq2seq":
        of_members += map(_of_bare_borders, plan.members)
    of_run = (
        _of_needless_sorting(plan.spec),
        _of_needless_skip(plan),
        _of_open_prompts(plan),
        _of_packed_rows(plan),
        _of_dropped_samples(plan),
    )
    yield from filter(None, (advice_on_room(plan), *of_run, *of_members))


def _of_bare_borders(served: Served | Member) -> str | None:
    """Return the warning about responses without a blank between them and their prompt; None without any."""
    with suppress(Problem, ValueError):  # the first batch reports a shard that cannot be read
        if served.blocks.have_bare_borders:
            prompt, response = (source.text for _, source in served.snapshot.recipe.fields)
            template = response if "{" in response else f"{{{response}}}"
            return (
                f"{served.name}: in its first rows nothing separates {prompt} and {response}: the last word of a prompt runs "
                f"into the first word of its response, since nothing is inserted between them. If the model expects a blank or "
                f'a line break, set response = " {template}" in {served.snapshot.folder / FILE_NAME}.'
            )
    return None


def _of_tight_cache(budget_bytes: int, datasets: Collection[Served]) -> str | None:
    """Return the warning about a cache that cannot hold even one block of some datasets; None if it can."""
    tight = [served for served in datasets if served.blocks.expected_bytes.max() > budget_bytes]
    if not tight:
        return None
    largest = max(int(served.blocks.expected_bytes.max()) for served in tight)
    together = sum(int(served.index.bytes_per_block().sum()) for served in datasets)
    return (
        f"the budget of the block cache, {budget_bytes:,} bytes, is too small for even one of the larger blocks of "
        f"{listed([served.name for served in tight])}, of up to about {largest:,} bytes. Such blocks are not kept, but "
        f"decoded and tokenized again for every batch that needs them, which is very slow. Raise --cache-bytes (all blocks "
        f"together take about {together:,} bytes), or name a folder on a larger disk with --cache-dir."
    )


def told_splits(shard_splits: Sequence[str]) -> str:
    """Return the number of shards in each split, for people."""
    numbers = Counter(shard_splits)
    names = {"train": "train", "validation": "validation", "test": "test", "none": "no split"}
    return ", ".join(f"{name} {numbers[split]:,}" for split, name in names.items() if split in numbers)


def _of_named_splits(served: Served | Member) -> str | None:
    """Return the warning that shard names, not the recipe, give the splits; None if they do not."""
    snapshot = served.snapshot
    if not snapshot.shard_splits or snapshot.recipe.splits:
        return None
    given = f"this run has split={served.order_key.split}" if isinstance(served, Member) else "the default is split=train"
    return (
        f"{served.name}: the names of its shards give its splits ({told_splits(snapshot.shard_splits)}), and {given}. Only "
        f'split=all has the rows of every shard. If this is right, set splits = "files" in {snapshot.folder / FILE_NAME}; '
        f'to ignore the names, set splits = "hash".'
    )


def _of_unused_columns(served: Served | Member) -> str | None:
    """Return the warning about unused columns that would select the tokens with loss; None without any."""
    if not (unused := served.snapshot.recipe.unused):
        return None
    if unused == ("label",):
        return (
            f"{served.name}: label of its shards is not used, so answers with label = false have loss like the others. To "
            f'leave them out, set filter = "label = true" in {served.snapshot.folder / FILE_NAME}; for a loss that needs the '
            f'label, such as that of KTO, set columns = ["label"].'
        )
    if unused == ("tools",):
        return (
            f"{served.name}: tools of its shards is not used, since its chat template looks at no tools. Take a template that "
            f"writes them; if this is right, set tools = false in {served.snapshot.folder / FILE_NAME}."
        )
    if served.snapshot.recipe.kind == "preference":
        return (
            f"{served.name}: prompt of its shards is not used, since of prompt, chosen and rejected some are text and others "
            f"are chats. If the answers do not begin with it, make all of one kind with a transform; else name the answers "
            f'alone in {served.snapshot.folder / FILE_NAME}: chosen = "chosen" and rejected = "rejected".'
        )
    if served.snapshot.recipe.kind == "text":
        role = unused[0]
        return (
            f"{served.name}: its rows are its texts, of which every token has loss; {', '.join(unused)} of its shards "
            f"{'is' if len(unused) == 1 else 'are'} not used. To learn answers alone, name "
            f"{'the chats' if role == 'messages' else 'both'} in {served.snapshot.folder / FILE_NAME}: "
            f'{_named_as(unused)}; if this is right, text = "text".'
        )
    return _of_unused_masks(served, unused)


def _of_unused_masks(served: Served | Member, unused: tuple[str, ...]) -> str:
    recipe, path = served.snapshot.recipe, served.snapshot.folder / FILE_NAME
    role_of = {name: role for name in unused for role in MASKS if name in MASKS[role] or name.endswith(f"_{role}")}
    used = next(((role, source.text) for role, source in recipe.masks if role in MASKS_OF_LOSS), None)
    are = f"{', '.join(unused)} of its shards {'is' if len(unused) == 1 else 'are'} not used"
    none_of_them = " and ".join(f"{role} = false" for role in dict.fromkeys(role_of.values()))
    if "tokens" not in dict(recipe.fields):
        why = "every id of an answer has loss, none of a prompt is, and padding would be taken for ids"
        what = f"Store the rows so that this is right, and set {none_of_them}"
    elif used and {*role_of.values()} <= {*MASKS_OF_LOSS}:
        why = f"what has loss is told by {used[1]} alone"
        what = f'Set {role_of[unused[0]]} = "{unused[0]}" to take that one, or {used[0]} = "{used[1]}" if this is right,'
    else:
        why = "a mask is a list of whole numbers, or of booleans, for each row of ids"
        what = f"Write it as such, or, if it is none, set {none_of_them}"
    return f"{served.name}: {are}: {why}. {what} in {path}."


def _named_as(unused: tuple[str, ...]) -> str:
    """Return the recipe lines that would use these columns of chats, or of a prompt and its answer."""
    if unused[0] == "messages":
        return 'messages = "messages"'
    if unused[0] == "chosen":
        return 'chosen = "chosen" and rejected = "rejected"'
    return f'prompt = "prompt" and response = "{unused[1]}"'


def _of_open_answers(served: Served | Member) -> str | None:
    """Return the warning about a chat template that writes nothing after an answer; None if it, or an EOS, ends answers."""
    recipe = served.snapshot.recipe
    if recipe.chat and recipe.chat.leaves_end_out and not recipe.adds_eos_to_chats:
        return (
            f"{served.name}: its chat template writes what ends an answer behind {{% endgeneration %}}, where it has "
            f"no loss, so nothing teaches a model to stop. Put {{% endgeneration %}} behind it."
        )
    if not recipe.chat or recipe.chat.closes or recipe.eos_id is not None:
        return None
    return (
        f"{served.name}: its chat template ends what the assistant says with nothing but blanks, so nothing teaches a model to "
        f"stop. Write the token that ends a turn into the template, or, for chats of one answer, name it in "
        f'{served.snapshot.folder / FILE_NAME}: eos = "<the token>".'
    )


def _of_dropped_system(served: Served | Member) -> str | None:
    """Return the warning about a chat template that drops system messages; None if it writes or refuses them."""
    chat = served.snapshot.recipe.chat
    if not chat or not chat.drops_system:
        return None
    return (
        f"{served.name}: its chat template writes nothing of system messages, so chats that have one have loss without it. "
        f"Use a template that writes them, or put their text into the first message of the user with a transform."
    )


def _of_unsaid_bos(served: Served | Member) -> str | None:
    """Return the warning about a tokenizer that opens texts while the recipe does not set bos; None if that is not so."""
    recipe = served.snapshot.recipe
    if not (recipe.tokenizer and recipe.unsaid_bos) or recipe.fields[0][1].text.startswith(recipe.unsaid_bos):
        return None
    return (
        f"{served.name}: {recipe.tokenizer.path} puts {recipe.unsaid_bos} before each text, but here nothing does. If the "
        f'model expects it, set bos = "{recipe.unsaid_bos}" in {served.snapshot.folder / FILE_NAME}; if not, set bos = false.'
    )


def _of_guessed_eos(served: Served | Member) -> str | None:
    """Return the warning about an EOS guessed from several candidates in the tokenizer; None if the EOS is known."""
    recipe = served.snapshot.recipe
    if not (recipe.tokenizer and recipe.guessed_eos):
        return None
    first, *others = recipe.guessed_eos
    return (
        f"{served.name}: its rows end with {first}, but {recipe.tokenizer.path} has {', '.join(others)}, too, and nothing says "
        f"which of them ends a text. Put the model's tokenizer_config.json beside it, or set "
        f'eos = "{first}" or another in {served.snapshot.folder / FILE_NAME}.'
    )


_OF_EACH = (  # dataset
    _of_named_splits,
    _of_unused_columns,
    _of_unsaid_bos,
    _of_guessed_eos,
    _of_open_answers,
    _of_dropped_system,
)


def _of_dropped_samples(plan: Plan) -> str | None:
    """Return the warning that drop_last=true drops a large part of each epoch; None if it does not."""
    schedule, spec = plan.schedule, plan.spec
    num_dropped = schedule.num_samples - schedule.num_steps * spec.samples_per_step
    if not spec.drop_last or spec.offset or num_dropped <= _DROPPED_SHARE * schedule.num_samples:
        return None
    return (
        f"{plan.dataset}: drop_last=true leaves out {num_dropped:,} of the {schedule.num_samples:,} samples of each epoch, "
        f"which do "
        f"not fill a step of batch_size x world_size = {spec.samples_per_step:,}. Choose a batch_size that divides them more "
        f"evenly, or use drop_last=false, which fills the last step from the epoch's start."
    )


def _of_open_prompts(plan: Plan) -> str | None:
    """Return the warning about encoder prompts without the token that the tokenizer closes texts with; None without any."""
    if plan.spec.task != "seq2seq":
        return None
    for member in plan.members:
        recipe = member.snapshot.recipe
        prompt, closing = recipe.fields[0][1].text, recipe.tokenizer and recipe.tokenizer.closing
        if closing and recipe.kind != "tokens" and not prompt.endswith(closing):
            template = prompt if "{" in prompt else f"{{{prompt}}}"
            return (
                f"{member.name}: the tokenizer puts {closing} behind each text, but here nothing stands behind a prompt. If "
                f'the model expects it, as those of T5 and BART do, set prompt = "{template}{closing}" in {FILE_NAME}; prompts '
                f"of more than seq_len={plan.spec.seq_len:,} tokens lose it."
            )
    return None


def _of_packed_rows(plan: Plan) -> str | None:
    """Return the warning about rows of several documents in batches that do not mark documents; None without any."""
    packed = [member.name for member in plan.members if member.snapshot.recipe.has_documents]
    if not packed or any(tensor.kind == "starts" for tensor in plan.tensors):
        return None
    return (
        f"{', '.join(packed)}: its rows hold several documents each, and batches of packing={plan.spec.packing} do not mark "
        f"where these begin: tokens attend to the documents before theirs, and positions run on. Use packing=best_fit, or "
        f"packing=concat with mark_documents=true."
    )


def _of_needless_sorting(spec: Spec) -> str | None:
    """Return the warning about sorting rows by length while padding does not depend on it; None if that is not so."""
    if spec.length_bucket_size and spec.pad == "seq_len":
        return (
            f"length_bucket_size={spec.length_bucket_size} puts rows of similar length side by side, but pad=seq_len pads "
            f"each to "
            f"{spec.seq_len:,} tokens anyway: nothing is saved. Use pad=longest or a multiple, such as pad=64."
        )
    if 0 < spec.length_bucket_size < spec.batch_size:
        return (
            f"length_bucket_size={spec.length_bucket_size} puts only that many rows of similar length side by side, but a "
            f"batch has "
            f"{spec.batch_size}: it is padded to the longest of several groups, and little is saved. Use the size of a global "
            f"batch, length_bucket_size={spec.samples_per_step}."
        )
    return None


def _of_needless_skip(plan: Plan) -> str | None:
    """Return the warning about skips that no epoch has, such as steps counted through a run; None if each epoch has them."""
    skipped, end, per_step = plan.schedule.skipped, plan.schedule.num_positions, plan.spec.samples_per_step
    if plan.spec.drop_last and not any(bound % per_step for bounds in skipped for bound in bounds):
        end -= end % per_step  # if whole steps are dropped, the incomplete one is in no epoch
    first = next((start for start, _ in skipped if start >= end), None)
    if first is None:
        return None
    return (
        f"skip leaves nothing out from step {first // per_step:,} on (sample {first:,}): an epoch ends in step "
        f"{(end - 1) // per_step:,}, with sample {end - 1:,}. Steps are counted from 0 in each epoch, not through a run."
    )
