"""The mix of a mixture: exact on every prefix, invertible, and spelled in one way."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import SpecError
from penstock.mix import Mix, Phase, first_other, parse_mix, spell_mix
from penstock_server.order.mixture import Mixture

shares = st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any)


@st.composite
def mixes(draw: st.DrawFn) -> Mix:
    num_datasets = draw(st.integers(1, 5))
    starts = sorted(draw(st.sets(st.integers(1, 2000), max_size=3)))
    weights = st.lists(st.integers(0, 60), min_size=num_datasets, max_size=num_datasets).filter(any)
    phases = [
        ",".join(f"{chr(97 + i)}:{weight}" for i, weight in enumerate(draw(weights))) + (f"@{start}" if start else "")
        for start in (0, *starts)
    ]
    return parse_mix(";".join(phases))


@given(mixes())
def test_mixture_prefixes_have_exact_shares(mix: Mix) -> None:
    datasets, _ = Mixture(mix).locate(np.arange(4000))
    ends = [*(phase.start for phase in mix.phases[1:]), 4000]
    for phase, end in zip(mix.phases, ends, strict=True):
        chosen = datasets[phase.start : end]
        counts = np.cumsum(chosen[:, None] == np.arange(len(mix.datasets)), axis=0)
        owed = np.arange(1, len(chosen) + 1)[:, None] * np.array(phase.shares)
        assert (np.abs(counts * sum(phase.shares) - owed) < sum(phase.shares)).all()


@given(mixes(), st.integers(0, 10**12))
def test_mixture_locate_and_sample_are_inverse(mix: Mix, far: int) -> None:
    mixture = Mixture(mix)
    samples = np.concatenate([np.arange(3000), far + np.arange(300)])
    datasets, numbers = mixture.locate(samples)
    for i in range(len(mix.datasets)):
        assert numbers[:3000][datasets[:3000] == i].tolist() == list(range(int((datasets[:3000] == i).sum())))
    for sample, dataset, number in list(zip(samples.tolist(), datasets.tolist(), numbers.tolist(), strict=True))[::37]:
        assert mixture.sample(dataset, number) == sample
        assert mixture.num_before(dataset, sample) == number


@given(mixes(), st.lists(st.integers(1, 300), min_size=5, max_size=5).map(np.array))
def test_mixture_epoch_ends_by_stopping_strategy(mix: Mix, sizes: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> None:
    sizes, mixture = sizes[: len(mix.datasets)], Mixture(mix)
    for stop in ("first_exhausted", "all_exhausted"):
        length = mixture.epoch_length(sizes.tolist(), stop)
        if length is None:
            assert not all(mix.phases[-1].shares)
            continue
        counts = np.array([mixture.num_before(i, length) for i in range(len(sizes))])
        if stop == "first_exhausted":
            assert (counts <= sizes).all()
            dataset, number = (int(value[0]) for value in mixture.locate(np.array([length])))
            assert number == sizes[dataset]  # the next sample would be seen a second time
        else:
            assert (counts >= sizes).all()
            dataset, number = (int(value[0]) for value in mixture.locate(np.array([length - 1])))
            assert number == sizes[dataset] - 1


@given(mixes())
def test_mix_has_one_canonical_text(mix: Mix) -> None:
    assert parse_mix(str(mix)) == mix


def test_mix_reduces_weights() -> None:
    assert str(parse_mix("wiki:0.7,code:0.3")) == str(parse_mix("code:3,wiki:7")) == "code:3,wiki:7"
    assert str(parse_mix("a:1,b:1;b:0.50,a:1.5@100")) == "a:1,b:1;a:3,b:1@100"


@pytest.mark.parametrize(
    ("weights", "spelled"),
    [
        ((1.0, 0.00004), "a:25000,b:1"),
        ((0.12345, 0.87655), "a:2469,b:17531"),
        ((1 / 3, 1 - 1 / 3), "a:1,b:2"),
        ((0.1 + 0.2, 0.7), "a:3,b:7"),
        ((np.float32(0.7), np.float64(0.3)), "a:7,b:3"),
        ((7, 0), "a:1,b:0"),
    ],
)
def test_mix_weights_are_exact(weights: tuple[float, float], spelled: str) -> None:
    assert str(parse_mix(spell_mix(dict(zip("ab", weights, strict=True))))) == spelled


@pytest.mark.parametrize("weight", [math.nan, math.inf, -0.1, "0.5", None])
def test_mix_refuses_invalid_weights(weight: Any) -> None:
    with pytest.raises(SpecError, match="the weight of b must be >= 0, not"):
        spell_mix({"a": 1, "b": weight})


def test_mix_refuses_weights_with_too_many_digits() -> None:
    with pytest.raises(SpecError, match="nine digits"):
        parse_mix(spell_mix({"a": 0.123456789012, "b": 1}))


def test_mix_accepts_names_with_special_characters() -> None:
    assert str(parse_mix("a@2:1,b:c:3;a@2:1,b:c:1@70")) == "a@2:1,b:c:3;a@2:1,b:c:1@70"
    assert parse_mix("a@2:1").datasets == ("a@2",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wiki", "'wiki' is not a dataset's name"),
        ("a,b:1,c:1", "'a' is not a dataset's name \\(without , and ;\\)"),
        ("wiki:-1", "is not a dataset's name"),
        (":1", "is not a dataset's name"),
        ("wiki:1,wiki:2", "wiki is named twice"),
        ("wiki:0", "all weights are 0"),
        ("a:1;b:1", "the first phase must have no @"),
        ("a:1@5", "the first phase must have no @"),
        ("a:1;b:1@9;c:1@9", "the first phase must have no @"),
        ("a:1;b:1@x", "'x' after @ is not the number of a sample"),
        ("a:0.333333333,b:0.666666667", "round them"),
        ("a:0.3333333333333333,b:1", "at most nine digits"),
        ("a:1e-05,b:1", "at most nine digits"),
        ("a:1;a:2@" + "9" * 17, "after @ is not the number of a sample"),
        ("a:1;a:2@" + "9" * 16, "after @ is not the number of a sample"),
        (";".join(["a:1,b:1", *(f"a:1,b:{99_000 + n}@{n}" for n in range(1, 20))]), "round the weights"),
    ],
)
def test_mix_refuses_invalid_text(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_mix(text)


@given(shares)
def test_mixture_takes_the_earliest_deadline(shares: list[int]) -> None:
    period, present = sum(shares), [i for i, share in enumerate(shares) if share]
    chosen: list[int] = []
    margin = max(1, 2 * len(present) - 2)
    for n in range(1, period + 1):
        owed = {i: shares[i] * n - chosen.count(i) * period for i in present}
        may_come = [i for i in present if owed[i] * margin >= period] or present
        chosen.append(min(may_come, key=lambda i: Fraction(period * (margin - 1) - owed[i] * margin, shares[i])))
    mix = Mix(tuple(map(str, range(len(shares)))), (Phase(0, tuple(shares)),))
    assert Mixture(mix).locate(np.arange(period))[0].tolist() == chosen


def test_mixture_counts_repeated_phases_once() -> None:
    assert len(parse_mix("a:1,b:99998" + "".join(f";a:{n % 2 + 1},b:99998@{n}" for n in range(1, 21))).phases) == 21


def test_mixture_has_no_sample_of_a_dataset_after_its_last_phase() -> None:
    for number, names in enumerate(("b", "a")):  # the other one goes on alone; one of the two would be next
        mixture = Mixture(parse_mix(f"a:1,b:1;{names}:1@4"))
        samples = [mixture.sample(number, n) for n in range(4)]
        assert None not in samples[:2]
        assert samples[2:] == [None, None]
        sizes = [2, 100] if number == 0 else [100, 2]
        assert mixture.epoch_length(sizes, "first_exhausted") == mixture.sample(1 - number, 100)


@pytest.mark.parametrize(
    ("one", "other", "first"),
    [
        ("a:1,b:1", "b:2,a:2,c:0", math.inf),
        ("a:1,b:1", "a:1,b:2", 0),
        ("a:1,b:1", "a:1,b:1;a:1@8", 8),
        ("a:1,b:1;a:1@9", "a:1,b:1;a:1@8", 8),
        ("a:1,b:1;b:1@8;a:1@20", "a:1,b:1;b:1@8", 20),
    ],
)
def test_mixes_agree_until_their_first_different_phase(one: str, other: str, first: float) -> None:
    mixes = parse_mix(one), parse_mix(other)
    assert [first_other(*mixes), first_other(*mixes[::-1])] == [first, first]
