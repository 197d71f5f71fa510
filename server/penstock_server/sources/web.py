"""Requests by HTTP, and a text file on a web server that lists the URLs of shards, one a line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit

import httpx

from penstock_server.monitoring.metrics import Metrics
from penstock_server.sources.remote import Changed, Retryable, Source, forbidden, not_found
from penstock_server.sources.stats import FileStat

T = TypeVar("T")

_TIMEOUT = httpx.Timeout(30.0, connect=10.0)  # without progress, not in all
_MAX_LIST_BYTES = 64 << 20


class Http(Source):
    """A source that is read by requests of HTTP. The client is made late: it must not be copied by a fork."""

    def __init__(self, url: str, metrics: Metrics) -> None:
        super().__init__(url.rstrip("/"), metrics)
        self._client: httpx.Client | None = None

    def request(
        self, method: str, url: str, headers: Mapping[str, str] | None = None, *, follows: bool = True
    ) -> httpx.Response:
        """Return a response with a status below 300, or 400 if it `follows` no redirect. Another host gets no token."""
        if self._client is None:
            self._client = httpx.Client(timeout=_TIMEOUT, limits=httpx.Limits(max_connections=64))
        try:
            response = self._client.request(method, url, headers=headers, follow_redirects=follows)
        except httpx.TransportError as error:
            raise Retryable(type(error).__name__) from None
        status = f"{response.status_code} {response.reason_phrase}"
        if response.status_code in (404, 410):
            raise not_found()
        if response.status_code in (412, 416):
            raise Changed
        if response.status_code in (408, 425, 429) or response.status_code >= 500:
            raise Retryable(status, is_throttled=response.status_code in (429, 503))
        if response.status_code >= (300 if follows else 400):
            raise forbidden(status)
        return response

    def close(self) -> None:
        """End the threads and the connections."""
        super().close()
        if self._client:
            self._client.close()

    def get_json(self, url: str, headers: Mapping[str, str], parse: Callable[[Any], T]) -> tuple[T, httpx.Response]:
        """Return what `parse` makes of the JSON of a response, and the response."""
        response = self.attempt(lambda: self.request("GET", url, headers))
        try:
            return parse(response.json()), response
        except (AttributeError, LookupError, TypeError, ValueError):
            raise OSError(f"{urlsplit(url).netloc} does not answer as the hub does") from None

    def get_range(self, url: str, start: int, stop: int, headers: Mapping[str, str]) -> httpx.Response:
        """Return the response with bytes [start, stop) of a URL."""
        response = self.request("GET", url, {**headers, "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"})
        if response.status_code == 206:
            return response
        raise forbidden(f"{response.status_code} to a request for a range, which it must support")


class WebList(Http):
    """The URLs in a text file, absolute or relative to it. Each shard is named by the last part of its path."""

    def __init__(self, url: str, metrics: Metrics) -> None:
        super().__init__(url, metrics)
        self._urls = dict[str, str]()

    def objects(self) -> Iterator[tuple[str, FileStat]]:
        """Yield the key and the FileStat of each object."""
        body = self.attempt(lambda: self.request("GET", self.url)).content
        if len(body) > _MAX_LIST_BYTES:
            raise OSError(f"{self.url} has {len(body):,} bytes; the limit of a list is {_MAX_LIST_BYTES:,}")
        lines = map(str.strip, body.decode(errors="replace").splitlines())
        urls = [urljoin(self.url, line) for line in lines if line and not line.startswith("#")]
        names = [urlsplit(url).path.rpartition("/")[2] for url in urls]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise OSError(f"{self.url} lists two URLs that end in {twice}; shards need different names")
        self._urls = dict(zip(names, urls, strict=True))
        yield from zip(names, self._threads.map(self._stat, urls), strict=True)

    def _stat(self, url: str) -> FileStat:
        headers = self.attempt(lambda: self.request("HEAD", url, {"Accept-Encoding": "identity"})).headers
        if not headers.get("content-length", "").isdecimal():
            raise OSError(f"{urlsplit(url).path} has no Content-Length")
        return FileStat(int(headers["content-length"]), version=_version(headers))

    def _read(self, key: str, stat: FileStat, start: int, stop: int) -> bytes:
        if key not in self._urls:  # the list has changed
            raise not_found()
        conditions = {"If-Match": stat.version} if stat.version.startswith('"') else {}
        response = self.get_range(self._urls[key], start, stop, conditions)
        if _version(response.headers) != stat.version:  # few servers of files know If-Match
            raise Changed
        return response.content


def _version(headers: httpx.Headers) -> str:
    """Return the strong ETag of a response, or else its Last-Modified."""
    etag: str = headers.get("etag", "")
    return etag if etag and not etag.startswith("W/") else headers.get("last-modified", "")
