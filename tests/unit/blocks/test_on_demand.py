"""Cold batches tokenize their own rows alone; their bytes are those that finished blocks give."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock_server.api.service import Requested
from penstock_server.batches.assemble import chunks, load
from penstock_server.batches.plan import Plan
from penstock_server.batches.text_view import provenance
from penstock_server.batches.writer import frames
from penstock_server.blocks import on_demand as on_demand_module
from penstock_server.blocks.decode import RowGroupReader
from penstock_server.blocks.on_demand import RowsOnDemand
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog import snapshot as snapshot_module
from penstock_server.catalog.catalog import Catalog, open_catalog
from penstock_server.problems import BadRow, ShardUnreadable
from penstock_server.recipes import encode
from penstock_server.recipes.allowed import EVERYTHING
from support.corpora import write_tokenizer
from support.engine import plan_of

TEXT = "the quick brown fox jumps over the lazy dog and says hello"
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def text(n: int) -> str:
    words = TEXT.split()
    return f"{n} " + " ".join(words[(n * 7 + k) % len(words)] for k in range(n % 13 + 1))


def chat(n: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": text(n)}, {"role": "assistant", "content": text(n + 1)}]


ROWS = 200
COLUMNS: dict[str, dict[str, list[Any]]] = {
    "text": {"text": [text(n) for n in range(ROWS)]},
    "bad rows": {"text": [None if n % 17 == 3 else text(n) for n in range(ROWS)]},
    "a bad block": {"text": [None if 30 <= n < 45 else text(n) for n in range(ROWS)]},
    "prompt and response": {"prompt": [text(n) for n in range(ROWS)], "response": [text(n + 5) for n in range(ROWS)]},
    "chats": {"messages": [chat(n) for n in range(ROWS)]},
    "preferences": {name: [text(n + k) for n in range(ROWS)] for k, name in enumerate(("prompt", "chosen", "rejected"))},
}
COLUMNS = {name: own | {"n": list(range(ROWS)), "word": [f"w{n}" for n in range(ROWS)]} for name, own in COLUMNS.items()}
RECIPES = {
    "plain": "validation = 0.2",
    "all": 'filter = "n % 3 > 0"\ntransform = "own:shout"\nvalidation = 0.4\nsplit_by = "word"',
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a dataset `d` of two shards with row groups of 15 rows."""

    def write(columns: dict[str, list[Any]], recipe: str = "") -> Path:
        folder = tmp_path / "data" / "d"
        folder.mkdir(parents=True)
        table = pa.table(columns)
        pq.write_table(table.slice(0, 120), folder / "part-0.parquet", row_group_size=15)
        pq.write_table(table.slice(120), folder / "part-1.parquet", row_group_size=15)
        write_tokenizer(folder / "tokenizer.json")
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        chats = 'chat_template = "chat_template.jinja"\n' if "messages" in columns else ""
        (folder / "penstock.toml").write_text(
            'tokenizer = "tokenizer.json"\ncolumns = ["n", "word"]\n'
            f'on_bad_row = "replace"\nmax_bad_share = 0.5\n{chats}{recipe}'
        )
        (folder / "own.py").write_text("def shout(batch):\n    return batch.slice(0)\n")
        return tmp_path

    return write


def opened(folder: Path, cache: str, decoded_bytes: int = 1 << 30) -> Catalog:
    return open_catalog(folder / "data", None, BlockStore(folder / cache, None, 2, decoded_bytes), EVERYTHING)


def bytes_of(plan: Plan, steps: range) -> list[bytes]:
    return [bytes(frames(chunk, load(chunk))) for step in steps for chunk in chunks(plan, 0, 0, range(step, step + 1))]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize("decoded_bytes", [3000, 1 << 30])
def test_cold_batch_has_the_bytes_of_finished_blocks(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, kind: str, recipe: str, decoded_bytes: int
) -> None:
    if decoded_bytes != 1 << 30:
        monkeypatch.setattr(snapshot_module, "_BLOCK_ROWS", 7)  # row groups of several blocks
    folder = write(COLUMNS[kind], RECIPES[recipe])
    specs: list[dict[str, Any]] = [{"split": split, "shuffle": "global"} for split in ("all", "train", "validation")]
    specs.append({"split": "train", "shuffle": "window", "window": 40, "pad": "longest"})
    warm, cold = opened(folder, "warm"), opened(folder, "cold", decoded_bytes)
    finished = warm["d"].latest
    finished.blocks.get(range(finished.snapshot.num_blocks))
    cold_rows = cold["d"].latest.blocks._store.rows
    for spec in specs:
        plan, cold_plan = (plan_of(catalog, "d", batch_size=4, seq_len=16, drop_last=False, **spec) for catalog in (warm, cold))
        steps = range(plan.schedule.num_steps)
        assert bytes_of(cold_plan, steps) == bytes_of(plan, steps)
        assert provenance(cold_plan, 0, 1, 0) == provenance(plan, 0, 1, 0)
    assert cold_rows.held_bytes == sum(decoded.nbytes for decoded in cold_rows._decoded.values())


