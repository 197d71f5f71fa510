"""What is cut in columns is what plain lists say."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.wire import Address, Heads, Layout
from penstock_server.batches.plan import TensorSpec
from penstock_server.batches.samples import LoadedBlock, Samples
from penstock_server.batches.writer import Pieces, Places, _add_ones, _add_tokens, _values, by_step_width
from penstock_server.blocks.block import Block, Feature, Features, ListColumn, RowSpans
from penstock_server.order.packing import STREAM, Spans

Row = list[list[int]]  # turns: prompt, response, prompt, ...
PAD = 999

rows_of_a_block = st.lists(st.lists(st.lists(st.integers(0, 900), max_size=4), min_size=1, max_size=4), min_size=1, max_size=4)


def block_of(rows: list[Row], *, has_turns: bool, has_documents: bool = False) -> Block:
    def column(lists: list[list[int]], type_: Any) -> ListColumn:
        return ListColumn.of(pa.array(lists, pa.large_list(type_)))

    tokens = column([[token for turn in row for token in turn] for row in rows], pa.uint16())
    turns = column([[len(turn) for turn in row] for row in rows], pa.int32()) if has_turns else None
    documents = column([document_lengths(row, is_packed=True) for row in rows], pa.int32()) if has_documents else None
    return Block({"tokens": Feature(tokens, turns, documents)}, {}, {}, np.arange(len(rows)), np.zeros(len(rows), np.uint32), 0)


def document_lengths(row: Row, *, is_packed: bool) -> list[int]:
    """The lengths of a row's documents. In a packed row each turn is one."""
    return [len(turn) for turn in row if turn] if is_packed else [sum(map(len, row))]


def marked(row: Row, *, has_turns: bool) -> list[tuple[int, bool]]:
    """The tokens of a row, each with whether it has loss."""
    return [(token, number % 2 == 1 or not has_turns) for number, turn in enumerate(row) for token in turn]


@given(rows_of_a_block, st.booleans(), st.data())
def test_prompt_length_is_the_tokens_before_the_first_loss(rows: list[Row], has_turns: bool, data: st.DataObject) -> None:
    asked = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=5))
    tokens = [marked(rows[row], has_turns=has_turns) for row in asked]
    before = [[in_loss for _, in_loss in of_row].index(True) if any(m for _, m in of_row) else len(of_row) for of_row in tokens]
    found = block_of(rows, has_turns=has_turns).prompt_lengths(np.array(asked, np.int64))
    assert found.tolist() == before


def test_prompt_length_of_a_pair_is_the_shorter_side() -> None:
    chosen, rejected = (block_of([row], has_turns=True) for row in ([[1, 2, 3], [4]], [[1], [2, 3, 4]]))
    features = {"chosen": chosen.features["tokens"], "rejected": rejected.features["tokens"]}
    assert replace(chosen, features=features).prompt_lengths(np.array([0])).tolist() == [1]
    assert replace(chosen, features=features).side_lengths(0) == {"chosen": 4, "rejected": 4}


@given(rows_of_a_block, st.booleans(), st.data())
def test_samples_are_cut_at_row_ends_and_between_turns(rows: list[Row], has_turns: bool, data: st.DataObject) -> None:
    block = block_of(rows, has_turns=has_turns)
    spans = st.tuples(st.integers(0, len(rows) - 1), st.integers(0, 9), st.integers(0, 20))
    asked = data.draw(st.lists(spans, min_size=1, max_size=5))
    numbers, firsts, lasts = (np.array(column) for column in zip(*asked, strict=True))
    parts = RowSpans(np.arange(len(asked)), numbers, firsts, lasts)
    pieces = Features([block.features["tokens"]]).cut(np.zeros(len(asked), np.int64), parts)
    values = block.features["tokens"].tokens.values
    found: list[list[tuple[int, bool]]] = [[] for _ in asked]
    for span, start, length, in_loss in zip(*(column.tolist() for column in pieces), strict=True):
        assert length > 0
        found[span] += [(token, in_loss) for token in values[start : start + length].tolist()]
    assert pieces.spans.tolist() == sorted(pieces.spans.tolist())
    assert found == [marked(rows[row], has_turns=has_turns)[first:last] for row, first, last in asked]
    for number, row in enumerate(rows):
        turns = [([token for token, _ in turn], turn[0][1]) for turn in _runs(marked(row, has_turns=has_turns), row, has_turns)]
        assert block.features["tokens"].row(number) == turns


