"""Arrow and Parquet files: types made plain, rows of any size and shape, files that are damaged or mixed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather as pf
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from importing import Rows, imported, read_back, shards_in, types_of
from penstock_server.importing import columnar
from penstock_server.importing.run import Import
from penstock_server.importing.shards import Shape
from penstock_server.importing.source import ImportRefused
from penstock_server.importing.token_formats import Documents

FORMATS = ["file.arrow", "stream.arrow", "lz4.feather", "x.parquet", "x.ipc"]
TEXT = pa.string()
TYPES = [
    (pa.int8(), "int8"),
    (pa.uint64(), "uint64"),
    (pa.float32(), "float"),
    (pa.bool_(), "bool"),
    (pa.timestamp("us"), "timestamp[us]"),
    (pa.decimal128(9, 2), "decimal128(9, 2)"),
    (pa.binary(4), "fixed_size_binary[4]"),
    (TEXT, "string"),
    (pa.large_string(), "string"),
    (pa.dictionary(pa.int16(), TEXT), "string"),
    (pa.large_binary(), "binary"),
    (pa.list_(pa.uint16()), "list<item: int32>"),
    (pa.large_list(pa.int64()), "list<item: int32>"),
    (pa.list_(pa.int32(), 2), "list<item: int32>"),
    (pa.list_(pa.list_(pa.int64())), "list<item: list<item: int64>>"),
    (pa.map_(TEXT, pa.int64()), "map<string, int64>"),
    (pa.map_(pa.large_string(), pa.int64()), "map<string, int64>"),
    (pa.json_(), "extension<arrow.json>"),
    (pa.json_(pa.large_string()), "extension<arrow.json>"),
    (pa.struct([("role", pa.large_string()), ("n", pa.int64())]), "struct<role: string, n: int64>"),
    (pa.struct([("lang", pa.dictionary(pa.int8(), TEXT))]), "struct<lang: string>"),
    (pa.list_(pa.dictionary(pa.int8(), TEXT)), "list<item: string>"),
    (pa.null(), "string"),
]


def write(path: Path, table: pa.Table, rows: int = 1 << 16) -> Path:
    """The table in the format that the name says, in record batches or row groups of some rows."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows)
    elif path.suffix == ".feather":
        pf.write_feather(table, str(path), compression="lz4", chunksize=rows)
    else:
        kind = pa.ipc.new_stream if path.name.startswith("stream") else pa.ipc.new_file
        with kind(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=rows)
    return path


def value_of(type_: pa.DataType, number: int) -> object:
    """A value of a type, another for each number."""
    types = pa.types
    if isinstance(type_, pa.BaseExtensionType):
        return value_of(type_.storage_type, number)
    if types.is_dictionary(type_) or types.is_string(type_) or types.is_large_string(type_):
        return f"text {number % 7}"
    if types.is_map(type_):
        return [("key", number)]
    if types.is_struct(type_):
        return {field.name: value_of(field.type, number) for field in type_}
    if types.is_fixed_size_list(type_):
        return [number, number + 1]
    if types.is_list(type_) or types.is_large_list(type_):
        return [value_of(type_.value_type, number)] * (number % 3)
    if types.is_binary(type_) or types.is_large_binary(type_) or types.is_fixed_size_binary(type_):
        return b"%04d" % number
    if types.is_null(type_):
        return None
    if types.is_decimal(type_):
        return Decimal(number) / 4
    if types.is_boolean(type_):
        return number % 2 == 0
    return pa.scalar(number).cast(type_).as_py()


@pytest.mark.parametrize("name", FORMATS)
def test_every_type_comes_back_plain_with_its_values(tmp_path: Path, name: str) -> None:
    columns = [
        pa.array([None if number % 5 == 4 else value_of(type_, number) for number in range(100)], type_) for type_, _ in TYPES
    ]
    table = pa.table(columns, [f"c{number}" for number in range(len(TYPES))])
    read = imported(tmp_path / "out", write(tmp_path / name, table, 30))
    assert list(types_of(read).values()) == [plain for _, plain in TYPES]
    assert read.to_pylist() == table.to_pylist()


