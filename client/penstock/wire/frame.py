"""Frames: batches as they are decoded from a body, each checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import WireError
from penstock.wire.header import BIN32, Address, Heads, digest, read_header
from penstock.wire.layout import TEXTS, unpack_texts
from penstock.wire.names import SIDES

Array = npt.NDArray[Any]
Texts = list[str] | list[bytes]


@dataclass(eq=False)
class FrameGroup:
    """Consecutive frames of a body with one layout and addresses that differ only in the step.

    address   address of the first frame
    steps     step of each frame; `digests` are those of their payloads
    nbytes    bytes of a payload
    arrays    each tensor of all frames, shape [num_frames, *shape]; views of the received bytes. `names` are their names
    replaced  samples of the first frame that replace bad rows; the other frames have no such samples
    texts     values of text columns in each frame; [] without such columns
    """

    address: Address
    steps: list[int]
    digests: list[str]
    nbytes: int
    arrays: Mapping[str, Array]
    replaced: int = 0
    texts: list[dict[str, Texts]] = field(default_factory=list)
    _totals: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = tuple(self.arrays)

    def totals(self, name: str) -> list[int]:
        """Return the sum of a tensor's numbers in each frame. The first call computes all of them at once."""
        if name not in self._totals:
            array = self.arrays[name]
            self._totals[name] = array.reshape(len(array), -1).sum(axis=1, dtype=np.int64).tolist()
        return self._totals[name]

    @cached_property
    def num_tokens(self) -> list[int]:
        """Number of tokens of each frame without padding: of prompts and responses, and of both sides of a pair."""
        if lengths := [name for name in (*(f"{side}lengths" for side in SIDES), "label_lengths") if name in self.names]:
            return [sum(each) for each in zip(*map(self.totals, lengths), strict=True)]
        ids = self.arrays["input_ids"]  # without lengths there is no padding
        return [ids[0].size] * len(ids)


class Frame(NamedTuple):
    """One batch of a group of frames."""

    group: FrameGroup
    number: int

    @property
    def address(self) -> Address:
        """Address of the batch."""
        return Address(*self.group.address[:-1], self.step)

    @property
    def step(self) -> int:
        """Step of the address."""
        return self.group.steps[self.number]

    @property
    def digest(self) -> str:
        """Checksum of the payload, verified."""
        return self.group.digests[self.number]

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return self.group.nbytes

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding."""
        return self.group.num_tokens[self.number]

    @property
    def tensors(self) -> dict[str, Array]:
        """The tensors, views of the received bytes."""
        number = self.number
        return {name: array[number] for name, array in self.group.arrays.items()}

    @property
    def texts(self) -> dict[str, Texts]:
        """Values of the text columns."""
        return self.group.texts[self.number] if self.group.texts else {}

    @property
    def replaced(self) -> int:
        """Number of samples that replace unusable rows."""
        return 0 if self.number else self.group.replaced

    def total(self, name: str) -> int:
        """Return the sum of a tensor's numbers."""
        return self.group.totals(name)[self.number]


def decode(body: bytes | bytearray | memoryview, steps: Sequence[int] = ()) -> Iterator[Frame]:
    """Yield the frames of a body, in order; their tensors share its memory. If they have these `steps`, this is faster.

    Raises:
        WireError: the bytes are not frames, a frame is cut short, or a checksum does not match.
        VersionMismatch: the frames are of another version, or have a tensor of an unknown type.
    """
    return chain.from_iterable(decode_groups(body, steps))


def decode_groups(body: bytes | bytearray | memoryview, steps: Sequence[int] = ()) -> Iterator[list[Frame]]:
    """Yield the frames of a body as `decode` does, a list for each group. The valid frames come before an error.

    If the first of a list has the expected step, the others have, too.
    """
    view = memoryview(body).cast("B")
    start = number = 0
    while start < len(view):
        header, at = read_header(view, start)
        layout = header.layout
        stride = at - start + layout.nbytes
        if len(view) - start < stride:
            step, received = header.address.step, len(view) - at
            raise WireError(f"the body ends inside the batch of step {step}: {received} of {layout.nbytes} bytes came")
        following = _recognised(view, start, at, stride, Heads(header.address, layout), steps[number + 1 :])
        group_steps = [header.address.step, *steps[number + 1 : number + 1 + len(following)]]
        try:
            arrays = layout.arrays(view, at, stride, len(group_steps))
            columns = [(tensor, arrays.pop(tensor.name)) for tensor in layout.tensors if tensor.dtype in TEXTS]
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"the header of a frame does not fit its payload: {error}") from error
        digests = [header.digest, *following]
        group = FrameGroup(header.address, group_steps, digests, layout.nbytes, arrays, header.replaced)
        frames: list[Frame] = []
        try:
            for index, expected in enumerate(digests):
                begin = at + index * stride
                actual = digest(view[begin : begin + layout.nbytes])
                if actual != expected:
                    step = group_steps[index]
                    raise WireError(f"the batch of step {step} was damaged on the way: checksum {actual}, not {expected}")
                if columns:
                    group.texts.append({tensor.name: unpack_texts(tensor, array[index]) for tensor, array in columns})
                frames.append(Frame(group, index))
        except WireError:
            if frames:
                yield frames
            raise
        yield frames
        start += len(frames) * stride
        number += len(frames)


def _recognised(view: memoryview, start: int, at: int, stride: int, heads: Heads, steps: Sequence[int]) -> list[str]:
    """Return the payload digests of the frames that follow the one at `start` and have its layout and these steps."""
    most = (len(view) - start) // stride
    # If the next frame has another layout, its payload mostly has another length, too: do not compare its head.
    if most < 2 or not steps or view[at - BIN32.size : at] != view[at - BIN32.size + stride : at + stride]:
        return []
    following = steps[: most - 1]
    memory = np.frombuffer(view[start:], np.uint8, most * stride).reshape(most, stride)
    return heads.recognise(memory[1 : 1 + len(following), : at - start], following)
