"""The OpenAPI document as the page shows it best: of version 3.0, where FastAPI writes schemas of 3.1."""

from __future__ import annotations

from typing import Any

_NULL = {"type": "null"}


def for_page(node: Any) -> Any:
    """The document, or a part of it: what may be null is said as in 3.0, which has no type null.

    Titles of schemas are left out: they are but the names of fields again, and what a field is would be folded away below them.
    """
    if isinstance(node, list):
        return [for_page(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {name: for_page(value) for name, value in node.items()}
    if _NULL in node.get("anyOf", ()):
        options = [option for option in node.pop("anyOf") if option != _NULL]
        # What stands beside a reference is not looked at.
        one = options[0] if len(options) == 1 and "$ref" not in options[0] else {"anyOf": options}
        node = one | node | {"nullable": True}
    if isinstance(node.get("title"), str) and "version" not in node:  # which the document as a whole has
        del node["title"]
    return node
