"""Aside of a run: questions that are no part of it, and the proxies that the environment names. Both are httpx's business."""

from __future__ import annotations

import time
from contextlib import suppress
from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from penstock.errors import SpecError
from penstock.text import without_passwords
from penstock.transport.receive import tls_context

_LONGEST = 1 << 20  # bytes of an answer that is no batch


def ask_aside(url: str, seconds: float) -> httpx.Response:
    """What a GET gives that is no part of a run, on a connection of its own; of what is too long only the beginning.

    Raises httpx.RequestError: nothing, or not all of its body in time.
    """
    deadline, body = time.monotonic() + seconds, b""
    with client_aside(url) as client, client.stream("GET", url, timeout=seconds) as answer:
        for part in answer.iter_bytes():
            body += part
            if len(body) > _LONGEST:
                break
            if time.monotonic() > deadline:
                raise httpx.ReadTimeout(f"its answer was not whole after {seconds:g} seconds", request=answer.request)
        return httpx.Response(answer.status_code, content=body, request=answer.request)


def client_aside(server: str) -> httpx.Client:
    """What asks a server for what is no part of a run. Raises SpecError: the environment's proxies cannot be used."""
    if proxy_of(server):
        return http_client({})
    # Where there is no proxy, httpx must not read the environment: it fails at what others take for a NO_PROXY.
    return http_client({}, httpx.HTTPTransport(verify=False if httpx.URL(server).scheme == "http" else tls_context()))


def tls_refusal(server: str, reason: str) -> str:
    """Why no attempt can make a TLS connection, and what to do; "" if the connection failed for another reason."""
    if "WRONG_VERSION_NUMBER" in reason:
        return f"{server} does not speak TLS: is {server.replace('https:', 'http:', 1)} meant?"
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        why = reason.partition("certificate verify failed: ")[2].partition(" (_ssl")[0].rstrip(".") or "it cannot be verified"
        return (
            f"the certificate of {server} is not trusted: {why}. If a private authority issued it, set SSL_CERT_FILE to a PEM "
            f"file with the certificate of that authority."
        )
    return ""


def proxy_of(server: str) -> str | None:
    """The variable of the environment that names a proxy for this server; None if no proxy is taken."""
    address, known = urlsplit(server), getproxies()
    host, port = address.hostname or "", address.port or (443 if address.scheme == "https" else 80)
    if proxy_bypass(host) or proxy_bypass(f"{host}:{port}") or _is_in_networks(host, known.get("no", "")):
        return None
    return next((f"{name.upper()}_PROXY" for name in (address.scheme, "all") if name in known), None)


def _is_in_networks(host: str, no_proxy: str) -> bool:
    """Whether it is an address in one of the networks that NO_PROXY names, as curl reads 10.0.0.0/8; urllib does not."""
    try:
        address = ip_address(host)
    except ValueError:
        return False
    for item in no_proxy.split(","):
        with suppress(ValueError):
            if address in ip_network(item.strip(), strict=False):
                return True
    return False


def by_proxy(server: str) -> str:
    """What to put after a failure that may be a proxy's, which nobody thinks of; "" if none is taken."""
    variable = proxy_of(server)
    return f" (through {variable}; NO_PROXY={urlsplit(server).hostname} goes past it)" if variable else ""


def http_client(headers: dict[str, str], transport: httpx.BaseTransport | None = None) -> httpx.Client:
    """A client that goes by the environment's proxies, unless it has a transport.

    Raises SpecError: what the environment says of proxies and certificates is not understood.
    """
    try:
        return httpx.Client(headers=headers, transport=transport, event_hooks={"request": [_remove_login]})
    except (httpx.InvalidURL, ValueError, ImportError, OSError) as error:
        named = ", ".join(f"{name}_proxy".upper() for name in getproxies() if name != "no")
        reason = without_passwords(str(error)).rstrip(".")
        raise SpecError(
            f"the environment names proxies ({named}), and they cannot be used: {reason}. Correct or unset these, or "
            f"SSL_CERT_FILE.",
            ("servers",),
        ) from error


def _remove_login(request: httpx.Request) -> None:
    """Removes name and password from the URL, which httpx logs. Its client has already put them into a header."""
    request.url = request.url.copy_with(username=None, password=None)
