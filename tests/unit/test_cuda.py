"""What travelled, expanded by torch on any device, is what numpy makes of it on the host; and the way there."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import penstock.cuda
from penstock import PenstockError, SpecError, wire
from penstock.cuda import Destination, OnDevice, allocate_pinned, check_device, find_destination, pack, tensor_over, unpack
from penstock.distributed import LoaderWorker
from penstock.http import MAX_BUFFER
from penstock.prefetch import Prefetch
from penstock.tensors import CPU, Item, expand, names_of
from penstock.wire.layout import DTYPES, Layout, TensorLayout

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
no_gpu_here = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


ADDRESS = wire.Address(dataset="d", snapshot="s", spec_digest="p", epoch=0, rank=0, step=0)


def frame_of(tensors: Mapping[str, npt.NDArray[Any]], texts: dict[str, Any] | None = None) -> wire.Frame:
    arrays = {name: array[None] for name, array in tensors.items()}
    held: dict[str, Any] = {"url": ["a", "b"]} if texts is None else texts
    alike = wire.FrameGroup(ADDRESS, [0], [""], 0, arrays)
    alike.texts.append(held)
    return wire.Frame(alike, 0)


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
        in_loss = draw(st.sampled_from(["all", "prompt_lengths", "loss_mask"]))
        if in_loss == "prompt_lengths":
            tensors[f"{side}prompt_lengths"] = lengths(width)
        elif in_loss == "loss_mask":
            tensors[f"{side}loss_mask"] = random.integers(0, 2, (size, width), np.uint8)
    if kind == "seq2seq":
        tensors |= {"labels": ids(7), "label_lengths": lengths(7)}
    if kind == "documents":
        tensors["document_starts"] = np.packbits(random.random((size, width)) < 0.2, axis=1, bitorder="little")
    if draw(st.booleans()):
        tensors |= {"score": random.random(size), "vector": random.integers(0, 9, (size, 3), np.uint32)}
        tensors["hash"] = random.integers(0, 1 << 64, size, np.uint64)
    return frame_of(tensors)


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name].cpu(), value), name
        else:
            assert found[name] == value


@given(frames())
def test_torch_expands_as_numpy_does(frame: wire.Frame) -> None:
    assert_equal(unpack(pack(frame, pin_memory=False)), expand(frame, pin_memory=False))


@given(frames(), st.data())
def test_selected_tensors_equal_those_among_all(frame: wire.Frame, data: st.DataObject) -> None:
    every = expand(frame, pin_memory=False)
    assert set(names_of([*frame.tensors, *frame.texts])) == set(every)
    columns = data.draw(st.sets(st.sampled_from(sorted(every))))
    some = {name: every[name] for name in columns}
    assert_equal(expand(frame, pin_memory=False, tensors=columns), some)
    assert_equal(unpack(pack(frame, pin_memory=False, tensors=columns), columns), some)


def tensors_of(step: int) -> dict[str, npt.NDArray[Any]]:
    random = np.random.default_rng(step)
    return {"input_ids": random.integers(0, 9, (64, 512), np.uint16), "lengths": random.integers(0, 513, 64, np.int32)}


def received(steps: Sequence[int], allocate: Callable[[int], memoryview]) -> list[wire.Frame]:
    """The frames of a run, one behind the other in memory of its own."""
    layout = Layout.of([(name, array.dtype.name, array.shape) for name, array in tensors_of(0).items()])
    arrays = layout.arrays(allocate(len(steps) * layout.nbytes), 0, layout.nbytes, len(steps))
    for number, step in enumerate(steps):
        for name, array in tensors_of(step).items():
            arrays[name][number] = array
    alike = wire.FrameGroup(ADDRESS, list(steps), [""] * len(steps), layout.nbytes, arrays)
    return [wire.Frame(alike, number) for number in range(len(steps))]


def ahead(
    groups: Generator[list[wire.Frame], None, None], interrupt: Callable[[], None] = lambda: None
) -> Prefetch[wire.Frame]:
    return Prefetch(
        groups, nbytes=lambda frames: sum(frame.nbytes for frame in frames), budget_bytes=1 << 18, interrupt=interrupt
    )


def ordinary(nbytes: int) -> memoryview:
    """Memory of torch's, as pinned memory is, though it is not pinned."""
    return torch.empty(nbytes, dtype=torch.uint8).numpy().data


