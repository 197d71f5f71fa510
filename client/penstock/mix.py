"""Mix of a mixture: its datasets and weights, and the samples where the weights change.

    wiki:0.7,code:0.3                           seven samples of wiki for three of code
    wiki:7,code:3;wiki:1,code:1@1000000         from sample 1,000,000 on equally many of each

Weights are exact: decimals as written; only their ratios matter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import zip_longest
from math import gcd, inf, isclose, lcm
from numbers import Real

from penstock.errors import SpecError
from penstock.text import cut

MAX_PERIOD = 100_000
MAX_PERIODS = 1_000_000  # of all phases together
MAX_WEIGHTS = 50_000  # likewise: each phase has one for each dataset of the mix
_WEIGHT = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_START = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class Phase:
    """From sample `start` on, shares[i] of every sum(shares) samples are of dataset i; in lowest terms."""

    start: int
    shares: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mix:
    """Dataset names in alphabetical order, and the phases of their weights. str() gives the canonical text."""

    datasets: tuple[str, ...]
    phases: tuple[Phase, ...]

    def __str__(self) -> str:
        return ";".join(
            ",".join(f"{name}:{share}" for name, share in zip(self.datasets, phase.shares, strict=True))
            + (f"@{phase.start}" if phase.start else "")
            for phase in self.phases
        )


@lru_cache(maxsize=64)
def parse_mix(text: str) -> Mix:
    """Parse a mix. Raises SpecError: the text is invalid."""
    weights: list[tuple[int, dict[str, Fraction]]] = []
    for number, part in enumerate(text.split(";")):
        body, at, start = part.rpartition("@")
        if not at or ":" in start:  # an @ in a dataset's name
            body, at, start = part, "", ""
        if at and not _START.fullmatch(start):
            raise _wrong(text, f"{start[:40]!r} after @ is not the number of a sample")
        if bool(number) != bool(at) or (weights and int(start) <= weights[-1][0]):
            raise _wrong(
                text, "the first phase must have no @, and each later one a larger number after its @ than the one before"
            )
        weights.append((int(start) if at else 0, _weights(text, body)))
    names = tuple(sorted({name for _, phase in weights for name in phase}))
    if len(names) * len(weights) > MAX_WEIGHTS:
        raise _wrong(text, f"{len(weights):,} phases of {len(names):,} datasets have more than {MAX_WEIGHTS:,} weights")
    phases = tuple(_phase(text, start, [phase.get(name, Fraction(0)) for name in names]) for start, phase in weights)
    if sum(sum(shares) for shares in {phase.shares for phase in phases}) > MAX_PERIODS:
        raise _wrong(text, f"its phases together repeat only after more than {MAX_PERIODS:,} samples; round the weights")
    return Mix(names, phases)


def spell_mix(weights: Mapping[str, float]) -> str:
    """Spell a mix of one phase. A float close to a simple fraction, such as 1/3, is read as that fraction.

    Raises SpecError: a weight is not a number >= 0.
    """
    exact = {name: _exact(name, weight) for name, weight in weights.items()}
    scale = lcm(*(weight.denominator for weight in exact.values()))
    return ",".join(f"{name}:{int(weight * scale)}" for name, weight in exact.items())


def first_other(one: Mix, other: Mix) -> float:
    """Return the first sample, counted over all epochs, that two mixes may choose differently; infinity without one."""
    pairs = zip_longest(_chosen(one), _chosen(other))
    return min((phase[0] for pair in pairs if pair[0] != pair[1] for phase in pair if phase), default=inf)


def _chosen(mix: Mix) -> list[tuple[int, dict[str, int]]]:
    """Return each phase's start and the shares of its datasets."""
    return [
        (phase.start, {name: share for name, share in zip(mix.datasets, phase.shares, strict=True) if share})
        for phase in mix.phases
    ]


def _exact(name: str, weight: float) -> Fraction:
    if not isinstance(weight, Real) or not 0 <= weight < inf:
        raise SpecError(f"mix: the weight of {name} must be >= 0, not {weight!r}", ("mix",))
    simple = Fraction(float(weight)).limit_denominator(10_000)
    return simple if isclose(simple, weight, rel_tol=1e-12) else Fraction(str(weight))


def _weights(text: str, body: str) -> dict[str, Fraction]:
    found: dict[str, Fraction] = {}
    for item in body.split(","):
        name, _, weight = item.rpartition(":")
        if not name or not _WEIGHT.fullmatch(weight):
            raise _wrong(
                text,
                f"{item!r} is not a dataset's name (without , and ;), a colon and a weight of at most nine digits before and "
                "after the point",
            )
        if name in found:
            raise _wrong(text, f"{name} is named twice")
        found[name] = Fraction(weight)
    if not any(found.values()):
        raise _wrong(text, "all weights are 0")
    return found


def _phase(text: str, start: int, weights: list[Fraction]) -> Phase:
    scale = lcm(*(weight.denominator for weight in weights))
    shares = [int(weight * scale) for weight in weights]
    common = gcd(*shares)
    shares = [share // common for share in shares]
    if sum(shares) > MAX_PERIOD:
        raise _wrong(
            text,
            f"its weights repeat only after {sum(shares):,} samples, and the limit is {MAX_PERIOD:,}; round them, to "
            "thousandths for example",
        )
    return Phase(start, tuple(shares))


def _wrong(text: str, what: str) -> SpecError:
    return SpecError(f"mix={cut(text)!r}: {what}. A mix looks like wiki:0.7,code:0.3", ("mix",))
