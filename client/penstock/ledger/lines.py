"""Lines of a ledger that wait to be written; the file may already hold a part of them."""

from __future__ import annotations

from dataclasses import dataclass

NOWHERE = -1  # file offset of text that is not written yet


@dataclass(slots=True)
class Lines:
    """Waiting lines of one iteration, each with its newline. The iteration's begin line may be the first.

    `is_over`: the iteration had ended when the file was closed.

    `placed` is (file offset of the text, text); the offset is NOWHERE while none of the text is written. It is one tuple, so
    that both change in one assignment: a signal handler may raise between any two lines.
    """

    begin: str
    placed: tuple[int, bytearray]
    is_over: bool = False

    @property
    def num_lines(self) -> int:
        """Number of lines; 1 for an iteration without lines, which has a begin line."""
        return max(1, self.placed[1].count(b"\n"))

    def begin_anew(self) -> None:
        """Put the begin line before the lines, unless it is there."""
        begin, text = f"{self.begin}\n".encode(), self.placed[1]
        if not text.startswith(begin):
            text[:0] = begin

    def cut(self, start: int, num_bytes: int) -> int:
        """Remove complete lines from the first `num_bytes`, which the file holds from `start`; return their bytes."""
        text = self.placed[1]
        whole = text.rfind(b"\n", 0, num_bytes) + 1
        if whole:
            self.placed = (start + whole, text[whole:])
        return whole
