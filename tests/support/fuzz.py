"""Values for fuzzing: odd JSON, and valid documents with odd values in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

HUGE = 10**5000  # more digits than int() and str() take
NESTED = "[" * 100_000  # deeper than any parser recurses

ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 2**31, 2**53 + 1, 2**63, 2**64 - 1]),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.integers() | st.text(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.none() | st.integers(), max_size=2),
)


def altered(document: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A document of which some values are odd, some keys are missing, and one may be new."""
    changes = st.dictionaries(st.sampled_from([*document, "new"]), ODD, min_size=1, max_size=3)
    removed = st.sets(st.sampled_from([*document]), max_size=2)
    return st.builds(
        lambda odd, without: {name: value for name, value in ({**document} | odd).items() if name not in without},
        changes,
        removed,
    )
