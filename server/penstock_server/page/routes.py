"""Routes of the page. Its files hold relative URLs alone, so it also works below a prefix of a proxy."""

from __future__ import annotations

import gzip
from base64 import b64encode
from functools import cache
from hashlib import blake2b, sha256
from html import escape
from pathlib import Path
from typing import NamedTuple

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

_FOLDER = Path(__file__).parent / "files"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # browsers ask with the ETag, so a new version shows at once
    "Vary": "Accept-Encoding",
}


class _File(NamedTuple):
    """A file of the page, and its bytes compressed."""

    media_type: str
    etag: str
    plain: bytes
    compressed: bytes


def add_page(app: FastAPI) -> None:
    """Adds the page at `/` and its files below `/page`."""

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request) -> Response:
        return _respond(request, "index.html")

    @app.api_route("/page/{name:path}", methods=["GET", "HEAD"], include_in_schema=False)
    async def file(request: Request, name: str) -> Response:
        return _respond(request, name)


def login_page(status: int, error: str = "") -> Response:
    """Returns the page that asks for a token. It is one file: without a token there is nothing else to load."""
    page = _files()["login.html"].plain.decode()
    style = b64encode(sha256(page.partition("<style>")[2].partition("</style>")[0].encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{style}'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    headers = _HEADERS | {"Content-Security-Policy": policy, "Cache-Control": "no-store"}
    alert = f'<p role="alert">{escape(error)}</p>' if error else ""
    return Response(page.replace("<!--error-->", alert), status, headers, media_type="text/html")


def _respond(request: Request, name: str) -> Response:
    file = _files().get(name)
    if file is None:
        raise HTTPException(404)
    headers = _HEADERS | {"ETag": file.etag}
    if file.etag in request.headers.get("If-None-Match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        return Response(file.compressed, headers=headers | {"Content-Encoding": "gzip"}, media_type=file.media_type)
    return Response(file.plain, headers=headers, media_type=file.media_type)


@cache
def _files() -> dict[str, _File]:
    """Returns the files by their path in the folder. They are read once, with the first request."""
    files = {}
    for path in _FOLDER.rglob("*"):
        if media_type := _TYPES.get(path.suffix):
            body = path.read_bytes()
            # Of the content: installers may give each version of a file the same mtime. Weak, as it is that of two encodings.
            etag = f'W/"{blake2b(body, digest_size=12).hexdigest()}"'
            files[path.relative_to(_FOLDER).as_posix()] = _File(media_type, etag, body, gzip.compress(body, mtime=0))
    return files
