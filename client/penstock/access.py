"""Token and certificates of a client.

The first of these gives the token: the argument token=, https://NAME:TOKEN@HOST, PENSTOCK_TOKEN, PENSTOCK_TOKEN_FILE.
"""

from __future__ import annotations

import os
import re
import ssl
from base64 import b64encode
from contextlib import suppress
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx

from penstock.errors import SpecError

_GIVE_TOKEN = "Give a token by token=, PENSTOCK_TOKEN or PENSTOCK_TOKEN_FILE."
_LOGIN = re.compile(r"[^\s/?#@:]+:[^\s/?#@]+", re.ASCII)
_TOKEN = re.compile(r"[!-~]+")
_DEFAULT_STORES = ("SSL_CERT_FILE", "SSL_CERT_DIR")

PathLike = str | os.PathLike[str]
Paths = PathLike | tuple[PathLike, PathLike]


class Access:
    """Token and certificates of a client. Their files may be replaced during a run: after a refusal they are read again.

    token         sent to the servers; the module names its other sources
    ca            PEM file of the authorities to trust; default: PENSTOCK_CA, SSL_CERT_FILE, else those of the system
    cert          PEM file of this client's certificate and its key, or a pair of files; default: PENSTOCK_CERT
    logins        "NAME:TOKEN" by server, for addresses that contain one
    was_accepted  whether a server has accepted a request

    A pickle contains the token only if multiprocessing sends it to a process that it starts, such as a spawned loader worker.
    Any other pickle may become a file. The process that loads it takes the token from the environment.

    Raises SpecError: the token cannot be sent in a header.
    """

    def __init__(self, token: str | None = None, *, ca: PathLike | None = None, cert: Paths | None = None) -> None:
        self._token = None if token is None else _checked(token, "token=")
        self._ca, self._cert = ca, cert
        self.logins = dict[str, str]()
        self.was_accepted = False
        self._content = ""  # of the token file
        self._context: ssl.SSLContext | None = None

    def headers(self, server: str) -> dict[str, str]:
        """Return the Authorization header for a server, if there is a token. Raises SpecError: the token cannot be read."""
        kind, secret, _ = self._find(server)
        return {"Authorization": f"{kind} {secret}"} if secret else {}

    def remedy(self, server: str) -> str:
        """Return what to do after a server has refused a request with this token, or without one."""
        _, secret, source = self._find(server)
        return f"The token came from {source}: replace it there." if secret else f"No token was sent. {_GIVE_TOKEN}"

    def read_token_again(self, server: str) -> bool:
        """Read the token file again after a refusal. Return whether the token has changed."""
        before, content = self._find(server), self._content
        self._content = ""
        try:
            return self._find(server) != before
        except SpecError:  # it is being replaced
            self._content = content
            return False

    def why_closed(self, server: str) -> str:
        """Return a guess why a server closed a connection without a response; "" if it has accepted a request before.

        After a failed handshake, servers on asyncio, such as Penstock's, close the connection without a TLS alert.
        """
        if self.was_accepted:
            return ""
        if server.startswith("http:"):
            return ". If the server uses TLS, its address begins with https"
        return ". Perhaps the server refuses the certificate of cert= or PENSTOCK_CERT" if self._cert_paths else ""

    def tls_context(self) -> ssl.SSLContext:
        """Return the TLS context with the certificates to trust and to show. Raises SpecError: they cannot be read."""
        if self._context is None:
            self._context = self._read_certificates()
        return self._context

    def read_certificates_again(self) -> None:
        """Read the certificates after a failed handshake, for later connections."""
        if self._context:
            with suppress(SpecError):  # they are being replaced
                self._context = self._read_certificates()

    def _find(self, server: str) -> tuple[str, str, str]:
        """Return the scheme of the Authorization header, its credentials and their source; "" without a token."""
        if self._token:
            return "Bearer", self._token, "token="
        if login := self.logins.get(server.partition("#")[0]):
            return "Basic", b64encode(login.encode()).decode(), "the address"
        if token := os.environ.get("PENSTOCK_TOKEN"):
            return "Bearer", _checked(token, "PENSTOCK_TOKEN"), "PENSTOCK_TOKEN"
        if path := os.environ.get("PENSTOCK_TOKEN_FILE"):
            source = f"the file {path} (PENSTOCK_TOKEN_FILE)"
            try:
                self._content = self._content or _checked(Path(path).read_text(errors="replace"), source)
            except OSError as error:
                raise SpecError(f"the token cannot be read from {source}: {error.strerror}. Correct it.", ("token",)) from error
            return "Bearer", self._content, source
        return "", "", ""

    @property
    def _cert_paths(self) -> Paths | None:
        return self._cert or os.environ.get("PENSTOCK_CERT")

    def _read_certificates(self) -> ssl.SSLContext:
        ca = self._ca or os.environ.get("PENSTOCK_CA")
        cert = self._cert_paths
        try:
            # httpx trusts the authorities of certifi, for machines without any. SSL_CERT_FILE and SSL_CERT_DIR replace both.
            context = ssl.create_default_context(cafile=ca) if ca else httpx.create_ssl_context()
            if not ca and not any(name in os.environ for name in _DEFAULT_STORES):
                context.load_default_certs()
        except OSError as error:
            names = "ca= or PENSTOCK_CA" if ca else ", ".join(name for name in _DEFAULT_STORES if name in os.environ)
            raise SpecError(
                f"the certificates to trust cannot be read: {error}. Correct or unset {names}.", ("servers",)
            ) from error
        if cert:
            files = cert if isinstance(cert, tuple) else tuple(os.fspath(cert).split(","))
            try:
                context.load_cert_chain(files[0], files[-1], password="")  # else OpenSSL would prompt for one
            except OSError as error:
                raise SpecError(
                    f"the client certificate cannot be read: {error}. cert= or PENSTOCK_CERT names a PEM file of a certificate "
                    f"and its key, or two files, as cert.pem,key.pem. The key must have no password.",
                    ("cert",),
                ) from error
        return context

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__ | {"_context": None, "_content": ""}
        return state if get_spawning_popen() else state | {"_token": None, "logins": {}, "was_accepted": False}

    def __deepcopy__(self, _: object) -> Access:
        return self  # a copy by way of a pickle would have no token


def _checked(token: str, source: str) -> str:
    """Return a token without the blanks around it. Raises SpecError, without quoting it: the text is not a token."""
    if not isinstance(token, str) or not _TOKEN.fullmatch(token.strip()):
        raise SpecError(f"{source} has no token: one line of ASCII letters, digits and signs. {_GIVE_TOKEN}", ("token",))
    return token.strip()


def split_login(address: str) -> tuple[str, str]:
    """Split an address such as https://NAME:TOKEN@host into https://host and NAME:TOKEN, or "".

    Raises SpecError, without quoting the address: its name or token is not percent-encoded.
    """
    scheme, separator, rest = address.rpartition("://")
    login, at, place = rest.rpartition("@")
    if at and not _LOGIN.fullmatch(login):
        raise SpecError(
            "the name or the token in an address is invalid. Write https://NAME:TOKEN@HOST, with both percent-encoded, or give "
            "the token by PENSTOCK_TOKEN.",
            ("servers",),
        )
    return f"{scheme}{separator}{place}", unquote(login)
