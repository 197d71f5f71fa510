"""The text of a batch on a terminal: no control characters, abridged in its middle."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from penstock.cli.batch_view import Piece, append_abridged, ids_as_text, text_of
from penstock.text import printable


def abridged(text: str, columns: int) -> str:
    result = Text()
    append_abridged(result, text, columns)
    return result.plain


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x07\r\n", "␛[31mred␇␍↵"),
        ("a\tb\x00\x7f\x9b2J", "a⇥b␀␡<U+009B>2J"),
        ("\u202eevil\u2066\u200b", "<U+202E>evil<U+2066><U+200B>"),
        ("\U000e0041\ud800\u2028", "<U+E0041><U+D800><U+2028>"),
        ("春天 é e\u0301 می\u200cم", "春天 é e\u0301 می\u200cم"),
    ],
)
def test_printable_spells_control_characters_out(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert abridged(text, 0) == shown


@given(st.text())
def test_printable_leaves_no_control_character(text: str) -> None:
    shown = printable(text)
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")]
    shown.encode()


def test_abridged_text_keeps_its_beginning_and_its_end() -> None:
    assert abridged("春天来了" * 3, 24) == "春天来了" * 3
    head, _, tail = abridged("begins " + "and goes on " * 90 + "ends", 60).partition(" [… 1,")
    assert head.startswith("begins and")
    assert tail.endswith("goes on ends")
    assert cell_len(abridged("春天来了" * 90, 60)) < 100


@given(st.lists(st.integers(0, 2**32 - 1), min_size=20), st.integers(20, 100))
def test_abridged_token_ids_stay_whole(ids: list[int], columns: int) -> None:
    head, _, tail = abridged(ids_as_text(ids), columns).partition(" [… ")
    tail = tail.partition(" …] ")[2]
    assert head.split() == list(map(str, ids))[: len(head.split())]
    assert tail.split() == list(map(str, ids))[len(ids) - len(tail.split()) :]


@pytest.mark.parametrize("columns", [24, 40, 54, 80])
def test_last_piece_is_shown_beside_the_first_in_any_width(columns: int) -> None:
    turns = [
        Piece(text=f"<{number} begins " + "and goes on " * 20 + f"{number} ends>", num_tokens=1, in_loss=True)
        for number in range(4)
    ]
    for pieces, left_out in ((turns[:1], ""), (turns[:2], ""), (turns[:3], "1 more turn …"), (turns, "2 more turns …")):
        shown = text_of(pieces, columns, has_styles=False).plain
        assert shown.startswith("<0 begi")
        assert shown.endswith("ds>")
        assert left_out in shown
        assert ("more turn" in shown) == bool(left_out)
