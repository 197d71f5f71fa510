"""TLS of the server: certificates that are reloaded while it serves, and the subjects of client certificates."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock_server.settings import Settings, SettingsError

_SHORT_NAMES = {  # of RFC 4514, section 3
    "commonName": "CN",
    "localityName": "L",
    "stateOrProvinceName": "ST",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "countryName": "C",
    "streetAddress": "STREET",
    "domainComponent": "DC",
    "userId": "UID",
}


class Certificates:
    """TLS context of the server, which takes its certificates from files that may be replaced.

    `load` reads all files into a new context, so a certificate is never combined with the key of another. Each handshake uses
    the context that was loaded last. Open connections are not affected.

    paths    files of the certificate, of its key, and of the authorities of client certificates
    context  for the listening socket
    """

    def __init__(self, settings: Settings) -> None:
        assert settings.tls_cert
        self._cert, self._key, self._client_ca = settings.tls_cert, settings.tls_key, settings.tls_client_ca
        self.paths = [path for path in (self._cert, self._key, self._client_ca) if path]
        self.context = self._loaded = self._empty()
        self.context.sni_callback = self._take_loaded  # called in each handshake, with or without a server name

    def load(self) -> None:
        """Read the files. Raises SettingsError: a file cannot be used. The certificates loaded before then stay in use."""
        context, path = self._empty(), self._cert
        try:
            # Without this argument, OpenSSL would prompt for the password of an encrypted key.
            context.load_cert_chain(self._cert, self._key, password="")
            if self._client_ca:
                path = self._client_ca
                context.load_verify_locations(self._client_ca)
        except OSError as error:
            raise SettingsError(self._refusal(path, error)) from error
        self._loaded = context

    def _take_loaded(self, connection: ssl.SSLSocket | ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        connection.context = self._loaded

    def _empty(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # A resumed session skips the check of the client certificate, which may have expired, or be of a replaced authority.
        # Sessions of TLS 1.2 cannot be prevented.
        context.minimum_version = ssl.TLSVersion.TLSv1_3 if self._client_ca else ssl.TLSVersion.TLSv1_2
        context.num_tickets = 0
        if self._client_ca:
            context.verify_mode = ssl.CERT_OPTIONAL  # probes and callers with a token have no certificate
        return context

    def _refusal(self, path: Path, error: OSError) -> str:
        if path == self._client_ca:
            return f"--tls-client-ca: {path} cannot be read: {error}. Name a PEM file with the certificates of authorities."
        files = f"{self._cert} and {self._key}" if self._key else f"{self._cert}"
        return f"--tls-cert: {files} cannot be used: {error}. Name PEM files of a certificate and its key, without password."


def subject_of(certificate: Mapping[str, Any]) -> str:
    """Format the subject of a certificate, from ssl.SSLSocket.getpeercert, by RFC 4514: "CN=trainer-a,O=team"."""
    names = reversed(certificate["subject"])
    return ",".join("+".join(f"{_SHORT_NAMES.get(kind, kind)}={_escaped(value)}" for kind, value in name) for name in names)


def _escaped(value: str) -> str:
    # Otherwise a common name of "trainer,O=team" would match the entry of CN=trainer,O=team.
    value = re.sub(r'[,+"\\<>;]|^[ #]| $', r"\\\g<0>", value)
    return re.sub(r"[\x00-\x1f\x7f]", lambda match: f"\\{ord(match[0]):02X}", value)