def test_batches_come_in_order_and_a_failure_after_them() -> None:
    def groups() -> Generator[list[wire.Frame], None, None]:
        for begin in range(0, 30, 3):
            yield received(range(begin, begin + 3), ordinary)
        raise ValueError("there is no more")

    found: list[Item] = []
    with closing(ahead(groups())) as frames, pytest.raises(ValueError, match="there is no more"):
        found.extend(OnDevice(frames, CPU))
    assert [item.step for item in found] == list(range(30))
    for item in found:
        assert_equal(item.batch, expand(frame_of(tensors_of(item.step), texts={}), pin_memory=False))


def test_batch_is_given_before_the_next_one_arrives() -> None:
    gate = threading.Event()

    def groups() -> Generator[list[wire.Frame], None, None]:
        for step in range(2):
            assert step == 0 or gate.wait(30)
            yield received([step], ordinary)

    with closing(ahead(groups(), gate.set)) as frames:
        batches = OnDevice(frames, CPU)
        assert next(batches).step == 0
        gate.set()
        assert [item.step for item in batches] == [1]


def test_batch_copied_in_inference_mode_can_be_trained_on() -> None:
    with closing(ahead(group for group in [received(range(2), ordinary)])) as frames:
        batches = OnDevice(frames, CPU)
        with torch.inference_mode():
            next(batches)
        ids = next(batches).batch["input_ids"]
    weights = torch.ones(ids.shape, requires_grad=True)
    (weights * ids).sum().backward()
    assert weights.grad is not None
    assert torch.equal(weights.grad, ids.float())


