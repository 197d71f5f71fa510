"""Tokens: the file of their SHA-256 hashes, and the identity of each.

{"tokens": [
    {"name": "trainer", "sha256": "9f86...", "datasets": ["team-a.*"], "scope": "read", "expires": "2027-02-28T09:00:00Z"}
]}

An entry with `certificate` instead of `sha256` is for clients whose certificate has that subject.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from penstock.text import listed
from penstock_server.settings import SettingsError

Scope = Literal["read", "metrics", "admin"]

_PREFIX = "pst_"  # lets scanners for leaked secrets find tokens
_NUM_BYTES = 32
MAX_FILE_BYTES = 4 << 20
_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]
_Glob = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


@dataclass(frozen=True, slots=True)
class Identity:
    """Caller of a request, and what it may do.

    name      name of its entry in the token file; "" without one
    datasets  patterns of the datasets that it may see, in the syntax of fnmatch; * also matches dots
    scope     read: what trainers and the page need; metrics: only /metrics; admin: both, and refreshes of datasets
    """

    name: str
    datasets: tuple[str, ...]
    scope: Scope

    def may_see(self, dataset: str) -> bool:
        """Return whether the caller may see a dataset."""
        return any(fnmatchcase(dataset, pattern) for pattern in self.datasets)


EVERYONE = Identity("", ("*",), "admin")  # every caller of a server without tokens
STRANGER = Identity("", (), "read")  # a caller without a valid token, who may only probe


class TokenEntry(BaseModel):
    """Entry of a token file. Without `expires` it never expires."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: _Name
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] | None = None
    certificate: Annotated[str, StringConstraints(min_length=1, max_length=4096)] | None = None
    datasets: Annotated[tuple[_Glob, ...], Field(min_length=1)] = ("*",)
    scope: Scope = "read"
    created: AwareDatetime | None = None
    expires: AwareDatetime | None = None

    @model_validator(mode="after")
    def _check(self) -> TokenEntry:
        if (self.sha256 is None) == (self.certificate is None):
            raise ValueError("an entry needs either sha256 or certificate")
        return self

    @property
    def identity(self) -> Identity:
        """Identity of the callers with this token or certificate."""
        return Identity(self.name, self.datasets, self.scope)

    def is_expired(self, now: float) -> bool:
        """Return whether the entry has expired at a time in Unix seconds."""
        return self.expires is not None and self.expires.timestamp() <= now


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tokens: tuple[TokenEntry, ...]

    @model_validator(mode="after")
    def _check(self) -> _Document:
        names = Counter(entry.name for entry in self.tokens)
        if repeated := sorted(name for name, number in names.items() if number > 1):
            raise ValueError(f"each name may occur once; these occur more often: {listed(repeated)}")
        return self


def read_tokens(path: Path) -> tuple[TokenEntry, ...]:
    """Return the entries of a token file. Raises SettingsError: the file cannot be read, or an entry is invalid."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(
            f"the token file {path} cannot be read: {reason}. Correct its path or its permissions, or create it with penstock "
            f"token create."
        ) from error
    if len(content) > MAX_FILE_BYTES:
        raise SettingsError(f"the token file {path} is larger than {MAX_FILE_BYTES:,} bytes. Revoke unused tokens.")
    try:
        return _Document.model_validate_json(content).tokens
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        raise SettingsError(f"the token file {path} is invalid at {place or 'the top'}: {reason}. Correct it.") from error


class Tokens:
    """Tokens of a running server. `load` replaces them with those of the file. Any thread may call it."""

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        self._path, self._now = path, now
        self._by_hash: dict[str, TokenEntry] = {}
        self._by_certificate: dict[str, TokenEntry] = {}

    def load(self) -> None:
        """Read the file. Raises SettingsError: it is unusable. The tokens loaded before then stay valid."""
        entries = read_tokens(self._path)
        self._by_certificate = {entry.certificate: entry for entry in entries if entry.certificate}
        self._by_hash = {entry.sha256: entry for entry in entries if entry.sha256}

    def identify(self, token: str) -> Identity | None:
        """Return the identity of a token; None if it is unknown or expired."""
        # The time of the lookup depends on the hash, not on the length of a correctly guessed prefix.
        return self._identity(self._by_hash.get(_hash(token)))

    def identify_certificate(self, subject: str) -> Identity | None:
        """Return the identity of a certificate's subject; None if it is unknown or expired."""
        return self._identity(self._by_certificate.get(subject))

    def _identity(self, entry: TokenEntry | None) -> Identity | None:
        return entry.identity if entry and not entry.is_expired(self._now()) else None


