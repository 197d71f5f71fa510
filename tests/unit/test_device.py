"""What travelled, expanded by torch on any device, is what numpy makes of it on the host; and the way there."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock import PenstockError, SpecError, wire
from penstock.device import Destination, OnDevice, check_device, find_destination, pack, unpack
from penstock.item import Item
from penstock.prefetch import OBJECT_BYTES, Prefetch
from penstock.rank import Worker
from penstock.tensors import CPU, Batch, expand, names_of

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
no_gpu_here = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


def frame_of(tensors: dict[str, Any], step: int = 0) -> wire.Frame:
    address = wire.Address(dataset="d", snapshot="s", spec="p", epoch=0, rank=0, step=step)
    arrays = {name: array[None] for name, array in tensors.items()}
    return wire.Frame(wire.Alike(wire.Told(address, [step], [""], 0), arrays, [{"url": ["a", "b"]}]), 0)


@st.composite
def frames(draw: st.DrawFn) -> wire.Frame:
    size, width, seed = draw(st.integers(1, 5)), draw(st.integers(1, 40)), draw(st.integers(0, 999))
    random = np.random.default_rng(seed)

    def ids(width: int) -> npt.NDArray[Any]:
        bits = draw(st.sampled_from([16, 32]))
        return random.integers(0, 1 << bits, (size, width)).astype(f"uint{bits}")

    def lengths(width: int) -> npt.NDArray[Any]:
        return random.integers(0, width + 1, size, np.int32)

    tensors: dict[str, Any] = {}
    kind = draw(st.sampled_from(["causal", "seq2seq", "pairs", "documents"]))
    for side in ("chosen_", "rejected_") if kind == "pairs" else ("",):
        tensors[f"{side}input_ids"] = ids(width)
        if draw(st.booleans()) or kind == "pairs":
            tensors[f"{side}lengths"] = lengths(width)
        learned = draw(st.sampled_from(["all", "prompt_lengths", "loss_mask"]))
        if learned == "prompt_lengths":
            tensors[f"{side}prompt_lengths"] = lengths(width)
        elif learned == "loss_mask":
            tensors[f"{side}loss_mask"] = random.integers(0, 2, (size, width), np.uint8)
    if kind == "seq2seq":
        tensors |= {"labels": ids(7), "label_lengths": lengths(7)}
    if kind == "documents":
        tensors["document_starts"] = np.packbits(random.random((size, width)) < 0.2, axis=1, bitorder="little")
    if draw(st.booleans()):
        tensors |= {"score": random.random(size), "vector": random.integers(0, 9, (size, 3), np.uint32)}
        tensors["hash"] = random.integers(0, 1 << 64, size, np.uint64)
    return frame_of(tensors)


def assert_equal(found: Batch, expected: Batch) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name].cpu(), value), name
        else:
            assert found[name] == value


@given(frames())
def test_torch_makes_of_what_travelled_what_numpy_makes(frame: wire.Frame) -> None:
    assert_equal(unpack(pack(frame, pin_memory=False)), expand(frame, pin_memory=False))


@given(frames(), st.data())
def test_tensors_that_are_asked_for_are_what_they_are_among_all(frame: wire.Frame, data: st.DataObject) -> None:
    every = expand(frame, pin_memory=False)
    assert set(names_of([*frame.tensors, *frame.texts])) == set(every)
    columns = data.draw(st.sets(st.sampled_from(sorted(every))))
    some = {name: every[name] for name in columns}
    assert_equal(expand(frame, pin_memory=False, columns=columns), some)
    assert_equal(unpack(pack(frame, pin_memory=False, columns=columns), columns), some)


def test_what_waits_for_a_device_is_as_small_as_it_travelled() -> None:
    made = frame_of({"input_ids": np.ones((2, 100), np.uint16), "lengths": np.ones(2, np.int32)})
    assert Item.of(made, pack(made, pin_memory=False)).nbytes == 2 * 2 * 100 + 2 * 4 + 2 + OBJECT_BYTES
    assert Item.of(made, expand(made, pin_memory=False)).nbytes == 3 * 8 * 2 * 100 + 2 + OBJECT_BYTES
    made.alike.told = made.alike.told._replace(nbytes=9999)
    assert Item.of(made, expand(made, pin_memory=False, columns=())).nbytes == 9999 + OBJECT_BYTES


def numbered(num: int, num_steps: int, *, pin_memory: bool = False) -> tuple[list[Batch], Prefetch[Item]]:
    """Batches, and a prefetch of them, which fails at the first step that is none of them."""
    random = np.random.default_rng(num)
    made = [
        frame_of(
            {
                "input_ids": random.integers(0, 9, (64, 512), np.uint16),
                "lengths": random.integers(0, 513, 64, np.int32),
            },
            step,
        )
        for step in range(num)
    ]

    def groups() -> Generator[list[Item], None, None]:
        for step in range(num_steps):
            if step >= num:
                raise ValueError("there is no more")
            yield [Item.of(made[step], pack(made[step], pin_memory=pin_memory))]

    items = Prefetch(
        groups(),
        nbytes=lambda items: sum(item.nbytes for item in items),
        budget_bytes=1 << 18,
        interrupt=lambda: None,
        name="ahead",
    )
    return [expand(frame, pin_memory=False) for frame in made], items


def test_batches_come_in_order_and_a_failure_behind_them() -> None:
    expected, items = numbered(30, 31)
    found: list[Item] = []
    with closing(items), pytest.raises(ValueError, match="there is no more"):
        found.extend(OnDevice(items, CPU))
    assert [item.step for item in found] == list(range(30))
    for item, batch in zip(found, expected, strict=True):
        assert_equal(item.batch, batch)


def test_a_batch_is_handed_over_though_the_next_one_is_not_there() -> None:
    gate = threading.Event()

    def groups() -> Generator[list[Item], None, None]:
        for step in range(2):
            assert step == 0 or gate.wait(30)
            made = frame_of({"input_ids": np.ones((1, 1), np.uint16)}, step)
            yield [Item.of(made, pack(made, pin_memory=False))]

    with closing(
        Prefetch(
            groups(), nbytes=lambda items: sum(item.nbytes for item in items), budget_bytes=9, interrupt=gate.set, name="ahead"
        )
    ) as items:
        batches = OnDevice(items, CPU)
        assert next(batches).step == 0
        gate.set()
        assert [item.step for item in batches] == [1]


@no_gpu_here
def test_a_gpu_that_is_not_there_is_refused() -> None:
    for device in ("cuda", "cuda:3", 1, torch.device("cuda")):
        with pytest.raises(SpecError, match="torch sees 0 GPUs here"):
            check_device(device)
    assert find_destination(None, None) == Destination(device=CPU, pinned_for=-1)


@pytest.mark.parametrize("device", ["gpu", "meta", "", 1.5])
def test_what_is_no_device_is_refused(device: str) -> None:
    with pytest.raises(SpecError, match="device must be 'cpu', or a GPU such as 'cuda'"):
        check_device(device)


def test_workers_leave_the_gpu_alone() -> None:
    worker = Worker(0, 2, 7)
    for device in (None, CPU):
        assert find_destination(device, worker) == Destination(device=CPU, pinned_for=-1)
    with pytest.raises(PenstockError, match="workers cannot give batches on device='cuda'"):
        find_destination(torch.device("cuda"), worker)


@pytest.fixture
def sync_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.usefixtures("sync_is_an_error")
def test_batches_on_a_gpu_are_the_same_however_late_the_gpu_reads_them_and_nothing_waits_for_it() -> None:
    expected, items = numbered(60, 60, pin_memory=True)
    gpu = torch.device("cuda", torch.cuda.current_device())
    seen: list[Batch] = []
    with closing(items):
        for item in OnDevice(items, gpu):
            assert item.batch["input_ids"].device == gpu
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]  # some ten milliseconds, in which the host runs ahead
            seen.append({n: value.clone() if isinstance(value, torch.Tensor) else value for n, value in item.batch.items()})
    torch.cuda.set_sync_debug_mode("default")
    for found, batch in zip(seen, expected, strict=True):
        assert_equal(found, batch)


@needs_gpu
@given(frames())
def test_a_gpu_makes_of_what_travelled_what_numpy_makes(frame: wire.Frame) -> None:
    packed = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in pack(frame, pin_memory=True).items()
    }
    assert_equal(unpack(packed), expand(frame, pin_memory=False))


@needs_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@given(frames())
def test_expanding_any_batch_waits_for_no_gpu(frame: wire.Frame) -> None:
    packed = pack(frame, pin_memory=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        unpack({n: v.to("cuda", non_blocking=True) if isinstance(v, torch.Tensor) else v for n, v in packed.items()})
    finally:
        torch.cuda.set_sync_debug_mode("default")
