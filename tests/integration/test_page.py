"""The page's files as a server sends them: policy, caches, compression. tests/browser opens the page."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from support.corpora import write_numbered
from support.servers import ROOT, Serve, Server

FILES = ROOT / "server/penstock_server/page/files"


@pytest.fixture(scope="module")
def server(serve: Serve, shared: Path) -> Server:
    write_numbered(shared / "numbers", 9)
    return serve(shared)


def test_page_is_served_with_a_strict_policy(server: Server) -> None:
    page = server.get("/")
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    head = httpx.head(f"{server.url}/")
    assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", page.headers["etag"])
    again = httpx.get(f"{server.url}/", headers={"If-None-Match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    plain = httpx.get(f"{server.url}/page/page.js", headers={"Accept-Encoding": "identity"})
    packed = httpx.get(f"{server.url}/page/page.js", headers={"Accept-Encoding": "gzip"})
    assert packed.content == plain.content
    assert packed.headers["content-encoding"] == "gzip"
    for path in ("/page/absent.js", "/page/../routes.py", "/page/%2e%2e/routes.py", "/page/vendor/README.md"):
        assert server.get(path).status_code == 404


def test_page_is_small(server: Server) -> None:
    names = [path.relative_to(FILES).as_posix() for path in FILES.rglob("*") if path.suffix in (".js", ".css", ".html", ".svg")]
    assert len(names) > 10
    with httpx.Client(headers={"Accept-Encoding": "gzip"}) as client:
        packed = sum(int(client.get(f"{server.url}/page/{name}").headers["content-length"]) for name in names)
    assert packed < 60_000
