"""Frames: decoded as they were sent, or refused."""

import tracemalloc
from contextlib import suppress
from io import BytesIO
from typing import Any
from unittest.mock import Mock

import msgpack
import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock.wire.frame
import penstock.wire.header
from penstock import VersionMismatch, WireError, wire
from penstock.wire import Address, Frame, Layout
from penstock.wire.header import BIN32
from penstock.wire.layout import DTYPES, MAX_SAMPLES, TEXTS, layout_of
from support.fuzz import ODD, altered

Arrays = dict[str, npt.NDArray[Any]]

TENSORS: Arrays = {
    "input_ids": np.arange(24, dtype=np.uint16).reshape(2, 12),
    "lengths": np.array([12, 7], np.int32),
}


def frame_bytes(tensors: Arrays = TENSORS, step: int = 3, replaced: int = 0, rank: int = 0) -> bytes:
    layout = Layout.of([(name, str(array.dtype), array.shape) for name, array in tensors.items()])
    payload = bytearray(layout.nbytes)
    for name, [view] in layout.arrays(memoryview(payload), 0, layout.nbytes, 1).items():
        view[...] = tensors[name]
    address = Address(dataset="tiny", snapshot="00112233aabbccdd", spec_digest="5bec", epoch=1, rank=rank, step=step)
    return wire.Heads(address, layout).head(address.step, wire.digest(memoryview(payload)), replaced) + bytes(payload)


def test_frame_is_decoded_as_it_was_sent() -> None:
    [frame] = wire.decode(frame_bytes())
    assert frame.address == Address(dataset="tiny", snapshot="00112233aabbccdd", spec_digest="5bec", epoch=1, rank=0, step=3)
    assert {name: array.tolist() for name, array in frame.tensors.items()} == {n: a.tolist() for n, a in TENSORS.items()}
    assert [array.dtype for array in frame.tensors.values()] == [np.uint16, np.int32]
    assert (frame.digest, frame.nbytes) == (wire.digest(frame_bytes()[-frame.nbytes :]), 128)


def test_frame_may_have_no_tensors() -> None:
    body = b"".join(frame_bytes({}, step) for step in range(3))
    assert [(frame.step, frame.tensors) for frame in wire.decode(body, range(3))] == [(0, {}), (1, {}), (2, {})]
    assert [frame.step for frame in wire.decode(body)] == [0, 1, 2]


def test_msgpack_reads_a_body_as_headers_and_payloads() -> None:
    body = frame_bytes(step=1) + frame_bytes(step=2)
    first, payload, second, _ = list(msgpack.Unpacker(BytesIO(body)))
    assert (first["step"], second["step"]) == (1, 2)
    assert first["digest"] == xxhash.xxh3_64_hexdigest(payload)
    name, dtype, shape, offset = first["tensors"][0]
    ids = np.frombuffer(payload, dtype, count=int(np.prod(shape)), offset=offset)
    assert (name, ids.tolist()) == ("input_ids", list(range(24)))


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=5), st.lists(st.integers(1, 70), min_size=1, max_size=3))
def test_tensors_lie_on_64_byte_boundaries_of_the_body(steps: list[int], sizes: list[int]) -> None:
    tensors = {f"t{n}": np.full(size, n, np.uint16) for n, size in enumerate(sizes)}
    body = b"".join(frame_bytes(tensors, step) for step in steps)
    start = np.frombuffer(body, np.uint8).__array_interface__["data"][0]
    frames = list(wire.decode(body))
    assert [frame.step for frame in frames] == steps
    for frame in frames:
        assert all((a.__array_interface__["data"][0] - start) % 64 == 0 for a in frame.tensors.values())


def test_header_length_does_not_depend_on_digest_or_replaced() -> None:
    layout = Layout.of([("input_ids", "uint16", (1, 1))])
    for length in range(64):  # it is rounded up, so what differs shows with some names only
        heads = wire.Heads(Address("d" * length, snapshot="s", spec_digest="p", epoch=0, rank=0, step=0), layout)
        others = [heads.head(70_000, "f" * 16, replaced) for replaced in (0, 1, 200, 1000, MAX_SAMPLES)]
        [nbytes] = {len(head) for head in (heads.head(70_000), *others)}
        assert nbytes % 64 == 0


STEPS = st.integers(0, 300)
FRAMES = st.lists(st.tuples(STEPS, st.integers(1, 40), st.sampled_from([0, 0, 1, 200])), min_size=1, max_size=6)