@given(
    lengths=st.lists(st.none() | st.integers(0, 50), min_size=1, max_size=60),
    rows=st.integers(1, 60),
    start=st.integers(0, 5),
    name=st.sampled_from(FORMATS),
    castable_bytes=st.sampled_from([100, 1 << 30]),  # above it, batches are copied: their offsets may need 64 bits
)
def test_rows_come_back_in_order_from_batches_and_slices_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int | None], rows: int, start: int, name: str, castable_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("columnar")
    tokens = [None if length is None else list(range(number, number + length)) for number, length in enumerate(lengths)]
    texts = [None if length is None else "é" * length for length in lengths]
    columns = {"tokens": pa.array(tokens, pa.list_(pa.int64())), "text": texts, "view": pa.array(texts, pa.string_view())}
    table = pa.table({**columns, "n": range(len(lengths))}).slice(start)
    if not table.num_rows:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columnar, "_CASTABLE_BYTES", castable_bytes)
        patch.setattr(columnar, "TABLE_BYTES", 300)
        shape = Shape(group_bytes=500, shard_bytes=900, group_rows=7)
        read = imported(folder / "out", write(folder / name, table, rows), shape=shape)
    assert read.to_pylist() == table.to_pylist()


@pytest.mark.parametrize("name", ["file.arrow", "x.parquet"])
@pytest.mark.parametrize(
    ("kind", "largest", "type_"),
    [
        (pa.int64(), 2**31 - 1, "list<item: int32>"),
        (pa.int64(), 2**31, "list<item: int64>"),
        (pa.int64(), -(2**31) - 1, "list<item: int64>"),
        (pa.uint32(), 2**32 - 1, "list<item: int64>"),
        (pa.uint64(), 5, "list<item: int32>"),
    ],
)
def test_token_lists_take_the_narrowest_type_that_holds_every_id(
    tmp_path: Path, name: str, kind: pa.DataType, largest: int, type_: str
) -> None:
    rows: list[list[int] | None] = [[1], None, [], *([[2, 3]] * 70_000), [4, largest]]
    tokens, early = (pa.array(column, pa.list_(kind)) for column in (rows, rows[::-1]))
    table = pa.table({"tokens": tokens, "early": early, "other": pa.nulls(len(rows), pa.list_(kind))})
    read = imported(tmp_path / "out", write(tmp_path / name, table))
    assert types_of(read) == {"tokens": type_, "early": type_, "other": "list<item: int32>"}
    assert read.column("tokens").to_pylist() == rows


def test_ids_that_are_stored_as_a_dictionarys_take_the_type_that_holds_them(tmp_path: Path) -> None:
    tokens = pa.ListArray.from_arrays([0, 1, 3], pa.array([7, 5_000_000_000, 7]).dictionary_encode())
    read = imported(tmp_path / "out", write(tmp_path / "x.arrow", pa.table({"tokens": tokens}), 2))
    assert types_of(read) == {"tokens": "list<item: int64>"}
    assert read.column("tokens").to_pylist() == [[7], [5_000_000_000, 7]]


def test_columns_are_picked_in_the_order_given_also_where_their_names_have_dots(tmp_path: Path) -> None:
    for name in FORMATS:
        table = pa.table({"a": [1], "a.b": [2], "c": [{"d": 3}]})
        read = imported(tmp_path / name / "out", write(mkdir(tmp_path / name) / name, table), columns=["c", "a.b"])
        assert [list(row.items()) for row in read.to_pylist()] == [[("c", {"d": 3}), ("a.b", 2)]]


