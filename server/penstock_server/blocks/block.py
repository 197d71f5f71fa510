"""Block in memory: the tokens of its rows, as views of the mapped file, and look-ups over several blocks together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock_server.files import SEAL_BYTES
from penstock_server.order.arrays import IntArray, distinct, find, in_order, numbered, starts_of
from penstock_server.recipes.encode import COLUMN, DOCUMENTS, REASON, ROW, SPLIT, TURNS
from penstock_server.recipes.fields import is_raw, numpy_type
from penstock_server.recipes.recipe import FEATURES
from penstock_server.recipes.split import Selection, is_selected, is_validation

STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"  # of Arrow IPC
# Arrow's view of a binary. A view holds short bytes itself. For longer ones it holds the first four, for comparisons; here they
# are zero, since no view is compared.
_VIEW = np.dtype(
    {
        "names": ["nbytes", "held", "buffer", "offset"],
        "formats": ["<i4", "S12", "<i4", "<i4"],
        "offsets": [0, 4, 8, 12],
        "itemsize": 16,
    }
)
_HELD_BYTES = 12
_FEW_PIECES, _FEW_BYTES = 128, 1 << 20  # below both, Python joins the pieces faster than Arrow
_REACH = (1 << 31) - 1  # bytes: largest offset in a view, and largest joined size


def joined(memory: Sequence[pa.Buffer], numbers: IntArray, starts: IntArray, sizes: IntArray) -> memoryview:
    """Concatenates bytes [starts[i], starts[i] + sizes[i]) of memory[numbers[i]] for each i.

    Raises IndexError: a range is outside its buffer, or the total is 2^31 bytes or more.
    """
    stops, nbytes = starts + sizes, int(sizes.sum())
    room = np.array([buffer.size for buffer in memory])[numbers] - stops
    if min(starts.min(initial=0), sizes.min(initial=0), room.min(initial=0), _REACH - nbytes) < 0:  # Arrow does not check this
        raise IndexError("bytes outside their buffer, or too many")
    if stops.max(initial=0) > _REACH or (len(numbers) < _FEW_PIECES and nbytes < _FEW_BYTES):
        return memoryview(bytearray().join(_slices(memory, numbers, starts, stops)))
    views = np.zeros(len(numbers), _VIEW)
    views["nbytes"], views["buffer"], views["offset"] = sizes, numbers, starts
    short = sizes <= _HELD_BYTES
    # Ranges at the start of their buffer, such as zeros and padding, are looked up once per buffer.
    which, place = np.unique(numbers[at := np.flatnonzero(short & (starts == 0))], return_inverse=True)
    views["held"][at] = np.array([memory[number][:_HELD_BYTES].to_pybytes() for number in which.tolist()], "S12")[place]
    at = np.flatnonzero(short & (starts != 0))
    views["held"][at] = list(map(bytes, _slices(memory, numbers[at], starts[at], stops[at])))
    # As bytes: exporting the buffer of a structured array describes its fields, which takes longer than the rest.
    column = pa.Array.from_buffers(pa.binary_view(), len(views), [None, pa.py_buffer(views.view(np.uint8)), *memory])
    *_, content = column.cast(pa.large_binary()).buffers()
    return memoryview(content).cast("B")


def _slices(memory: Sequence[pa.Buffer], numbers: IntArray, starts: IntArray, stops: IntArray) -> list[pa.Buffer]:
    spans = zip(numbers.tolist(), starts.tolist(), stops.tolist(), strict=True)
    return [memory[number][start:stop] for number, start, stop in spans]


_BOUNDS = np.dtype(np.int64)


@dataclass(frozen=True, slots=True)
class ListColumn:
    """A column with one list per row: row i is values[starts[i] : stops[i]].

    dtype    type of the values
    memory   buffer of the values, from the first one on
    bounds   start and stop of list i, int64, in the 16 bytes from byte i * stride on
    stride   8 if the lists are contiguous and cover all values; else 16
    """

    dtype: np.dtype[Any]
    memory: pa.Buffer
    bounds: pa.Buffer
    stride: int

    @classmethod
    def of(cls, column: pa.LargeListArray) -> ListColumn:
        """Views the lists of an Arrow column without a copy: thousands of blocks are held at a time."""
        values = column.values
        # Keep only buffers: Arrow's array objects would take half of a block's memory.
        return cls(numpy_type(values.type), _memory(values), _memory(column.offsets), _BOUNDS.itemsize)

    @property
    def is_whole(self) -> bool:
        """Whether the lists are contiguous and cover all values."""
        return self.stride == _BOUNDS.itemsize

    @property
    def values(self) -> npt.NDArray[np.integer[Any]]:
        """All values."""
        return np.frombuffer(self.memory, self.dtype)

    @property
    def starts(self) -> IntArray:
        """Start of each list, shape [num_lists]."""
        return self.offsets[:-1] if self.is_whole else self.offsets[::2]

    @property
    def stops(self) -> IntArray:
        """Stop of each list, shape [num_lists]."""
        return self.offsets[1:] if self.is_whole else self.offsets[1::2]

    @property
    def offsets(self) -> IntArray:
        """All bounds; for contiguous lists the start of each, then the end of the last."""
        return np.frombuffer(self.bounds, _BOUNDS)

    @property
    def lengths(self) -> IntArray:
        """Length of each list, shape [num_lists]."""
        return self.stops - self.starts

    def take(self, rows: IntArray) -> ListColumn:
        """Returns some of the rows."""
        bounds = np.stack([self.starts[rows], self.stops[rows]], axis=1)
        return ListColumn(self.dtype, self.memory, pa.py_buffer(bounds), 2 * _BOUNDS.itemsize)


class ListColumns:
    """A list column of several blocks, by block number. Avoids a Python step per block, since there may be thousands."""

    def __init__(self, columns: Sequence[ListColumn]) -> None:
        self._columns = columns

    def __getitem__(self, block: int) -> ListColumn:
        return self._columns[block]

    @cached_property
    def memory(self) -> list[pa.Buffer]:
        """Buffer of each block's values."""
        return [column.memory for column in self._columns]

    @cached_property
    def dtypes(self) -> list[np.dtype[Any]]:
        """Type of each block's values."""
        return [column.dtype for column in self._columns]

    @property
    def are_whole(self) -> bool:
        """Whether the lists of each block are contiguous and cover all of its values."""
        return all(column.is_whole for column in self._columns)

    def bounds(self, blocks: IntArray, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Returns (starts, stops) of lists rows[i] of block blocks[i] in its values. Raises IndexError for a missing row."""
        sizes = np.full(len(rows), 2 * _BOUNDS.itemsize)
        pairs = joined(self._bounds, blocks, rows * self._strides[blocks], sizes)
        starts, stops = np.frombuffer(pairs, _BOUNDS).reshape(-1, 2).T
        return starts, stops

    def lengths(self, blocks: IntArray, rows: IntArray) -> IntArray:
        """Returns the lengths of lists; arguments as in `bounds`."""
        starts, stops = self.bounds(blocks, rows)
        return stops - starts

    def values(self, blocks: IntArray, starts: IntArray, lengths: IntArray) -> npt.NDArray[Any]:
        """Concatenates values [starts[i], starts[i] + lengths[i]) of block blocks[i]; all blocks must have one type."""
        dtype = self.dtypes[0]
        return np.frombuffer(joined(self.memory, blocks, starts * dtype.itemsize, lengths * dtype.itemsize), dtype)

    @cached_property
    def _bounds(self) -> list[pa.Buffer]:
        return [column.bounds for column in self._columns]

    @cached_property
    def _strides(self) -> IntArray:
        return np.array([column.stride for column in self._columns])


def _memory(numbers: pa.Array) -> pa.Buffer:
    """Returns the buffer slice of numbers without nulls, from the first to the last."""
    itemsize = numpy_type(numbers.type).itemsize
    return numbers.buffers()[1].slice(numbers.offset * itemsize, len(numbers) * itemsize)


Turn = tuple[list[int], bool]  # tokens, and whether they have loss


class RowSpans(NamedTuple):
    """Parts of rows, in columns: part i is tokens [firsts[i], lasts[i]) of rows[i], in span spans[i]."""

    spans: IntArray
    rows: IntArray
    firsts: IntArray
    lasts: IntArray


class TokenRuns(NamedTuple):
    """Runs of tokens, in columns: piece i, of span spans[i], is values[starts[i] : starts[i] + lengths[i]] of a feature.

    They are in the order of the spans; no run is empty. `in_loss[i]`: the tokens of the run have loss.
    """

    spans: IntArray
    starts: IntArray
    lengths: IntArray
    in_loss: npt.NDArray[np.bool_]


class Feature(NamedTuple):
    """One token list per row, with the lengths of its turns: prompt, response, prompt, ...; without turns, all is response.

    `documents` has the lengths of the documents in each row; without it, a row is one document.
    """

    tokens: ListColumn
    turns: ListColumn | None
    documents: ListColumn | None = None

    def take(self, rows: IntArray) -> Feature:
        """Returns the feature of some of the rows."""
        turns, documents = (lists and lists.take(rows) for lists in (self.turns, self.documents))
        return Feature(self.tokens.take(rows), turns, documents)

    def prompt_lengths(self, rows: IntArray) -> IntArray:
        """Returns the tokens of each row before its first response, shape of `rows`."""
        lengths = np.zeros(len(rows), np.int64)
        if self.turns is not None:
            starts, stops, turns = self.turns.starts[rows], self.turns.stops[rows], self.turns.values
            with_prompt, with_both = (np.flatnonzero(stops - starts > n) for n in (0, 1))
            lengths[with_prompt] = turns[starts[with_prompt]]
            for row in with_both[turns[starts[with_both] + 1] == 0].tolist():  # as in a chat with an empty first reply
                of_row = turns[starts[row] : stops[row]]
                first = np.append(np.flatnonzero(of_row[1::2]), len(of_row))[0]
                lengths[row] = of_row[: 2 * first + 1].sum()
        return lengths

    def num_loss_tokens(self, row: int) -> int:
        """Returns the number of tokens with loss in a row."""
        if self.turns is None:
            return int(self.tokens.lengths[row])
        return int(self.turns.values[self.turns.starts[row] : self.turns.stops[row]][1::2].sum(dtype=np.int64))

    def row(self, row: int, most: int | None = None) -> list[Turn]:
        """Returns the tokens of a row by turn, at most the first `most`."""
        of_row = RowSpans(*np.array([[0], [row], [0], [len(self.tokens.values) if most is None else most]]))
        _, starts, lengths, in_loss = Features([self]).cut(np.zeros(1, np.int64), of_row)
        turns = zip(starts.tolist(), lengths.tolist(), in_loss.tolist(), strict=True)
        return [(self.tokens.values[start : start + length].tolist(), is_in_loss) for start, length, is_in_loss in turns]


class Features:
    """A feature of several blocks, by block number."""

    def __init__(self, features: Sequence[Feature]) -> None:
        self.tokens = ListColumns([feature.tokens for feature in features])
        self._turns = _Partition([feature.turns for feature in features])
        self._documents = _Partition([feature.documents for feature in features])

    @cached_property
    def are_streams(self) -> bool:
        """Whether each block's stream is all of its tokens in order, without prompts."""
        return self.tokens.are_whole and not self._turns.blocks

    def cut(self, blocks: IntArray, parts: RowSpans) -> TokenRuns:
        """Returns the tokens of parts of rows, part i in block blocks[i], cut at the row's end and between turns."""
        spans, rows, firsts, lasts = parts
        begins, ends = self.tokens.bounds(blocks, rows)
        part, firsts, lasts, numbers = self._turns.cut(blocks, rows, firsts, np.minimum(lasts, ends - begins))
        lengths = lasts - firsts
        starts, is_kept = begins[part] + firsts, lengths > 0
        return TokenRuns(spans[part][is_kept], starts[is_kept], lengths[is_kept], numbers[is_kept] % 2 == 1)

    def documents(self, blocks: IntArray, parts: RowSpans) -> tuple[IntArray, IntArray]:
        """Returns the documents in parts of rows, as passed to `cut`: the part of each, and its first token in the row."""
        part, firsts, _, _ = self._documents.cut(blocks, *parts[1:])
        return part, firsts


class _Partition:
    """Division of rows into pieces: for each block the lengths of each row's pieces, or None for whole rows."""

    def __init__(self, lists: Sequence[ListColumn | None]) -> None:
        self._has_lists = np.array([column is not None for column in lists])
        self._lists = ListColumns([column for column in lists if column is not None])
        self.blocks = int(self._has_lists.sum())

    def cut(self, blocks: IntArray, rows: IntArray, firsts: IntArray, lasts: IntArray) -> tuple[IntArray, ...]:
        """Cuts tokens [firsts[i], lasts[i]) of rows between pieces; returns the part i, the tokens and the number of each.

        The number is that of the piece in its row. A whole row has number 1: without turns, all is response.
        """
        whole = (np.arange(len(rows)), firsts, lasts, np.ones(len(rows), np.int64))
        if not self.blocks:
            return whole
        has_lists = self._has_lists[blocks]
        plain, others = np.flatnonzero(~has_lists), np.flatnonzero(has_lists)
        part, *pieces = self._cut(*(column[others] for column in (blocks, rows, firsts, lasts)))
        return tuple(in_order([tuple(column[plain] for column in whole), (others[part], *pieces)]))

    def _cut(
        self, blocks: IntArray, rows: IntArray, firsts: IntArray, lasts: IntArray
    ) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        # Scan each row's pieces once: one row may be cut into thousands of parts.
        keys = blocks << 32 | rows
        scanned = distinct(keys)
        in_blocks, in_rows = np.divmod(scanned, 1 << 32)
        in_blocks = np.cumsum(self._has_lists)[in_blocks] - 1  # numbers among the blocks with lists
        starts, stops = self._lists.bounds(in_blocks, in_rows)
        offsets = starts_of(self._lists.values(in_blocks, starts, stops - starts))  # all pieces of these rows, concatenated
        first_pieces = starts_of(stops - starts)[np.searchsorted(scanned, keys)]
        begins = offsets[first_pieces]
        pieces = find(offsets, begins + firsts)
        part, further = numbered(np.maximum(np.searchsorted(offsets, begins + lasts) - pieces, 0))
        pieces, begins = pieces[part] + further, begins[part]
        firsts = np.maximum(offsets[pieces] - begins, firsts[part])
        lasts = np.minimum(offsets[pieces + 1] - begins, lasts[part])
        return part, firsts, lasts, pieces - first_pieces[part]


@dataclass(frozen=True)
class Block:
    """Tokens of the rows of one block, or of some of them.

    features  "tokens", or "chosen" and "rejected"
    columns   passthrough columns, by name
    bad       unusable rows, with reasons; they have no tokens
    numbered  number of each row among the stored rows of the block, before the filter, shape [num_rows]; None if all are here
    splits    hash of each row that decides its split, shape [num_rows]
    nbytes    bytes of the whole block in the cache
    picked    numbers of the only rows that were tokenized, all good, in the block or the requested split; ascending
    """

    features: dict[str, Feature]
    columns: dict[str, pa.Array]
    bad: dict[int, str]
    numbered: npt.NDArray[np.integer[Any]] | None
    splits: npt.NDArray[np.uint32]
    nbytes: int
    picked: IntArray | None = None

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> Block:
        """Returns the block of an encoded record batch."""
        names, reasons = batch.schema.names, batch.column(REASON)
        bad_rows = np.flatnonzero(reasons.is_valid().to_numpy(zero_copy_only=False))
        features = {}
        for name in FEATURES:
            if name in names:
                lists = (ListColumn.of(batch.column(n)) if n in names else None for n in (name + TURNS, name + DOCUMENTS))
                features[name] = Feature(ListColumn.of(batch.column(name)), *lists)
        return cls(
            features=features,
            columns={name.removeprefix(COLUMN): batch.column(name) for name in names if name.startswith(COLUMN)},
            bad={int(row): reasons[int(row)].as_py() for row in bad_rows},
            numbered=_view(batch.column(ROW)) if ROW in names else None,
            splits=_view(batch.column(SPLIT)),
            nbytes=pa.ipc.get_record_batch_size(batch) + batch.schema.serialize().size + len(STREAM_END) + SEAL_BYTES,
        )

    @property
    def num_rows(self) -> int:
        """Number of rows, including bad ones."""
        return len(self.splits)

    @property
    def stored_rows(self) -> IntArray:
        """Number of each row in the block in the shard, shape [num_rows]."""
        return np.arange(self.num_rows) if self.numbered is None else self.numbered.astype(np.int64)

    def is_validation(self, row: int, share: float) -> bool:
        """Returns whether the hash holds a row out for validation, a `share` of all rows."""
        return bool(is_validation(self.splits[row : row + 1], share)[0])

    def selected(self, selection: Selection, share: float) -> Block:
        """Returns the rows of a split as a block; the hash holds out `share` for validation."""
        return self.take(np.flatnonzero(is_selected(is_validation(self.splits, share), selection)))

    def take(self, rows: IntArray) -> Block:
        """Returns some of the rows as a block."""
        return replace(
            self,
            features={name: feature.take(rows) for name, feature in self.features.items()},
            columns={name: column.take(pa.array(rows)) for name, column in self.columns.items()},
            bad={number: self.bad[row] for number, row in enumerate(rows.tolist()) if row in self.bad} if self.bad else {},
            numbered=rows if self.numbered is None else self.numbered[rows],
            splits=self.splits[rows],
        )

    @cached_property
    def numbers(self) -> dict[str, npt.NDArray[Any]]:
        """Numeric columns, each of shape [num_rows, *item]."""
        return {name: _numbers(column) for name, column in self.columns.items() if not is_raw(column.type)}

    def text_bounds(self, name: str, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Returns where the values of a text or binary column in some rows start and stop in the column's bytes."""
        column = self.columns[name]
        offsets = np.frombuffer(column.buffers()[1], np.int64)[column.offset :]
        return offsets[rows], offsets[rows + 1]

    @property
    def row_lengths(self) -> IntArray:
        """Tokens of each row, shape [num_rows]; of the longest feature if a row has several."""
        return reduce(np.maximum, (feature.tokens.lengths for feature in self.features.values()))

    def prompt_lengths(self, rows: IntArray) -> IntArray:
        """Returns the tokens of rows before their first response, the minimum over the sides of a pair; shape of `rows`."""
        return reduce(np.minimum, (feature.prompt_lengths(rows) for feature in self.features.values()))

    def side_lengths(self, row: int) -> dict[str, int] | None:
        """Returns the tokens of each side of a preference pair; None for other rows."""
        if len(self.features) == 1:
            return None
        lists = {name: feature.tokens for name, feature in self.features.items()}
        return {name: int(tokens.stops[row] - tokens.starts[row]) for name, tokens in lists.items()}

    @cached_property
    def stream(self) -> IntArray:
        """Start of each row in the block's stream of tokens, shape [num_rows + 1]."""
        first, *others = (feature.tokens for feature in self.features.values())
        return first.offsets if first.is_whole and not others else starts_of(self.row_lengths)

    @property
    def has_good(self) -> bool:
        """Whether any row can be used."""
        return len(self.bad) < self.num_rows

    @cached_property
    def replacements(self) -> IntArray:
        """Row to serve for each row: itself, or the next good row, wrapping at the block's end. Needs a good row."""
        good = np.delete(np.arange(self.num_rows), np.fromiter(self.bad, np.int64, len(self.bad)))
        return good[np.searchsorted(good, np.arange(self.num_rows)) % len(good)]


def _view(numbers: pa.Array) -> npt.NDArray[Any]:
    """Views numbers without nulls. Arrow's view would keep its array objects alive, half of a block's memory."""
    dtype = numpy_type(numbers.type)
    return np.frombuffer(numbers.buffers()[1], dtype, len(numbers), numbers.offset * dtype.itemsize)


def _numbers(column: pa.Array) -> npt.NDArray[Any]:
    if pa.types.is_fixed_size_list(column.type):
        return _numbers(column.flatten()).reshape(len(column), column.type.list_size)
    numbers: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return numbers
