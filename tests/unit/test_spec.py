import inspect
import math
import re
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock import RemoteDataset, Spec, SpecError
from penstock.client import Client
from penstock.numbers import check_amount, check_whole
from penstock.spec import describe

DEFAULTS = {parameter["name"]: parameter["default"] for parameter in describe()}


def test_query_leaves_defaults() -> None:
    assert Spec.from_query([]) == Spec()
    assert Spec.from_query([("batch_size", "32"), ("shuffle", "global")]) == Spec(batch_size=32, shuffle="global")


def test_spec_round_trips_through_its_query() -> None:
    spec = Spec(batch_size=3, seed=2**63 - 1, snapshot="abc", pad="longest", drop_last=False, target_seq_len=7, task="seq2seq")
    assert Spec.from_query(spec.to_query().items()) == spec


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ([("batchsize", "3")], "Did you mean 'batch_size'"),
        ([("flavour", "sweet")], "Known: batch_size, dataset_index"),
        ([("seed", "1"), ("seed", "2")], "seed is given twice"),
        ([("seq_len", "-3")], "seq_len must be from 1 to 1,048,576, not -3"),
        ([("seq_len", "99999999")], "seq_len must be from 1 to"),
        ([("seq_len", "9" * 5000)], "seq_len must be a whole number"),
        ([("seq_len", "1_000")], "seq_len must be a whole number"),
        ([("seq_len", "")], "seq_len must be a whole number"),
        ([("seed", "1.5")], "seed must be a whole number"),
        ([("shuffle", "yes")], "shuffle must be one of none, window, global"),
        ([("snapshot", "")], "snapshot must be a text \\(fingerprint"),
        ([("skip", "9-3")], "'9-3' is not a range FIRST-LAST"),
        ([("mix", "wiki")], "'wiki' is not a dataset's name"),
    ],
)
def test_query_refuses_a_wrong_parameter_with_its_bounds(query: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        Spec.from_query(query)
    assert caught.value.parameters == (query[0][0],)


def test_unknown_parameter_suggests_others_of_the_url() -> None:
    with pytest.raises(SpecError, match="'strat' is not .* Did you mean 'start'\\? Known: .*, start, stop, stopping_strategy"):
        Spec.from_query([("strat", "1")], others=("start", "stop"))
    with pytest.raises(SpecError, match="'start' is not a parameter of a batch"):
        Spec.from_query([("start", "1")])


def test_spec_lists_all_wrong_parameters() -> None:
    with pytest.raises(SpecError) as caught:
        Spec(batch_size=0, seq_len=0, drop_last=2)  # type: ignore[arg-type]
    assert caught.value.parameters == ("batch_size", "seq_len", "drop_last")


@pytest.mark.parametrize("number", [0, 4, True, 1.0, "2"])
def test_check_whole_refuses_other_types_and_values(number: object) -> None:
    assert [check_whole("some", found, 1, 3) for found in (1, 3, np.int64(3))] == [1, 3, 3]
    with pytest.raises(SpecError, match=f"some must be a whole number from 1 to 3, not {number!r}"):
        check_whole("some", number, 1, 3)


@pytest.mark.parametrize("amount", [-1, math.nan, False, "2"])
def test_check_amount_refuses_other_types_and_negative_values(amount: object) -> None:
    for found in (0, 0.0, 1e9, math.inf, np.int64(3), np.float32(0.5), torch.tensor(3)):
        kept = check_amount("some", found)
        assert (type(kept), kept) == (float, found)
    with pytest.raises(SpecError, match=f"some must be >= 0, not {amount!r}"):
        check_amount("some", amount)


def test_spec_takes_integers_of_numpy_and_torch() -> None:
    spec = Spec(batch_size=np.int64(3), seq_len=torch.tensor(7), target_seq_len=np.uint8(5), task="seq2seq")  # type: ignore[arg-type]
    assert spec == Spec(batch_size=3, seq_len=7, target_seq_len=5, task="seq2seq")
    assert spec.to_query() == Spec(batch_size=3, seq_len=7, target_seq_len=5, task="seq2seq").to_query()
    with pytest.raises(SpecError, match="batch_size must be a whole number"):
        Spec(batch_size=np.float64(3))  # type: ignore[arg-type]


def test_remote_dataset_has_the_specs_defaults() -> None:
    taken = inspect.signature(RemoteDataset).parameters
    for name, default in DEFAULTS.items():
        if name not in ("world_size", "offset"):  # found out, and kept in the state
            assert taken[name].default == default


def test_remote_dataset_describes_parameters_as_the_spec_does() -> None:
    lines = re.findall(r"^(\w+) +(\S.*(?:\n {19}\S.*)*)", inspect.getdoc(RemoteDataset) or "", re.MULTILINE)
    described = {name: " ".join(text.split()) for name, text in lines}
    taken = [parameter for parameter in describe() if parameter["name"] not in ("world_size", "offset", "mix")]
    assert [(p["name"], described.get(p["name"])) for p in taken] == [(p["name"], p["doc"]) for p in taken]


def test_remote_dataset_passes_every_parameter_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Spec] = []

    def resolve(_: Client, spec: Spec) -> None:
        asked.append(spec)
        raise SpecError("far enough")

    monkeypatch.setattr(Client, "resolve", resolve)
    given: list[dict[str, Any]] = [
        {"batch_size": 3, "seq_len": 64, "world_size": 2, "seed": 1, "shuffle": "none", "window": 9, "split": "train"},
        {
            "packing": "concat",
            "overlap": 1,
            "labels": "shifted",
            "mark_documents": True,
            "loss_on": "all",
            "drop_last": False,
            "skip": "1-2",
            "snapshot": "a+b",
        },
        {
            "overflow": "split",
            "pad": "longest",
            "length_bucket_size": 4,
            "mix": "a:1,b:1",
            "stopping_strategy": "all_exhausted",
            "dataset_index": True,
        },
        {"task": "seq2seq", "target_seq_len": 8, "repeat": 2},
    ]
    for spec in given:
        with pytest.raises(SpecError, match="far enough"):
            RemoteDataset("host:8000", "a", **({"rank": 0, "world_size": 1} | spec))
    assert asked == [Spec(**spec) for spec in given]
    assert {name for spec in given for name in spec} == DEFAULTS.keys() - {"offset"}