def mkdir(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_cut_short_or_of_another_kind_is_refused(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, pa.table({"n": np.arange(100_000), "text": ["x"] * 100_000}), 10_000)
    whole = path.read_bytes()
    for content in (b"", whole[:20], whole[: len(whole) // 2], b"no such thing" * 40):
        path.write_bytes(content)
        with pytest.raises(ImportRefused, match=f"{path} cannot be (read|imported): "):
            imported(tmp_path / "out", path)
        assert list(tmp_path.iterdir()) == [path]


COUNTED = 9_000  # rows of a row group; takes three bytes in a footer


def three_bytes(number: int) -> bytes:
    """Encode a number as Parquet footers do: zigzag, then seven bits a byte."""
    return bytes([2 * number & 0x7F | 0x80, 2 * number >> 7 & 0x7F | 0x80, 2 * number >> 14])


def write_counted(path: Path, numbers: dict[int, int]) -> Path:
    """Write two row groups, then change numbers of rows in the footer; keys are OF_FILE and the like."""
    # The footer counts the nulls of nullable columns as well, which would be more numbers to find.
    schema = pa.schema([pa.field("text", TEXT, nullable=False), pa.field("n", pa.int64(), nullable=False)])
    table = pa.table({"text": [f"row {number}" for number in range(2 * COUNTED)], "n": range(2 * COUNTED)}, schema=schema)
    pq.write_table(table, path, row_group_size=COUNTED, write_statistics=False)
    whole = path.read_bytes()
    begin = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    before, *parts = re.split(b"(?=%b|%b)" % tuple(map(re.escape, map(three_bytes, (2 * COUNTED, COUNTED)))), whole[begin:])
    assert len(parts) == 1 + 2 * 3
    for place, number in numbers.items():
        parts[place] = three_bytes(number) + parts[place][3:]
    path.write_bytes(whole[:begin] + before + b"".join(parts))
    return path


# Positions among the footer's numbers of rows and values: of the file, and of the second row group.
OF_FILE, OF_N, OF_GROUP = 0, 5, 6


@pytest.mark.parametrize("stated", [0, COUNTED, 2 * COUNTED - 1])
def test_rows_are_imported_from_a_parquet_file_whose_own_count_is_too_small(tmp_path: Path, stated: int) -> None:
    read = imported(tmp_path / "out", write_counted(tmp_path / "x.parquet", {OF_FILE: stated}))
    assert read["n"].to_pylist() == list(range(2 * COUNTED))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({OF_GROUP: COUNTED + 5}, "row group 1 is damaged: the footer states 9,005 rows, but only 9,000 can be read"),
        (
            {OF_GROUP: 4_500, OF_FILE: 0},
            "row group 1 is damaged: the footer states 4,500 rows, but 9,000 values in column 'text'",
        ),
        ({OF_GROUP: 4_500}, "the footer is damaged: it states 18,000 rows, but 13,500 in the row groups"),
        ({OF_N: 9_001}, "row group 1 is damaged: the footer states 9,000 rows, but 9,001 values in column 'n'"),
    ],
)
def test_a_parquet_file_with_fewer_rows_than_its_footer_states_is_refused(
    tmp_path: Path, numbers: dict[int, int], message: str
) -> None:
    path = write_counted(tmp_path / "x.parquet", numbers)
    with pytest.raises(ImportRefused, match=f"{path} cannot be imported: {re.escape(message)}"):
        imported(tmp_path / "out", path)
    assert list(tmp_path.iterdir()) == [path]


def test_categories_as_polars_writes_them_become_text(tmp_path: Path) -> None:
    numbers, texts = pa.array([1, 0, None], pa.uint32()), pa.array(["fox", "dog"], pa.string_view())
    table = pa.table({"c": pa.DictionaryArray.from_arrays(numbers, texts), "n": [1, 2, 3]})
    read = imported(tmp_path / "out", write(tmp_path / "file.arrow", table, 2))
    assert read.to_pydict() == {"c": ["dog", "fox", None], "n": [1, 2, 3]}


def test_times_of_96_bits_are_imported_beyond_the_year_2262(tmp_path: Path) -> None:
    table = pa.table({"at": pa.array([datetime(2500, 1, 1)], pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "x.parquet", use_deprecated_int96_timestamps=True)
    assert imported(tmp_path / "out", tmp_path / "x.parquet").to_pydict() == {"at": [datetime(2500, 1, 1)]}


def test_feather_of_version_1_is_told(tmp_path: Path) -> None:
    (path := tmp_path / "old.feather").write_bytes(b"FEA1" + bytes(100) + b"FEA1")
    with pytest.raises(
        ImportRefused, match=r"cannot be imported: it is Feather of version 1, which is not read; version 2 is\."
    ):
        imported(tmp_path / "out", path)


@pytest.mark.parametrize("name", ["file.arrow", "x.parquet"])
def test_text_that_is_not_utf8_is_refused(tmp_path: Path, name: str) -> None:
    broken = pa.Array.from_buffers(TEXT, 2, [None, pa.array([0, 1, 2], pa.int32()).buffers()[1], pa.py_buffer(b"a\xff")])
    with pytest.raises(ImportRefused, match=f"{name} cannot be imported: .*UTF8.*Nothing was written"):
        imported(tmp_path / "out", write(tmp_path / name, pa.table({"text": broken})))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table([[1], [2]], names=["a", "a"]), "2 columns are called 'a'"),
        (pa.table({"a": pa.array([[1]], pa.list_view(pa.int64()))}), "column 'a': list_view.* cannot be turned into list"),
        (
            pa.table({"a": pa.array([[[1]]], pa.list_(pa.list_view(pa.int64())))}),
            "column 'a': list_view.* cannot be turned into list",
        ),
        (pa.table({"a": pc.run_end_encode(pa.array([1, 1]))}), "column 'a': Parquet does not hold run_end"),
        (pa.table({"a": [1]}).slice(1), "there is not one row to import"),
        (pa.table({"a": [{}]}), "there is no column to import"),
        (pa.table({"a": pa.array([[2**63]], pa.list_(pa.uint64()))}), "column 'a' does not fit list<item: int64>"),
        (pa.table({"a": pa.array([None], pa.month_day_nano_interval())}), "column 'a': Parquet does not hold month_day"),
    ],
)
def test_what_parquet_or_the_server_cannot_hold_is_refused(tmp_path: Path, table: pa.Table, message: str) -> None:
    path = write(tmp_path / "file.arrow", table)
    with pytest.raises(ImportRefused, match=message):
        imported(tmp_path / "out", path)
    assert list(tmp_path.iterdir()) == [path]


