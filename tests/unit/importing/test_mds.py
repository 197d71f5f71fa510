"""MDS: rows come back in every encoding and compression; damage, foreign files and code in the data are refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock_server.importing import row_files
from penstock_server.importing.schema import ImportRefused
from penstock_server.importing.token_files import Documents
from support.corpora import Rows, damaged, imported, shards_in, types_of
from support.row_files import COMPRESSIONS, write_mds

NUMBERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
COLUMNS = {
    "text": "str",
    "n": "int",
    "raw": "bytes",
    "image": "jpeg",
    "meta": "json",
    "tokens": "ndarray:uint16",
    "any": "ndarray",
    "grid": "ndarray:float32:2,3",
    "many": "str_int",
    "share": "str_float",
    "price": "str_decimal",
    **dict(zip(NUMBERS, NUMBERS, strict=True)),
}

repeated = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def rows_of(count: int) -> Rows:
    """Rows with all columns."""
    return [
        {
            "text": f"é {row}",
            "n": -row,
            "raw": bytes([row, 0]),
            "image": b"\xff\xd8",
            "meta": {"k": [row, None]},
            "tokens": np.arange(row + 1, dtype="uint16"),
            "any": row * np.ones((row % 3 + 1, 2), "int32"),
            "grid": np.full((2, 3), row, "float32"),
            "many": row,
            "share": row / 8,
            "price": Decimal(row) / 4,
            **dict.fromkeys(NUMBERS, row),
        }
        for row in range(count)
    ]


def stored(row: dict[str, Any]) -> dict[str, Any]:
    """A row as pyarrow reads it: JSON and decimals are text."""
    values = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in row.items()}
    return dict(sorted((values | {"meta": json.dumps(row["meta"]), "price": str(row["price"])}).items()))


@pytest.mark.parametrize("compression", [None, "zstd:7", *COMPRESSIONS])
def test_rows_of_all_encodings_come_back(tmp_path: Path, compression: str | None) -> None:
    rows = rows_of(10)
    folder = write_mds(tmp_path / "mds", COLUMNS, rows, compression=compression, hashes=["sha1", "xxh64"])
    read = imported(tmp_path / "out", folder)
    assert read.to_pylist() == [stored(row) for row in rows]
    assert read.schema.names == sorted(COLUMNS)
    types = types_of(read)
    assert {name: types[name] for name in ("text", "raw", "image", "price")} == {
        "text": "string",
        "raw": "binary",
        "image": "binary",
        "price": "string",
    }
    assert (types["tokens"], types["any"]) == ("list<item: int32>", "list<item: list<item: int32>>")
    assert (types["grid"], types["meta"]) == ("list<item: list<item: float>>", "extension<arrow.json>")
    assert (types["many"], types["share"], types["float16"], types["uint8"]) == ("int64", "double", "halffloat", "uint8")


ARRAYS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6), min_size=1, max_size=9)


@repeated
@given(ARRAYS, st.sampled_from(NUMBERS[:8]), st.booleans(), st.integers(1, 4), st.integers(1, 40))
def test_arrays_come_back_in_any_portions(
    tmp_path_factory: pytest.TempPathFactory, arrays: list[list[int]], type_: str, is_stated: bool, shard_rows: int, size: int
) -> None:
    folder = tmp_path_factory.mktemp("mds")
    rows: Rows = [{"tokens": np.array(array, type_)} for array in arrays]
    columns = {"tokens": f"ndarray:{type_}" if is_stated else "ndarray"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_files, "_PORTION_BYTES", size)
        patch.setattr(row_files, "_PORTION_ROWS", 3)
        read = imported(folder / "out", write_mds(folder / "mds", columns, rows, shard_rows=shard_rows))
    assert read["tokens"].to_pylist() == arrays


def test_arrays_that_state_their_types_get_the_widest(tmp_path: Path) -> None:
    rows: Rows = [
        {"ids": np.array([1], "uint8"), "weights": np.array([0.1], "float32")},
        {"ids": np.array([1 << 40], "int64"), "weights": np.array([0.1], "float64")},
    ]
    read = imported(tmp_path / "out", write_mds(tmp_path / "mds", {"ids": "ndarray", "weights": "ndarray"}, rows))
    assert read["ids"].to_pylist() == [[1], [1 << 40]]
    assert read["weights"].to_pylist() == [[float(np.float32(0.1))], [0.1]]


@pytest.mark.parametrize(
    "arrays",
    [
        [np.ones(2, "int32"), np.ones((2, 2), "int32")],
        [np.ones(2, "int32"), np.ones(2, "float32")],
        [np.ones(2, "int64"), np.ones(2, "uint64")],
    ],
    ids=["dimensions", "kinds", "widths"],
)
def test_arrays_that_do_not_go_together_are_refused(tmp_path: Path, arrays: list[Any]) -> None:
    folder = write_mds(tmp_path / "mds", {"x": "ndarray"}, [{"x": array} for array in arrays])
    with pytest.raises(ImportRefused, match="shard.00000.mds cannot be imported: column 'x' .* do not go together"):
        imported(tmp_path / "out", folder)


def test_bytes_are_token_ids_of_the_type_given(tmp_path: Path) -> None:
    rows: Rows = [{"tokens": np.arange(row, dtype="<i8").tobytes()} for row in range(3)]
    folder = write_mds(tmp_path / "mds", {"tokens": "bytes"}, rows)
    read = imported(tmp_path / "out", folder, documents=Documents(type="int64"))
    assert read["tokens"].to_pylist() == [[], [0], [0, 1]]
    assert types_of(read) == {"tokens": "list<item: int32>"}


def test_text_options_keep_numbers_and_json_as_text(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "mds", {"a": "str_int", "b": "json"}, [{"a": 1 << 70, "b": [1]}])
    with pytest.raises(ImportRefused, match="column 'a' has a value that is not str_int"):
        imported(tmp_path / "out", folder)
    assert imported(tmp_path / "out", folder, text=["a", "b"]).to_pylist() == [{"a": str(1 << 70), "b": "[1]"}]


def test_folders_and_files_make_one_dataset_in_the_order_given(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "middle", "n": 7}\n')
    first = write_mds(tmp_path / "a", {"text": "str"}, [{"text": "first"}])
    last = write_mds(tmp_path / "b", {"text": "str", "n": "int"}, [{"text": "last", "n": 9}])
    read = imported(tmp_path / "out", first, tmp_path / "x.jsonl", last)
    assert read.to_pylist() == [{"text": "first", "n": None}, {"text": "middle", "n": 7}, {"text": "last", "n": 9}]


def merged(folder: Path, parts: dict[str, Path]) -> Path:
    """As merge_index of MosaicML Streaming: one index.json, which names the shards with their folders."""
    shards = []
    for name, part in parts.items():
        for shard in json.loads((part / "index.json").read_text())["shards"]:
            shard["raw_data"]["basename"] = f"{name}/{shard['raw_data']['basename']}"
            shards.append(shard)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder


def test_merged_index_names_shards_of_nested_folders(tmp_path: Path) -> None:
    root = tmp_path / "root"
    parts = {
        "1": write_mds(root / "1", {"a": "str"}, [{"a": str(row)} for row in range(6)]),
        "2": write_mds(root / "2", {"a": "str", "b": "int"}, [{"a": "x", "b": 1}]),
    }
    read = imported(tmp_path / "out", merged(root, parts))
    assert read.to_pylist() == [*({"a": str(row), "b": None} for row in range(6)), {"a": "x", "b": 1}]
    assert imported(tmp_path / "b", root, columns=["b"])["b"].to_pylist() == [None] * 6 + [1]


def test_shard_that_is_named_twice_is_read_twice(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "mds", {"a": "str"}, [{"a": "x"}, {"a": "y"}])
    changed(folder, lambda index: index.update(shards=index["shards"] * 2))
    assert imported(tmp_path / "out", folder, folder)["a"].to_pylist() == ["x", "y"] * 4


def test_decompressed_shards_of_a_cache_are_read(tmp_path: Path) -> None:
    rows: Rows = [{"a": str(row)} for row in range(6)]
    folder = write_mds(tmp_path / "mds", {"a": "str"}, rows, compression="gz")
    plain = write_mds(tmp_path / "plain", {"a": "str"}, rows)
    (folder / "shard.00000.mds.gz").unlink()
    (folder / "shard.00000.mds").write_bytes((plain / "shard.00000.mds").read_bytes())
    assert imported(tmp_path / "out", folder).to_pylist() == rows


def test_many_rows_become_shards_of_bounded_size(tmp_path: Path) -> None:
    rows: Rows = [{"tokens": np.full(row % 50 + 1, row % 9, "int64")} for row in range(100_000)]
    folder = write_mds(tmp_path / "mds", {"tokens": "ndarray:int64"}, rows, shard_rows=70_000)
    read = imported(tmp_path / "out", folder)
    assert read["tokens"].to_pylist() == [row["tokens"].tolist() for row in rows]
    assert len(shards_in(tmp_path / "out")) == 1


class Exploit:
    """Its pickle, once read, makes a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.mkdir, (self._path,)


