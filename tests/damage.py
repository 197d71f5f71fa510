"""Damage to a file, generated: what a crash, a bad disk or a confused copy leaves of it."""

from __future__ import annotations

from hypothesis import assume
from hypothesis import strategies as st


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Other bytes than these: cut, grown, with one bit flipped, or with two ranges swapped."""
    how = draw(st.sampled_from(["cut", "grow", "flip", "swap"] if whole else ["grow"]))
    at = draw(st.integers(0, max(len(whole) - 1, 0)))
    if how == "cut":
        return whole[:at]
    if how == "grow":
        return whole + draw(st.binary(min_size=1, max_size=9))
    if how == "flip":
        return whole[:at] + bytes([whole[at] ^ 1 << draw(st.integers(0, 7))]) + whole[at + 1 :]
    other = draw(st.integers(0, len(whole)))
    first, second = min(at, other), max(at, other)
    size = min(draw(st.sampled_from([1, 4, 8, 64])), second - first, len(whole) - second)
    swapped = bytearray(whole)
    swapped[first : first + size], swapped[second : second + size] = whole[second:][:size], whole[first:][:size]
    assume(swapped != whole)
    return bytes(swapped)
