"""Frozen values. Whoever changes one breaks every run that resumes (order, state) or every client in the field (frame)."""

import json
from pathlib import Path

import numpy as np
import pytest

from penstock import Spec, wire
from penstock.state import Cursor, read_state
from penstock.wire import Address, Layout
from penstock_server.order.permutation import key, permute, unpermute
from penstock_server.order.shuffle import EpochOrder

HERE = Path(__file__).parent
ORDER = json.loads((HERE / "order.json").read_text())
STATE = {
    "version": 3, "dataset": "wiki", "run": "0123456789abcdef", "start": "123456789abcdef0",
    "epoch": 2, "step": 9, "offset": 64, "batch_size": 8, "world_size": 1, "skip": None,
    "snapshot": "0123456789abcdef", "seed": 7, "shuffle": "window", "window": 262144, "split": "all", "packing": "concat",
    "overflow": "truncate", "length_bucket_size": 0, "mix": None, "stopping_strategy": None, "seq_len": 64, "task": None,
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), ORDER["key"].items())
def test_keys_are_frozen(name: str, value: int) -> None:
    seed, epoch, purpose = name.split("/")
    assert key(int(seed), int(epoch), purpose) == value


@pytest.mark.parametrize(("name", "images"), ORDER["permute"].items())
def test_permutations_are_frozen(name: str, images: dict[str, int]) -> None:
    size, permutation_key = (np.uint64(int(part)) for part in name.split("/"))
    indices, expected = [int(index) for index in images], list(images.values())
    assert permute(indices, size, permutation_key).tolist() == expected
    assert unpermute(expected, size, permutation_key).tolist() == indices


@pytest.mark.parametrize(("name", "samples"), ORDER["epoch"].items())
def test_epoch_orders_are_frozen(name: str, samples: str) -> None:
    shuffle, seed, epoch = name.split("/")
    counts = np.array([5, 0, 7, 3, 9, 4, 8, 2, 6])
    order = EpochOrder(counts, np.ones_like(counts), shuffle=shuffle, window=10, seed=int(seed), epoch=int(epoch))
    blocks, indices = order.samples(np.arange(order.num_samples))
    assert " ".join(f"{b}.{i}" for b, i in zip(blocks.tolist(), indices.tolist(), strict=True)) == samples


def test_state_is_frozen() -> None:
    spec = Spec(packing="concat", seq_len=64, seed=7, split="all", snapshot="0123456789abcdef")
    assert read_state(STATE, "wiki", spec, num_samples=100) == Cursor(epoch=2, offset=64, step=9)


def test_frame_is_frozen() -> None:
    layout = Layout.of([("input_ids", "uint16", (2, 5)), ("lengths", "int32", (2,))])
    payload = memoryview(bytearray(layout.nbytes))
    views = {name: array for name, [array] in layout.arrays(payload, 0, layout.nbytes, 1).items()}
    views["input_ids"][:] = [[1, 2, 3, 50256, 0], [65535, 7, 50256, 0, 0]]
    views["lengths"][:] = [4, 3]
    address = Address(dataset="wiki", snapshot="0123456789abcdef", spec_digest="fedcba9876543210", epoch=2, rank=1, step=300)
    frame = wire.Heads(address, layout).head(address.step, wire.digest(payload)) + bytes(payload)
    golden = (HERE / "frame.msgpack").read_bytes()
    assert frame == golden
    [decoded] = wire.decode(golden)
    assert decoded.address == address
    assert decoded.tensors["lengths"].tolist() == [4, 3]
