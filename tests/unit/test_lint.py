"""What a loop is warned of, and where the shares lie from which on it is."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from penstock import Spec
from penstock.client import Client
from penstock.lint import Advice, is_trained_on
from penstock.row_lengths import RowLength
from penstock.wire.names import IGNORED

LEARNED, NOT_LEARNED = torch.tensor([[3, IGNORED]]), torch.tensor([[IGNORED, IGNORED]])


class Rows(Client):
    """Knows how long the first rows of an epoch are, without a server."""

    def __init__(self, lengths: Sequence[RowLength]) -> None:
        super().__init__("http://nowhere", "docs", rank=0, retry_seconds=0.0)
        self._lengths = list(lengths)

    def sample_lengths(self, *_: Any) -> list[RowLength]:
        return self._lengths


def said_by(call: Callable[[], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in told]


def length_of(row: int | tuple[int, int] | RowLength) -> RowLength:
    if isinstance(row, RowLength):
        return row
    prompt, response = (0, row) if isinstance(row, int) else row
    return RowLength((prompt + response,), prompt)


def said_of(
    batches: Sequence[Mapping[str, torch.Tensor]], lengths: Sequence[int | tuple[int, int] | RowLength] = (), **spec: Any
) -> list[str]:
    """What a loop is told of rows of so many tokens, or of so many in a prompt and in a response."""
    advice = Advice(Rows([*map(length_of, lengths)]), Spec(**spec), 0)

    def loop() -> None:
        for number, batch in enumerate(batches, 1):
            advice.look_at(batch, number, has_place=True)

    return said_by(loop)


@pytest.mark.parametrize(
    ("spec", "lengths", "told"),
    [
        ({"seq_len": 10}, [20, 10, 5], ["docs: 1 of 3 sampled rows are longer than seq_len=10, and 28.6% of"]),
        ({"seq_len": 90}, [100] * 9, []),
        ({"seq_len": 90}, [101] * 9, ["docs: 9 of 9 sampled rows are longer than seq_len=90, and 10.9% of"]),
        ({"seq_len": 10}, [], []),
        ({"seq_len": 100}, [11] * 9, []),
        ({"seq_len": 100}, [9] * 9, ["docs: 91% of the tokens of a batch's rows are padding: the mean of 9"]),
        ({"seq_len": 100}, [1] * 99 + [1000], ["docs: 98% of the tokens of a batch's rows", "docs: 1 of 100 sampled"]),
        ({"seq_len": 10, "mix": "code:3,wiki:7"}, [20], ["code:3,wiki:7: 1 of 1 sampled row"]),
        ({"seq_len": 10}, [(10, 1), (10, 1), (3, 3)], ["docs: no token has loss in 2 of 3 sampled rows, since"]),
        ({"seq_len": 10}, [(9, 1), (10, 1), *[(3, 3)] * 8], []),
        ({"seq_len": 10, "loss_on": "all"}, [(10, 1)], []),
        ({"seq_len": 10, "packing": "best_fit"}, [(10, 1)], []),
        ({"seq_len": 10, "task": "seq2seq"}, [(10, 10)], []),
        (
            {"seq_len": 10, "task": "seq2seq"},
            [*[(5, 11)] * 2, *[(5, 9)] * 8],
            ["docs: 2 of 10 sampled responses are longer than"],
        ),
        ({"seq_len": 10, "task": "seq2seq"}, [(5, 11), *[(5, 9)] * 9], []),
        (
            {"seq_len": 990, "task": "seq2seq", "pad": "longest"},
            [*[(5, 1000)] * 2, *[(5, 900)] * 8],
            ["docs: 2 of 10 sampled responses are longer than target_seq_len=990, and 0.2% of the tokens of all"],
        ),
        (
            {"seq_len": 10},
            [RowLength((18, 2), 0), RowLength((10, 10), 0)],
            ["docs: 1 of 4 sampled sides of pairs are longer than"],
        ),
        ({"seq_len": 10, "task": "seq2seq"}, [(10, 12)] * 2, ["docs: 2 of 2 sampled responses are longer than t"]),
        ({"seq_len": 9, "target_seq_len": 2, "task": "seq2seq"}, [(12, 2)], ["docs: 1 of 1 sampled prompts are longer than"]),
        ({"seq_len": 99, "task": "seq2seq"}, [(9, 50)], ["docs: 91% of the tokens of a batch's prompts are padding:"]),
        ({"seq_len": 99, "task": "seq2seq", "pad": "longest"}, [(9, 50)], []),
    ],
)
def test_rows_mostly_cut_or_padded_are_warned_of(
    spec: dict[str, Any], lengths: list[int | tuple[int, int] | RowLength], told: list[str]
) -> None:
    said = said_of([{"labels": LEARNED}] * 3, lengths, **spec)
    assert [text[: len(expected)] for text, expected in zip(said, told, strict=True)] == told


@pytest.mark.parametrize(("num_batches", "told_at"), [(1, 1), (2, 2), (9, 2)])
def test_rows_are_checked_with_the_second_batch_or_the_only_one(num_batches: int, told_at: int) -> None:
    advice = Advice(Rows([RowLength((20,), 0)]), Spec(seq_len=10), 0, None, num_batches)
    for number in range(1, num_batches + 1):
        said = said_by(lambda at=number: advice.look_at({"labels": LEARNED}, at, has_place=True))  # type: ignore[misc]
        assert len(said) == (number == told_at)


def test_packing_is_advised_only_if_it_is_possible() -> None:
    more = {"chosen_labels": False, "labels": True, "dataset_index": True, "score": False}
    for name, may_pack in more.items():
        [text] = said_of([{"labels": LEARNED, name: LEARNED}] * 2, [9] * 9, seq_len=100)
        assert ("best_fit" in text) == may_pack, name


def test_advice_on_prompts_depends_on_pairs_and_labels() -> None:
    rows: list[int | tuple[int, int]] = [(10, 1)] * 9
    pair = {"chosen_labels": LEARNED, "rejected_labels": LEARNED}
    for batch, num_told, may_learn in (({"labels": LEARNED}, 1, True), (pair, 1, False), ({"input_ids": LEARNED}, 0, False)):
        said = said_of([batch] * 2, rows, seq_len=10)
        assert [("loss_on='all'" in text) for text in said] == [may_learn] * num_told
    [said_of_pair] = said_of([{"chosen_labels": NOT_LEARNED}] * 2)
    assert said_of_pair.endswith("seq_len=1024? Raise it, or leave such rows out with a filter.")


def test_column_named_like_a_side_makes_no_pairs() -> None:
    [said] = said_of([{"labels": LEARNED, "chosen_by": LEARNED}] * 2, [20] * 9, seq_len=10)
    assert "packing='best_fit'" in said
    [said] = said_of([{"rejected_labels": LEARNED}] * 2, [RowLength((20, 20), 0)] * 9, seq_len=10)
    assert "Preference pairs can be neither split nor packed" in said


def test_batches_without_labels_are_warned_of() -> None:
    assert said_of([{"chosen_labels": NOT_LEARNED, "rejected_labels": LEARNED}, {"input_ids": NOT_LEARNED}]) == []
    [said] = said_of([{"chosen_labels": NOT_LEARNED, "rejected_labels": NOT_LEARNED}] * 2)
    assert said.startswith("no token has loss in the first batch: ")
    [said] = said_of([*[{"labels": LEARNED}] * 63, {"labels": NOT_LEARNED}])
    assert said.startswith("no token has loss in batch 64: ")
    assert said_of([*[{"labels": LEARNED}] * 64, {"labels": NOT_LEARNED}]) == []


@pytest.mark.parametrize(
    ("row", "share"),
    [
        ([*range(60), *[7] * 40], "32%"),  # what comes behind the first eight repetitions, and the one before them
        ([*range(10, 80), *[0] * 30], "22%"),
        ([*range(10, 80), *[0] * 27], None),
        ([*range(60), *[IGNORED] * 40], None),
        ([*[7] * 9, *range(20), *[8] * 9] * 9, None),
    ],
)
@pytest.mark.parametrize("name", ["labels", "rejected_labels"])
def test_repeated_tokens_are_warned_of(row: list[int], share: str | None, name: str) -> None:
    said = said_of([{name: torch.tensor([row] * 3)}] * 3)
    assert [text.partition(" of the tokens")[0] for text in said] == ([f"more than {share}"] if share else [])


def test_evaluation_may_repeat_its_epoch() -> None:
    for spec, is_told in ((Spec(), True), (Spec(shuffle="none"), False), (Spec(split="validation"), False)):
        assert is_trained_on(spec) == is_told
