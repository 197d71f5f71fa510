"""Keyed permutations: invertible functions on [0, size), in O(1) memory per lookup. No I/O, no library's random generator.

Golden values in tests/golden freeze it: a changed value breaks every run that resumes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from penstock_server.order.arrays import IntArray

WordArray = npt.NDArray[np.uint64]
_Word = np.uint64
_Step = Callable[[WordArray, WordArray, WordArray], WordArray]

# Sixteen rounds are the fewest after which every permutation of 4 to 7 elements is equally frequent (chi-square over
# 200,000 keys); at eight, some come up twenty times too often.
_ROUNDS = 16
_GOLDEN = _Word(0x9E3779B97F4A7C15)
_STRETCH = 512  # indices
_REMEMBERED_STRETCHES = 1024
_REMEMBERED_PERMUTATIONS = 256
_MAX_OUTSIDE = 1 << 12  # cells, of permutations of up to some ten million
_AT_A_TIME = 1 << 14  # elements; temporary arrays then fit into a core's cache


def key(seed: int, epoch: int, purpose: str) -> int:
    """A 64-bit key for one use of one epoch.

    A hash of the tuple, never a sum: with `seed + epoch`, run 41's epoch 1 would replay run 42's epoch 0.
    """
    text = f"penstock order v1\0{seed}\0{epoch}\0{purpose}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def keys_below(key: int, numbers: IntArray) -> WordArray:
    """Derives a key per number, shape [n], from one key, as for the windows of an epoch."""
    return _mix(np.full(1, key, _Word) + (numbers.astype(_Word) + _Word(1)) * _GOLDEN)


def permute(index: npt.ArrayLike, size: npt.ArrayLike, key: npt.ArrayLike) -> IntArray:
    """Applies a keyed permutation of [0, size) to each index.

    The three arguments broadcast: sizes and keys may differ between elements. Every size is in
    [1, 2^53], every index in [0, size).

    A generalised Feistel network on a rectangle of at least `size` cells, walked until it lands inside [0, size):
    Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, method 3 and cycle walking.
    """
    return _walk(index, size, key, _forward)


def permute_together(index: IntArray, size: IntArray, key: WordArray) -> IntArray:
    """As permute, for `index` [n]; `size` and `key` are both [n], or both [1].

    For a few close indices it also permutes their neighbours and caches them: permuting tens takes as long as hundreds, and the
    ranks of a job request adjacent tens.
    """
    if size.size > 1 or not 0 < len(index) <= _STRETCH // 4:
        return permute(index, size, key)
    number = int(index[0]) // _STRETCH
    at = index - number * _STRETCH
    if at.min() < 0 or at.max() >= _STRETCH:
        return permute(index, size, key)
    return _permuted_stretch(number, int(size[0]), int(key[0]))[at]


@lru_cache(maxsize=_REMEMBERED_STRETCHES)
def _permuted_stretch(number: int, size: int, key: int) -> IntArray:
    return permute(np.arange(number * _STRETCH, min((number + 1) * _STRETCH, size)), size, key)


def unpermute(image: npt.ArrayLike, size: npt.ArrayLike, key: npt.ArrayLike) -> IntArray:
    """Applies the inverse of `permute` for the same size and key."""
    return _walk(image, size, key, _backward)


def _walk(index: npt.ArrayLike, size: npt.ArrayLike, key: npt.ArrayLike, step: _Step) -> IntArray:
    shape = np.broadcast_shapes(np.shape(index), np.shape(size), np.shape(key))
    cells = np.array(np.broadcast_to(np.asarray(index, _Word), shape)).reshape(-1)
    sizes, keys = (_one_or_all(np.asarray(value, _Word), shape) for value in (size, key))
    for start in range(0, len(cells), _AT_A_TIME):
        some = slice(start, start + _AT_A_TIME)
        own_sizes, own_keys = (values if len(values) == 1 else values[some] for values in (sizes, keys))
        _walk_some(cells[some], own_sizes, own_keys, step)
    return cells.astype(np.int64).reshape(shape)


def _walk_some(cells: WordArray, sizes: WordArray, keys: WordArray, step: _Step) -> None:
    cells[:] = step(cells, sizes, keys)
    while len(outside := np.flatnonzero(cells >= sizes)):
        if len(sizes) == len(keys) == 1 and (next_ones := _next_of_outside(int(sizes[0]), int(keys[0]), step)) is not None:
            cells[outside] = next_ones[cells[outside] - sizes]
        else:
            pick = [values if len(values) == 1 else values[outside] for values in (sizes, keys)]
            cells[outside] = step(cells[outside], *pick)


@lru_cache(maxsize=_REMEMBERED_PERMUTATIONS)
def _next_of_outside(size: int, key: int, step: _Step) -> WordArray | None:
    """Returns the next cell of the walk from each cell outside [0, size); None if these are too many to cache.

    Among some thousand elements a handful falls outside, and a step of only these takes half as long as a step of all.
    """
    height, width = _sides(np.array([size], _Word))
    outside = np.arange(size, int(height[0] * width[0]), dtype=_Word)
    return step(outside, np.array([size], _Word), np.array([key], _Word)) if len(outside) <= _MAX_OUTSIDE else None


def _one_or_all(values: WordArray, shape: tuple[int, ...]) -> WordArray:
    # One key for all elements needs one key schedule; only arguments that differ between elements are expanded.
    return values.reshape(1) if values.size == 1 else np.broadcast_to(values, shape).reshape(-1)


def _sides(size: WordArray) -> tuple[WordArray, WordArray]:
    # height * width >= size, with a small excess. An odd height could only produce even permutations.
    height = (np.sqrt(size.astype(np.float64)).astype(_Word) | _Word(1)) + _Word(1)
    return height, size // height + _Word(1)


def _forward(cells: WordArray, size: WordArray, key: WordArray) -> WordArray:
    height, width = _sides(size)
    row, column = np.divmod(cells, width)
    rounds = _Rounds(key, len(cells))
    for r in range(0, _ROUNDS, 2):
        _add(row, rounds.draw(column, r, height), height)
        _add(column, rounds.draw(row, r + 1, width), width)
    return row * width + column


def _backward(cells: WordArray, size: WordArray, key: WordArray) -> WordArray:
    height, width = _sides(size)
    row, column = np.divmod(cells, width)
    rounds = _Rounds(key, len(cells))
    for r in reversed(range(0, _ROUNDS, 2)):
        _add(column, width - rounds.draw(row, r + 1, width), width)
        _add(row, height - rounds.draw(column, r, height), height)
    return row * width + column


def _add(value: WordArray, by: WordArray, side: WordArray) -> None:
    """Adds in place modulo `side`; both operands are at most `side`."""
    value += by
    np.minimum(value, value - side, out=value)  # a value below side wraps to a huge number


class _Rounds:
    """Keyed functions of all rounds, for `count` elements, with temporary arrays allocated once."""

    def __init__(self, key: WordArray, count: int) -> None:
        rounds = np.arange(1, _ROUNDS + 1, dtype=_Word)[:, None] * _GOLDEN
        self._keys = _mix(key + rounds)
        self._drawn, self._spare = np.empty((2, count), _Word)

    def draw(self, value: WordArray, number: int, side: WordArray) -> WordArray:
        """Returns values in [0, side), valid until the next call; side is below 2^32."""
        drawn = self._drawn
        np.bitwise_xor(value, self._keys[number], out=drawn)
        _mix(drawn, drawn, self._spare)
        drawn >>= _Word(32)
        drawn *= side
        drawn >>= _Word(32)
        return drawn


def _mix(x: WordArray, out: WordArray | None = None, spare: WordArray | None = None) -> WordArray:
    """The finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014); arithmetic wraps at 2^64."""
    out = np.bitwise_xor(x, np.right_shift(x, _Word(30), out=spare), out=out)
    out *= _Word(0xBF58476D1CE4E5B9)
    out ^= np.right_shift(out, _Word(27), out=spare)
    out *= _Word(0x94D049BB133111EB)
    out ^= np.right_shift(out, _Word(31), out=spare)
    return out