def test_an_object_without_fields_is_left_out_and_named(tmp_path: Path) -> None:
    table = pa.table({"a": [1], "b": [{}], "c": [[{"d": {}, "e": 1}]], "f": [{"g": {}}]})
    task = Import(files=[write(tmp_path / "file.arrow", table)], out_dir=tmp_path / "out")
    assert task.run().left_out == ["b", "c[].d", "f.g"]
    assert read_back(tmp_path / "out").to_pylist() == [{"a": 1, "c": [{"e": 1}]}]


def test_files_of_all_formats_make_one_dataset_in_the_order_given(tmp_path: Path) -> None:
    rows: list[Rows] = [[{"text": f"{part}-{row}", "n": row} for row in range(50)] for part in range(4)]
    lines = tmp_path / "b.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows[0]))
    commas = tmp_path / "c.csv"
    commas.write_text("n,text\n" + "".join(f"{row['n']},{row['text']}\n" for row in rows[1]))
    arrow = write(tmp_path / "d.arrow", pa.Table.from_pylist(rows[2]), 7)
    parquet = write(
        tmp_path / "a.parquet", pa.table({"text": pa.array([row["text"] for row in rows[3]]).dictionary_encode()}), 9
    )
    read = imported(tmp_path / "out", lines, commas, arrow, parquet)
    assert read.to_pylist() == [*rows[0], *rows[1], *rows[2], *({"text": row["text"], "n": None} for row in rows[3])]
    assert types_of(read) == {"text": "string", "n": "int64"}


def test_objects_of_files_that_have_other_fields_get_all_of_them(tmp_path: Path) -> None:
    one = write(tmp_path / "a.parquet", pa.table({"m": [[{"role": "x", "n": 1}]]}))
    two = write(tmp_path / "b.arrow", pa.table({"m": [[{"n": 0.5, "more": {"k": True}}], None]}))
    assert imported(tmp_path / "out", one, two).column("m").to_pylist() == [
        [{"role": "x", "n": 1.0, "more": None}],
        [{"role": None, "n": 0.5, "more": {"k": True}}],
        None,
    ]


@pytest.mark.parametrize("number", [pa.float16(), pa.float32(), pa.float64()])
@pytest.mark.parametrize(
    "within",
    [
        lambda type_: type_,
        pa.list_,
        lambda type_: pa.map_(pa.string(), type_),
        lambda type_: pa.struct([("a", pa.int8()), ("b", pa.list_(pa.struct([("c", type_)])))]),
    ],
)
def test_decimals_beside_floats_are_refused_and_not_rounded(
    tmp_path: Path, number: pa.DataType, within: Callable[[pa.DataType], pa.DataType]
) -> None:
    """To Arrow they are floats, of 32 bits where those are: 1234567890123 becomes 1234567954432."""
    files = [
        write(tmp_path / f"{part}.parquet", pa.table({"n": pa.nulls(1, within(type_))}))
        for part, type_ in (("decimals", pa.decimal128(38, 0)), ("floats", number), ("more", pa.decimal256(50, 2)))
    ]
    for one, two in ((0, 1), (1, 0)):
        with pytest.raises(ImportRefused, match=f"{files[two].name}: column 'n' is .* here, and .* in what was read before"):
            imported(tmp_path / "out", files[one], files[two])
    assert imported(tmp_path / "out", files[0], files[2]).num_rows == 2


