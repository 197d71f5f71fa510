"""Texts that are a URL and not a path."""

from __future__ import annotations

import re


def is_url(text: str) -> bool:
    """Return whether a text is a URL and not a path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None
