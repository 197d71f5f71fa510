"""OpenAPI document for the docs page: converts FastAPI's 3.1 schemas to version 3.0."""

from __future__ import annotations

from typing import Any

_NULL = {"type": "null"}


def for_page(node: Any) -> Any:
    """Converts the document, or a part of it, to version 3.0.

    Version 3.0 has no type null, only `nullable`, and ignores siblings of a reference. The result has no schema titles: they
    repeat the field names, and the page would collapse the descriptions below them.
    """
    if isinstance(node, list):
        return [for_page(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {name: for_page(value) for name, value in node.items()}
    if _NULL in node.get("anyOf", ()):
        first, *others = (option for option in node.pop("anyOf") if option != _NULL)
        first["nullable"] = True  # allows null beside the type
        node = {"anyOf": [first, *others]} | node if others else first | node
    if "$ref" in node and len(node) > 1:
        node = {"allOf": [{"$ref": node.pop("$ref")}]} | node
    if isinstance(node.get("title"), str) and "version" not in node:  # the document itself keeps its title
        del node["title"]
    return node
