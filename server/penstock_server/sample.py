"""A generated sample corpus: stories (text), questions (prompt and response), and a tokenizer trained on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from errno import EEXIST
from itertools import islice
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import ByteLevelBPETokenizer

EOS = "<|endoftext|>"
PAD = "<pad>"
_MARK = ".penstock-sample"  # marks folders that `sample` wrote and may replace

_SHARDS = 4
_ROWS_PER_GROUP = 1_000
_MAX_VOCAB = 2_048
_RECIPE = f'tokenizer = "../tokenizer.json"\neos = "{EOS}"\npad = "{PAD}"\n'

_NAMES = "Ada Bruno Chen Dora Emil Fatima Goran Hana Ivo Jun Kofi Lena Milo Nadia Omar Priya Rosa Sam Tara Yusuf".split()
_ANIMALS = "heron otter hedgehog goat crow fox toad mule hare owl".split()
_PLACES = ["the mill", "the harbour", "the old bridge", "the orchard", "the quarry", "the lighthouse", "the market"]
_THINGS = ["lantern", "kite", "copper pot", "map", "fiddle", "basket of plums", "letter", "wooden boat", "brass key"]
_WEATHER = ["It rained", "The wind was high", "Fog lay on the water", "The sun came out", "Snow fell", "It was still"]
_MOODS = ["glad", "tired", "curious", "worried", "proud", "hungry", "calm"]
_GOODS = ["apples", "nails", "candles", "eggs", "bricks", "stamps", "buttons", "loaves"]


def write_sample(out_dir: Path, *, rows: int, seed: int) -> Iterator[str]:
    """Write the corpus, and yields a line for each output. Equal arguments write equal rows.

    out_dir/tokenizer.json, out_dir/stories and out_dir/questions, each of `rows` rows in several shards.

    Raises FileExistsError: the folder has files that `sample` did not write.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    if any(out_dir.iterdir()) and not (out_dir / _MARK).exists():
        raise FileExistsError(EEXIST, "it holds other things, which a sample must not replace; name a new folder", str(out_dir))
    (out_dir / _MARK).touch()
    corpora: dict[str, Callable[[Random], dict[str, str]]] = {"stories": _story, "questions": _question}
    random = Random(seed)
    training = [" ".join(make(random).values()) for make in corpora.values() for _ in range(2_000)]
    path = out_dir / "tokenizer.json"
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(training, _MAX_VOCAB, min_frequency=0, show_progress=False, special_tokens=[EOS, PAD])
    path.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")  # its `save` raises no OSError on a full disk
    yield f"{path}: byte-level BPE, {tokenizer.get_vocab_size():,} ids"
    for name, make in corpora.items():
        folder = out_dir / name
        folder.mkdir(exist_ok=True)
        random = Random(f"{seed} {name}")
        written = (make(random) for _ in range(rows))
        for shard in range(_SHARDS):
            size = rows // _SHARDS + (shard < rows % _SHARDS)
            table = pa.Table.from_pylist(list(islice(written, size)))
            path = folder.absolute() / f"part-{shard}.parquet"  # absolute: pyarrow would read s3:x as a URI
            pq.write_table(table, path, compression="zstd", row_group_size=_ROWS_PER_GROUP)
        (folder / "penstock.toml").write_text(_RECIPE, encoding="utf-8")
        yield f"{folder}: {rows:,} rows in {_SHARDS} shards"


def _story(random: Random) -> dict[str, str]:
    one, two = random.sample(_NAMES, 2)
    animal, place, thing, mood = (random.choice(words) for words in (_ANIMALS, _PLACES, _THINGS, _MOODS))
    opening = random.choice(
        [
            f"{one} lived near {place} with a {animal}.",
            f"One morning {one} walked to {place} with {two}.",
            f"At {place} there was a {animal} that only {one} could see.",
        ]
    )
    events = [
        f"{random.choice(_WEATHER)}, and {one} was {mood}.",
        f"{two} had lost a {thing} on the way to {random.choice(_PLACES)}.",
        f'"Have you seen my {thing}?" asked {two}.',
        f'"No," said {one}, "but the {animal} may know."',
        f"The {animal} looked at the {thing} and did not move.",
        f"They looked behind {place} and under every stone.",
        f"{one} carried the {thing} back before dark.",
        f"{two} laughed and shared some {random.choice(_GOODS)} with the {animal}.",
    ]
    told = [event for event in events if random.random() < 0.6]
    ending = random.choice(
        [
            f"From that day on {one} and {two} were friends.",
            f"The {animal} slept, and {one} was {random.choice(_MOODS)} again.",
            f"And the {thing} stayed at {place}.",
        ]
    )
    return {"text": " ".join([opening, *told, ending])}


def _question(random: Random) -> dict[str, str]:
    name, goods = random.choice(_NAMES), random.choice(_GOODS)
    boxes, each, away = random.randint(2, 9), random.randint(2, 12), random.randint(1, 4)
    total = boxes * each
    prompt = f"{name} has {boxes} boxes with {each} {goods} in each and gives {away} {goods} away. How many are left?"
    response = (
        f" {boxes} boxes hold {boxes} x {each} = {total} {goods}. {total} - {away} = {total - away}. Answer: {total - away}"
    )
    return {"prompt": prompt, "response": response}
