import numpy as np
import torch

from penstock import wire
from penstock.tensors import expand, nbytes


def frame(**tensors: object) -> wire.Frame:
    address = wire.Address(dataset="d", snapshot="s", epoch=0, rank=0, step=0)
    arrays = {
        name: np.array(values, np.uint16 if name in ("input_ids", "labels") else np.int32) for name, values in tensors.items()
    }
    return wire.Frame(address=address, digest="", nbytes=0, tensors=arrays)


def test_padding_is_masked_and_has_no_label_even_where_it_is_the_eos() -> None:
    batch = expand(frame(input_ids=[[5, 6, 0], [7, 0, 0]], lengths=[3, 2]), pin_memory=False)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[5, 6, 0], [7, 0, 0]],
        "attention_mask": [[1, 1, 1], [1, 1, 0]],
        "labels": [[5, 6, 0], [7, 0, -100]],
    }
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert nbytes(batch) == 3 * 6 * 8


def test_a_prompt_is_attended_to_and_has_no_label() -> None:
    batch = expand(frame(input_ids=[[5, 6, 9, 0]], lengths=[3], prompt_lengths=[2]), pin_memory=False)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 9, -100]]


def test_seq2seq_has_the_prompt_as_input_and_the_response_as_labels() -> None:
    batch = expand(frame(input_ids=[[5, 6, 0]], lengths=[2], labels=[[8, 9, 0, 0]], label_lengths=[3]), pin_memory=False)
    assert batch["input_ids"].tolist() == [[5, 6, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0]]
    assert batch["labels"].tolist() == [[8, 9, 0, -100]]


def test_large_ids_stay_what_they_are() -> None:
    wide = frame(input_ids=[[1]], lengths=[1])
    wide.tensors["input_ids"] = np.array([[2**32 - 1]], np.uint32)
    assert expand(wide, pin_memory=False)["input_ids"].tolist() == [[2**32 - 1]]
