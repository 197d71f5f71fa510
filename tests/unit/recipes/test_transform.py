"""Transforms: the code that runs is the code whose hash is in the snapshot, wherever its module lies."""

import os
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pytest

from penstock_server.recipes.transform import Transform, TransformError, load_transform

ROWS = pa.record_batch({"text": ["fox"]})
SAYS = "import pyarrow as pa\n\ndef say(rows):\n    return pa.record_batch({{'text': ['{}'] * rows.num_rows}})\n"


def said(folder: Path, name: str = "clean:say") -> str:
    [text] = load_transform(name, folder)(ROWS)["text"].to_pylist()
    return str(text)


def test_two_folders_may_have_modules_of_one_name(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "clean.py").write_text(SAYS.format(name))
    one, two = (load_transform("clean:say", tmp_path / name) for name in ("one", "two"))
    assert one.digest != two.digest
    assert [transform(ROWS)["text"].to_pylist() for transform in (one, two)] == [["one"], ["two"]]


def test_two_functions_of_one_module_make_two_datasets(tmp_path: Path) -> None:
    (tmp_path / "clean.py").write_text("def say(rows):\n    return rows\n\ndef shout(rows):\n    return rows\n")
    assert load_transform("clean:say", tmp_path).digest != load_transform("clean:shout", tmp_path).digest


def test_a_source_that_changes_within_a_second_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "clean.py"
    for text in ("one", "two", "six"):
        path.write_text(SAYS.format(text))
        os.utime(path, (1_700_000_000, 1_700_000_000))
        assert said(tmp_path) == text
    assert [file.name for file in tmp_path.iterdir()] == ["clean.py"]


def test_a_module_may_have_dataclasses_and_names_that_look_themselves_up(tmp_path: Path) -> None:
    source = "from __future__ import annotations\nfrom dataclasses import dataclass\n\n@dataclass\nclass Word:\n    text: str\n"
    (tmp_path / "clean.py").write_text(source + SAYS.format("fox"))
    assert said(tmp_path) == "fox"


def test_a_file_that_is_a_link_to_nothing_is_not_an_installed_module(tmp_path: Path) -> None:
    (tmp_path / "json.py").symlink_to("away")
    with pytest.raises(TransformError, match=r"json\.py cannot be read: No such file"):
        load_transform("json:loads", tmp_path)


def test_an_installed_module_is_found_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "penstock_test_words"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "words.py").write_text("WORD = 'dog'\n")
    source = SAYS.format("x").replace("'x'", "WORD")
    (package / "clean.py").write_text(f"from .words import WORD\n{source}")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert said(tmp_path, "penstock_test_words.clean:say") == "dog"


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("clean", "", 'must name a function, as in "module:function"'),
        ("clean:say", None, "there is no module 'clean'"),
        ("sys:exit", None, "there is no module 'sys'"),
        ("no.such.module:say", None, r"the module 'no\.such\.module' cannot be looked for: ModuleNotFoundError"),
        ("clean:say", "say = 1", "has no function 'say'"),
        ("clean:say", "raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
        ("clean:say", "def say(:", "cannot be imported: SyntaxError"),
        ("clean:say", "import beside", "cannot be imported: ModuleNotFoundError: No module named 'beside'"),
    ],
)
def test_what_cannot_be_had_is_refused(tmp_path: Path, name: str, source: str | None, message: str) -> None:
    if source is not None:
        (tmp_path / "clean.py").write_text(source)
    with pytest.raises(TransformError, match=message):
        load_transform(name, tmp_path)


def test_a_lack_of_memory_is_no_fault_of_a_function() -> None:
    with pytest.raises(MemoryError):
        Transform("clean:all", "digest", Mock(side_effect=MemoryError))(pa.RecordBatch.from_pylist([]))


def test_what_a_function_raises_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "clean.py").write_text(
        "def say(rows):\n    return inner(rows)\n\ndef inner(rows):\n    return rows.column(9)\n"
    )
    with pytest.raises(TransformError, match=r"the transform clean:say raises \w+ in line 5 of clean\.py: "):
        load_transform("clean:say", tmp_path)(pa.RecordBatch.from_pylist([{"n": 1}]))
    with pytest.raises(TransformError, match=r"the transform clean:sorted raises TypeError: "):
        Transform("clean:sorted", "digest", sorted)(1)
