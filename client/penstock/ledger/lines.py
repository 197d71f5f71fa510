"""Lines of a ledger that wait to be written, of which the file may have a part."""

from __future__ import annotations

from dataclasses import dataclass

NOWHERE = -1  # in the file


@dataclass(slots=True)
class Lines:
    """Lines of one iteration that wait, each with its newline. Its begin line may be among them, as the first.

    `is_over`: the iteration was, when the file was closed.

    `placed` is (where the text begins in the file, the text); NOWHERE while none of it is written. It is one tuple, so that
    both change in one assignment: a signal's handler may raise between any two lines.
    """

    begin: str
    placed: tuple[int, bytearray]
    is_over: bool = False

    @property
    def num_lines(self) -> int:
        """How many there are; of an iteration without any the begin line."""
        return max(1, self.placed[1].count(b"\n"))

    def begin_anew(self) -> None:
        """They are written behind their begin line."""
        begin, text = f"{self.begin}\n".encode(), self.placed[1]
        if not text.startswith(begin):
            text[:0] = begin

    def cut(self, start: int, num_bytes: int) -> int:
        """So many bytes of the text are in the file, and what is left begins there. How many are whole lines, which go."""
        text = self.placed[1]
        whole = text.rfind(b"\n", 0, num_bytes) + 1
        if whole:
            self.placed = (start + whole, text[whole:])
        return whole