@given(FRAMES, st.lists(STEPS, max_size=7))
def test_frames_do_not_depend_on_the_expected_steps(sent: list[tuple[int, int, int]], others: list[int]) -> None:
    body = b"".join(frame_bytes({"ids": np.arange(width, dtype=np.uint16)}, step, bad) for step, width, bad in sent)
    frames = list(wire.decode(body))
    assert [(frame.step, frame.tensors["ids"].size, frame.replaced) for frame in frames] == sent
    for steps in ([step for step, _, _ in sent], others):
        again = list(wire.decode(body, steps))
        assert all(_same(*pair) and pair[0].digest == pair[1].digest for pair in zip(again, frames, strict=True))
        assert [frame.replaced for frame in again] == [frame.replaced for frame in frames]


def test_headers_of_a_group_are_compared_and_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Mock(wraps=penstock.wire.header.read_header)
    monkeypatch.setattr(penstock.wire.frame, "read_header", read)
    steps = range(120, 300, 4)
    body = b"".join(frame_bytes(step=step) for step in steps)
    assert [frame.step for frame in wire.decode(body, steps)] == list(steps)
    assert read.call_count == 1
    long, many = {"ids": np.arange(600_000, dtype=np.uint16)}, {f"column {n}": np.arange(n) for n in range(90)}
    body = b"".join(frame_bytes((TENSORS, long, many)[step // 10 % 3], step) for step in range(100, 160))
    assert [frame.step for frame in wire.decode(body, range(100, 160))] == list(range(100, 160))
    assert read.call_count == 7


def test_frame_of_another_rank_is_in_no_group() -> None:
    body = frame_bytes(step=1) + frame_bytes(step=2, rank=3) + frame_bytes(step=3)
    assert [(frame.step, frame.address.rank) for frame in wire.decode(body, (1, 2, 3))] == [(1, 0), (2, 3), (3, 0)]


def test_frames_of_a_group_have_their_own_part_of_each_tensor() -> None:
    cubes = np.arange(90, dtype=np.int32).reshape(3, 2, 3, 5)
    body = b"".join(frame_bytes({"cube": cube}, step, 9 * (step == 4)) for step, cube in enumerate(cubes, start=4))
    frames = list(wire.decode(body, range(4, 7)))
    assert len({id(frame.group) for frame in frames}) == 1
    assert [frame.replaced for frame in frames] == [9, 0, 0]
    assert [frame.tensors["cube"].tolist() for frame in frames] == cubes.tolist()
    assert [frame.total("cube") for frame in frames] == cubes.sum(axis=(1, 2, 3)).tolist()


@pytest.mark.parametrize("steps", [(), (1, 2, 3)])
def test_flipped_bit_is_detected(steps: tuple[int, ...]) -> None:
    sound = frame_bytes(step=1) + frame_bytes(step=2) + frame_bytes(step=3)
    expected = list(wire.decode(sound))
    for bit in range(len(sound) * 8):
        flipped = bytearray(sound)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            frames = list(wire.decode(flipped, steps))
        except WireError:
            continue
        # Filler may change, the batch may not.
        assert all(_same(*pair) for pair in zip(frames, expected, strict=True)), f"bit {bit} changed a batch"


@pytest.mark.parametrize("steps", [(), (1, 2, 3)])
def test_body_cut_at_any_byte_is_refused(steps: tuple[int, ...]) -> None:
    body = frame_bytes(step=1) + frame_bytes(step=2) + frame_bytes(step=3)
    size = len(frame_bytes())
    for length in range(1, len(body)):
        if length % size:
            with pytest.raises(WireError):
                list(wire.decode(body[:length], steps))


@pytest.mark.parametrize(
    "body",
    [b"<html>502 Bad Gateway</html>", b'{"detail": "no"}', b"\xc1" * 64, msgpack.packb({"a": 1}), msgpack.packb({"v": 1})],
)
def test_body_without_a_frame_is_refused(body: bytes) -> None:
    with pytest.raises(WireError):
        list(wire.decode(body))


def sealed(fields: dict[str, Any], payload: bytes) -> bytes:
    """A frame with these fields and valid digests, as only a faulty or hostile server makes it."""
    fields = fields | {"digest": wire.digest(payload), "nbytes": len(payload)}
    header = msgpack.packb(fields | {"header_digest": wire.digest(msgpack.packb(fields))})
    return bytes(header) + BIN32.pack(0xC6, len(payload)) + payload


FIELDS = {"v": wire.VERSION, "dataset": "d", "snapshot": "s", "spec_digest": "5bec", "epoch": 0, "rank": 0, "step": 3} | {
    "digest": "", "nbytes": 0, "replaced": 0,
}  # fmt: skip
TENSOR = st.tuples(
    st.sampled_from(["input_ids", "lengths", "n"]) | ODD,
    st.sampled_from([*DTYPES, *TEXTS]) | ODD,
    st.lists(st.integers(0, 9) | ODD, max_size=4) | ODD,
    st.integers(0, 128) | ODD,
)


@given(st.just(FIELDS) | altered(FIELDS), st.lists(TENSOR, max_size=3), st.binary(max_size=200), st.lists(st.integers(0, 9)))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_any_sealed_header_is_frames_or_refused(
    fields: dict[str, Any], tensors: list[Any], payload: bytes, steps: list[int]
) -> None:
    with suppress(OverflowError):  # of msgpack, in this test: a number has more than 64 bits
        body = sealed({"tensors": tensors} | fields, payload)
        with suppress(WireError, VersionMismatch):
            for frame in wire.decode(body + body, steps):
                assert {array.nbytes <= len(body) for array in frame.tensors.values()} <= {True}


@given(st.binary(max_size=300) | st.recursive(ODD, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_any_bytes_are_frames_or_refused(content: Any) -> None:
    with suppress(OverflowError):
        body = content if isinstance(content, bytes) else msgpack.packb(content)
        with suppress(WireError, VersionMismatch):
            list(wire.decode(body))


@pytest.mark.parametrize("count", [1 << 14, 1 << 20, 0xFFFFFFFF])
@pytest.mark.parametrize("mark", [b"\xdd", b"\xdf"])
def test_declared_lengths_allocate_nothing(mark: bytes, count: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            list(wire.decode((mark + count.to_bytes(4, "big")) * 1000))
        assert tracemalloc.get_traced_memory()[1] < 256 << 20
    finally:
        tracemalloc.stop()


def test_tensors_keep_their_memory() -> None:
    body = bytearray(frame_bytes())
    [frame] = wire.decode(body)
    with pytest.raises(BufferError):
        body.pop()
    del frame
    body.pop()


def test_tensor_may_have_the_name_of_a_header_field() -> None:
    [frame] = wire.decode(
        frame_bytes({"header_digest": np.arange(3, dtype=np.uint16), "filler": np.arange(3, dtype=np.uint16)})
    )
    assert list(frame.tensors) == ["header_digest", "filler"]


def test_other_wire_version_is_named() -> None:
    header: dict[str, object] = {"v": wire.VERSION + 1, "something": "new"}
    header |= {"header_digest": wire.digest(msgpack.packb(header))}
    with pytest.raises(VersionMismatch, match=f"version {wire.VERSION + 1}"):
        list(wire.decode(msgpack.packb(header) + bytes(8)))


def test_unknown_dtype_is_named_as_a_version_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    body = frame_bytes({"weights": np.zeros(2, np.float64)})
    monkeypatch.delitem(DTYPES, "float64")
    layout_of.cache_clear()
    with pytest.raises(VersionMismatch, match=r"does not know \(weights is float64\): install the same penstock on both"):
        list(wire.decode(body))


def _same(one: Frame, other: Frame) -> bool:
    mine, theirs = ([(a.tobytes(), a.dtype, a.shape) for a in frame.tensors.values()] for frame in (one, other))
    return (one.address, mine) == (other.address, theirs)


def text_body(tensors: dict[str, tuple[str, list[bytes]]]) -> bytes:
    """A frame of texts, by name: their dtype and their bytes."""
    layout = Layout.of([(name, dtype, (len(texts), sum(map(len, texts)))) for name, (dtype, texts) in tensors.items()])
    payload = bytearray(layout.nbytes)
    for name, [view] in layout.arrays(memoryview(payload), 0, layout.nbytes, 1).items():
        texts = tensors[name][1]
        view[...] = np.frombuffer(np.cumsum([0, *map(len, texts)]).tobytes() + b"".join(texts), np.uint8)
    address = Address(dataset="d", snapshot="s", spec_digest="p", epoch=0, rank=0, step=0)
    return wire.Heads(address, layout).head(0, wire.digest(memoryview(payload))) + payload


def test_texts_and_bytes_are_decoded_as_they_were_sent() -> None:
    texts = {"some": ["fox", "", "\u00fcber"], "none": ["", ""], "no": []}
    tensors = {name: ("utf8", [text.encode() for text in values]) for name, values in texts.items()}
    [frame] = wire.decode(text_body(tensors | {"raw": ("binary", [b"\xff\0", b"a"])}))
    assert frame.texts == texts | {"raw": [b"\xff\0", b"a"]}


def test_texts_that_are_no_utf8_are_refused() -> None:
    with pytest.raises(WireError, match="a holds bytes that are no UTF-8"):
        list(wire.decode(text_body({"a": ("utf8", [b"\xff"])})))


@pytest.mark.parametrize("offsets", [(0, 4, 0, 4), (-4, 0, 4, 4), (0, 0, 0, 5), (0, 2**63 - 1, -2, 4)])
def test_texts_that_overlap_or_are_cut_off_are_refused(offsets: tuple[int, ...]) -> None:
    payload = np.array(offsets, "<i8").tobytes() + b"text"
    with pytest.raises(WireError, match="a has texts that overlap or are cut off"):
        list(wire.decode(sealed(FIELDS | {"tensors": [("a", "utf8", (3, 4), 0)]}, payload)))
