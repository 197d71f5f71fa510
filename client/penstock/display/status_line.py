"""A line on stderr that is drawn anew again and again, on a terminal alone that can clear it."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO


class StatusLine:
    """What a person who waits sees meanwhile; as a context it is gone afterwards."""

    def __init__(self) -> None:
        self._drawn_on: TextIO | None = None

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    @property
    def is_seen(self) -> bool:
        """Whether anybody sees it."""
        try:
            return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        except (AttributeError, ValueError):  # there is none, or a closed one, or something else in its place
            return False

    def draw(self, text: str) -> None:
        """Draws the line, or draws it anew."""
        if self.is_seen:
            stream = self._drawn_on = sys.stderr
            with suppress(OSError, ValueError):  # it has no width, or no number: what is too long wraps
                text = text[: max(0, os.get_terminal_size(stream.fileno()).columns - 1) or None]
            stream.write(f"\r{text}\x1b[K")
            stream.flush()

    def clear(self) -> None:
        """Clears the line, if it is drawn."""
        if stream := self._drawn_on:
            self._drawn_on = None
            with suppress(ValueError):  # it was closed since
                stream.write("\r\x1b[K")
                stream.flush()
