"""The table of a batch: a line of numbers for each sample, and beside it the rows that it is made of, with their text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.display.batch_view import MUCH_PADDING, Passage, Piece, SequenceView
from penstock.display.terminal import BOLD, CYAN, DIM, PLAIN, RED, YELLOW, Terminal, Unit, abridge, units, wrap
from penstock.text import counted

_WIDTHS = (4, 7, 5, 7)  # of the columns below
_TITLES = ("#", "tokens", "pad", "in loss")
_MIN_PIECE_COLUMNS = 32


def table(samples: Sequence[SequenceView], terminal: Terminal, num_lines: int) -> Iterator[str]:
    """The table's lines. Of each row about `num_lines` lines of text are shown, and as many rows of each sample; 0: all."""
    width = terminal.columns - sum(_WIDTHS) - len(_WIDTHS) - 2
    yield f"{_numbers(_TITLES, [BOLD] * 4, terminal)} {_bar(terminal)} {terminal.paint('text', BOLD)}"
    yield terminal.paint("─" * (sum(_WIDTHS) + len(_WIDTHS)) + "┼" + "─" * (width + 1), DIM)
    for sample in samples:
        facts = (f"{sample.index}", f"{sample.num_tokens:,}", f"{sample.padding:.0%}", f"{sample.num_loss_tokens:,}")
        styles = (PLAIN, PLAIN, YELLOW if sample.padding >= MUCH_PADDING else PLAIN, PLAIN if sample.num_loss_tokens else RED)
        left = _numbers(facts, styles, terminal)
        for line in _text(sample, terminal, width, num_lines):
            yield f"{left} {_bar(terminal)} {line}".rstrip()
            left = " " * (sum(_WIDTHS) + len(_WIDTHS) - 1)


def _bar(terminal: Terminal) -> str:
    return terminal.paint("│", DIM)


def _numbers(cells: Sequence[str], styles: Sequence[str], terminal: Terminal) -> str:
    return " ".join(terminal.paint(c.rjust(w), s) for c, w, s in zip(cells, _WIDTHS, styles, strict=True))


def _text(sample: SequenceView, terminal: Terminal, width: int, num_lines: int) -> Iterator[str]:
    several = len(sample.passages) > 1
    shown = sample.passages[: num_lines or None]
    for passage in shown:
        for line in wrap(_heading(passage, several), width):
            yield terminal.line(line)
        yield from piece_lines(passage.pieces, terminal, width, num_lines)
    if left_out := len(sample.passages) - len(shown):
        yield terminal.paint(f"▸ and {left_out:,} more; --lines 0 shows all", YELLOW)
    for name, value in sample.columns.items():
        for line in wrap([*units(f"{name}: ", CYAN), *_abridged(str(value), PLAIN, num_lines * width)], width):
            yield terminal.line(line)


def _heading(passage: Passage, several: bool) -> Iterator[Unit]:
    if several:
        yield from (Unit("▸", YELLOW), Unit(" ", PLAIN))
    side = f"{passage.side}: " if passage.side else ""
    yield from units(side, BOLD)
    yield from units(f"{passage.source}" + (f", {passage.num_tokens:,} tokens" if several else ""), CYAN)


def piece_lines(pieces: Sequence[Piece], terminal: Terminal, width: int, num_lines: int) -> Iterator[str]:
    """The text of some pieces in about `num_lines` lines of at most `width` columns; 0: all of it."""
    for line in wrap(_pieces(pieces, terminal, num_lines * width), width):
        yield terminal.line(line)


def _pieces(pieces: Sequence[Piece], terminal: Terminal, columns: int) -> Iterator[Unit]:
    """Of each piece its beginning and its end: a long prompt must not hide the response."""
    most = max(2, columns // _MIN_PIECE_COLUMNS) if columns else len(pieces)
    if len(pieces) <= most:
        for piece, share in zip(pieces, _shares([len(piece.text) for piece in pieces], columns), strict=True):
            yield from _piece(piece, terminal, share)
        return
    first, last = pieces[: -(-most // 2)], pieces[len(pieces) - most // 2 :]
    for piece in first:
        yield from _piece(piece, terminal, _MIN_PIECE_COLUMNS)
    yield from _note(counted(len(pieces) - most, "more turn"))
    for piece in last:
        yield from _piece(piece, terminal, _MIN_PIECE_COLUMNS)


def _shares(lengths: Sequence[int], columns: int) -> list[int]:
    """The columns that each text of these lengths gets: what a short one leaves is for the longer ones."""
    shares, left = [0] * len(lengths), columns
    for place, index in enumerate(sorted(range(len(lengths)), key=lengths.__getitem__)):
        shares[index] = left // (len(lengths) - place)
        left -= min(shares[index], lengths[index])
    return shares


def _piece(piece: Piece, terminal: Terminal, columns: int) -> Iterator[Unit]:
    """Without colours, what carries no loss stands between ⟦ and ⟧."""
    marks = ("", "") if piece.in_loss or terminal.has_colours else ("⟦", "⟧")
    style = PLAIN if piece.in_loss else DIM
    yield from units(marks[0], style)
    yield from _abridged(piece.text, style, columns)
    yield from units(marks[1], style)


def _abridged(text: str, style: str, columns: int) -> Iterator[Unit]:
    head, left_out, tail = abridge(text, columns) if columns else (text, 0, "")
    yield from units(head, style)
    if left_out:
        yield from _note(f"{left_out:,} characters")
        yield from units(tail, style)


def _note(text: str) -> Iterator[Unit]:
    yield from (Unit(" ", PLAIN), Unit(f"[… {text} …]", YELLOW), Unit(" ", PLAIN))
