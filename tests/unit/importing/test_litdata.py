"""LitData: rows come back in every format, from every kind of chunk; damage, foreign files and code in the data are refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock_server.importing import row_files
from penstock_server.importing.schema import ImportRefused
from support.corpora import damaged, imported, types_of
from support.row_files import NUMPY_CODES, TENSOR_CODES, with_footer, write_litdata

FORMATS = ["str", "int", "float", "bool", "bytes", "file:txt", "no_header_tensor:18", "no_header_numpy:5", "numpy", "tensor"]
LEVELS = [None, "chunk", "batch", "sample"]

repeated = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def items_of(count: int) -> list[dict[str, Any]]:
    """Items with leaves of all formats."""
    return [
        {
            "text": f"é {row}",
            "n": -row,
            "share": row / 8,
            "meta": {"ok": row % 2 == 0, "raw": bytes([row])},
            "file": b"abc",
            "ids": np.arange(row),
            "types": np.arange(row + 1, dtype="uint16"),
            "pair": (np.full((2, row), row, "float32"), np.array(row, "int32")),
        }
        for row in range(count)
    ]


def stored(item: dict[str, Any]) -> dict[str, Any]:
    """An item as a row: nested keys are joined."""
    array, number = item["pair"]
    row = {
        "text": item["text"],
        "n": item["n"],
        "share": item["share"],
        "meta.ok": item["meta"]["ok"],
        "meta.raw": item["meta"]["raw"],
        "file": item["file"],
        "ids": item["ids"],
        "types": item["types"],
        "pair.0": array,
        "pair.1": number,
    }
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in row.items()}


@pytest.mark.parametrize("level", LEVELS)
def test_rows_of_all_formats_come_back(tmp_path: Path, level: str | None) -> None:
    items = items_of(10)
    read = imported(tmp_path / "out", write_litdata(tmp_path / "chunks", FORMATS, items, level=level))
    assert read.to_pylist() == [stored(item) for item in items]
    types = types_of(read)
    assert [types[name] for name in ("text", "n", "share", "meta.ok", "meta.raw")] == "string int64 double bool binary".split()
    assert (types["ids"], types["pair.0"], types["pair.1"]) == ("list<item: int32>", "list<item: list<item: double>>", "int32")


@pytest.mark.parametrize(
    ("kind", "type_", "code"),
    [
        *(("no_header_tensor", *entry) for entry in [*TENSOR_CODES.items(), ("bool", 19), ("uint16", 20)]),
        *(("no_header_numpy", *entry) for entry in NUMPY_CODES.items()),
    ],
)
def test_arrays_of_every_type_come_back(tmp_path: Path, kind: str, type_: str, code: int) -> None:
    items = [np.array([1, 0, 1], type_), np.array([], type_)]
    read = imported(tmp_path / "out", write_litdata(tmp_path / "chunks", [f"{kind}:{code}", "int"], [(x, 1) for x in items]))
    assert read["0"].to_pylist() == [[1, 0, 1], []]
    if "int" not in type_:
        assert read.schema.field("0").type.value_type == pa.from_numpy_dtype(np.dtype(type_))


@pytest.mark.parametrize(
    ("format_", "item", "name"),
    [("str", "x", "text"), ("int", 7, "value"), ("no_header_numpy:5", np.arange(3, dtype="uint16"), "tokens")],
)
def test_item_without_keys_is_named_after_its_format(tmp_path: Path, format_: str, item: Any, name: str) -> None:
    read = imported(tmp_path / "out", write_litdata(tmp_path / "chunks", [format_], [item]))
    assert read.to_pylist() == [{name: item.tolist() if isinstance(item, np.ndarray) else item}]


DOCUMENTS = st.lists(st.lists(st.integers(0, 99), max_size=6), min_size=1, max_size=9)


@repeated
@given(DOCUMENTS, st.sampled_from(["numpy:5", "tensor:18", "tensor:16"]), st.sampled_from([None, "chunk"]), st.integers(1, 40))
def test_tokens_come_back_as_documents(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], format_: str, level: str | None, size: int
) -> None:
    folder = tmp_path_factory.mktemp("litdata")
    type_ = {"numpy:5": "uint16", "tensor:18": "int64", "tensor:16": "int32"}[format_]
    items = [np.array(document, type_) for document in documents]
    write_litdata(folder / "chunks", [f"no_header_{format_}"], items, level=level, item_loader="TokensLoader")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_files, "_PORTION_BYTES", size)
        read = imported(folder / "out", folder / "chunks")
    assert read.to_pylist() == [{"tokens": document} for document in documents]


def test_old_index_without_a_loader_has_tokens(tmp_path: Path) -> None:
    items = [np.arange(row) for row in range(1, 4)]
    folder = write_litdata(tmp_path / "chunks", ["no_header_tensor:18"], items, item_loader="TokensLoader")
    changed(folder, lambda index: [index["config"].pop(name) for name in ("item_loader", "compression_level")])
    assert imported(tmp_path / "out", folder)["tokens"].to_pylist() == [[0], [0, 1], [0, 1, 2]]


@pytest.mark.parametrize("is_file", [True, False])
def test_rows_in_arrow_come_from_the_end_of_a_chunk(tmp_path: Path, is_file: bool) -> None:
    """Their types are those of each chunk, and their data_format is of no use."""
    folder = write_litdata(tmp_path / "chunks", ["str", "json"], [("", b"")] * 5)
    tables = [
        pa.table({"text": ["a", "b", "c", "d"], "ids": [[1], [2, 3], [], None], "note": pa.nulls(4)}),
        pa.table({"text": ["e"], "ids": [[1 << 40]], "note": ["late"]}),
    ]
    for number, table in enumerate(tables):
        (folder / f"chunk-0-{number}.bin").write_bytes(with_footer(table.num_rows, table, is_file=is_file))
    read = imported(tmp_path / "out", folder)
    assert read.to_pylist() == [row for table in tables for row in table.to_pylist()]


def test_decompressed_chunks_of_a_cache_are_read(tmp_path: Path) -> None:
    folder = write_litdata(tmp_path / "chunks", ["str"], [*"abcdef"], level="chunk")
    plain = write_litdata(tmp_path / "plain", ["str"], [*"abcdef"])
    (folder / "chunk-0-1.zstd:3.bin").unlink()
    (folder / "chunk-0-1.bin").write_bytes((plain / "chunk-0-1.bin").read_bytes())
    assert imported(tmp_path / "out", folder)["text"].to_pylist() == [*"abcdef"]


class Exploit:
    """Its pickle, once read, makes a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.mkdir, (self._path,)


