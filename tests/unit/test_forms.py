"""The forms of a batch's tensors, compared with those of the default form, sample by sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock import wire
from penstock.cuda import OnDevice
from penstock.forms import Form
from penstock.tensors import CPU, expand, names_of

ADDRESS = wire.Address(dataset="d", snapshot="s", spec_digest="p", epoch=0, rank=0, step=0)


def frame_of(**tensors: np.ndarray[Any, Any]) -> wire.Frame:
    return wire.Frame(wire.FrameGroup(ADDRESS, [0], [""], 0, {name: array[None] for name, array in tensors.items()}), 0)


@st.composite
def frames(draw: st.DrawFn, kinds: tuple[str, ...] = ("rows", "full", "documents", "padded documents")) -> wire.Frame:
    size, width, kind = draw(st.integers(1, 5)), draw(st.integers(2, 20)), draw(st.sampled_from(kinds))
    random = np.random.default_rng(draw(st.integers(0, 999)))
    tensors: dict[str, Any] = {"input_ids": random.integers(1, 1 << 16, (size, width)).astype(np.uint16)}
    if kind in ("rows", "padded documents"):
        tensors["lengths"] = random.integers(1, width + 1, size, np.int32)
    if draw(st.booleans()):
        tensors["loss_mask"] = random.integers(0, 2, (size, width), np.uint8)
    if "documents" in kind:
        starts = random.random((size, width)) < 0.3
        if "lengths" in tensors:
            columns, lengths = np.arange(width), tensors["lengths"][:, None]
            starts = (starts & (columns < lengths)) | (columns == lengths)  # padding is marked as a document is
        tensors["document_starts"] = np.packbits(starts, axis=1, bitorder="little")
    return frame_of(**tensors)


def lines(batch: dict[str, Any], name: str) -> list[list[int]]:
    found: list[list[int]] = batch[name].tolist()
    return found


@given(frames(), st.booleans())
def test_shifted_labels_are_the_next_tokens(frame: wire.Frame, is_left: bool) -> None:
    plain, shifted = expand(frame, pin_memory=False), expand(frame, pin_memory=False, form=Form(shifted=True))
    assert lines(shifted, "input_ids") == [line[:-1] for line in lines(plain, "input_ids")]
    assert lines(shifted, "labels") == [line[1:] for line in lines(plain, "labels")]
    assert lines(shifted, "attention_mask") == [line[:-1] for line in lines(plain, "attention_mask")]
    if "position_ids" in plain:
        positions = lines(shifted, "position_ids")
        assert positions == [line[:-1] for line in lines(plain, "position_ids")]
        flat = [position for line in positions for position in line]
        assert shifted["cu_seqlens"].tolist() == [*(i for i, position in enumerate(flat) if not position), len(flat)]
    assert all(value.is_contiguous() for value in shifted.values())


@given(frames(kinds=("rows", "full")), st.booleans())
def test_padding_may_be_on_the_left(frame: wire.Frame, is_shifted: bool) -> None:
    right = expand(frame, pin_memory=False, form=Form(shifted=is_shifted))
    left = expand(frame, pin_memory=False, form=Form(shifted=is_shifted, pads_left=True))
    assert left.keys() == right.keys()
    for name in right:
        for found, line, mask in zip(lines(left, name), lines(right, name), lines(right, "attention_mask"), strict=True):
            assert found == line[sum(mask) :] + line[: sum(mask)]


@given(frames(), st.booleans())
def test_flat_batch_has_all_tokens_without_padding(frame: wire.Frame, is_shifted: bool) -> None:
    plain = expand(frame, pin_memory=False, form=Form(shifted=is_shifted))
    flat = expand(frame, pin_memory=False, form=Form(shifted=is_shifted, flat=True))
    assert sorted(flat) == sorted(names_of(frame.group.names, Form(flat=True)))
    kept = plain["attention_mask"].bool()
    starts = plain.get("position_ids", torch.arange(kept.shape[1]).expand_as(kept))[kept] == 0
    assert flat["input_ids"].tolist() == [plain["input_ids"][kept].tolist()]
    expected = plain["labels"][kept] if is_shifted else plain["labels"][kept].masked_fill(starts, -100)
    assert flat["labels"].tolist() == [expected.tolist()]
    begins = [*starts.nonzero()[:, 0].tolist(), len(starts)]
    assert flat["cu_seqlens"].tolist() == begins
    assert flat["max_seqlen"].item() == max(np.diff(begins))
    assert flat["position_ids"].tolist() == [[n for length in np.diff(begins).tolist() for n in range(length)]]
    assert (flat["cu_seqlens"].dtype, flat["position_ids"].dtype) == (torch.int32, torch.int64)


@given(frames(), st.sampled_from([(True,), (False, True), (True, True), (False, False, True), (True, False, True)]))
def test_device_gives_the_same_form(frame: wire.Frame, parts: tuple[bool, ...]) -> None:
    form = Form(*parts)

    class Frames:
        has_next = False

        def __next__(self) -> wire.Frame:
            return frame

    for tensors in (None, {"labels", "cu_seqlens"}):
        wanted = {"tensors": tensors} if tensors else {}
        sent = next(OnDevice(Frames(), CPU, form=form, **wanted)).batch  # type: ignore[arg-type]
        expected = expand(frame, pin_memory=False, form=form, **wanted)
        assert sent.keys() == expected.keys()
        assert all(torch.equal(sent[name], value) for name, value in expected.items())


def test_preference_pairs_have_both_sides_in_the_form() -> None:
    sides = {
        f"{side}_{name}": array
        for side in ("chosen", "rejected")
        for name, array in (("input_ids", np.array([[5, 6, 7, 0]], np.uint16)), ("lengths", np.array([3], np.int32)))
    }
    made = expand(frame_of(**sides), pin_memory=False, form=Form(shifted=True, pads_left=True))
    for side in ("chosen", "rejected"):
        assert made[f"{side}_input_ids"].tolist() == [[5, 6, 7]]
        assert made[f"{side}_labels"].tolist() == [[6, 7, -100]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_gpu_never_waits_for_a_form() -> None:
    frame = frame_of(input_ids=np.array([[5, 6, 7, 0]], np.uint16), lengths=np.array([3], np.int32))

    class Frames:
        has_next = False

        def __next__(self) -> wire.Frame:
            return frame

    torch.cuda.set_sync_debug_mode("error")
    try:
        for form in (Form(True), Form(False, True), Form(True, True), Form(True, False, True)):
            batch = next(OnDevice(Frames(), torch.device("cuda"), form=form)).batch  # type: ignore[arg-type]
            assert not batch.get("max_seqlen", torch.zeros(())).is_cuda
    finally:
        torch.cuda.set_sync_debug_mode("default")
