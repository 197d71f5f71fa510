"""The OpenAPI document as the page shows it best: of version 3.0, where FastAPI writes schemas of 3.1."""

from __future__ import annotations

from typing import Any

_NULL = {"type": "null"}


def for_page(node: Any) -> Any:
    """The document, or a part of it, in the words of 3.0.

    That has no type null but says of another type that its values may be null, and does not look at what stands beside a
    reference. Titles of schemas are left out: they are but the names of fields again, and what a field is would be folded
    away below them.
    """
    if isinstance(node, list):
        return [for_page(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {name: for_page(value) for name, value in node.items()}
    if _NULL in node.get("anyOf", ()):
        first, *others = (option for option in node.pop("anyOf") if option != _NULL)
        first["nullable"] = True  # which widens the type beside it
        node = {"anyOf": [first, *others]} | node if others else first | node
    if "$ref" in node and len(node) > 1:
        node = {"allOf": [{"$ref": node.pop("$ref")}]} | node
    if isinstance(node.get("title"), str) and "version" not in node:  # which the document as a whole has
        del node["title"]
    return node