def test_samples_cut_long_rows_in_linear_time() -> None:
    num_turns, num_parts = 10_000, 500
    feature = block_of([[[1, 2]] * num_turns], has_turns=True).features["tokens"]
    borders = np.linspace(0, 2 * num_turns, num_parts + 1, dtype=np.int64)
    parts = RowSpans(np.arange(num_parts), np.zeros(num_parts, np.int64), borders[:-1], borders[1:])
    tracemalloc.start()
    pieces = Features([feature]).cut(np.zeros(num_parts, np.int64), parts)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1000 * num_turns
    assert pieces.lengths.tolist() == [2] * num_turns


def _runs(tokens: list[tuple[int, bool]], row: Row, has_turns: bool) -> list[list[tuple[int, bool]]]:
    sizes, at, found = ([len(turn) for turn in row] if has_turns else [len(tokens)]), 0, []
    for size in sizes:
        found += [tokens[at : at + size]] if size else []
        at += size
    return found


@given(
    st.lists(st.tuples(rows_of_a_block, st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=3),
    st.booleans(),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 8),
    st.randoms(use_true_random=False),
)
def test_samples_fill_lines_in_order_then_pad(
    of_blocks: list[tuple[list[Row], bool, bool, bool]],
    of_stream: bool,
    num_batches: int,
    batch_size: int,
    longest: int,
    random: Random,
) -> None:
    contents = [rows for rows, *_ in of_blocks]
    blocks = [block_of(rows, has_turns=has_turns, has_documents=is_packed) for rows, has_turns, _, is_packed in of_blocks]
    blocks = [
        block.take(np.arange(len(rows))) if is_split else block
        for block, (rows, _, is_split, _) in zip(blocks, of_blocks, strict=True)
    ]
    marked_rows = [[marked(row, has_turns=has_turns) for row in rows] for rows, has_turns, *_ in of_blocks]
    documents = [[document_lengths(row, is_packed=of[3]) for row in of[0]] for of in of_blocks]
    streams = [[token for row in rows for token in row] for rows in marked_rows]
    parts: list[tuple[int, int, int, int, int]] = []
    expected: list[list[tuple[int, bool]]] = []
    starts: list[list[int]] = []  # of documents
    for sample in range(num_batches * batch_size):
        line: list[tuple[int, bool]] = []
        begins: list[int] = []
        while len(line) < longest:
            number = random.randrange(len(blocks))
            row = STREAM if of_stream else random.randrange(len(contents[number]))
            whole = streams[number] if of_stream else marked_rows[number][row]
            start = random.randint(0, len(whole))
            stop = random.randint(start, min(len(whole), start + longest - len(line)))
            if of_stream and start == stop:  # no packing has such a span
                break
            parts.append((sample, number, row, start, stop))
            sizes = [size for own in documents[number] for size in own] if of_stream else documents[number][row]
            borders = np.cumsum([0, *sizes]).tolist()
            met = [max(a, start) for a, b in pairwise(borders) if max(a, start) < min(b, stop)]
            begins += [len(line) + at - start for at in met]
            line += whole[start:stop]
            if random.random() < 0.4:
                break
        expected.append(line)
        starts.append(begins)

    assume(parts)
    loaded = [LoadedBlock(None, 0, index, block) for index, block in enumerate(blocks)]  # type: ignore[arg-type]
    columns = Spans(*(np.array(column) for column in zip(*parts, strict=True)))
    samples = Samples(len(expected), loaded, columns, np.zeros(len(expected), np.bool_))

    def made(tensor: TensorSpec, width: int, dtype: str) -> Any:
        layout = Layout.of(
            [("other", "uint8", (random.randint(1, 99),)), ("it", dtype, (batch_size, width)[: 2 if width else 1])]
        )
        # In two or three parts, and in one of them the frames stand farther apart.
        cuts = sorted({0, random.randint(0, num_batches - 1), random.randint(0, num_batches - 1)})
        begins = []
        for number, (first, last) in enumerate(pairwise([*cuts, num_batches])):
            begin, stride = 2 * first * layout.nbytes + layout.tensors[1].offset, (1 + (number == 1)) * layout.nbytes
            begins += [begin + at * stride for at in range(last - first)]
        itemsize = np.dtype(dtype).itemsize
        places = Places(np.array(begins), np.full(num_batches, width or batch_size), batch_size, itemsize)
        pieces = Pieces()
        if tensor.kind == "mask":
            _add_ones(tensor, places, samples, pieces)
        elif tensor.has_lines:
            _add_tokens(tensor, places, samples, PAD, pieces)
        else:
            pieces.put(_values(tensor, samples).astype(dtype), places.begins)
        body = pieces.join(num_batches * 2 * layout.nbytes)
        written = [np.frombuffer(body, dtype, batch_size * max(width, 1), begin) for begin in begins]
        values = np.concatenate(written).reshape((-1, width) if width else -1).tolist()
        for array in written:
            array[...] = 0
        assert not any(body)
        return values

    def padded(line: list[int], width: int, value: int) -> list[int]:
        return line + [value] * (width - len(line))

    tokens = TensorSpec(name="input_ids", kind="tokens", dtype="uint16", feature="tokens", longest=longest)
    assert made(tokens, longest, "uint16") == [padded([token for token, _ in line], longest, PAD) for line in expected]
    wide = TensorSpec(name="input_ids", kind="tokens", dtype="uint32", feature="tokens", longest=longest)
    assert made(wide, longest, "uint32") == made(tokens, longest, "uint16")
    mask = TensorSpec(name="loss_mask", kind="mask", dtype="uint8", feature="tokens", longest=longest)
    assert made(mask, longest, "uint8") == [padded([int(in_loss) for _, in_loss in line], longest, 0) for line in expected]
    lengths = TensorSpec(name="lengths", kind="count", dtype="int32", feature="tokens")
    assert made(lengths, 0, "int32") == [len(line) for line in expected]
    for turn, is_in_loss in (("prompt", False), ("response", True)):
        of_turn = [[token for token, in_loss in line if in_loss == is_in_loss][:3] for line in expected]
        side = TensorSpec(name=turn, kind="tokens", dtype="uint16", feature="tokens", turn=turn, longest=3)  # type: ignore[arg-type]
        assert made(side, 3, "uint16") == [padded(line, 3, PAD) for line in of_turn]
        assert samples.lengths(side).tolist() == [len(line) for line in of_turn]
    bits = TensorSpec(name="document_starts", kind="starts", dtype="uint8", feature="tokens", longest=longest)
    found = np.unpackbits(np.array(made(bits, -(-longest // 8), "uint8"), np.uint8), axis=1, bitorder="little")
    ends = [[len(line)] if len(line) < longest else [] for line in expected]
    assert [np.flatnonzero(line).tolist() for line in found] == [
        sorted({*begins, *end}) for begins, end in zip(starts, ends, strict=True)
    ]


@pytest.mark.parametrize("longer", [1 << 7, 1 << 8, 1 << 16, 1 << 32])
@pytest.mark.parametrize("stride", [1, 3])
def test_step_widths_group_heads_of_one_length(longer: int, stride: int) -> None:
    steps = range(longer - 8, longer + 8, stride)
    parts = list(by_step_width(steps))
    assert [step for part in parts for step in part] == list(steps)
    for length in range(64):  # heads are rounded up, so the bytes of a step show with some names only
        address = Address(dataset="d" * length, snapshot="s", spec_digest="p", epoch=0, rank=0, step=0)
        heads = Heads(address, Layout((), 0))
        assert all(len({len(heads.head(step)) for step in part}) == 1 for part in parts)
