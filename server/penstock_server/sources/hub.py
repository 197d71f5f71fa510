"""Datasets of the Hugging Face hub: hf://datasets/ORG/NAME[@REVISION][/FOLDER]."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from penstock_server.monitoring.metrics import Metrics
from penstock_server.problems import DatasetInvalid
from penstock_server.sources.remote import Retryable
from penstock_server.sources.stats import FileStat
from penstock_server.sources.web import Http

_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_LOCATIONS = 4096
_AT = ":"  # between the hash of a file's content and the commit that it is read from


class Hub(Http):
    """Files of a dataset repository. A branch is resolved to its commit, and files are read from that.

    A poll asks for the commit alone, and lists the files when it is another. A revision that is a commit is never polled.
    """

    def __init__(self, url: str, metrics: Metrics) -> None:
        super().__init__(url, metrics)
        found = re.fullmatch(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([^/@]+))?((?:/[^/@]+)*)/?", url)
        if not found:
            raise DatasetInvalid(f"{url} is not the URL of a dataset. Write hf://datasets/ORG/NAME@REVISION/FOLDER.")
        self._repository, self._revision, self._folder = found[1], found[2] or "main", found[3].strip("/")
        self._endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
        self._commit = ""
        self._files = dict[str, FileStat]()
        self._locations = dict[str, str]()  # where the hub redirects to, for an hour or so

    def objects(self) -> Iterator[tuple[str, FileStat]]:
        """Yield the key and the FileStat of each object."""
        commit = self._resolved()
        if commit != self._commit:
            self._files = dict(self._listed(commit))
            self._commit = commit
        yield from self._files.items()

    def _resolved(self) -> str:
        if _COMMIT.fullmatch(self._revision):
            return self._revision
        path = f"/api/datasets/{self._repository}/revision/{quote(self._revision, safe='')}"
        commit, _ = self.get_json(f"{self._endpoint}{path}", self._headers(), lambda answer: str(answer["sha"]))
        return commit

    def _listed(self, commit: str) -> Iterator[tuple[str, FileStat]]:
        folder = f"/{quote(self._folder)}" if self._folder else ""
        url = f"{self._endpoint}/api/datasets/{self._repository}/tree/{commit}{folder}?recursive=true"
        while url:
            files, response = self.get_json(url, self._headers(), _files_of)
            for path, size_bytes, content in files:
                key = path.removeprefix(f"{self._folder}/") if self._folder else path
                known = self._files.get(key)
                is_same = known is not None and known.version.partition(_AT)[0] == content
                yield key, known if known and is_same else FileStat(size_bytes, version=f"{content}{_AT}{commit}")
            url = response.links.get("next", {}).get("url", "")

    def _read(self, key: str, stat: FileStat, start: int, stop: int) -> bytes:
        commit, path = stat.version.partition(_AT)[2], quote(f"{self._folder}/{key}" if self._folder else key)
        url = f"{self._endpoint}/datasets/{self._repository}/resolve/{commit}/{path}"
        if url not in self._locations:
            response = self.request("HEAD", url, self._headers(), follows=False)
            while len(self._locations) >= _MAX_LOCATIONS:
                self._locations.pop(next(iter(self._locations)))
            self._locations[url] = urljoin(url, response.headers.get("location", url))
        location = self._locations[url]
        try:
            is_ours = urlsplit(location).netloc == urlsplit(url).netloc
            return self.get_range(location, start, stop, self._headers() if is_ours else {}).content
        except PermissionError:  # its signature has expired
            if self._locations.pop(url, url) == url:
                raise
            raise Retryable("an expired redirect") from None

    def content(self, stat: FileStat) -> str:
        """Return the hash of a file's content."""
        return stat.version.partition(_AT)[0]

    def _headers(self) -> dict[str, str]:
        """Return the header with the token, which is read again for each request: it may be replaced during a long run."""
        token = os.environ.get("HF_TOKEN") or _stored_token()
        return {"Authorization": f"Bearer {token}"} if token else {}


def _files_of(entries: Any) -> list[tuple[str, int, str]]:
    """Return the path, the bytes, and the hash of the content of each file of a tree."""
    files = [entry for entry in entries if entry["type"] == "file"]
    return [(str(file["path"]), int(file["size"]), str(file.get("lfs", file)["oid"])) for file in files]


def _stored_token() -> str:
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    try:
        return Path(os.environ.get("HF_TOKEN_PATH", f"{home}/token")).expanduser().read_text().strip()
    except OSError:
        return ""
