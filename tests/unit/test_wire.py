from io import BytesIO
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import msgpack
import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

import penstock.wire.frame
from penstock import VersionMismatch, WireError, wire
from penstock.wire import Address, Frame, Layout
from penstock.wire.layout import DTYPES, MAX_SAMPLES, layout_of, pack_texts

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


def test_a_frame_comes_back_as_it_was_sent() -> None:
    [frame] = wire.decode(frame_bytes())
    assert frame.address == Address(dataset="tiny", snapshot="00112233aabbccdd", spec_digest="5bec", epoch=1, rank=0, step=3)
    assert {name: array.tolist() for name, array in frame.tensors.items()} == {n: a.tolist() for n, a in TENSORS.items()}
    assert [array.dtype for array in frame.tensors.values()] == [np.uint16, np.int32]
    assert (frame.digest, frame.nbytes) == (wire.digest(frame_bytes()[-frame.nbytes :]), 128)


def test_a_frame_may_hold_nothing() -> None:
    body = b"".join(frame_bytes({}, step) for step in range(3))
    assert [(frame.step, frame.tensors) for frame in wire.decode(body, range(3))] == [(0, {}), (1, {}), (2, {})]
    assert [frame.step for frame in wire.decode(body)] == [0, 1, 2]


def test_any_msgpack_library_reads_a_body_as_header_and_payload_in_turn() -> None:
    body = frame_bytes(step=1) + frame_bytes(step=2)
    first, payload, second, _ = list(msgpack.Unpacker(BytesIO(body)))
    assert (first["step"], second["step"]) == (1, 2)
    assert first["digest"] == xxhash.xxh3_64_hexdigest(payload)
    name, dtype, shape, offset = first["tensors"][0]
    ids = np.frombuffer(payload, dtype, count=int(np.prod(shape)), offset=offset)
    assert (name, ids.tolist()) == ("input_ids", list(range(24)))


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=5), st.lists(st.integers(1, 70), min_size=1, max_size=3))
def test_payloads_and_tensors_lie_on_64_byte_boundaries_of_the_body(steps: list[int], sizes: list[int]) -> None:
    tensors = {f"t{n}": np.full(size, n, np.uint16) for n, size in enumerate(sizes)}
    body = b"".join(frame_bytes(tensors, step) for step in steps)
    start = np.frombuffer(body, np.uint8).__array_interface__["data"][0]
    frames = list(wire.decode(body))
    assert [frame.step for frame in frames] == steps
    for frame in frames:
        assert all((a.__array_interface__["data"][0] - start) % 64 == 0 for a in frame.tensors.values())


def test_the_length_of_a_header_does_not_depend_on_the_digest_nor_on_how_much_is_substituted() -> None:
    layout = Layout.of([("input_ids", "uint16", (1, 1))])
    for length in range(64):  # it is rounded up, so what differs shows with some names only
        heads = wire.Heads(Address("d" * length, snapshot="s", spec_digest="p", epoch=0, rank=0, step=0), layout)
        others = [heads.head(70_000, "f" * 16, replaced) for replaced in (0, 1, 200, 1000, MAX_SAMPLES)]
        [nbytes] = {len(head) for head in (heads.head(70_000), *others)}
        assert nbytes % 64 == 0


STEPS = st.integers(0, 300)
FRAMES = st.lists(st.tuples(STEPS, st.integers(1, 40), st.sampled_from([0, 0, 1, 200])), min_size=1, max_size=6)


@given(FRAMES, st.lists(STEPS, max_size=7))
def test_frames_are_the_same_whatever_steps_are_expected(sent: list[tuple[int, int, int]], others: list[int]) -> None:
    body = b"".join(frame_bytes({"ids": np.arange(width, dtype=np.uint16)}, step, bad) for step, width, bad in sent)
    frames = list(wire.decode(body))
    assert [(frame.step, frame.tensors["ids"].size, frame.replaced) for frame in frames] == sent
    for steps in ([step for step, _, _ in sent], others):
        again = list(wire.decode(body, steps))
        assert all(_same(*pair) and pair[0].digest == pair[1].digest for pair in zip(again, frames, strict=True))
        assert [frame.replaced for frame in again] == [frame.replaced for frame in frames]