def test_texts_beside_bytes_are_refused_and_not_made_bytes(tmp_path: Path) -> None:
    for bytes_ in (pa.binary(), pa.binary(1)):
        files = [
            write(tmp_path / f"{number}.parquet", pa.table({"x": pa.array([["a"]], pa.list_(type_))}))
            for number, type_ in enumerate((pa.string(), bytes_))
        ]
        with pytest.raises(ImportRefused, match=r"column 'x' is list<item: .*binary.*> here, and list<item: string> in what"):
            imported(tmp_path / "out", *files)


@pytest.mark.parametrize("type_", [pa.binary(2), pa.float16(), pa.date32(), pa.decimal128(9, 2), pa.list_(pa.int8())], ids=str)
def test_what_json_lines_hold_no_value_of_is_null_of_the_type_in_other_files(tmp_path: Path, type_: pa.DataType) -> None:
    lines = tmp_path / "x.jsonl"
    lines.write_text('{"id": 1, "a": {"h": null}, "b": [null], "c": null}\n')
    columns = {"a": pa.nulls(1, pa.struct({"h": type_})), "b": pa.nulls(1, pa.list_(type_)), "c": pa.nulls(1, type_)}
    other = write(tmp_path / "y.parquet", pa.table({"id": [2], **columns}))
    table = imported(tmp_path / "out", lines, other)
    assert table.to_pylist()[0] == {"id": 1, "a": {"h": None}, "b": [None], "c": None}


@pytest.mark.parametrize("type_", [pa.map_(pa.string(), pa.int8()), pa.duration("s")], ids=str)
def test_what_json_lines_cannot_hold_is_refused_inside_of_their_objects(tmp_path: Path, type_: pa.DataType) -> None:
    (tmp_path / "x.jsonl").write_text('{"id": 1, "a": {"h": null}}\n')
    other = write(tmp_path / "y.parquet", pa.table({"id": [2], "a": pa.nulls(1, pa.struct({"h": type_}))}))
    with pytest.raises(ImportRefused, match=r"x\.jsonl: column 'a' does not fit"):
        imported(tmp_path / "out", tmp_path / "x.jsonl", other)


def test_a_dictionary_of_lists_is_refused_with_the_reason(tmp_path: Path) -> None:
    lists = pa.DictionaryArray.from_arrays(pa.array([1, 0]), pa.array([[1, 2], [3]]))
    with (
        pa.OSFile(str(path := tmp_path / "x.arrow"), "wb") as file,
        pa.ipc.new_file(file, (table := pa.table({"x": lists})).schema) as to,
    ):
        to.write_table(table)
    with pytest.raises(ImportRefused, match="x.arrow cannot be imported: .*--columns"):
        imported(tmp_path / "out", path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (None, "b.parquet: column 'n' is string here, and int64 in what was read before. All shards .*--columns"),
        (["texd"], "no file has a column 'texd'. Did you mean 'text'\\? There are: text, n, other"),
        (["other"], "a.parquet has none of the columns other; its columns are text, n"),
    ],
)
def test_files_that_do_not_go_together_are_refused(tmp_path: Path, columns: list[str] | None, message: str) -> None:
    one = write(tmp_path / "a.parquet", pa.table({"text": ["x"], "n": [1]}))
    two = write(tmp_path / "b.parquet", pa.table({"text": ["y"], "n": ["1"], "other": [2]}))
    with pytest.raises(ImportRefused, match=message):
        imported(tmp_path / "out", one, two, columns=columns)
    assert imported(tmp_path / "out", one, two, columns=["text"]).column("text").to_pylist() == ["x", "y"]


def test_a_dataset_can_be_given_another_shape_in_its_own_place(tmp_path: Path) -> None:
    table = pa.table({"text": [str(row) for row in range(1_000)]})
    path = write(tmp_path / "one.parquet", table, 1_000)
    read = imported(tmp_path, path, shape=Shape(shard_bytes=2_000, group_bytes=500), overwrite=True)
    assert read.to_pylist() == table.to_pylist()
    assert not path.exists()
    assert len(shards_in(tmp_path)) > 3


