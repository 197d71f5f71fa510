"""Tensors over the memory that they were received into: what torch is shown is what numpy sees, or nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.feeding.pinned import allocate_pinned, tensor_over
from penstock.transport.buffers import MAX_BUFFER
from penstock.wire.layout import DTYPES, TensorLayout, strided


@given(
    dtype=st.sampled_from([*DTYPES]),
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    begin=st.integers(0, 70),
    gap=st.integers(0, 20),
    count=st.integers(1, 3),
)
def test_a_tensor_lies_over_an_array_wherever_that_begins(
    dtype: str, shape: list[int], begin: int, gap: int, count: int
) -> None:
    layout = TensorLayout(name="x", dtype=dtype, shape=tuple(shape), offset=0)
    itemsize = np.dtype(dtype).itemsize
    stride = math.prod(shape) * itemsize + gap
    owner = torch.randint(0, 2, (begin + count * stride,), dtype=torch.uint8)
    for array in strided(layout, np.frombuffer(owner.numpy().data, np.uint8), begin, stride, count):
        tensor = tensor_over(array)
        at = array.ctypes.data - owner.data_ptr()
        if at % itemsize:
            assert tensor is None
            continue
        assert tensor is not None
        assert tensor.numpy().dtype == array.dtype
        assert tensor.shape == array.shape
        assert tensor.numpy().tobytes() == array.tobytes()
        assert tensor.untyped_storage().data_ptr() == owner.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(4),
        np.frombuffer(bytearray(8), np.uint8),
        torch.zeros(4, 4).numpy()[:, :2],
        torch.zeros(4, 4).numpy().T,
    ],
    ids=["numpy's own", "python's", "with gaps", "transposed"],
)
def test_what_is_no_whole_piece_of_a_tensors_memory_is_left_to_numpy(array: np.ndarray) -> None:
    assert tensor_over(array) is None


def test_what_is_larger_than_most_bodies_is_not_pinned_for_good() -> None:
    memory = allocate_pinned(torch.device("cuda", 0), MAX_BUFFER + 1)
    assert tensor_over(np.frombuffer(memory, np.uint8)) is None
