"""Transforms: the code that runs is the code whose hash is in the snapshot."""

import os
from pathlib import Path

import pyarrow as pa
import pytest

from penstock_server.recipes.transform import Transform, TransformError, load_transform

ROWS = pa.record_batch({"text": ["fox"]})
SAYS = "import pyarrow as pa\n\ndef say(rows):\n    return pa.record_batch({{'text': ['{}'] * rows.num_rows}})\n"


def said(folder: Path, name: str = "clean:say") -> str:
    [text] = load_transform(name, folder)(ROWS)["text"].to_pylist()
    return str(text)


def test_files_of_two_folders_may_share_a_name(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "clean.py").write_text(SAYS.format(name))
    one, two = (load_transform("clean:say", tmp_path / name) for name in ("one", "two"))
    assert one.digest != two.digest
    assert [transform(ROWS)["text"].to_pylist() for transform in (one, two)] == [["one"], ["two"]]


def test_digest_covers_the_function_name(tmp_path: Path) -> None:
    (tmp_path / "clean.py").write_text("def say(rows):\n    return rows\n\ndef shout(rows):\n    return rows\n")
    assert load_transform("clean:say", tmp_path).digest != load_transform("clean:shout", tmp_path).digest


def test_source_is_read_again_when_it_changes_within_a_second(tmp_path: Path) -> None:
    path = tmp_path / "clean.py"
    for text in ("one", "two", "six"):
        path.write_text(SAYS.format(text))
        os.utime(path, (1_700_000_000, 1_700_000_000))
        assert said(tmp_path) == text
    assert [file.name for file in tmp_path.iterdir()] == ["clean.py"]


def test_file_may_define_dataclasses(tmp_path: Path) -> None:
    source = "from __future__ import annotations\nfrom dataclasses import dataclass\n\n@dataclass\nclass Word:\n    text: str\n"
    (tmp_path / "clean.py").write_text(source + SAYS.format("fox"))
    assert said(tmp_path) == "fox"


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("clean", "", 'as in "clean:function"'),
        ("clean:say", None, r"clean\.py cannot be read: No such file"),
        ("clean:say", "say = 1", "has no function 'say'"),
        ("clean:say", "raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
        ("clean:say", "def say(:", "cannot be imported: SyntaxError"),
        ("clean:say", "import beside", "cannot be imported: ModuleNotFoundError: No module named 'beside'"),
    ],
)
def test_missing_or_failing_functions_are_refused(tmp_path: Path, name: str, source: str | None, message: str) -> None:
    if source is not None:
        (tmp_path / "clean.py").write_text(source)
    with pytest.raises(TransformError, match=message):
        load_transform(name, tmp_path)


def test_error_of_a_function_is_reported_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "clean.py").write_text(
        "def say(rows):\n    return inner(rows)\n\ndef inner(rows):\n    return rows.column(9)\n"
    )
    with pytest.raises(TransformError, match=r"the transform clean:say raises \w+ in line 5 of clean\.py: "):
        load_transform("clean:say", tmp_path)(pa.RecordBatch.from_pylist([{"n": 1}]))
    with pytest.raises(TransformError, match=r"the transform clean:sorted raises TypeError: "):
        Transform("clean:sorted", "digest", sorted)(1)
