"""A line on stderr that is drawn anew again and again, on a terminal alone."""

from __future__ import annotations

import shutil
import sys


class StatusLine:
    """What a person who waits sees meanwhile; as a context it is gone afterwards."""

    def __init__(self) -> None:
        self._is_drawn = False

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    @property
    def is_seen(self) -> bool:
        """Whether anybody sees it."""
        return sys.stderr.isatty()

    def draw(self, text: str) -> None:
        """Draws the line, or draws it anew."""
        if self.is_seen:
            sys.stderr.write(f"\r{text[: shutil.get_terminal_size().columns - 1]}\x1b[K")
            sys.stderr.flush()
            self._is_drawn = True

    def clear(self) -> None:
        """Clears the line, if it is drawn."""
        if self._is_drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._is_drawn = False