def test_pickle_is_refused_and_never_read(tmp_path: Path) -> None:
    rows: Rows = [{"a": "x", "b": pickle.dumps(Exploit(tmp_path / "made"))}]
    folder = write_mds(tmp_path / "mds", {"a": "str", "b": "pkl"}, rows)
    with pytest.raises(ImportRefused, match="column 'b' is a pickle, which can run any code when it is read"):
        imported(tmp_path / "out", folder)
    assert imported(tmp_path / "out", folder, columns=["a"]).to_pylist() == [{"a": "x"}]
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("encoding", ["pil", "jpeg_array", "list[png]", "ndarray:complex64", "tensor"])
def test_column_of_another_encoding_is_named(tmp_path: Path, encoding: str) -> None:
    folder = write_mds(tmp_path / "mds", {"a": "str", "b": encoding}, [{"a": "x", "b": b"?"}])
    with pytest.raises(ImportRefused) as refusal:
        imported(tmp_path / "out", folder)
    assert f"column 'b' has the encoding {encoding}, which is not read. Name the other columns: --columns" in str(refusal.value)
    assert imported(tmp_path / "out", folder, columns=["a"]).to_pylist() == [{"a": "x"}]


def changed(folder: Path, change: Callable[[Any], None]) -> Path:
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.update(version=1), "mds cannot be imported: index.json .* at version: Input should be 2"),
        (lambda index: index.update(shards=[]), "at shards: List should have at least 1 item"),
        (lambda index: index.pop("shards"), "at shards: Field required"),
        (lambda index: index["shards"][0].update(format="csv"), "at shards.0.format: Input should be 'mds'"),
        (lambda index: index["shards"][0].update(samples=3), "shard.00000.mds .* it has 2 rows, but index.json states 3"),
        (lambda index: index["shards"][0].update(samples=10**30), "at shards.0.samples"),
        (lambda index: index["shards"][0].update(column_names=["a"]), "at shards.0: .*as many encodings and sizes as columns"),
        (lambda index: index["shards"][0].update(column_sizes=[1, None]), "sizes of values do not add up"),
        (lambda index: index["shards"][0].update(column_encodings=["int", "str"]), "'a' .* not int: it has 1 bytes, not 8"),
        (lambda index: index["shards"][0]["raw_data"].update(basename="../secret"), "names '../secret', which is outside"),
        (lambda index: index["shards"][0]["raw_data"].update(basename="/etc/passwd"), "names '/etc/passwd', which is outside"),
        (lambda index: index["shards"][0]["raw_data"].update(basename="none.mds"), "none.mds cannot be read"),
        (lambda index: index["shards"][0]["raw_data"].update(hashes={"md5": "00"}), "its md5 is .* index.json states 00"),
    ],
)
def test_foreign_index_is_refused(tmp_path: Path, change: Callable[[Any], None], message: str) -> None:
    folder = write_mds(tmp_path / "mds", {"a": "str", "b": "str"}, [{"a": "x", "b": "yy"}] * 2)
    with pytest.raises(ImportRefused, match=message):
        imported(tmp_path / "out", changed(folder, change))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": 1}', "[" * 100_000])
def test_other_json_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(ImportRefused, match=f"{tmp_path} cannot be imported: "):
        imported(tmp_path / "out", tmp_path)


def test_unknown_hash_is_left_out_and_unknown_compression_refused(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "mds", {"a": "str"}, [{"a": "x"}], compression="zstd")
    changed(folder, lambda index: index["shards"][0]["zip_data"].update(hashes={"shake_128": "00", "crc": "00"}))
    assert imported(tmp_path / "out", folder).to_pylist() == [{"a": "x"}]
    changed(folder, lambda index: index["shards"][0].update(compression="lz4"))
    with pytest.raises(ImportRefused, match="the compression 'lz4' is not known; br, bz2, gz, snappy, zstd are"):
        imported(tmp_path / "other", folder)


@pytest.mark.parametrize("compression", [None, *COMPRESSIONS])
def test_truncated_shard_is_refused(tmp_path: Path, compression: str | None) -> None:
    folder = write_mds(tmp_path / "mds", COLUMNS, rows_of(4), compression=compression)
    [shard] = folder.glob("shard*")
    whole = shard.read_bytes()
    for size in (0, 3, 30, len(whole) // 2, len(whole) - 9):
        shard.write_bytes(whole[:size])
        with pytest.raises(ImportRefused, match=f"{shard} cannot be "):
            imported(tmp_path / "out", folder)
    assert not (tmp_path / "out").exists()


def test_flipped_bit_is_found_by_the_hash(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "mds", {"a": "str"}, [{"a": "x"}], hashes=["sha256"])
    [shard] = folder.glob("shard*")
    shard.write_bytes(shard.read_bytes()[:-1] + b"y")
    with pytest.raises(ImportRefused, match=f"{shard} cannot be imported: its sha256 is .*, but index.json states"):
        imported(tmp_path / "out", folder)


@repeated
@given(st.data(), st.sampled_from([None, "snappy", "zstd", "gz"]))
def test_damaged_shard_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, compression: str | None
) -> None:
    folder = tmp_path_factory.mktemp("mds")
    write_mds(folder / "mds", COLUMNS, rows_of(2), compression=compression)
    [shard] = (folder / "mds").glob("shard*")
    shard.write_bytes(data.draw(damaged(shard.read_bytes())))
    with suppress(ImportRefused):
        imported(folder / "out", folder / "mds")


def test_error_names_the_shard_and_the_column(tmp_path: Path) -> None:
    rows: Rows = [{"a": b"x", "b": 1}] * 4 + [{"a": b"\xff", "b": 1}]
    folder = write_mds(tmp_path / "mds", {"a": "str", "b": "int"}, rows)
    with pytest.raises(ImportRefused, match=r"shard.00001.mds cannot be imported: column 'a' .* not str: Invalid UTF8"):
        imported(tmp_path / "out", folder)


@repeated
@given(st.data())
def test_damaged_index_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("mds")
    write_mds(folder / "mds", COLUMNS, rows_of(2), compression="zstd", hashes=["sha1"])
    index = folder / "mds" / "index.json"
    index.write_bytes(data.draw(damaged(index.read_bytes())))
    with suppress(ImportRefused):
        imported(folder / "out", folder / "mds")
