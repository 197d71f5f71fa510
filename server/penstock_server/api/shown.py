"""JSON responses. They name files relative to the data folder, so that callers do not learn where it is on the server."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from fastapi.responses import JSONResponse

shown_paths: ContextVar[ShownPaths | None] = ContextVar("shown_paths", default=None)  # for the request that is answered


class ShownPaths:
    """Names that callers see instead of folders and URLs. `folders` maps each to its name; "" is the data folder."""

    def __init__(self, folders: Mapping[Path | str, str]) -> None:
        forms = {form: name for place, name in folders.items() for form in _forms_of(place)}
        self._names = {json.dumps(form, ensure_ascii=False)[1:-1]: name for form, name in forms.items() if form != "/"}
        longest_first = sorted(self._names, key=len, reverse=True)
        # Not in the middle of another path, as in /v1/datasets/data of the folder /data.
        self._pattern = re.compile(rf"(?<![\w./-])({'|'.join(map(re.escape, longest_first))})(/|(?![\w-]))")

    def shorten(self, text: str) -> str:
        """Replace each folder in a JSON text with its name."""
        return self._pattern.sub(self._shortened, text)

    def _shortened(self, found: re.Match[str]) -> str:
        name = self._names[found[1]]
        return f"{name}{found[2]}" if name else "" if found[2] else "the data folder"


def _forms_of(place: Path | str) -> tuple[str, ...]:
    """Return how messages may name a folder or a URL."""
    return (place,) if isinstance(place, str) else (str(place.absolute()), str(place.resolve()))


class Json(JSONResponse):
    """JSON response with the paths that callers may see. All routes and errors send it, except for the texts of rows."""

    def render(self, content: Any) -> bytes:
        """Return the body."""
        body, paths = super().render(content), shown_paths.get()
        return paths.shorten(body.decode()).encode() if paths else body