def test_pickle_is_refused_and_never_read(tmp_path: Path) -> None:
    items = [{"a": "x", "b": pickle.dumps(Exploit(tmp_path / "made"))}]
    folder = write_litdata(tmp_path / "chunks", ["str", "pickle"], items)
    with pytest.raises(ImportRefused, match=r"chunk-0-0.bin .* column 'b' is a pickle, which can run any code"):
        imported(tmp_path / "out", folder)
    assert imported(tmp_path / "out", folder, columns=["a"]).to_pylist() == [{"a": "x"}]
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("format_", ["json", "pil", "graph:pickle", "video", "no_header_tensor:10", "no_header_numpy:14"])
def test_column_of_another_format_is_named(tmp_path: Path, format_: str) -> None:
    folder = write_litdata(tmp_path / "chunks", ["str", format_], [{"a": "x", "b": b"?"}])
    with pytest.raises(ImportRefused, match=f"column 'b' has the encoding {format_}, which is not read"):
        imported(tmp_path / "out", folder)


def changed(folder: Path, change: Callable[[Any], object]) -> Path:
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.update(chunks=[]), "at chunks: List should have at least 1 item"),
        (lambda index: index.pop("config"), "at config: Field required"),
        (lambda index: index["config"].update(data_format=[]), "at config.data_format"),
        (lambda index: index["config"].update(data_format=["str", "str"]), "chunk-0-0.bin cannot be imported"),
        (lambda index: index["config"].update(data_spec="[1"), "at config.data_spec: Invalid JSON"),
        (lambda index: index["config"].update(data_spec='[1, {"a": 0}]'), "at config.data_spec.1.type: Field required"),
        (lambda index: index["config"].update(compression="lz4"), "at config.compression"),
        (lambda index: index["config"].update(compression="zstd", compression_level="batch"), "does not begin as a chunk of 2"),
        (lambda index: index["config"].update(encryption={"algorithm": "rsa"}), "chunks are encrypted"),
        (lambda index: index["config"].update(item_loader="ParquetLoader"), "ParquetLoader .* Parquet files, serve or import"),
        (lambda index: index["chunks"][0].update(chunk_size=3), "it has 2 rows, but index.json states 3"),
        (lambda index: index["chunks"][0].update(filename="../x.bin"), "names '../x.bin', which is outside"),
        (lambda index: index["chunks"][0].update(filename="none.bin"), "none.bin cannot be read"),
    ],
)
def test_foreign_index_is_refused(tmp_path: Path, change: Callable[[Any], object], message: str) -> None:
    folder = write_litdata(tmp_path / "chunks", ["str"], [{"a": "x"}] * 2)
    with pytest.raises(ImportRefused, match=message):
        imported(tmp_path / "out", changed(folder, change))
    assert not (tmp_path / "out").exists()


def test_tokens_of_several_formats_are_refused(tmp_path: Path) -> None:
    folder = write_litdata(tmp_path / "chunks", ["int", "int"], [(1, 2)], item_loader="TokensLoader")
    with pytest.raises(ImportRefused, match="several values for each row of tokens"):
        imported(tmp_path / "out", folder)


@pytest.mark.parametrize("level", LEVELS)
def test_truncated_chunk_is_refused(tmp_path: Path, level: str | None) -> None:
    folder = write_litdata(tmp_path / "chunks", FORMATS, items_of(4), level=level)
    [chunk] = folder.glob("chunk*")
    whole = chunk.read_bytes()
    for size in (0, 3, 30, len(whole) // 2, len(whole) - 1):
        chunk.write_bytes(whole[:size])
        with pytest.raises(ImportRefused, match=f"{chunk} cannot be "):
            imported(tmp_path / "out", folder)
    assert not (tmp_path / "out").exists()


@repeated
@given(st.data(), st.sampled_from([*LEVELS, "footer"]))
def test_damaged_chunk_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, level: str | None
) -> None:
    folder = tmp_path_factory.mktemp("litdata")
    write_litdata(folder / "chunks", FORMATS, items_of(2), level=None if level == "footer" else level)
    [chunk] = (folder / "chunks").glob("chunk*")
    table = pa.table({"a": ["x", "y"], "b": [[1], [2, 3]]})
    whole = with_footer(2, table) if level == "footer" else chunk.read_bytes()
    chunk.write_bytes(data.draw(damaged(whole)))
    with suppress(ImportRefused):
        imported(folder / "out", folder / "chunks")


@repeated
@given(st.data())
def test_damaged_index_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("litdata")
    write_litdata(folder / "chunks", FORMATS, items_of(2), level="batch")
    index = folder / "chunks" / "index.json"
    index.write_bytes(data.draw(damaged(index.read_bytes())))
    with suppress(ImportRefused):
        imported(folder / "out", folder / "chunks")
