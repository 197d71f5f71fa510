"""What reaches a terminal: nothing that it obeys, and no line that is wider than it is."""

import io
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.display.terminal import Terminal, Unit, abridge, columns_of, units, wrap
from penstock.printable import printable


def text_of(line: list[Unit]) -> str:
    return "".join(unit.text for unit in line)


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
def test_what_a_terminal_would_obey_is_spelled_out(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert text_of(list(units(text, ""))) == shown


@given(st.text())
def test_no_text_reaches_a_terminal_with_a_control_character(text: str) -> None:
    shown = printable(text)
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")]
    shown.encode()


@pytest.mark.parametrize(
    ("text", "columns"),
    [("abc", 3), ("春天", 4), ("\uff57", 2), ("e\u0301", 1), ("한", 2), ("👩", 2), ("❤\ufe0f", 2), ("a\u200db", 2)],
)
def test_columns_are_counted(text: str, columns: int) -> None:
    assert columns_of(text) == columns


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three", ["one two", "three"]),
        ("one twothree four", ["one", "twothree", "four"]),
        ("abcdefghijkl", ["abcdefgh", "ijkl"]),
        ("春天来了万物", ["春天来了", "万物"]),
        ("a春天来了", ["a春天来", "了"]),
        ("ab 春天来", ["ab 春天", "来"]),
        ("", []),
    ],
)
def test_lines_break_behind_words_and_around_wide_characters(text: str, lines: list[str]) -> None:
    assert [text_of(line) for line in wrap(units(text, ""), 8)] == lines


@given(st.text(), st.integers(8, 40))
def test_no_line_is_too_wide_and_no_character_is_lost(text: str, width: int) -> None:
    lines = [text_of(line) for line in wrap(units(text, ""), width)]
    assert all(columns_of(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == printable(text).replace(" ", "")


@given(st.text(), st.integers(8, 100))
def test_a_text_is_abridged_in_its_middle(text: str, columns: int) -> None:
    head, left_out, tail = abridge(text, columns)
    assert len(head) + left_out + len(tail) == len(text)
    assert text.startswith(head)
    assert text.endswith(tail)
    if left_out:
        assert columns_of(printable(head + tail)) <= columns


@given(st.lists(st.integers(0, 2**32 - 1), min_size=20), st.integers(8, 100))
def test_no_token_id_is_cut_into_another_one(ids: list[int], columns: int) -> None:
    head, _, tail = abridge(" ".join(map(str, ids)), columns)
    assert head.split() == list(map(str, ids))[: len(head.split())]
    assert not tail or tail.split() == list(map(str, ids))[-len(tail.split()) :]


def test_a_pipe_gets_no_colours_and_a_width_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert Terminal.of(io.StringIO(), {}) == Terminal(100, False)
    monkeypatch.setenv("COLUMNS", "20")
    assert Terminal.of(io.StringIO(), {}) == Terminal(40, False)


def test_a_terminal_has_colours_but_in_a_notebook_or_where_they_are_unwanted() -> None:
    class Tty(io.StringIO):
        def isatty(self) -> bool:
            return True

    asked: tuple[dict[str, str], ...] = ({}, {"NO_COLOR": "1"}, {"JPY_PARENT_PID": "7"}, {"TERM": "dumb"}, {"TERM": "xterm"})
    assert [Terminal.of(Tty(), environment).has_colours for environment in asked] == [True, False, False, False, True]