def test_frames_of_one_layout_are_recognised_and_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Mock(wraps=penstock.wire.frame.read_header)
    monkeypatch.setattr(penstock.wire.frame, "read_header", read)
    steps = range(120, 300, 4)
    body = b"".join(frame_bytes(step=step) for step in steps)
    assert [frame.step for frame in wire.decode(body, steps)] == list(steps)
    assert read.call_count == 1
    long, many = {"ids": np.arange(600_000, dtype=np.uint16)}, {f"column {n}": np.arange(n) for n in range(90)}
    body = b"".join(frame_bytes((TENSORS, long, many)[step // 10 % 3], step) for step in range(100, 160))
    assert [frame.step for frame in wire.decode(body, range(100, 160))] == list(range(100, 160))
    assert read.call_count == 7


def test_a_frame_of_another_rank_is_none_of_those_that_are_alike() -> None:
    body = frame_bytes(step=1) + frame_bytes(step=2, rank=3) + frame_bytes(step=3)
    assert [(frame.step, frame.address.rank) for frame in wire.decode(body, (1, 2, 3))] == [(1, 0), (2, 3), (3, 0)]


def test_each_of_several_frames_that_are_alike_has_its_own_part_of_a_tensor_of_any_shape() -> None:
    cubes = np.arange(90, dtype=np.int32).reshape(3, 2, 3, 5)
    body = b"".join(frame_bytes({"cube": cube}, step, 9 * (step == 4)) for step, cube in enumerate(cubes, start=4))
    frames = list(wire.decode(body, range(4, 7)))
    assert len({id(frame.alike) for frame in frames}) == 1
    assert [frame.replaced for frame in frames] == [9, 0, 0]
    assert [frame.tensors["cube"].tolist() for frame in frames] == cubes.tolist()
    assert [frame.total("cube") for frame in frames] == cubes.sum(axis=(1, 2, 3)).tolist()


@pytest.mark.parametrize("bad", [[1], [1, 0], [0, 0, 1]])
def test_frames_that_are_not_as_expected_are_not_compared_over_and_over(
    monkeypatch: pytest.MonkeyPatch, bad: list[int]
) -> None:
    compared, digests = list[int](), wire.Heads._digests

    def counting(self: wire.Heads, heads: npt.NDArray[np.uint8], steps: npt.NDArray[np.uint8]) -> list[str]:
        compared.append(len(heads))
        return digests(self, heads, steps)

    monkeypatch.setattr(wire.Heads, "_digests", counting)
    steps = range(300)
    body = b"".join(frame_bytes(step=step, replaced=bad[step % len(bad)]) for step in steps)
    assert [frame.step for frame in wire.decode(body, steps)] == list(steps)
    assert sum(compared) <= 9 * len(steps)


@pytest.mark.parametrize("steps", [(), (1, 2, 3)])
def test_no_flipped_bit_goes_unnoticed(steps: tuple[int, ...]) -> None:
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
def test_a_body_cut_at_any_byte_is_refused(steps: tuple[int, ...]) -> None:
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
def test_what_is_no_frame_is_refused(body: bytes) -> None:
    with pytest.raises(WireError):
        list(wire.decode(body))


def test_tensors_hold_the_memory_that_they_are_views_of() -> None:
    body = bytearray(frame_bytes())
    [frame] = wire.decode(body)
    with pytest.raises(BufferError):
        body.pop()
    del frame
    body.pop()


def test_names_may_be_those_of_a_headers_fields() -> None:
    [frame] = wire.decode(
        frame_bytes({"header_digest": np.arange(3, dtype=np.uint16), "filler": np.arange(3, dtype=np.uint16)})
    )
    assert list(frame.tensors) == ["header_digest", "filler"]


def test_another_wire_version_is_named() -> None:
    header: dict[str, object] = {"v": wire.VERSION + 1, "something": "new"}
    header |= {"header_digest": wire.digest(msgpack.packb(header))}
    with pytest.raises(VersionMismatch, match=f"version {wire.VERSION + 1}"):
        list(wire.decode(msgpack.packb(header) + bytes(8)))


def test_a_type_that_came_later_is_named_and_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    body = frame_bytes({"weights": np.zeros(2, np.float64)})
    monkeypatch.delitem(DTYPES, "float64")
    layout_of.cache_clear()
    with pytest.raises(VersionMismatch, match=r"does not know \(weights is float64\): install the same penstock on both"):
        list(wire.decode(body))


def _same(one: Frame, other: Frame) -> bool:
    mine, theirs = ([(a.tobytes(), a.dtype, a.shape) for a in frame.tensors.values()] for frame in (one, other))
    return (one.address, mine) == (other.address, theirs)


def test_tensors_do_not_overlap() -> None:
    layout = Layout.of([("a", "uint16", (33,)), ("b", "int32", (1,)), ("c", "uint16", (4, 4))])
    assert all(one.offset + one.nbytes <= two.offset for one, two in pairwise(layout.tensors))
    assert layout.nbytes % 64 == 0


def sealed(tensors: list[Any], payload: bytes = bytes(128)) -> bytes:
    """A frame whose digests are right, whatever its header says of the tensors."""
    empty = wire.Heads(
        Address(dataset="d", snapshot="s", spec_digest="p", epoch=0, rank=0, step=0), Layout((), len(payload))
    ).head(0)
    header = msgpack.unpackb(empty[:-5]) | {"digest": wire.digest(payload), "tensors": tensors}
    fields = {name: value for name, value in header.items() if name not in ("header_digest", "filler")}
    header["header_digest"] = wire.digest(msgpack.packb(fields))
    packed: bytes = msgpack.packb(header)
    return packed + empty[-5:] + payload


huge = st.sampled_from([-1, 0, 1, 2, 3, 7, 8, 15, 16, 17, 2**31, 2**32, 2**61, 2**63 - 1, -(2**62)])
sizes = st.lists(st.sampled_from([0, 1, 2, 2**31, 2**32 - 1]), max_size=5)
odd = st.one_of(huge, st.floats(), st.text(max_size=3), st.none(), st.booleans(), st.lists(huge, max_size=2))
dtypes = st.one_of(st.sampled_from(["utf8", "binary", "bool", "uint8", "int64", "float64", "complex64"]), odd)


@given(
    st.lists(st.tuples(st.just("a") | odd, dtypes, st.lists(odd, max_size=4) | sizes | odd, odd), max_size=3),
    st.lists(huge, min_size=16, max_size=16),
)
@example([("a", "utf8", [], 0)], [-1] * 16)
@example([("a", "float64", [], 0)], [-1] * 16)
@example([("a", "float64", [0, 2**31, 2**24 - 1], 0)], [0] * 16)
def test_a_header_that_lies_is_refused_or_holds_what_it_says(tensors: list[Any], words: list[int]) -> None:
    body = sealed([list(tensor) for tensor in tensors], np.array(words, "<i8").tobytes())
    try:
        [frame] = wire.decode(body)
        frames = list(wire.decode(body * 40, [0] * 40))
    except (WireError, VersionMismatch):
        return
    assert all(_same(frame, other) and frame.texts == other.texts for other in frames)
    assert len(frames) == 40
    assert sum(array.nbytes for array in frame.tensors.values()) <= 128 * len(tensors)
    assert sum(len(text) for texts in frame.texts.values() for text in texts) <= 128 * len(tensors)


@pytest.mark.parametrize(
    "lie",
    [
        (5, "uint8", [4], 0), (None, "uint8", [4], 0), ("b", "uint8", [True], 0), ("c", "uint8", [4.0], 0),
        ("d", "uint8", [4], False), ("a", "uint8", [4], -8), ("a", "uint8", [-1, -2], 0), ("a", "uint8", [0, 2**32], 0),
        ("a", "uint8", [1] * 64, 0),
    ],
)  # fmt: skip
def test_one_lie_in_a_header_is_enough_to_refuse_it(lie: tuple[Any, ...]) -> None:
    assert [frame.tensors["a"].shape for frame in wire.decode(sealed([["a", "uint8", [4], 0]]))] == [(4,)]
    with pytest.raises(WireError, match="does not fit"):
        list(wire.decode(sealed([list(lie)])))


def test_many_long_texts_fit_where_their_bytes_do() -> None:
    texts = [b"x" * (1 << 19)] * 128  # of as many texts and bytes the product is past 32 bits
    layout = Layout.of([("a", "binary", (128, 1 << 26))])
    content = np.zeros(layout.nbytes, np.uint8)
    pack_texts(texts, content[: layout.tensors[0].nbytes])
    [frame] = wire.decode(sealed([["a", "binary", [128, 1 << 26], 0]], content.tobytes()))
    assert frame.texts == {"a": texts}


def test_two_tensors_of_one_name_and_more_texts_than_samples_are_refused() -> None:
    with pytest.raises(WireError, match="does not fit"):
        list(wire.decode(sealed([["a", "uint8", [4], 0], ["a", "uint8", [4], 64]])))
    for count in (MAX_SAMPLES, MAX_SAMPLES + 1):
        body = sealed([["a", "utf8", [count, 0], 0]], bytes(8 * (count + 1)))
        if count > MAX_SAMPLES:
            with pytest.raises(WireError, match="does not fit"):
                list(wire.decode(body))
        else:
            assert [frame.texts for frame in wire.decode(body)] == [{"a": [""] * count}]


@given(st.lists(st.one_of(st.integers(-200, 200), huge), min_size=16, max_size=16), st.integers(0, 15), st.integers(0, 128))
@example([0, 5, 3, 8] + [0] * 12, 3, 8)
@example([2, 8] + [0] * 14, 1, 8)
@example([0, 7] + [0] * 14, 1, 8)
def test_texts_whose_offsets_lie_are_refused(words: list[int], count: int, nbytes: int) -> None:
    body = sealed([["a", "binary", [count, nbytes], 0]], np.array(words, "<i8").tobytes())
    sound = words[0] == 0 and words[count] == nbytes and words[: count + 1] == sorted(words[: count + 1])
    if sound and 8 * (count + 1) + nbytes <= 128:
        [frame] = wire.decode(body)
        assert [len(text) for text in frame.texts["a"]] == np.diff(words[: count + 1]).tolist()
    else:
        with pytest.raises(WireError):
            list(wire.decode(body))


def test_bytes_come_back_as_bytes_and_what_is_no_utf8_is_no_text() -> None:
    payload = (np.array([0, 2, 3], "<i8").tobytes() + b"\xff\0a").ljust(128, b"\0")
    [frame] = wire.decode(sealed([["a", "binary", [2, 3], 0]], payload))
    assert frame.texts == {"a": [b"\xff\0", b"a"]}
    with pytest.raises(WireError, match="a holds bytes that are no UTF-8"):
        list(wire.decode(sealed([["a", "utf8", [2, 3], 0]], payload)))


def test_frames_before_one_whose_texts_lie_are_given() -> None:
    layout = Layout.of([("url", "utf8", (2, 4))])
    frames = []
    for step, borders in enumerate([(0, 1, 4), (0, 2, 4), (0, 5, 4), (0, 3, 4)]):
        payload = (np.array(borders, "<i8").tobytes() + b"abcd").ljust(layout.nbytes, b"\0")
        address = Address(dataset="d", snapshot="s", spec_digest="p", epoch=0, rank=0, step=step)
        frames.append(wire.Heads(address, layout).head(step, wire.digest(payload)) + payload)
    found = wire.decode(b"".join(frames), range(4))
    assert [next(found).texts["url"] for _ in range(2)] == [["a", "bcd"], ["ab", "cd"]]
    with pytest.raises(WireError, match="the offsets of the texts in url are none"):
        next(found)
    with pytest.raises(WireError, match="the offsets of the texts in url are none"):
        next(wire.decode_alike(b"".join(frames[2:])))  # and no list of none


def test_texts_come_back_as_they_were_sent() -> None:
    texts = {"some": ["fox", "", "über"], "none": ["", ""], "no": []}
    raw = {name: [text.encode() for text in own] for name, own in texts.items()}
    layout = Layout.of([(name, "utf8", (len(own), sum(map(len, own)))) for name, own in raw.items()])
    payload = bytearray(layout.nbytes)
    for name, [view] in layout.arrays(memoryview(payload), 0, layout.nbytes, 1).items():
        wire.pack_texts(raw[name], view)
    address = Address(dataset="d", snapshot="s", spec_digest="p", epoch=0, rank=0, step=0)
    [frame] = wire.decode(wire.Heads(address, layout).head(address.step, wire.digest(memoryview(payload))) + payload)
    assert frame.texts == texts
