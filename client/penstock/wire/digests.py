"""Digests: what tells a body that is damaged."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256

import xxhash


def digest(content: bytes | memoryview) -> str:
    """xxh3-64, as 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(content)


def content_digest(body: bytes | memoryview) -> str:
    """Return the Content-Digest header (RFC 9530) of a body that is no frame, and so contains no digest."""
    return f"sha-256=:{b64encode(sha256(body).digest()).decode()}:"