def test_batch_is_given_before_the_failure_of_the_next_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def sent(frame: wire.Frame, **settings: Any) -> dict[str, Any]:
        if frame.step == 2:
            raise torch.OutOfMemoryError("no more")
        return pack(frame, **settings)

    monkeypatch.setattr(penstock.cuda, "pack", sent)
    found: list[int] = []
    with (
        closing(ahead(group for group in [received(range(4), ordinary)])) as frames,
        pytest.raises(torch.OutOfMemoryError, match="no more"),
    ):
        found.extend(item.step for item in OnDevice(frames, CPU))
    assert found == [0, 1]


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Of the storage of a tensor, by which torch knows what a copy reads from."""
    return tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_packed_tensors_are_views_of_the_received_body() -> None:
    bodies: list[memoryview] = []

    def allocate(nbytes: int) -> memoryview:
        bodies.append(ordinary(nbytes))
        return bodies[-1]

    for frame in received(range(3), allocate):
        for name, value in pack(frame, pin_memory=False).items():
            assert np.array_equal(value.numpy(), frame.tensors[name])
            assert place_of(value) == place_of(torch.from_numpy(np.frombuffer(bodies[0], np.uint8)))
    for frame in received(range(3), lambda nbytes: memoryview(bytearray(nbytes))):
        for name, value in pack(frame, pin_memory=False).items():
            assert not np.shares_memory(value.numpy(), frame.tensors[name])


@no_gpu_here
def test_missing_gpu_is_refused() -> None:
    for named in ("cuda", "cuda:3", 1, torch.device("cuda")):
        with pytest.raises(SpecError, match="torch sees 0 GPUs here"):
            check_device(named)
    assert find_destination(None, None) == Destination(device=CPU, pin_memory=False)


@pytest.mark.parametrize("device", ["gpu", "meta", "", 1.5])
def test_invalid_device_is_refused(device: str) -> None:
    with pytest.raises(SpecError, match="device must be 'cpu', or a GPU such as 'cuda'"):
        check_device(device)


def test_fork_of_a_process_with_a_gpu_pins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for is_bad in (False, True):
        monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda is_bad=is_bad: is_bad)
        assert find_destination(None, None) == Destination(device=CPU, pin_memory=not is_bad)


def test_loader_workers_do_not_use_the_gpu() -> None:
    worker = LoaderWorker(0, 2, 7)
    for host in (None, CPU):
        assert find_destination(host, worker) == Destination(device=CPU, pin_memory=False)
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
@pytest.mark.parametrize("late", ["copies", "loop"])
def test_late_gpu_reads_the_same_batches_without_synchronization(late: str) -> None:
    gpu = torch.device("cuda", torch.cuda.current_device())
    places: list[int] = []

    def allocate(nbytes: int) -> memoryview:
        body = allocate_pinned(gpu, nbytes)
        places.append(np.frombuffer(body, np.uint8).ctypes.data)
        return body

    def groups() -> Generator[list[wire.Frame], None, None]:
        for begin in range(0, 60, 3):
            yield received(range(begin, begin + 3), allocate)

    seen: list[dict[str, Any]] = []
    with closing(ahead(groups())) as frames:
        batches = OnDevice(frames, gpu)
        for _ in range(60):
            with torch.cuda.stream(batches._stream if late == "copies" else None):
                torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]  # some ten milliseconds: the host runs ahead,
            time.sleep(0.005)  # but not so far that nothing has been read yet when it is done
            batch = next(batches).batch
            assert batch["input_ids"].device == gpu
            seen.append({name: tensor.clone() for name, tensor in batch.items()})
        assert next(batches, None) is None
    torch.cuda.set_sync_debug_mode("default")
    for step, found in enumerate(seen):
        assert_equal(found, expand(frame_of(tensors_of(step), texts={}), pin_memory=False))
    assert len(set(places)) < len(places)  # or nothing was received over what may still have been read


@needs_gpu
@given(frames())
def test_gpu_expands_as_numpy_does(frame: wire.Frame) -> None:
    packed = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in pack(frame, pin_memory=True).items()
    }
    assert_equal(unpack(packed), expand(frame, pin_memory=False))


@needs_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@given(frames())
def test_expanding_a_batch_does_not_synchronize(frame: wire.Frame) -> None:
    packed = pack(frame, pin_memory=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        unpack({n: v.to("cuda", non_blocking=True) if isinstance(v, torch.Tensor) else v for n, v in packed.items()})
    finally:
        torch.cuda.set_sync_debug_mode("default")


@given(
    dtype=st.sampled_from([*DTYPES]),
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    begin=st.integers(0, 70),
    gap=st.integers(0, 20),
    count=st.integers(1, 3),
)
def test_tensor_over_is_a_view_of_the_array(dtype: str, shape: list[int], begin: int, gap: int, count: int) -> None:
    layout = Layout((TensorLayout(name="x", dtype=dtype, shape=tuple(shape), offset=0),), 0)
    itemsize = np.dtype(dtype).itemsize
    stride = math.prod(shape) * itemsize + gap
    owner = torch.randint(0, 2, (begin + count * stride,), dtype=torch.uint8)
    for array in layout.arrays(owner.numpy().data, begin, stride, count)["x"]:
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
    [np.zeros(4), np.frombuffer(bytearray(8), np.uint8), torch.zeros(4, 4).numpy()[:, :2], torch.zeros(4, 4).numpy().T],
    ids=["numpy's own", "python's", "with gaps", "transposed"],
)
def test_tensor_over_refuses_memory_without_a_tensor_or_with_gaps(array: np.ndarray) -> None:
    assert tensor_over(array) is None


def test_large_body_is_not_pinned() -> None:
    memory = allocate_pinned(torch.device("cuda", 0), MAX_BUFFER + 1)
    assert tensor_over(np.frombuffer(memory, np.uint8)) is None
