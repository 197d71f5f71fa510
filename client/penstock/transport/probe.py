"""Requests outside of a run, and the proxies of the environment. Both use httpx."""

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

_LONGEST = 1 << 20  # bytes kept of a response


def ask_aside(url: str, seconds: float) -> httpx.Response:
    """Send a GET outside of a run, on a new connection. Keeps about the first MiB of a longer body.

    Raises httpx.RequestError: no response, or an incomplete body after `seconds`.
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
    """Create a client for requests outside of a run. Raises SpecError: the environment's proxies are unusable."""
    if proxy_of(server):
        return http_client({})
    # Without a proxy httpx must not read the environment: it fails on NO_PROXY values that other programs accept.
    return http_client({}, httpx.HTTPTransport(verify=False if httpx.URL(server).scheme == "http" else tls_context()))


def tls_refusal(server: str, reason: str) -> str:
    """Explain a permanent TLS failure and its remedy; "" if the connection failed for another reason."""
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
    """Return the environment variable of the proxy for this server; None without a proxy."""
    address, known = urlsplit(server), getproxies()
    host, port = address.hostname or "", address.port or (443 if address.scheme == "https" else 80)
    if proxy_bypass(host) or proxy_bypass(f"{host}:{port}") or _is_in_networks(host, known.get("no", "")):
        return None
    return next((f"{name.upper()}_PROXY" for name in (address.scheme, "all") if name in known), None)


def _is_in_networks(host: str, no_proxy: str) -> bool:
    """Whether a host is an address in a network of NO_PROXY: curl reads 10.0.0.0/8 there, urllib does not."""
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
    """Return a hint at the proxy to append to a failure; "" without a proxy."""
    variable = proxy_of(server)
    return f" (through {variable}; NO_PROXY={urlsplit(server).hostname} goes past it)" if variable else ""


def http_client(headers: dict[str, str], transport: httpx.BaseTransport | None = None) -> httpx.Client:
    """Create a client that uses the environment's proxies, unless `transport` is given.

    Raises SpecError: the environment's proxies or certificates are invalid.
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
    """Remove user and password from the URL, which httpx logs; the client has already put them into a header."""
    request.url = request.url.copy_with(username=None, password=None)