def test_every_file_that_cannot_be_taken_is_listed(tmp_path: Path) -> None:
    (tmp_path / "x.txt").touch()
    (tmp_path / "x.parquet.gz").touch()
    (tmp_path / "folder.csv").mkdir()
    in_folders = ["saved/dataset_info.json", "saved/data-0.arrow", "zipped/a.csv.gz", "zipped/b.csv.gz", "zipped/c.csv"]
    for name in (*in_folders, "mds/index.json", "mds/shard.00000.mds"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "x.TFRecord-00000-of-00002").touch()
    (tmp_path / "x.tar.gz").touch()
    (tmp_path / "x.target").touch()
    (tmp_path / "saved/notes.mdsum").touch()
    names = ["none.csv", "x.txt", "x.parquet.gz", "folder.csv", "saved", "zipped"]
    names += ["mds", "mds/shard.00000.mds", "x.TFRecord-00000-of-00002", "x.tar.gz", "x.target"]
    files = [tmp_path / name for name in names]
    with pytest.raises(ImportRefused) as refused:
        imported(tmp_path / "out", *files, Path("/dev/null"))
    for line, message in zip(
        str(refused.value).splitlines(),
        [
            "does not exist",
            "its ending is not one that is read: .csv",
            "JSON lines, a document a line",
            "folder.csv is a folder. Name its files, such as {tmp}/folder.csv/*.jsonl.",
            "saved is a folder. Name its files, such as {tmp}/saved/*.arrow.",
            "zipped is a folder. Name its files, such as {tmp}/zipped/*.csv.gz.",
            "{tmp}/mds/shard.00000.mds is a shard of MosaicML's MDS, which is not read here. Write its rows as Parquet from",
            "{tmp}/mds/shard.00000.mds is a shard of MosaicML's MDS",
            "{tmp}/x.TFRecord-00000-of-00002 is TensorFlow's TFRecord, which is not read here. Write its rows as Parquet",
            "{tmp}/x.tar.gz is an archive (unpack it, unless it is a shard of WebDataset), which is not read here. Write its",
            "{tmp}/x.target: its ending is not one that is read",
            "no regular file",
        ],
        strict=True,
    ):
        assert message.replace("{tmp}", str(tmp_path)) in line


@pytest.mark.parametrize(
    ("options", "ending", "told"),
    [
        ({"delimiter": ";"}, ".csv", "--delimiter is for CSV"),
        ({"quoting": "none"}, ".csv", "--quoting is for CSV"),
        ({"text": ["a"]}, ".jsonl", "--text is for CSV and JSON lines"),
        ({"documents": Documents(type="uint16")}, ".bin", "--ids is for files of token ids"),
        ({"documents": Documents(start=1)}, ".bin", "--document-start is for files of token ids"),
        ({"documents": Documents(end=1)}, ".bin", "--document-end is for files of token ids"),
    ],
)
def test_an_option_that_no_file_takes_is_refused(tmp_path: Path, options: dict[str, Any], ending: str, told: str) -> None:
    path = write(tmp_path / "one.parquet", pa.table({"a": ["x"]}))
    with pytest.raises(ImportRefused, match=f"{told}, and by its ending no file here is such"):
        imported(tmp_path / "out", path, **options)
    (tmp_path / f"two{ending}").write_bytes({".csv": b"a\ny", ".jsonl": b'{"a": "y"}', ".bin": bytes([1, 0, 1, 0])}[ending])
    with (
        nullcontext() if ending != ".bin" or "--ids" in told else pytest.raises(ImportRefused, match="two.bin")
    ):  # for other reasons
        imported(tmp_path / "out", path, tmp_path / f"two{ending}", **options)


@pytest.mark.parametrize("behind", [b"x", b"again"], ids=["anything", "another stream"])
def test_what_follows_the_end_of_a_stream_is_not_left_out_without_a_word(tmp_path: Path, behind: bytes) -> None:
    path = write(tmp_path / "stream.arrow", pa.table({"a": [1, 2]}))
    path.write_bytes(path.read_bytes() + (path.read_bytes() if behind == b"again" else behind))
    with pytest.raises(ImportRefused, match="bytes follow the end of its stream.*import them one by one"):
        imported(tmp_path / "out", path)