def create_token(
    path: Path,
    name: str,
    datasets: tuple[str, ...],
    scope: Scope,
    expires: datetime | None,
    certificate: str | None = None,
) -> str:
    """Add an entry to a token file, and return its token; "" for a certificate. Creates the file if it is missing.

    Raises SettingsError: the name is taken or invalid, or the file cannot be read or written.
    """
    token = "" if certificate else _PREFIX + secrets.token_urlsafe(_NUM_BYTES)
    try:
        entry = TokenEntry(
            name=name,
            sha256=_hash(token) if token else None,
            certificate=certificate,
            datasets=datasets,
            scope=scope,
            created=datetime.now(UTC).replace(microsecond=0),
            expires=expires,
        )
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise SettingsError(
            f"no token was created, since {first['loc'][0]} is invalid: {first['msg']}. A name has up to 64 letters, "
            f"digits and . _ @ -, and begins with a letter or a digit. --datasets has one or more names."
        ) from error
    with _changing(path) as entries:
        if any(other.name == name for other in entries):
            raise SettingsError(f"{path} already has a token {name}. Choose another name, or revoke that token first.")
        entries.append(entry)
    return token


def revoke_token(path: Path, name: str) -> None:
    """Remove an entry from a token file. Raises SettingsError: no entry has that name, or the file cannot be written."""
    with _changing(path) as entries:
        kept = [entry for entry in entries if entry.name != name]
        if len(kept) == len(entries):
            known = listed([entry.name for entry in entries]) or "none"
            raise SettingsError(f"{path} has no token {name}. Its tokens: {known}.")
        entries[:] = kept


def _hash(token: str) -> str:
    return sha256(token.encode(errors="surrogateescape")).hexdigest()


@contextmanager
def _changing(path: Path) -> Iterator[list[TokenEntry]]:
    """Yield the entries of a token file, then write them back. A lock makes concurrent commands wait for each other."""
    path = Path(os.path.realpath(path))  # the server reads the file that a symlink leads to
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            entries = list(read_tokens(path)) if path.exists() else []
            yield entries
            document = {"tokens": [entry.model_dump(mode="json", exclude_none=True) for entry in entries]}
            _replace(path, json.dumps(document, indent=2) + "\n")
        finally:
            os.close(folder)
    except OSError as error:
        raise SettingsError(
            f"the token file {path} cannot be written: {error.strerror}. Check the permissions and free space of its folder."
        ) from error


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically, so that no server reads half of it. The owner, the group and the mode stay as they are.

    A new file is readable by its owner only. Raises SettingsError: the user may not give the file to its owner.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            if path.exists():
                _take_owner(file.fileno(), path)
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _take_owner(handle: int, path: Path) -> None:
    """Give an open file the owner, the group and the mode of another. Raises SettingsError: the user may not."""
    before = path.stat()
    try:
        os.fchown(handle, before.st_uid, before.st_gid)
    except PermissionError as error:
        raise SettingsError(
            f"the token file {path} is unchanged: it belongs to user {before.st_uid} and group {before.st_gid}, and only that "
            f"user or root may replace it. Otherwise a server of that user could not read it. Run the command as that user."
        ) from error
    os.fchmod(handle, before.st_mode & 0o777)
