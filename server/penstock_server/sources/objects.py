"""Object stores by obstore: Amazon S3 and stores like it, Google Cloud Storage, Azure."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from errno import EACCES, EEXIST
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore import exceptions
from obstore.store import LocalStore, from_url

from penstock_server.monitoring.metrics import Metrics
from penstock_server.problems import DatasetInvalid
from penstock_server.sources.remote import Changed, Retryable, Source, forbidden, not_found
from penstock_server.sources.stats import FileStat

if TYPE_CHECKING:
    from obstore import GetOptions

SCHEMES = ("s3", "gs", "az")
_LISTED_TOGETHER = 1000
_CONNECT_SECONDS, _REQUEST_SECONDS = 10, 60  # of a request for a few megabytes
_THROTTLED = ("429", "503")
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_ENDPOINT",),
}


class ObjectStore(Source):
    """A prefix of a bucket. Each read carries the ETag of the version, so that the store refuses to send another."""

    def __init__(self, url: str, metrics: Metrics) -> None:
        super().__init__(url.rstrip("/"), metrics)
        self._store: Any = None

    def objects(self) -> Iterator[tuple[str, FileStat]]:
        """Yield the key and the FileStat of each object."""
        for chunk in self._chunks():
            for found in chunk:
                yield found["path"], FileStat(found["size"], version=found["e_tag"] or found["version"] or "")

    def _chunks(self, prefix: str | None = None, retry_seconds: float | None = None) -> Iterator[Any]:
        chunks, last = None, None

        def next_chunk() -> Any:
            nonlocal chunks
            if chunks is None:  # at first, and after a failure: an iterator that failed just ends
                chunks = obstore.list(self._opened(), prefix, offset=last, chunk_size=_LISTED_TOGETHER)
            try:
                return self._translated(lambda: next(chunks, None))
            except BaseException:
                chunks = None
                raise

        while chunk := self.attempt(next_chunk, retry_seconds):
            yield chunk
            last = chunk[-1]["path"]

    def _read(self, key: str, stat: FileStat, start: int, stop: int) -> Any:
        options: GetOptions = {"range": (start, stop)}
        if stat.version:
            options["if_match"] = f'"{_bare(stat.version)}"'  # some stores list ETags without quotes
        result = self._translated(lambda: obstore.get(self._opened(), key, options=options))
        if stat.version and _bare(result.meta["e_tag"] or "") not in ("", _bare(stat.version)):
            raise Changed  # the store ignores If-Match
        return self._translated(result.bytes)

    def get(self, key: str) -> Any:
        """Return a whole object, with the buffer protocol. Raises FileNotFoundError, PermissionError, Retryable."""
        return self._translated(lambda: obstore.get(self._opened(), key).bytes())

    def create(self, key: str, content: bytes) -> bool:
        """Write an object unless it exists. Return whether it is new. Raises PermissionError, Retryable."""
        try:
            self._translated(lambda: obstore.put(self._opened(), key, content, mode="create", use_multipart=False))
        except FileExistsError:
            return False
        return True

    def has(self, key: str) -> bool:
        """Return whether an object exists. Raises PermissionError, Retryable."""
        try:
            self._translated(lambda: obstore.head(self._opened(), key))
        except FileNotFoundError:
            return False
        return True

    def entries(self, prefix: str | None = None, retry_seconds: float | None = None) -> Iterator[tuple[str, int, datetime]]:
        """Yield the key, the bytes and the time of the last write of each object, in any order. Raises OSError.

        `prefix` is a folder of keys; None is all. `retry_seconds`: see `attempt`.
        """
        for chunk in self._chunks(prefix, retry_seconds):
            yield from ((found["path"], found["size"], found["last_modified"]) for found in chunk)

    def replace(self, key: str, content: bytes) -> bool:
        """Write an object, in place of another if there is one. Returns True. Raises PermissionError, Retryable."""
        self._translated(lambda: obstore.put(self._opened(), key, content, use_multipart=False))
        return True

    def upload(self, key: str, path: Path) -> None:
        """Write the content of a file as an object, in parts. Raises PermissionError, Retryable."""
        self._translated(lambda: obstore.put(self._opened(), key, path))

    def copy(self, key: str, other: str) -> None:
        """Have the store copy an object. Raises FileNotFoundError, PermissionError, Retryable."""
        self._translated(lambda: obstore.copy(self._opened(), key, other))

    def delete(self, key: str) -> None:
        """Remove an object. Raises FileNotFoundError, PermissionError, Retryable."""
        self._translated(lambda: obstore.delete(self._opened(), key))

    def _opened(self) -> Any:
        """Return the client. It is made late: threads of a client do not survive a fork."""
        if self._store is None:
            scheme, _, path, *_ = urlsplit(self.url)
            if scheme == "file":
                self._store = LocalStore(unquote(path), mkdir=True)
                return self._store
            is_plain = any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS[scheme])
            self._store = from_url(
                self.url,
                client_options={
                    "allow_http": is_plain,
                    "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
                    "timeout": timedelta(seconds=_REQUEST_SECONDS),
                },
                retry_config={"max_retries": 0},  # Source.attempt does it, and counts
                **_credentials(scheme),
            )
        return self._store

    def _translated(self, request: Any) -> Any:
        """Call a function of obstore, and raise the errors of this package. Its texts may have signed URLs."""
        try:
            return request()
        except FileNotFoundError:
            raise not_found() from None
        except exceptions.AlreadyExistsError:
            raise FileExistsError(EEXIST, "the object exists") from None
        except exceptions.PreconditionError:
            raise Changed from None
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise forbidden(_status(error)) from None
        except exceptions.BaseError as error:
            if "BareRedirect" in str(error):
                raise PermissionError(EACCES, "the bucket is in another region; set AWS_REGION") from None
            status = _status(error)
            if status.startswith("4") and not status.startswith(("408", "429")):
                raise forbidden(status) from None
            raise Retryable(status, is_throttled=status.startswith(_THROTTLED)) from None


def _bare(etag: str) -> str:
    return etag.removeprefix("W/").strip('"')


def _status(error: Exception) -> str:
    found = re.search(r"status code: (\d{3}[ \w]*)", str(error))
    return found[1].strip() if found else "no connection" if "error sending request" in str(error) else type(error).__name__


def _credentials(scheme: str) -> dict[str, Any]:
    """Return the provider of credentials from a profile of the AWS command line, if one is named and boto3 is installed.

    Without it obstore reads environment variables, and asks for the role of the machine.
    """
    if scheme == "s3" and os.environ.get("AWS_PROFILE") and "AWS_ACCESS_KEY_ID" not in os.environ:
        try:
            from obstore.auth.boto3 import Boto3CredentialProvider
        except ImportError:
            raise DatasetInvalid("AWS_PROFILE needs the package boto3. Install it, or set AWS_ACCESS_KEY_ID.") from None
        return {"credential_provider": Boto3CredentialProvider()}
    return {}