def test_cold_batch_tokenizes_only_its_own_rows_and_none_twice(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(COLUMNS["text"])
    num_encoded, encode_rows = list[int](), encode.encode

    def counting(selected: encode.Selected, *args: Any) -> pa.RecordBatch:
        num_encoded.append(len(selected.numbers))
        return encode_rows(selected, *args)

    monkeypatch.setattr(encode, "encode", counting)
    catalog = opened(folder, "cache")
    plan = plan_of(catalog, "d", batch_size=8, seq_len=16, shuffle="global")
    bytes_of(plan, range(1))
    assert sum(num_encoded) == 8
    bytes_of(plan, range(plan.schedule.num_steps))
    blocks = catalog["d"].latest.blocks
    for index in range(len(blocks._snapshot.rows_per_block)):
        blocks.finish(index)
    assert sum(num_encoded) == ROWS
    assert all(blocks.is_stored(index) for index in range(blocks._snapshot.num_blocks))
    assert blocks._store.rows.held_bytes == 0


def test_finished_blocks_do_not_depend_on_earlier_requests(write: Callable[..., Path]) -> None:
    folder = write(COLUMNS["bad rows"], RECIPES["all"])
    whole, mixed = opened(folder, "whole")["d"].latest, opened(folder, "mixed")
    bytes_of(plan_of(mixed, "d", batch_size=8, seq_len=16, shuffle="global"), range(3))
    for index in range(whole.snapshot.num_blocks):
        mixed["d"].latest.blocks.finish(index)
        [one], [other] = whole.blocks.get([index]), mixed["d"].latest.blocks.get([index])
        assert [f.tokens.values.tolist() for f in one.features.values()] == [
            f.tokens.values.tolist() for f in other.features.values()
        ]
        assert (one.bad, one.stored_rows.tolist(), one.splits.tolist()) == (
            other.bad,
            other.stored_rows.tolist(),
            other.splits.tolist(),
        )


def test_bad_row_has_the_same_error_in_cold_and_finished_blocks(write: Callable[..., Path]) -> None:
    folder = write({"text": ["" if n % 17 == 3 else text(n) for n in range(ROWS)], "n": [0] * ROWS, "word": ["w"] * ROWS})
    recipe = folder / "data" / "d" / "penstock.toml"
    recipe.write_text(recipe.read_text().replace("replace", "fail"))
    told = []
    for cache in ("cold", "finished"):
        catalog = opened(folder, cache)
        if cache == "finished":
            catalog["d"].latest.blocks.get(range(catalog["d"].latest.snapshot.num_blocks))
        plan = plan_of(catalog, "d", batch_size=50, seq_len=16, shuffle="none")
        with pytest.raises(BadRow) as error:
            bytes_of(plan, range(1))
        told.append(str(error.value))
    assert told[0] == told[1]


def test_unreadable_row_group_fails_only_its_batches(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(COLUMNS["text"])
    blocks_of = RowGroupReader.blocks

    def failing(reader: RowGroupReader, address: Any) -> Any:
        if address.group == 1:
            raise ShardUnreadable("row group 1 is damaged")
        yield from blocks_of(reader, address)

    monkeypatch.setattr(RowGroupReader, "blocks", failing)
    plan = plan_of(opened(folder, "cache"), "d", batch_size=15, seq_len=16, shuffle="none")
    bytes_of(plan, range(1))
    with pytest.raises(ShardUnreadable, match="row group 1 is damaged"):
        bytes_of(plan, range(1, 2))
    bytes_of(plan, range(2, 3))


def test_blocks_are_finished_between_requests(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(COLUMNS["text"])
    catalog = opened(folder, "cache")
    served = catalog["d"].latest
    rows: RowsOnDemand = served.blocks._store.rows
    began, go_on, encode_rows = threading.Event(), threading.Event(), encode.encode

    def waiting(selected: encode.Selected, *args: Any) -> pa.RecordBatch:
        if threading.current_thread().name.startswith("penstock-rows"):
            began.set()
            assert go_on.wait(30)
        return encode_rows(selected, *args)

    monkeypatch.setattr(encode, "encode", waiting)
    plan = plan_of(catalog, "d", batch_size=4, seq_len=16, shuffle="none")
    request = threading.Thread(target=bytes_of, args=(plan, range(1)))
    request.start()
    assert began.wait(30)
    finishing = threading.Thread(target=served.blocks.finish, args=(5,))
    finishing.start()
    time.sleep(0.3)
    assert not served.blocks.is_stored(5)
    rows.budget_bytes = 1  # decoded rows fill it: making room comes first
    finishing.join(30)
    go_on.set()
    request.join(30)
    served.blocks.finish(5)
    assert served.blocks.is_stored(5)


def test_decoded_rows_stay_within_their_budget(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(COLUMNS["text"])
    catalog = opened(folder, "cache", 4000)
    rows: RowsOnDemand = catalog["d"].latest.blocks._store.rows
    plan = plan_of(catalog, "d", batch_size=32, seq_len=16, shuffle="global")
    bytes_of(plan, range(2))
    kept = set(rows._decoded)
    assert 0 < rows.held_bytes < 2 * 4000
    monkeypatch.setattr(on_demand_module, "_UNUSED_SECONDS", 0.0)
    bytes_of(plan, range(2, 6))
    assert not kept <= set(rows._decoded)
    assert 0 < rows.held_bytes < 2 * 4000


def test_cancelled_rows_are_not_tokenized(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(COLUMNS["text"])
    catalog = opened(folder, "cache")
    plan = plan_of(catalog, "d", batch_size=8, seq_len=16, shuffle="global")
    encoded, read, go_on, blocks_of = list[int](), threading.Event(), threading.Event(), RowGroupReader.blocks

    def waiting(*args: Any) -> Any:
        read.set()
        assert go_on.wait(30)
        yield from blocks_of(*args)

    monkeypatch.setattr(RowGroupReader, "blocks", waiting)
    monkeypatch.setattr(encode, "encode", lambda selected, *_: encoded.append(len(selected.numbers)))
    [chunk] = chunks(plan, 0, 0, range(1))
    futures: list[Any] = chunk.request()
    assert read.wait(30)
    Requested(futures).forget()
    go_on.set()
    store = catalog["d"].latest.blocks._store
    deadline = time.monotonic() + 30
    while store.rows.num_requests:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (encoded, [future.cancelled() for future in futures]) == ([], [True] * len(futures))
