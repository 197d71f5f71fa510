"""Batches that are sent to a GPU lie where they were received. Where there is no GPU, the host's memory passes for one's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import penstock.cuda
import penstock.dataset
import penstock.iteration
from penstock import RemoteDataset
from penstock.cuda import Destination, OnDevice, tensor_over, unpack
from penstock.spec import Packing
from penstock.tensors import CPU, expand
from support.chaos import ChaosProxy
from support.corpora import write_numbered, write_pairs, write_tokenizer
from support.servers import Serve, Server

KINDS: dict[str, dict[str, Any]] = {
    "packed": {"dataset": "many", "packing": "best_fit"},
    "padded": {"dataset": "numbers"},
    "pairs": {"dataset": "pairs"},
}


@pytest.fixture(scope="module")
def server(serve: Serve, shared: Path) -> Server:
    write_numbered(shared / "many", 2000)
    write_numbered(shared / "numbers", 480)
    write_pairs(shared / "pairs", [("the quick brown fox jumps over", " the lazy dog")] * 480)
    return serve(shared, "--tokenizer", str(write_tokenizer(shared / "tokenizer.json")))


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        return

    def allocate(gpu: torch.device, nbytes: int) -> memoryview:
        assert gpu == torch.device("cuda:5")
        return torch.empty(nbytes, dtype=torch.uint8).numpy().data

    destinations = {
        None: Destination(device=CPU, pin_memory=False),
        "cuda": Destination(device=torch.device("cuda:5"), pin_memory=True),
    }
    monkeypatch.setattr(penstock.dataset, "check_device", lambda device: device)
    monkeypatch.setattr(penstock.dataset, "find_destination", lambda device, _: destinations[device])
    monkeypatch.setattr(penstock.iteration, "allocate_pinned", allocate)
    monkeypatch.setattr(penstock.iteration, "OnDevice", lambda frames, _, *settings: OnDevice(frames, CPU, *settings))


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, bool]]:
    """How many arrays were sent of so many dimensions, and whether from where they were received."""
    found = Counter[tuple[int, bool]]()

    def look(array: npt.NDArray[Any]) -> torch.Tensor | None:
        tensor = tensor_over(array)
        found[array.ndim, tensor is not None and np.shares_memory(tensor.numpy(), array)] += 1
        return tensor

    monkeypatch.setattr(penstock.cuda, "tensor_over", look)
    return found


def batches(url: str, device: str | None, *, dataset: str, **settings: Any) -> list[dict[str, torch.Tensor]]:
    data = RemoteDataset(url, dataset, batch_size=4, seq_len=16, seed=3, device=device, **settings)
    return [{name: value.cpu() for name, value in batch.items()} for batch in data]


def assert_same(found: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> None:
    assert len(found) == len(expected) > 100
    for batch, other in zip(found, expected, strict=True):
        assert batch.keys() == other.keys()
        assert all(torch.equal(batch[name], other[name]) for name in batch)


@pytest.mark.parametrize("kind", KINDS)
def test_received_arrays_are_sent_without_a_copy(server: Server, places: Counter[tuple[int, bool]], kind: str) -> None:
    assert_same(batches(server.url, "cuda", **KINDS[kind]), batches(server.url, None, **KINDS[kind]))
    assert places[2, True] > 100
    assert not places[2, False]
    # The only one that is made on the host are the borders of documents, cu_seqlens.
    assert bool(places[1, False]) == (kind == "packed")


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_frames_are_not_sent(server: Server, kind: str) -> None:
    with ChaosProxy(server.url, 7, ["cut", "truncate", "flip"], longest=20_000) as proxy:
        found = batches(proxy.url, "cuda", **KINDS[kind])
    assert sum(proxy.num_faults.values()) > 3
    assert_same(found, batches(server.url, None, **KINDS[kind]))


def test_replay_sends_each_batch_once(server: Server, places: Counter[tuple[int, bool]]) -> None:
    found = batches(server.url, "cuda", dataset="numbers", replay=2)
    assert places[2, True] == 2
    assert_same(found, found[:2] * (len(found) // 2))
    assert torch.equal(found[1]["input_ids"], batches(server.url, None, dataset="numbers")[1]["input_ids"])


@pytest.mark.filterwarnings("ignore:.*lru_cache")  # of torch, that it traces what is cached,
@pytest.mark.filterwarnings("ignore:Guards may run slower")  # and of Python 3.13.0
@pytest.mark.parametrize(
    ("device", "dataset", "packing"), [("cuda", "many", "best_fit"), (None, "many", "best_fit"), (None, "pairs", "rows")]
)
def test_compiled_function_takes_batches(
    server: Server, monkeypatch: pytest.MonkeyPatch, device: str | None, dataset: str, packing: Packing
) -> None:
    are_traced: list[bool] = []

    def traced(made: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **settings: Any) -> Any:
            are_traced.append(torch.compiler.is_compiling())
            return made(*arguments, **settings)

        return run

    monkeypatch.setattr(penstock.cuda, "unpack", traced(unpack))
    monkeypatch.setattr(penstock.iteration, "expand", traced(expand))
    data = RemoteDataset(server.url, dataset, batch_size=4, seq_len=16, seed=3, device=device, packing=packing)
    expected = [sum(tensor.sum() for tensor in batch.values()) for batch, _ in zip(data, range(3), strict=False)]
    are_traced.clear()
    step = torch.compile(lambda batches: sum(tensor.sum() for tensor in next(batches).values()), backend="eager")
    batches = iter(data)
    assert [step(batches) for _ in expected] == expected
    batches.close()  # type: ignore[attr-defined]
    assert are_traced
    assert not any(are_traced)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_pinned_without_a_device(server: Server, kind: str) -> None:
    data = RemoteDataset(server.url, batch_size=4, seq_len=16, seed=3, **KINDS[kind])
    for batch in data:
        assert all(tensor.is_pinned() for tensor in batch.values())
    on_cpu = batches(server.url, "cpu", **KINDS[kind])
    assert_same(batches(server.url, None, **KINDS[kind]), on_cpu)
