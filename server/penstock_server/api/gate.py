"""Access control: an ASGI layer that refuses every request without a valid token or client certificate, except probes.

It also refuses requests that other sites make a browser send, and adds headers that restrict browsers.

A request has its token in `Authorization: Bearer`, as the password of Basic, or in the cookie that the page's login sets. The
layer sets `scope["identity"]`, which the routes read: a route that is reached without this layer fails.
"""

from __future__ import annotations

import logging
import time
from base64 import b64decode
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import parse_qs, urlsplit

from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.text import cut
from penstock_server.api.admission import current_caller
from penstock_server.api.errors import problem_response
from penstock_server.logs import Seldom
from penstock_server.page.routes import login_page
from penstock_server.problems import Forbidden, Misdirected, Problem, TooManyAttempts, Unauthorized
from penstock_server.security.tokens import EVERYONE, STRANGER, Identity, Tokens

log = logging.getLogger("penstock.security")

_PROBES = ("/healthz", "/readyz")
_FOR_PEOPLE = ("/", "/docs", "/login")  # a browser without a token gets the login page here
_COOKIE = "penstock_token"
_OF_SITE = (b"host", b"origin", b"sec-fetch-site", b"x-forwarded-host")
_NO_STORE = (b"cache-control", b"no-store")
_RESTRICTIONS = (
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"frame-ancestors 'none'"),
    _NO_STORE,
)
_MAX_FORM_BYTES = 4096
_MAX_ATTEMPTS, _ATTEMPTS_SECONDS = 20, 60.0
_MAX_ADDRESSES = 10_000

# Forms of a token that `token_of` accepts, for the OpenAPI document. One of them is enough.
SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "basic": {"type": "http", "scheme": "basic", "description": "The token is the password. The name is ignored."},
    "cookie": {"type": "apiKey", "in": "cookie", "name": _COOKIE, "description": "Set by the login of the page."},
}


