"""Templates and transforms over rows that lack something."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from penstock_server.problems import DatasetInvalid, ShardUnreadable
from penstock_server.recipes.tokenizer import load_tokenizer
from support.corpora import none_is_bad, open_blocks, write
from support.engine import rows_of


def test_template_with_invalid_utf8_makes_a_bad_row(data: Path) -> None:
    write(data, 'text = "{raw}!"', {"raw": pa.array([b"fox", b"\xff"], pa.binary())})
    [block] = open_blocks(data).get([0])
    assert block.bad == {1: "{raw}! is not valid UTF-8 at byte 0"}
    assert rows_of(block)[0] == [*load_tokenizer(data / "../tokenizer.json").encode(["fox!"], none_is_bad)[0], 0]


def test_number_is_refused_as_a_text_without_a_template(data: Path) -> None:
    write(data, 'text = "n"', {"n": [7]})
    with pytest.raises(DatasetInvalid, match="is int64, but text must be text"):
        open_blocks(data)


def test_template_without_a_column_is_refused(data: Path) -> None:
    write(data, 'text = "{{fox}}"', {"text": ["the dog"]})
    with pytest.raises(DatasetInvalid, match="reads no column"):
        open_blocks(data)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("pa.record_batch({'other': rows['body']})", "there is no column 'body'; there are: other"),
        ("pa.record_batch({'body': pa.array(range(rows.num_rows))})", "column 'body' is int64, but text must be text"),
        ("pa.record_batch({'body': rows['body'], 'n': rows['body']})", "column 'n' is string, but int64 in the first shard"),
    ],
)
def test_transform_is_named_when_it_returns_other_columns(data: Path, returned: str, message: str) -> None:
    write(data, 'text = "body"\ntransform = "odd:odd"\ncolumns = ["n"]', {"body": ["fox"], "n": [1]})
    source = f"import pyarrow as pa\n\ndef odd(rows):\n    return {returned} if rows.num_rows else rows\n"
    (data / "odd.py").write_text(source)
    with pytest.raises(ShardUnreadable, match=message):
        open_blocks(data).get([0])
