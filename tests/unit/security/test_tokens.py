"""Token files: read, or refused with what is wrong."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock_server.security.tokens import Tokens, create_token, read_tokens, revoke_token
from penstock_server.settings import SettingsError
from support.fuzz import NESTED, ODD, altered

ENTRY = {
    "name": "trainer",
    "sha256": "0" * 64,
    "datasets": ["team-a.*"],
    "scope": "read",
    "created": "2026-01-01T00:00:00Z",
    "expires": "2027-02-28T09:00:00Z",
}
ENTRIES = st.lists(st.just(ENTRY) | altered(ENTRY) | ODD, max_size=3)


@given(ENTRIES.map(lambda entries: {"tokens": entries}) | ODD)
@example({"tokens": [ENTRY | {"expires": "0001-01-01T00:00:00+14:00"}]})
@example({"tokens": [ENTRY | {"expires": 1e300}]})
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_document_is_tokens_or_refused(tmp_path: Path, document: Any) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(document))
    tokens = Tokens(file)
    with suppress(SettingsError):
        tokens.load()
    assert tokens.identify("pst_wrong") is None


@given(st.binary())
@example(NESTED.encode())
@example(b'{"tokens": [' + b"9" * 5000 + b"]}")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "tokens.json"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match="token file"):
        read_tokens(file)


def test_file_of_many_tokens_names_those_that_are_there_twice(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    entries = [{"name": f"t{number}", "certificate": "a"} for number in range(50_000)]
    file.write_text(json.dumps({"tokens": [*entries, entries[7]]}))
    with pytest.raises(SettingsError, match="these occur more often: t7"):
        read_tokens(file)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A token file with a token named "trainer"."""
    file = tmp_path / "tokens" / "tokens.json"
    create_token(file, "trainer", ("*",), "read", None)
    return file


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_changed_file_keeps_its_owner_group_and_mode(file: Path) -> None:
    os.chown(file, 65_534, 65_533)
    file.chmod(0o640)
    before = os.umask(0o077)
    try:
        revoke_token(file, "trainer")
    finally:
        os.umask(before)
    status = file.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (65_534, 65_533, 0o640)
    assert read_tokens(file) == ()


def test_file_of_another_user_stays_as_it_is(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    content = file.read_text()
    monkeypatch.setattr(os, "fchown", refuse)
    with pytest.raises(SettingsError, match=f"belongs to user {file.stat().st_uid} and group .* Run the command as that user"):
        revoke_token(file, "trainer")
    assert file.read_text() == content
    assert [*file.parent.iterdir()] == [file]


def test_file_behind_a_symlink_is_changed(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(file)
    create_token(link, "other", ("*",), "read", None)
    revoke_token(link, "trainer")
    assert link.is_symlink()
    assert [entry.name for entry in read_tokens(file)] == ["other"]
