"""The table of a batch, as narrow as terminals get."""

from __future__ import annotations

import io

import pytest

from penstock.display.batch_view import Piece
from penstock.display.table import piece_lines
from penstock.display.terminal import Terminal


@pytest.mark.parametrize("width", [24, 40, 54, 80])
def test_however_narrow_a_terminal_is_the_last_piece_is_shown_beside_the_first(width: int) -> None:
    turns = [
        Piece(text=f"<{number} begins " + "and goes on " * 20 + f"{number} ends>", num_tokens=1, in_loss=True)
        for number in range(4)
    ]
    for pieces, left_out in ((turns[:1], ""), (turns[:2], ""), (turns[:3], "1 more turn …"), (turns, "2 more turns …")):
        shown = "".join(piece_lines(pieces, Terminal.of(io.StringIO()), width, 1))
        assert shown.startswith("<0 begi")
        assert shown.rstrip().endswith("ds>")
        assert left_out in shown
        assert ("more turn" in shown) == bool(left_out)
