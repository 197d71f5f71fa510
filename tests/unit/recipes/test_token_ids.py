"""Pre-tokenized rows: turns, what has loss and what is padding, against plain Python; and which columns are masks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_server.batches.assemble import chunks, load
from penstock_server.batches.text_view import as_json, provenance
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import open_catalog
from penstock_server.catalog.warnings import advice_on_run
from penstock_server.problems import DatasetInvalid
from penstock_server.recipes.encode import Selected, encode
from penstock_server.recipes.fields import Field
from penstock_server.recipes.recipe import Recipe
from penstock_server.recipes.split import Place
from support.corpora import write_tokenizer
from support.engine import open_snapshot, plan_of

Row = list[tuple[int, bool, bool]]  # of each id: itself, whether it has loss, and whether it is no padding

ROWS = st.lists(st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.booleans()), max_size=6), min_size=1, max_size=6)


def named(column: str) -> Field:
    return Field(column, (("", (column,)),))


def encoded(columns: dict[str, Any], *masks: str, bos: int | None = None, eos: int | None = None) -> pa.RecordBatch:
    recipe = Recipe(
        kind="tokens",
        fields=(("tokens", named("ids")),),
        masks=tuple((name, named(name)) for name in masks),
        bos_id=bos,
        eos_id=eos,
    )
    return encode(Selected.of(pa.record_batch(columns), recipe, Place("part.parquet", 0)), recipe, "uint16", 100)


def expected(row: Row, *, loss: bool, padding: bool, bos: int | None, eos: int | None) -> tuple[list[int], list[bool]] | None:
    """The ids of a row, and whether each has loss; None if the row is bad."""
    left = [(token, is_in_loss or not loss) for token, is_in_loss, is_there in row if is_there or not padding]
    if not any(is_in_loss for _, is_in_loss in left):
        return None
    if bos is not None and left[0][0] != bos:
        left.insert(0, (bos, left[0][1]))
    if eos is not None and left[-1][0] != eos:
        left.append((eos, left[-1][1]))
    return [token for token, _ in left], [is_in_loss for _, is_in_loss in left]


def told(turns: list[int]) -> list[bool]:
    return [number % 2 == 1 for number, length in enumerate(turns) for _ in range(length)]


@given(ROWS, st.sampled_from(["labels", "loss_mask", "switches", "none"]), st.booleans(), *[st.sampled_from([None, 0, 9])] * 2)
def test_masks_decide_loss_and_padding(rows: list[Row], loss: str, padding: bool, bos: int | None, eos: int | None) -> None:
    columns: dict[str, Any] = {"ids": pa.array([[token for token, _, _ in row] for row in rows], pa.list_(pa.int32()))}
    masks = [{"switches": "loss_mask"}.get(loss, loss)] if loss != "none" else []
    if loss == "labels":
        # What is padding may have any label.
        labels = [[(token if there else 77) if in_loss else -100 for token, in_loss, there in row] for row in rows]
        columns["labels"] = pa.array(
            labels if padding else [[t if m else -100 for t, m, _ in row] for row in rows], pa.list_(pa.int64())
        )
    elif masks:
        marks = [[in_loss for _, in_loss, _ in row] for row in rows]
        kind = pa.bool_() if loss == "switches" else pa.int8()
        columns["loss_mask"] = pa.array(
            [[int(mark) if kind == pa.int8() else mark for mark in row] for row in marks], pa.large_list(kind)
        )
    if padding:
        masks.append("attention_mask")
        columns["attention_mask"] = pa.array([[int(there) for _, _, there in row] for row in rows], pa.list_(pa.int8()))
    found = encoded(columns, *masks, bos=bos, eos=eos)
    wanted = [expected(row, loss=loss != "none", padding=padding, bos=bos, eos=eos) for row in rows]
    assert found["tokens"].to_pylist() == [row and row[0] for row in wanted]
    assert [reason is not None for reason in found["bad"].to_pylist()] == [row is None for row in wanted]
    if loss == "none":
        assert "tokens_turns" not in found.schema.names
    else:
        turns = found["tokens_turns"].to_pylist()
        assert [row and told(row) for row in turns] == [row and row[1] for row in wanted]
        for row in turns:  # of no ids is the first turn alone, before ids that have loss from the first on
            assert row is None or 0 not in row[1:]


@pytest.mark.parametrize(
    ("column", "values", "reason"),
    [
        ("labels", [1, 2], "labels has 2 values for 3 ids"),
        ("labels", None, "labels is null"),
        ("labels", [1, None, 3], "labels has a null"),
        ("labels", [2, 3, -100], "labels has 2 at id 1; a label must be the id itself, not the next one, or -100"),
        ("labels", [-100] * 3, "labels is -100 throughout: no token has loss"),
        ("loss_mask", [0, 0, 0], "loss_mask is 0 throughout: no token has loss"),
        ("loss_mask", [0, 2, 1], "loss_mask has 2 instead of 0 or 1"),
        ("attention_mask", [0, 0, 0], "attention_mask is 0 throughout: it is padding alone"),
        ("attention_mask", [1, -1, 1], "attention_mask has -1 instead of 0 or 1"),
        ("attention_mask", [1] * 4, "attention_mask has 4 values for 3 ids"),
    ],
)
def test_row_is_bad_when_its_mask_does_not_fit(column: str, values: list[int | None] | None, reason: str) -> None:
    fine = [1, 2, 3] if column == "labels" else [1, 1, 1]
    found = encoded({"ids": [[1, 2, 3]] * 3, column: [fine, values, fine]}, column)
    assert found["bad"].to_pylist() == [None, reason, None]
    assert found["tokens"].to_pylist() == [[1, 2, 3], None, [1, 2, 3]]


Packed = list[list[tuple[int, bool, bool]]]  # the documents of a row, each as a Row; only the first may have no id
DOCUMENT = st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.booleans()), min_size=1, max_size=4)


@given(
    st.lists(st.lists(DOCUMENT, min_size=1, max_size=4), min_size=1, max_size=4), st.booleans(), st.booleans(), st.booleans()
)
def test_packed_documents_stay_apart(rows: list[Packed], by_position: bool, loss: bool, padding: bool) -> None:
    def column(number: int) -> list[list[int]]:
        return [[int(token[number]) for document in row for token in document] for row in rows]

    role = "position_ids" if by_position else "seq_lengths"
    left = [[[token for token in document if token[2] or not padding] for document in row] for row in rows]
    left = [[document for document in row if document] for row in left]
    if by_position:  # positions count what is left; padding may have any
        numbers = [[iter(range(len([token for token in d if token[2] or not padding]))) for d in row] for row in rows]
        told_by = [
            [next(n) if token[2] or not padding else 1 for d, n in zip(row, own, strict=True) for token in d]
            for row, own in zip(rows, numbers, strict=True)
        ]
    else:
        told_by = [[len(document) for document in row] for row in rows]
    columns = {"ids": column(0), role: told_by, "loss_mask": column(1), "attention_mask": column(2)}
    masks = [role, *(["loss_mask"] if loss else []), *(["attention_mask"] if padding else [])]
    found = encoded(columns, *masks)
    for row, documents in enumerate(left):
        if not any(token[1] or not loss for document in documents for token in document):
            assert found["bad"][row].as_py()
            continue
        assert found["tokens"][row].as_py() == [token for document in documents for token, _, _ in document]
        assert found["tokens_documents"][row].as_py() == [len(document) for document in documents]
        assert told(found["tokens_turns"][row].as_py()) == [
            (is_in_loss or not loss) and (place > 0 or number == 0)
            for number, document in enumerate(documents)
            for place, (_, is_in_loss, _) in enumerate(document)
        ]


@pytest.mark.parametrize(
    ("column", "values", "reason"),
    [
        ("seq_lengths", [1, 1], "seq_lengths adds up to 2 for 3 ids"),
        ("seq_lengths", [], "seq_lengths adds up to 0 for 3 ids"),
        ("seq_lengths", None, "seq_lengths is null"),
        ("seq_lengths", [4, -1], "seq_lengths has -1"),
        ("seq_lengths", [4, None], "seq_lengths has a null"),
        ("position_ids", [0, 1], "position_ids has 2 values for 3 ids"),
        ("position_ids", [0, 1, 3], "position_ids has 3 after 1; positions in a document are 0, 1, 2 and so on"),
        ("position_ids", [5, 6, 7], "position_ids has 5 at the first id; positions in a document are 0, 1, 2 and so on"),
    ],
)
def test_row_is_bad_when_its_documents_do_not_fit(column: str, values: list[int | None] | None, reason: str) -> None:
    fine = [2, 0, 1] if column == "seq_lengths" else [0, 1, 0]
    found = encoded({"ids": [[1, 2, 3]] * 3, column: [fine, values, fine]}, column)
    assert found["bad"].to_pylist() == [None, reason, None]
    assert found["tokens_documents"].to_pylist() == [[2, 1], None, [2, 1]]


def test_bos_and_eos_belong_to_the_first_and_the_last_document() -> None:
    found = encoded({"ids": [[1, 2, 3]], "seq_lengths": [[1, 2]]}, "seq_lengths", bos=0, eos=9)
    assert found["tokens"].to_pylist() == [[0, 1, 2, 3, 9]]
    assert found["tokens_documents"].to_pylist() == [[2, 3]]


@pytest.mark.parametrize("columns", [{"seq_lengths": [[2, 3, 1]] * 3}, {"position_ids": [[0, 1, 0, 1, 2, 0]] * 3}])
@pytest.mark.parametrize(
    ("spec", "positions", "labels"),
    [
        ({"packing": "rows"}, None, [1, 2, -100, 4, 5, -100]),
        ({"packing": "best_fit"}, [0, 1, 0, 1, 2, 0], [-100, 2, -100, 4, 5, -100]),
        ({"packing": "best_fit", "loss_on": "all"}, [0, 1, 0, 1, 2, 0], [-100, 2, -100, 4, 5, -100]),
        ({"packing": "concat", "mark_documents": True}, [0, 1, 0, 1, 2, 0], [-100, 2, -100, 4, 5, -100]),
        # Cut within the second document: what is left of it is a document, as where rows are cut.
        ({"packing": "concat", "mark_documents": True, "seq_len": 3}, [0, 1, 0], [-100, 2, -100]),
    ],
)
def test_batch_keeps_packed_documents_apart(
    tmp_path: Path, columns: dict[str, Any], spec: dict[str, Any], positions: list[int] | None, labels: list[int]
) -> None:
    write(tmp_path / "data" / "packed", pa.table({"input_ids": [[1, 2, 3, 4, 5, 6]] * 3, **columns}))
    catalog = open_catalog(tmp_path / "data", None, BlockStore(tmp_path / "cache"))
    plan = plan_of(catalog, "packed", **{"seq_len": 6, "batch_size": 1, "shuffle": "none"} | spec)
    [chunk] = chunks(plan, 0, 0, range(1))
    [line] = json.loads(as_json(chunk, load(chunk))[0])["samples"]
    assert (line.get("position_ids"), line["labels"]) == (positions, labels)
    assert [source["stop"] for source in provenance(plan, 0, 0, 0)["samples"][0]["sources"]] == [plan.spec.seq_len]
    advice = [sentence for sentence in advice_on_run(plan) if "packed: its rows hold several documents" in sentence]
    assert bool(advice) == (spec["packing"] == "rows")


def test_bad_ids_are_the_reason_before_their_mask() -> None:
    columns = {"ids": [None, [], [500], [1]], "labels": [[1], [1], [500], [1]]}
    found = encoded(columns, "labels")
    assert found["bad"].to_pylist() == ["is null", "is empty", "has token id 500, outside 0 to 99", None]


@given(
    st.lists(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=3, max_size=3), min_size=1, max_size=4),
    st.booleans(),
    *[st.sampled_from([None, 0, 9])] * 2,
)
def test_prompts_and_answers_may_be_ids(
    rows: list[list[list[int]]], has_prompt: bool, bos: int | None, eos: int | None
) -> None:
    roles = ["prompt", "chosen", "rejected"]
    columns = {role: pa.array([row[n] for row in rows], pa.list_(pa.int16())) for n, role in enumerate(roles)}

    def made(roles: list[str]) -> pa.RecordBatch:
        fields = tuple((role, named({"response": "chosen"}.get(role, role))) for role in roles)
        recipe = Recipe(kind="tokens", fields=fields, bos_id=bos, eos_id=eos)
        return encode(Selected.of(pa.record_batch(columns), recipe, Place("part.parquet", 0)), recipe, "uint16", 100)

    def wanted(prompt: list[int] | None, answer: list[int]) -> tuple[list[int], list[int]]:
        """The ids, and the lengths of the turns."""
        first = answer if prompt is None else prompt
        opening = [bos] if bos is not None and first[0] != bos else []
        closing = [eos] if eos is not None and answer[-1] != eos else []
        asked = [] if prompt is None else [*opening, *prompt]
        said = [*(opening if prompt is None else []), *answer, *closing]
        return [*asked, *said], [len(asked), len(said)]

    pairs, single = made(roles if has_prompt else roles[1:]), made(["prompt", "response"])

    def found(batch: pa.RecordBatch, feature: str, row: int) -> tuple[list[int], list[int]]:
        return batch[feature][row].as_py(), batch[f"{feature}_turns"][row].as_py()

    for row, (prompt, chosen, rejected) in enumerate(rows):
        for side, own in (("chosen", chosen), ("rejected", rejected)):
            is_good = chosen and rejected and (prompt or not has_prompt)
            assert found(pairs, side, row) == (wanted(prompt if has_prompt else None, own) if is_good else (None, None))
        assert found(single, "tokens", row) == (wanted(prompt, chosen) if prompt and chosen else (None, None))
        reason = "" if prompt and chosen else f"{'chosen' if prompt else 'prompt'} is empty"
        assert (single["bad"][row].as_py() or "") == reason


Written = Callable[..., Recipe]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """The recipe of a shard with such columns beside its ids, and such a penstock.toml."""

    def write(columns: dict[str, Any], declared: str = "") -> Recipe:
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "penstock.toml").write_text(declared)
        pq.write_table(
            pa.table(columns if {"text", "prompt"} & columns.keys() else {"input_ids": [[1, 2, 3]], **columns}),
            tmp_path / "data" / "part-0.parquet",
        )
        return open_snapshot(tmp_path / "data", write_tokenizer(tmp_path / "tokenizer.json")).recipe

    return write


ONES, LABELS = [[1, 1, 1]], [[-100, 2, 3]]
SIDES = {"prompt": ONES, "response": ONES}


@pytest.mark.parametrize(
    ("columns", "declared", "masks", "unused"),
    [
        ({}, "", [], ()),
        ({"labels": LABELS, "attention_mask": ONES}, "", [("labels", "labels"), ("attention_mask", "attention_mask")], ()),
        ({"completion_mask": ONES}, "", [("loss_mask", "completion_mask")], ()),
        ({"labels": LABELS, "completion_mask": ONES}, "", [("labels", "labels")], ()),
        ({"completion_mask": ONES, "assistant_masks": ONES}, "", [("loss_mask", "completion_mask")], ("assistant_masks",)),
        (
            {"completion_mask": ONES, "assistant_masks": ONES},
            'loss_mask = "assistant_masks"',
            [("loss_mask", "assistant_masks")],
            (),
        ),
        ({"labels": LABELS, "other": ONES}, 'loss_mask = "other"', [("loss_mask", "other")], ()),
        ({"labels": LABELS, "attention_mask": ONES}, "labels = false\nattention_mask = false", [], ()),
        ({"labels": LABELS, "loss_mask": ONES}, "labels = false", [("loss_mask", "loss_mask")], ()),
        ({"labels": LABELS, "loss_mask": ONES}, "loss_mask = false", [("labels", "labels")], ()),
        ({"labels": [1]}, "", [], ("labels",)),
        ({"labels": [1], "loss_mask": ONES}, "", [("loss_mask", "loss_mask")], ("labels",)),
        ({"attention_mask": [[1.0, 1.0, 1.0]]}, "", [], ("attention_mask",)),
        ({"seq_lengths": [[3]], "position_ids": [[0, 1, 2]]}, "", [("seq_lengths", "seq_lengths")], ()),
        ({"position_ids": [[0, 1, 2]]}, "", [("position_ids", "position_ids")], ()),
        ({"position_ids": [[0, 1, 2]]}, "position_ids = false", [], ()),
        ({"seq_lengths": [3]}, "", [], ("seq_lengths",)),
        # Beside prompts and answers no mask is used.
        (SIDES, "", [], ()),
        ({**SIDES, "attention_mask": ONES}, "", [], ()),
        ({"prompt": ONES, "labels": ONES}, 'prompt = "prompt"\nresponse = "labels"', [], ()),
    ],
)
def test_masks_are_found_by_the_recipe_or_by_their_names(
    written: Written, columns: dict[str, Any], declared: str, masks: list[tuple[str, str]], unused: tuple[str, ...]
) -> None:
    recipe = written(columns, declared)
    assert [(role, source.text) for role, source in recipe.masks] == masks
    assert recipe.unused == unused


@pytest.mark.parametrize(
    ("columns", "declared", "message"),
    [
        ({"labels": [1]}, 'labels = "labels"', "column 'labels' is int64, but labels must be lists of integers"),
        ({"labels": ONES}, 'attention_mask = "mask"', "there is no column 'mask'"),
        ({}, 'text = "input_ids"', "column 'input_ids' is list<element: int64>, but text must be text"),
        ({}, 'messages = "input_ids"', "column 'input_ids' is list<element: int64>, but messages must be lists of messages"),
        ({"a": ONES, "b": ONES}, 'labels = "a"\nloss_mask = "b"', "labels and loss_mask say the same"),
        ({"a": ONES, "b": ONES}, 'seq_lengths = "a"\nposition_ids = "b"', "seq_lengths and position_ids say the same"),
        (
            {"text": ["fox"]},
            'text = "text"\nlabels = "a"',
            "labels is a mask of tokens, but rows are made of text. Remove it.",
        ),
    ],
)
def test_unsuitable_masks_are_refused(written: Written, columns: dict[str, Any], declared: str, message: str) -> None:
    with pytest.raises(DatasetInvalid, match=message):
        written(columns, declared)


def write(folder: Path, *shards: pa.Table, recipe: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "penstock.toml").write_text(recipe)
    for number, shard in enumerate(shards):
        pq.write_table(shard, folder / f"part-{number}.parquet")
    return folder


IDS, MASKED = pa.table({"input_ids": [[1, 2, 3]]}), pa.table({"input_ids": [[1, 2, 3]], "labels": LABELS})


def test_mask_is_refused_when_only_a_later_shard_has_it(tmp_path: Path) -> None:
    with pytest.raises(DatasetInvalid, match=r"part-1.parquet: column 'labels' is not in the first .*: labels = false"):
        open_snapshot(write(tmp_path / "later", IDS, MASKED))
    with pytest.raises(DatasetInvalid, match=r"part-1.parquet: there is no column 'labels'"):
        open_snapshot(write(tmp_path / "sooner", MASKED, IDS))
    assert open_snapshot(write(tmp_path / "none", IDS, MASKED, recipe="labels = false")).num_rows == 2


def test_padding_may_be_an_invalid_id(tmp_path: Path) -> None:
    padded = pa.table({"input_ids": [[1, 2, 7], [1, 2, -1]], "attention_mask": [[1, 1, 0]] * 2})
    assert open_snapshot(write(tmp_path / "padded", padded, recipe="vocab_size = 5")).num_rows == 2
    found = encoded({"ids": [[1, 200, -1], [200, 1, -1]], "attention_mask": [[1, 0, 0], [1, 1, 0]]}, "attention_mask")
    assert found["bad"].to_pylist() == [None, "has token id 200, outside 0 to 99"]
    assert found["tokens"].to_pylist() == [[1], None]


@pytest.mark.parametrize(
    ("columns", "roles"),
    [
        (["prompt", "response"], ["prompt", "response"]),
        (["prompt", "completion"], ["prompt", "response"]),
        (["chosen", "rejected"], ["chosen", "rejected"]),
        (["prompt", "chosen", "rejected"], ["prompt", "chosen", "rejected"]),
    ],
)
def test_prompts_and_answers_of_ids_need_no_recipe(tmp_path: Path, columns: list[str], roles: list[str]) -> None:
    recipe = open_snapshot(write(tmp_path / "data", pa.table({name: [[1, 2]] for name in columns}))).recipe
    assert (recipe.kind, [role for role, _ in recipe.fields]) == ("tokens", roles)
