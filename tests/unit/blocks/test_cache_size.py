"""What a dataset takes in the cache, as people are told, beside what lies there."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.cli.doctor import check_cache
from penstock.spec import Spec
from penstock_server.batches.plan import advice_on_room, check_room
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import Catalog, open_catalog
from penstock_server.catalog.describe import describe_dataset
from penstock_server.prepare import prepare
from penstock_server.problems import BadParameter
from support.corpora import write_tokenizer

NUM_ROWS = 800
CHAT_TEMPLATE = """{% for message in messages %}<{{ message.role }}>
{% if message.role == "assistant" %}{% generation %}{{ message.content }}{% endgeneration %}
{% else %}{{ message.content }}{% endif %}
{% endfor %}"""


def text(number: int) -> str:
    """From 1 to 30 words, none of them as often as in the rows beside it."""
    return " ".join(f"{word * number % 977} the quick fox" for word in range(1, 2 + number * 7 % 30))


def chat(number: int) -> str:
    turns = [{"role": ("user", "assistant")[turn % 2], "content": text(number + turn)} for turn in range(2 + 2 * (number % 4))]
    return json.dumps(turns)


KINDS: dict[str, tuple[dict[str, Callable[[int], Any]], str]] = {
    "tokens": ({"input_ids": lambda n: [n * k % 60_000 for k in range(1 + n % 90)]}, ""),
    "large_ids": ({"input_ids": lambda n: [n * k % 90_000 for k in range(1 + n % 90)]}, ""),
    "short_tokens": ({"input_ids": lambda n: [n]}, ""),
    "texts": ({"text": text}, ""),
    "short_texts": ({"text": lambda n: f"fox {n}"}, ""),
    "prompt_response": ({"prompt": text, "response": lambda n: f"fox {n}"}, ""),
    "chats": ({"messages": chat}, 'messages = "messages"\nchat_template = "../chat.jinja"\n'),
    "pairs": ({"chosen": text, "rejected": lambda n: text(n + 1)}, ""),
    "pairs_of_one_long_side": ({"chosen": text, "rejected": lambda n: f"fox {n}"}, ""),
    "with_columns": (
        {"text": text, "source": lambda n: f"https://example.org/{n}", "score": float, "vector": lambda n: [float(n)] * 16},
        'columns = ["source", "score", "vector"]\n',
    ),
    "with_splits": ({"text": text, "id": lambda n: n}, 'validation = 0.3\nsplit_by = "id"\n'),
    "filtered": ({"text": text, "id": lambda n: n}, 'filter = "id < 400"\n'),
    "bad_rows": (
        {"text": lambda n: text(n) if n % 3 else None},
        'on_bad_row = "replace"\nmax_bad_share = 0.5\n',
    ),
}
SOME = ("tokens", "short_texts", "prompt_response", "pairs", "with_columns", "filtered")


@pytest.fixture
def open_all(tmp_path: Path) -> Callable[..., Catalog]:
    """A dataset of one kind, named after it, as a server sees it that has just been started; each budget has its own folder."""
    write_tokenizer(tmp_path / "tokenizer.json", [text(number) for number in range(50)])
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "chat.jinja").write_text(CHAT_TEMPLATE)

    def opened(kind: str, *, budget_bytes: int = 1 << 30, row_group_size: int = 100) -> Catalog:
        columns, recipe = KINDS[kind]
        folder = tmp_path / "data" / kind
        if not folder.exists():
            folder.mkdir(parents=True)
            (folder / "penstock.toml").write_text(recipe)
            types = {"vector": pa.list_(pa.float32(), 16)}
            arrays = {name: pa.array(map(make, range(NUM_ROWS)), types.get(name)) for name, make in columns.items()}
            pq.write_table(pa.table(arrays), folder / "part-0.parquet", row_group_size=row_group_size)
        store = BlockStore(tmp_path / f"cache-{budget_bytes}", budget_bytes, 1)
        return open_catalog(tmp_path / "data", tmp_path / "tokenizer.json", store)

    return opened


def prepared(catalog: Catalog) -> str:
    """The last thing that is said of the only dataset when it is prepared."""
    [served] = catalog.datasets.values()
    return list(prepare(served, []))[-1]


def told(catalog: Catalog) -> int:
    [served] = catalog.datasets.values()
    return int(describe_dataset(served)["blocks_bytes"])


def stored(catalog: Catalog) -> int:
    [served] = catalog.datasets.values()
    return sum(path.stat().st_size for path in served.blocks.cache.folder.glob("*.block"))


@pytest.mark.parametrize("row_group_size", [50])
@pytest.mark.parametrize("kind", KINDS)
def test_described_bytes_are_exact_after_counting(kind: str, row_group_size: int, open_all: Callable[..., Catalog]) -> None:
    catalog = open_all(kind, row_group_size=row_group_size)
    before = told(catalog)
    prepared(catalog)
    assert told(catalog) == stored(catalog)
    assert stored(catalog) / 2 < before < 4 * stored(catalog)
    assert told(open_all(kind)) == stored(catalog)  # as the next server reads it


@pytest.mark.parametrize("kind", SOME)
def test_too_small_cache_is_reported_by_every_command(kind: str, open_all: Callable[..., Catalog]) -> None:
    prepared(whole := open_all(kind))
    for budget_bytes, is_enough in ((stored(whole), True), (stored(whole) - 1, False)):
        catalog = open_all(kind, budget_bytes=budget_bytes)
        said = prepared(catalog)
        assert (": 8 of 8 blocks are in the cache" in said) == is_enough
        assert ("is full" not in said) == is_enough
        plan = catalog.plan(kind, Spec(batch_size=1, window=10**6))
        assert (advice_on_room(plan) is None) == is_enough
        [check] = check_cache([describe_dataset(served) for served in catalog.datasets.values()])
        assert is_enough or "the datasets take about" in check.text
        plan = catalog.plan(kind, Spec(batch_size=1, shuffle="global"))
        with nullcontext() if is_enough else pytest.raises(BadParameter, match=f"takes about {stored(whole):,} bytes there"):
            check_room(plan)


@pytest.mark.parametrize("kind", SOME)
def test_room_is_estimated_from_a_few_blocks_before_counting(kind: str, open_all: Callable[..., Catalog]) -> None:
    prepared(whole := open_all(kind))
    plan = open_all(kind, budget_bytes=stored(whole)).plan(kind, Spec(batch_size=1, shuffle="global"))
    [member] = plan.members
    needed = int(member.index.bytes_per_block(sampled=True).sum())
    assert not member.index.lengths.is_ready
    assert 0.95 < needed / stored(whole) < 1.05
    check_room(plan)
    member.blocks.cache.budget_bytes = stored(whole) * 85 // 100
    with pytest.raises(BadParameter, match=f"takes about {needed:,} bytes there"):
        check_room(plan)