def test_digest_depends_on_every_parameter() -> None:
    assert Spec(dataset_index=False).digest == Spec().digest
    assert Spec(dataset_index=True).digest != Spec().digest
    assert Spec.from_query(Spec(dataset_index=True).to_query().items()) == Spec(dataset_index=True)


def test_spec_refuses_contradictions_and_names_the_parameter() -> None:
    for name, spec in (
        ("target_seq_len", {"target_seq_len": 9}),
        ("overflow", {"overflow": "split", "packing": "concat"}),
        ("task", {"task": "seq2seq", "packing": "best_fit"}),
        ("length_bucket_size", {"length_bucket_size": 8, "packing": "concat"}),
        ("length_bucket_size", {"length_bucket_size": 8, "shuffle": "global"}),
        ("mark_documents", {"mark_documents": True}),
        ("overflow", {"overflow": "split", "task": "seq2seq"}),
        ("pad", {"pad": "3", "seq_len": 8}),
    ):
        with pytest.raises(SpecError) as caught:
            Spec.from_query((key, str(value)) for key, value in spec.items())
        assert caught.value.parameters == (name,)


def test_query_restores_a_plus_of_a_snapshot() -> None:
    assert Spec.from_query([("snapshot", "5eed 5eee")]).snapshot == "5eed+5eee"


def test_pad_must_divide_the_response_length() -> None:
    with pytest.raises(SpecError, match="pad must be seq_len"):
        Spec(pad="000000001" + 5_000 * "0")
    with pytest.raises(SpecError, match="pad=64 must divide target_seq_len=100"):
        Spec(seq_len=128, task="seq2seq", target_seq_len=100, pad="64")


NAMES = st.sampled_from([parameter["name"] for parameter in describe()]) | st.text(max_size=5)
PARTS = ["wiki", "samples:", "latest", "longest", "true", "0", "7", "9" * 30, "-", ",", ";", ":", "@", ".", "+", " ", "\u00b2"]


@given(st.lists(st.tuples(NAMES, st.text() | st.lists(st.sampled_from(PARTS)).map("".join)), max_size=6))
def test_any_query_is_a_spec_or_refused(query: list[tuple[str, str]]) -> None:
    with suppress(SpecError):
        spec = Spec.from_query(query)
        assert Spec.from_query(spec.to_query().items()) == spec


def test_mix_of_too_many_phases_and_names_is_refused() -> None:
    """64 KiB of a URL had 64 million weights."""
    text = ";".join(f"d{number}:1" + (f"@{number}" if number else "") for number in range(224))
    assert str(Spec(mix=";".join(text.split(";")[:223])).mixed()).count(":") == 223**2
    with pytest.raises(SpecError, match="224 phases of 224 datasets have more than 50,000 weights"):
        Spec(mix=text)
