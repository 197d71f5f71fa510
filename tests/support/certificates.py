"""Certificates, by an authority that no machine trusts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

import trustme

HOST = "127.0.0.1"


class Authority:
    """Issues certificates for tests; `file` has its own."""

    def __init__(self, folder: Path) -> None:
        self._authority, self._folder, self._numbers = trustme.CA(), folder, count()
        folder.mkdir(exist_ok=True)
        self.file = folder / "authority.pem"
        self._authority.cert_pem.write_to_path(self.file)

    def issue(
        self, *names: str, into: Path | None = None, days: float = 1, subject: str | None = None, team: str | None = None
    ) -> Path:
        """Write a certificate that is valid for some days, since yesterday, and its key into one file."""
        now = datetime.now(UTC)
        made = self._authority.issue_cert(
            *(names or (() if subject else (HOST, "localhost"))),
            common_name=subject,
            organization_name=team,
            not_before=now - timedelta(days=1),
            not_after=now + timedelta(days=days),
        )
        path = into or self._folder / f"{next(self._numbers)}.pem"
        made.private_key_and_cert_chain_pem.write_to_path(path)
        return path