class Gate:
    """ASGI layer around the application. Without `tokens` it lets every caller in.

    With `for_this_machine` it refuses requests for a host name other than localhost.
    """

    def __init__(self, app: ASGIApp, tokens: Tokens | None, *, for_this_machine: bool = False) -> None:
        self._app, self._tokens, self._for_this_machine = app, tokens, for_this_machine
        self._attempts, self._warnings = Attempts(), Seldom()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with the identity of its caller, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        response: Response | None = None
        try:
            self._check_site(scope)
            if self._tokens is None:
                scope["identity"] = EVERYONE
            else:
                response = await self._admit(Request(scope, receive), self._tokens)
        except Problem as problem:
            response = problem_response(scope, problem)
            if isinstance(problem, Unauthorized) and scope["path"] in _FOR_PEOPLE and _is_browser(scope):
                response = login_page(response.status_code)
        if response is None:
            current_caller.set(scope["identity"].name or _address_of(scope))

        def send_restricted(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = _restricted(message["headers"])
            return send(message)

        await (response or self._app)(scope, receive, send_restricted)

    def _check_site(self, scope: Scope) -> None:
        """Check that a request is not one that another site makes a browser send. Raises Misdirected, Forbidden."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"] if name in _OF_SITE}
        host = headers.get(b"host", "localhost")
        if self._for_this_machine and not _is_of_this_machine(host):
            raise Misdirected(
                f"This server has no tokens, so it only accepts requests for localhost or an IP address, not for {cut(host)}: "
                f"with a host name of its own, another site could read it through a browser. Use http://localhost, create "
                f"tokens with penstock token create, or start the server with --insecure."
            )
        if scope["method"] == "POST" and _is_of_another_site(headers, host):
            raise Forbidden(
                "The request comes from another site. Send it from the page of this server, or without the headers "
                "Sec-Fetch-Site and Origin. A proxy must pass Host on, or set X-Forwarded-Host."
            )

    async def _admit(self, request: Request, tokens: Tokens) -> Response | None:
        """Set the identity of a request. Return the response of a login or logout, else None. Raises Problem: it is refused."""
        scope, path = request.scope, request.scope["path"]
        if path == "/login" and request.method == "POST":
            return await self._login(request, tokens)
        if path == "/logout" and request.method == "POST":
            response = RedirectResponse("./", 303)
            response.set_cookie(_COOKIE, "", max_age=0, path=None, httponly=True, samesite="strict")
            return response
        try:
            scope["identity"] = self._identify(scope, tokens)
        except (Unauthorized, TooManyAttempts):
            if path not in _PROBES:
                raise
            scope["identity"] = STRANGER
        if scope["identity"].scope == "metrics" and path not in ("/metrics", *_PROBES):
            raise Forbidden(
                f"The token {scope['identity'].name} has the scope metrics, which allows only /metrics. Use another token."
            )
        return None

    def _identify(self, scope: Scope, tokens: Tokens) -> Identity:
        """Return the identity of a request. Raises Unauthorized, TooManyAttempts."""
        token = token_of(scope)
        if token is not None:
            return self._check(scope, tokens, token)
        subject = scope.get("state", {}).get("certificate")
        if subject is None:
            raise Unauthorized(
                "This server needs a token, and the request has none. Send Authorization: Bearer TOKEN. The operator creates "
                "one with penstock token create."
            )
        if identity := tokens.identify_certificate(subject):
            return identity
        raise Unauthorized(
            f"The token file has no entry for the client certificate {subject}, or the entry has expired. The operator adds "
            f"one with penstock token create --certificate."
        )

    def _check(self, scope: Scope, tokens: Tokens, token: str) -> Identity:
        """Return the identity of a token. Raises Unauthorized, TooManyAttempts: the token is not valid."""
        if identity := tokens.identify(token):
            return identity
        address = _address_of(scope)
        if after_seconds := self._attempts.add(address):
            if self._warnings.is_due():
                log.warning("%s sent more than %d wrong tokens in a minute", address, _MAX_ATTEMPTS)
            raise TooManyAttempts(
                f"{address} sent more than {_MAX_ATTEMPTS} wrong tokens in a minute. Retry in {after_seconds} seconds, or now "
                f"with a valid token.",
                after_seconds,
            )
        raise Unauthorized("The token is wrong, expired or revoked. Ask the operator of this server for another.")

    async def _login(self, request: Request, tokens: Tokens) -> Response:
        """Check the token of the login form. Set the cookie and redirect to the page, or show the form and the reason."""
        body = b""
        try:
            async for piece in request.stream():
                body += piece
                if len(body) > _MAX_FORM_BYTES:
                    break
        except ClientDisconnect:
            return Response(status_code=499)
        token = parse_qs(body[:_MAX_FORM_BYTES].decode("latin-1")).get("token", [""])[0].strip()
        try:
            self._check(request.scope, tokens, token)
        except Problem as problem:
            request.scope["problem"] = problem.slug
            return login_page(problem.status, error=str(problem))
        response = RedirectResponse("./", 303)
        # Without a path the browser uses the path of the request, which is right below the prefix of a proxy, too.
        is_tls = request.url.scheme == "https"
        response.set_cookie(_COOKIE, token, path=None, httponly=True, samesite="strict", secure=is_tls)
        return response


def token_of(scope: Scope) -> str | None:
    """Return the token of the Authorization header, else of the cookie; None without either, "" if the header is invalid."""
    headers: dict[bytes, str] = {
        name: value.decode("latin-1") for name, value in scope["headers"] if name in (b"authorization", b"cookie")
    }
    if b"authorization" in headers:
        scheme, _, credentials = headers[b"authorization"].partition(" ")
        if scheme.lower() == "bearer":
            return credentials.strip()
        if scheme.lower() == "basic":
            try:
                return b64decode(credentials, validate=True).decode("latin-1").partition(":")[2]
            except ValueError:
                return ""
        return ""
    # http.cookies would take seconds to parse a quoted value of backslashes.
    cookies = (cookie.strip().partition("=") for cookie in headers.get(b"cookie", "").split(";"))
    return next((value for name, _, value in cookies if name == _COOKIE), None)


def _is_of_this_machine(host: str) -> bool:
    """Return whether a Host header is localhost or an IP address. Other names may be those of a site, by DNS rebinding."""
    with suppress(ValueError):
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ip_address(name))
    return False


def _is_of_another_site(headers: Mapping[bytes, str], host: str) -> bool:
    if site := headers.get(b"sec-fetch-site"):  # browsers send it over https, and to this machine
        return site not in ("same-origin", "none")
    origin = headers.get(b"origin")
    return origin is not None and origin.partition("://")[2] not in (host, headers.get(b"x-forwarded-host"))


def _restricted(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers of a response with those that restrict browsers and caches, unless it has them."""
    names = {name for name, _ in headers}
    is_versioned = b"etag" in names  # its route says how long it may be kept
    return headers + [pair for pair in _RESTRICTIONS if pair[0] not in names and not (is_versioned and pair == _NO_STORE)]


def _address_of(scope: Scope) -> str:
    return str(scope["client"][0]) if scope.get("client") else ""


def _is_browser(scope: Scope) -> bool:
    accepted = next((value for name, value in scope["headers"] if name == b"accept"), b"")
    return b"text/html" in accepted and scope["method"] in ("GET", "HEAD")


class Attempts:
    """Times of wrong tokens by address, for the 10,000 addresses that sent one last."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._times = OrderedDict[str, deque[float]]()

    def add(self, address: str) -> int:
        """Count a wrong token. Return 0, or the seconds until the address may try again, if it has sent too many."""
        now = self._now()
        times = self._times.setdefault(address, deque(maxlen=_MAX_ATTEMPTS))
        self._times.move_to_end(address)
        if len(self._times) > _MAX_ADDRESSES:
            self._times.popitem(last=False)
        if len(times) == _MAX_ATTEMPTS and now - times[0] < _ATTEMPTS_SECONDS:
            return int(_ATTEMPTS_SECONDS - (now - times[0])) + 1
        times.append(now)
        return 0
