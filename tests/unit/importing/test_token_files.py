"""Files of token ids: documents of any length come out as they were written, whatever tells where they end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock_server.importing import token_files
from penstock_server.importing.run import Import
from penstock_server.importing.schema import ImportRefused
from penstock_server.importing.shards import Shape
from penstock_server.importing.token_files import Documents
from support.corpora import ID_CODES, imported, shards_in, write_datatrove, write_indexed

EOT = 99
IDS = st.lists(st.integers(0, 98), max_size=5)

files = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def rows_of(folder: Path, *files: Path, **options: Any) -> list[list[int]]:
    table = imported(folder, *files, overwrite=True, **options)
    assert table.schema.names == ["tokens"]
    found: list[list[int]] = table["tokens"].to_pylist()
    return found


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_files, "_STEP", 3)
    monkeypatch.setattr(token_files, "_MAX_DOCUMENTS", 2)


@pytest.mark.usefixtures("small_steps")
@files
@given(st.lists(st.lists(IDS, max_size=3), min_size=1, max_size=8), st.sampled_from(sorted(ID_CODES)), st.booleans())
def test_megatron_index_gives_the_documents(tmp_path: Path, documents: list[list[list[int]]], type_: str, modes: bool) -> None:
    rows = [row for document in documents if (row := [token for sample in document for token in sample])]
    if rows:
        assert rows_of(tmp_path / "out", write_indexed(tmp_path / "corpus.bin", documents, type_, modes=modes)) == rows


@pytest.mark.usefixtures("small_steps")
@files
@given(st.lists(IDS, min_size=1, max_size=8), st.sampled_from(["uint16", "uint32"]), st.booleans())
def test_datatrove_index_gives_the_documents(tmp_path: Path, documents: list[list[int]], type_: str, is_masked: bool) -> None:
    rows = [document for document in documents if document]
    loss = [token % 2 for row in rows for token in row] if is_masked else []
    for path in tmp_path.glob("*.loss"):
        path.unlink()
    if rows:
        table = imported(tmp_path / "out", write_datatrove(tmp_path / "web.ds", documents, type_, loss), overwrite=True)
        assert table["tokens"].to_pylist() == rows
        assert table.schema.names == ["tokens", "loss_mask"][: 1 + is_masked]
        if is_masked:
            assert table["loss_mask"].to_pylist() == [[token % 2 for token in row] for row in rows]


@pytest.mark.parametrize(
    ("ends", "loss", "message"),
    [
        ([2, 5], None, "web.ds.index states 5 ids"),
        ([2, 4], [1, 1, 1], "web.ds.loss states 3 ids, but there are 4"),
    ],
)
def test_datatrove_index_beside_other_ids_is_refused(
    tmp_path: Path, ends: list[int], loss: list[int] | None, message: str
) -> None:
    write_datatrove(tmp_path / "web.ds", [[1, 2], [3, 4]], loss=loss or ())
    np.array(ends, "<u8").tofile(tmp_path / "web.ds.index")
    with pytest.raises(ImportRefused, match=message):
        rows_of(tmp_path / "out", tmp_path / "web.ds")


@pytest.mark.usefixtures("small_steps")
@files
@given(st.lists(IDS, min_size=1, max_size=8), st.booleans(), st.booleans())
def test_border_id_gives_the_documents(tmp_path: Path, documents: list[list[int]], ends: bool, is_cut: bool) -> None:
    """Also where the last one has no end, or the first no beginning, as of a file that was cut into two."""
    rows = [[*document, EOT] if ends else [EOT, *document] for document in documents]
    if is_cut:
        rows = [*rows[:-1], rows[-1][:-1]] if ends else [rows[0][1:], *rows[1:]]
    ids = np.array([token for row in rows for token in row], "<u2")
    if EOT in ids:
        ids.tofile(tmp_path / "train.bin")
        told = Documents(type="uint16", end=EOT) if ends else Documents(type="uint16", start=EOT)
        assert rows_of(tmp_path / "out", tmp_path / "train.bin", documents=told) == [row for row in rows if row]


@pytest.mark.parametrize(("magic", "type_"), [(20240520, "<u2"), (20240801, "<u4")])
def test_llmc_header_gives_the_type(tmp_path: Path, magic: int, type_: str) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = magic, 7 if type_ == "<u4" else 1, 5
    (tmp_path / "shard.bin").write_bytes(header.tobytes() + np.array([99, 1, 2, 99, 3], type_).tobytes())
    assert rows_of(tmp_path / "out", tmp_path / "shard.bin", documents=Documents(start=EOT)) == [[99, 1, 2], [99, 3]]
    (tmp_path / "shard.bin").write_bytes((tmp_path / "shard.bin").read_bytes()[: -int(type_[-1])])
    with pytest.raises(ImportRefused, match="its header states 5 ids, but there are 4"):
        rows_of(tmp_path / "out", tmp_path / "shard.bin", documents=Documents(start=EOT))


@pytest.mark.parametrize(("magic", "version"), [(20240520, 2), (20240801, 1), (20240522, 1)])
def test_other_versions_of_llmc_are_refused(tmp_path: Path, magic: int, version: int) -> None:
    (tmp_path / "questions.bin").write_bytes(np.array([magic, version, *[0] * 300], "<i4").tobytes())
    with pytest.raises(ImportRefused, match=f"format {magic}, version {version} of llm.c"):
        rows_of(tmp_path / "out", tmp_path / "questions.bin", documents=Documents(type="uint16", start=0))


@pytest.mark.parametrize("type_", ["uint16", "int32", "uint32", "int64", ">u2", ">i4"])
def test_numpy_file_gives_its_type(tmp_path: Path, type_: str) -> None:
    np.save(tmp_path / "shard.npy", np.array([1, 99, 2, 3, 99], type_))
    assert rows_of(tmp_path / "out", tmp_path / "shard.npy", documents=Documents(end=EOT)) == [[1, 99], [2, 3, 99]]


def test_ids_beyond_32_bits_stay_and_all_others_are_int32(tmp_path: Path) -> None:
    write_indexed(tmp_path / "wide.bin", [[[1, 1 << 40]]], "int64")
    assert str(imported(tmp_path / "a", tmp_path / "wide.bin").schema.field("tokens").type.value_type) == "int64"
    write_indexed(tmp_path / "narrow.bin", [[[1, 2]]], "int64")
    assert str(imported(tmp_path / "b", tmp_path / "narrow.bin").schema.field("tokens").type.value_type) == "int32"


def test_several_files_become_one_dataset_of_bounded_shards(tmp_path: Path) -> None:
    documents = [[[row % 90] * (1 + row % 700)] for row in range(3000)]
    files = [write_indexed(tmp_path / "a.bin", documents[:1000]), write_indexed(tmp_path / "b.bin", documents[1000:], "int32")]
    found = rows_of(tmp_path / "out", *files, shape=Shape(shard_bytes=10**6, group_bytes=10**5))
    assert found == [row for [row] in documents]
    assert len(shards_in(tmp_path / "out")) > 2


def broken(path: Path, at: int, value: int, type_: str) -> None:
    content = bytearray(path.read_bytes())
    raw = np.array([value], type_).tobytes()
    content[at : at + len(raw)] = raw
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("at", "value", "type_", "message"),
    [
        (0, 0, "<i4", "corpus.idx beside it is not an index"),
        (9, 2, "<u8", "corpus.idx has version 2"),
        (17, 7, "u1", "and type 7"),
        (18, 99, "<u8", "corpus.bin cannot be imported"),
        (34, 1, "<i4", "corpus.idx states 3 ids in 3 samples, but there are 4"),
        (34 + 36 + 16, 2, "<i8", "end at sample 2"),
    ],
)
def test_damaged_index_is_refused(tmp_path: Path, at: int, value: int, type_: str, message: str) -> None:
    write_indexed(tmp_path / "corpus.bin", [[[1, 2], [3]], [[4]]])
    broken(tmp_path / "corpus.idx", at, value, type_)
    with pytest.raises(ImportRefused, match=message):
        rows_of(tmp_path / "out", tmp_path / "corpus.bin")
    assert not (tmp_path / "out").exists()


def test_truncated_ids_are_refused(tmp_path: Path) -> None:
    path = write_indexed(tmp_path / "corpus.bin", [[[1, 2, 3]], [[4]]])
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ImportRefused, match="corpus.idx states 4 ids .*but there are 3"):
        rows_of(tmp_path / "out", path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ImportRefused, match="has 5 bytes of ids, not a multiple of the 2 bytes of uint16"):
        rows_of(tmp_path / "out", path)


@pytest.mark.parametrize("num_ids", [1, 6, 8, 20])
def test_file_without_borders_becomes_equal_rows(tmp_path: Path, num_ids: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_files, "STREAM_ROW_IDS", 6)
    ids = list(range(num_ids))
    np.array(ids, "<u2").tofile(tmp_path / "train.bin")
    rows = rows_of(tmp_path / "out", tmp_path / "train.bin", documents=Documents(type="uint16"))
    assert rows == [ids[begin : begin + 6] for begin in range(0, num_ids, 6)]


def test_streams_are_the_files_without_borders(tmp_path: Path) -> None:
    np.array([1, 2], "<u2").tofile(tmp_path / "train.bin")
    (tmp_path / "empty.bin").write_bytes(b"")
    files = [tmp_path / "train.bin", tmp_path / "empty.bin", write_indexed(tmp_path / "corpus.bin", [[[3]]])]
    done = Import(files=files, out_dir=tmp_path / "out", documents=Documents(type="uint16")).run()
    assert done.streams == [tmp_path / "train.bin"]


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (Documents(end=EOT), "as in --ids uint16"),
        (Documents(type="uint32", end=49), "its 25 ids do not contain 49"),
        (Documents(type="uint16", start=70_000), "its 50 ids do not contain 70000"),
        (Documents(type="uint16", end=EOT), "24 ids from number 0 on do not contain 99"),
    ],
)
def test_missing_or_wrong_options_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents: Documents, message: str
) -> None:
    np.arange(50, dtype="<u2").tofile(tmp_path / "train.bin")
    if documents.end == EOT:
        monkeypatch.setattr(token_files, "_STEP", 8)
        monkeypatch.setattr(token_files, "_LONGEST", 20)
    with pytest.raises(ImportRefused, match=message):
        rows_of(tmp_path / "out", tmp_path / "train.bin", documents=documents)


def test_numpy_file_that_is_not_ids_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "times.npy", np.zeros(3, "timedelta64[s]"))
    with pytest.raises(ImportRefused, match="it is an array of timedelta64"):
        rows_of(tmp_path / "out", tmp_path / "times.npy", documents=Documents(end=EOT))


def test_empty_file_adds_no_row(tmp_path: Path) -> None:
    files = [write_indexed(tmp_path / "none.bin", []), write_indexed(tmp_path / "some.bin", [[[1]]])]
    files.append(write_indexed(tmp_path / "empty.bin", [[[]], []]))
    np.save(tmp_path / "empty.npy", np.zeros(0, "uint16"))
    (tmp_path / "nothing.bin").write_bytes(b"")
    files += [tmp_path / "empty.npy", tmp_path / "nothing.bin"]
    assert rows_of(tmp_path / "out", *files, documents=Documents(type="uint16", end=EOT)) == [[1]]
