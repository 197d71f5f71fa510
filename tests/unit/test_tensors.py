import pickle
from copy import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import default_convert

from penstock import SpecError, wire
from penstock.tensors import Batch, batch_of, document_mask, expand, names_of


def frame(**tensors: object) -> wire.Frame:
    address = wire.Address(dataset="d", snapshot="s", spec_digest="p", epoch=0, rank=0, step=0)
    arrays = {}
    for name, values in tensors.items():
        of_list = np.uint16 if name in ("input_ids", "labels") else np.int32
        arrays[name] = (values if isinstance(values, np.ndarray) else np.array(values, of_list))[None]
    alike = wire.FrameGroup(address, [0], [""], 0, arrays)
    alike.texts.append({})
    return wire.Frame(alike, 0)


def test_padding_is_masked_even_when_it_is_the_eos() -> None:
    batch = expand(frame(input_ids=[[5, 6, 0], [7, 0, 0]], lengths=[3, 2]), pin_memory=False)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[5, 6, 0], [7, 0, 0]],
        "attention_mask": [[1, 1, 1], [1, 1, 0]],
        "labels": [[5, 6, 0], [7, 0, -100]],
    }
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_tensors_are_in_host_memory_with_any_default_device() -> None:
    with torch.device("meta"):
        batch = expand(frame(input_ids=[[5, 6, 0]], lengths=[2]), pin_memory=False)
    assert batch["labels"].tolist() == [[5, 6, -100]]


def test_prompt_is_attended_and_has_no_label() -> None:
    batch = expand(frame(input_ids=[[5, 6, 9, 0]], lengths=[3], prompt_lengths=[2]), pin_memory=False)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 9, -100]]


def test_loss_mask_selects_labels() -> None:
    marks = np.array([[0, 1, 0, 1, 0]], np.uint8)
    batch = expand(frame(input_ids=[[5, 6, 7, 8, 0]], lengths=[4], loss_mask=marks), pin_memory=False)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0]]
    assert batch["labels"].tolist() == [[-100, 6, -100, 8, -100]]


def test_seq2seq_has_prompt_inputs_and_response_labels() -> None:
    batch = expand(frame(input_ids=[[5, 6, 0]], lengths=[2], labels=[[8, 9, 0, 0]], label_lengths=[3]), pin_memory=False)
    assert batch["input_ids"].tolist() == [[5, 6, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0]]
    assert batch["labels"].tolist() == [[8, 9, 0, -100]]


def test_large_ids_are_kept() -> None:
    wide = frame(input_ids=np.array([[2**32 - 1]], np.uint32), lengths=[1])
    assert expand(wide, pin_memory=False)["input_ids"].tolist() == [[2**32 - 1]]


def test_documents_have_separate_positions_and_masks() -> None:
    starts = np.array([[0b10101], [0b00001]], np.uint8)  # at 0, 2 and the padding; at 0
    made = frame(input_ids=[[5, 6, 7, 8, 0], [1, 2, 3, 4, 5]], lengths=[4, 5], document_starts=starts)
    batch = expand(made, pin_memory=False)
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 0], [0, 1, 2, 3, 4]]
    assert batch["cu_seqlens"].tolist() == [0, 2, 4, 5, 10]
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["labels"].tolist() == [[-100, 6, -100, 8, -100], [-100, 2, 3, 4, 5]]
    mask = document_mask(batch)
    assert mask.shape == (2, 1, 5, 5)
    assert mask[0, 0].tolist() == [[row // 2 == column // 2 and column <= row for column in range(5)] for row in range(5)]
    assert mask[1, 0].equal(torch.tril(torch.ones(5, 5, dtype=torch.bool)))
    added = document_mask(batch, torch.bfloat16)
    assert added.dtype == torch.bfloat16
    assert (added == 0).equal(mask)
    assert (added[~mask] == torch.finfo(torch.bfloat16).min).all()
    assert sorted(names_of(made.group.names)) == sorted(batch)
    for name, whole in batch.items():
        alone = expand(made, pin_memory=False, tensors={name})
        assert list(alone) == [name]
        assert torch.equal(alone[name], whole)


def test_document_mask_needs_marked_documents() -> None:
    with pytest.raises(SpecError, match="where documents begin"):
        document_mask(expand(frame(input_ids=[[5, 6]], lengths=[2]), pin_memory=False))


def test_preference_pair_expands_both_sides() -> None:
    batch = expand(
        frame(
            chosen_input_ids=[[5, 6, 0]],
            chosen_lengths=[2],
            chosen_prompt_lengths=[1],
            rejected_input_ids=[[5, 7, 8]],
            rejected_lengths=[3],
            rejected_prompt_lengths=[1],
        ),
        pin_memory=False,
    )
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "chosen_input_ids": [[5, 6, 0]], "chosen_attention_mask": [[1, 1, 0]], "chosen_labels": [[-100, 6, -100]],
        "rejected_input_ids": [[5, 7, 8]], "rejected_attention_mask": [[1, 1, 1]], "rejected_labels": [[-100, 7, 8]],
    }  # fmt: skip


def test_passthrough_columns_keep_names_and_types() -> None:
    columns = {
        "score": np.array([0.5], np.float32),
        "vector": np.array([[1, 2]], np.uint16),
        "number": np.array([2**32 - 1], np.uint32),
        "is_clean": np.array([True]),
    }
    made = frame(input_ids=[[1]], lengths=[1], **columns)
    made.texts["url"] = ["über"]
    batch = expand(made, pin_memory=False)
    assert (batch["score"].dtype, batch["vector"].dtype, batch["is_clean"].dtype) == (torch.float32, torch.int32, torch.bool)
    assert (batch["number"].dtype, batch["number"].tolist()) == (torch.int64, [2**32 - 1])
    assert batch["url"] == ["über"]


def test_num_tokens_excludes_padding() -> None:
    assert frame(input_ids=[[5, 6, 0], [7, 0, 0]], lengths=[2, 1]).num_tokens == 3
    assert frame(input_ids=[[5, 6, 0]], lengths=[2], labels=[[8, 9, 0, 0]], label_lengths=[3]).num_tokens == 5
    pair = frame(chosen_input_ids=[[5, 6]], chosen_lengths=[1], rejected_input_ids=[[5]], rejected_lengths=[1])
    assert pair.num_tokens == 2
    assert frame(input_ids=[[5, 6, 7], [8, 9, 1]]).num_tokens == 6


def test_batch_keeps_its_address_through_copies_workers_and_trees(tmp_path: Path) -> None:
    batch = batch_of({"input_ids": torch.zeros(2)}, wire.Address("d", "s", "p", 1, 2, 3))
    moved = tree_map(lambda tensor: tensor + 1, batch)
    for one in (copy(batch), pickle.loads(pickle.dumps(batch)), default_convert(batch), moved):  # type: ignore[no-untyped-call]
        assert (type(one), one.address) == (Batch, batch.address)
    assert moved["input_ids"].tolist() == [1, 1]
    other = batch_of({"input_ids": torch.ones(2)}, None)
    assert tree_map(torch.add, other, batch)["input_ids"].tolist() == [1, 1]
    torch.save(batch, tmp_path / "batch.pt")
    assert torch.load(tmp_path / "batch.pt").address == batch.address
    assert Batch(batch).address is None
