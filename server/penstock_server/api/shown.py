"""JSON responses: they name files relative to the data folder, so that no caller learns where the server keeps them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from fastapi.responses import JSONResponse

shown_paths: ContextVar[ShownPaths | None] = ContextVar("shown_paths", default=None)  # of the application of a request


class ShownPaths:
    """Names of folders for callers; `folders` maps each to its name. "" stands for the data folder."""

    def __init__(self, folders: Mapping[Path, str]) -> None:
        forms = {str(form): name for path, name in folders.items() for form in (path.absolute(), path.resolve())}
        self._names = {json.dumps(form, ensure_ascii=False)[1:-1]: name for form, name in forms.items() if form != "/"}
        longest_first = sorted(self._names, key=len, reverse=True)
        # Not in the middle of another path, as in /v1/datasets/data of the folder /data.
        self._pattern = re.compile(rf"(?<![\w./-])({'|'.join(map(re.escape, longest_first))})(/|(?![\w-]))")

    def shorten(self, text: str) -> str:
        """Replace each folder in a JSON text by its name."""
        return self._pattern.sub(self._shortened, text)

    def _shortened(self, found: re.Match[str]) -> str:
        name = self._names[found[1]]
        return f"{name}{found[2]}" if name else "" if found[2] else "the data folder"


class Json(JSONResponse):
    """A JSON response with the paths that a caller may see. Routes and errors send all JSON by it, but for texts of rows."""

    def render(self, content: Any) -> bytes:
        """Return the body."""
        body, paths = super().render(content), shown_paths.get()
        return paths.shorten(body.decode()).encode() if paths else body
