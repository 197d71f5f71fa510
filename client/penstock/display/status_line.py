"""Status line on stderr, redrawn in place; only on a terminal that can clear it."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO


class StatusLine:
    """Progress line for a waiting user; as a context manager it clears the line on exit."""

    def __init__(self) -> None:
        self._drawn_on: TextIO | None = None

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    @property
    def is_seen(self) -> bool:
        """Whether a terminal shows the line."""
        try:
            return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        except (AttributeError, ValueError):  # stderr is missing, closed or replaced
            return False

    def draw(self, text: str) -> None:
        """Draw or redraw the line."""
        if self.is_seen:
            stream = self._drawn_on = sys.stderr
            with suppress(OSError, ValueError):  # unknown width: a long line wraps
                text = text[: max(0, os.get_terminal_size(stream.fileno()).columns - 1) or None]
            stream.write(f"\r{text}\x1b[K")
            stream.flush()

    def clear(self) -> None:
        """Clear the line, if it is drawn."""
        if stream := self._drawn_on:
            self._drawn_on = None
            with suppress(ValueError):  # the stream was closed since
                stream.write("\r\x1b[K")
                stream.flush()
