"""A server of files with ranges and ETags, which speaks the endpoints of the Hugging Face hub that the server uses."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_secret"
_PER_PAGE = 2


class FileServer:
    """Commits of a repository org/name, each a dict of paths and contents; the branch main is the last one.

    paths     /files/PATH, of the last commit; and the hub's, which redirect to /cdn/
    ignores_conditions  whether it sends a file that If-Match does not name
    answer    what the hub's API answers in place of the truth
    failures  statuses to answer with, one for each of the next requests
    seen      number of requests by the first part of their path
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.commits = [files]
        self.failures: list[int] = []
        self.ignores_conditions = False
        self.answer: bytes | None = None
        self.seen = Counter[str]()
        self.tokens = Counter[str]()
        self.url = ""

    def commit(self, files: dict[str, bytes]) -> None:
        """Replace all files."""
        self.commits.append(files)

    @property
    def commit_id(self) -> str:
        """The id of the last commit."""
        return _id(len(self.commits) - 1)


def _id(number: int) -> str:
    return f"{number:040x}"


@contextmanager
def file_server(files: dict[str, bytes]) -> Iterator[FileServer]:
    """Serve files until the block ends."""
    served = FileServer(files)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Print nothing."""

        def do_HEAD(self) -> None:
            self._answer(is_head=True)

        def do_GET(self) -> None:
            self._answer(is_head=False)

        def _answer(self, *, is_head: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            kind = path.split("/")[1]
            served.seen[kind] += 1
            served.tokens[f"{kind} {self.headers.get('Authorization', '')}"] += 1
            if served.failures:
                self._send(served.failures.pop(0), b"", is_head=is_head)
            elif kind in ("api", "datasets") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self._send(401, b"", is_head=is_head)
            elif kind == "api" and served.answer is not None:
                self._send(200, served.answer, is_head=is_head)
            elif path == "/api/datasets/org/name/revision/main":
                self._send(200, json.dumps({"sha": served.commit_id}).encode(), is_head=is_head)
            elif found := re.fullmatch(r"/api/datasets/org/name/tree/([0-9a-f]{40})(/.*)?", path):
                self._tree(int(found[1], 16), (found[2] or "").strip("/"), is_head=is_head)
            elif found := re.fullmatch(r"/datasets/org/name/resolve/([0-9a-f]{40})/(.+)", path):
                self._send(
                    302,
                    b"",
                    {"Location": f"{served.url.replace('127.0.0.1', 'localhost')}/cdn/{found[1]}/{found[2]}"},
                    is_head=is_head,
                )
            elif found := re.fullmatch(r"/cdn/([0-9a-f]{40})/(.+)", path):
                self._file(served.commits[int(found[1], 16)].get(found[2]), is_head=is_head)
            else:
                self._file(served.commits[-1].get(path.removeprefix("/files/")), is_head=is_head)

        def _tree(self, commit: int, folder: str, *, is_head: bool) -> None:
            below = f"{folder}/" if folder else ""
            files = {path: body for path, body in sorted(served.commits[commit].items()) if path.startswith(below)}
            if below and not files:  # as the hub does, also for the path of a file
                self._send(404, b"", is_head=is_head)
                return
            entries = [
                {
                    "type": "file",
                    "path": path,
                    "size": len(body),
                    "oid": "of-a-pointer",
                    "lfs": {"oid": sha256(body).hexdigest()},
                }
                for path, body in files.items()
            ]
            first = int(parse_qs(urlsplit(self.path).query).get("cursor", ["0"])[0])
            more = f"{served.url}{urlsplit(self.path).path}?recursive=true&cursor={first + _PER_PAGE}"
            headers = {"Link": f'<{more}>; rel="next"'} if first + _PER_PAGE < len(entries) else {}
            self._send(200, json.dumps(entries[first : first + _PER_PAGE]).encode(), headers, is_head=is_head)

        def _file(self, body: bytes | None, *, is_head: bool) -> None:
            if body is None:
                self._send(404, b"", is_head=is_head)
                return
            etag = f'"{sha256(body).hexdigest()[:16]}"'
            if self.headers.get("If-Match", etag) != etag and not served.ignores_conditions:
                self._send(412, b"", is_head=is_head)
            elif found := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                self._send(206, body[int(found[1]) : int(found[2]) + 1], {"ETag": etag}, is_head=is_head)
            else:
                self._send(200, body, {"ETag": etag}, is_head=is_head)

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, *, is_head: bool) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if not is_head:
                self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        served.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield served
        finally:
            server.shutdown()
            thread.join()
