"""HTTP connections that receive bodies into reused or pinned memory, and the proxies of the environment.

httpx copies a body four times on its way through Python; http.client reads it straight into the memory of its tensors.
"""

from __future__ import annotations

import socket
import ssl
import time
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from ipaddress import ip_address, ip_network
from itertools import accumulate
from multiprocessing.connection import wait as wait_for
from queue import Empty, SimpleQueue
from secrets import token_hex
from typing import Any, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from penstock import __version__
from penstock.access import Access
from penstock.errors import SpecError, WireError
from penstock.responses import TransientError, UnexpectedServer, failure_of
from penstock.waits import Reporter
from penstock.wire import content_digest
from penstock.wire.names import DRAINING, REQUEST_ID
from penstock.wire.report import TIMING_HEADER

MAX_BUFFER = 16 << 20  # larger than most bodies
_KEPT_BUFFERS = 12  # one receives, the others hold frames that wait for the loop
_SPARE_BYTES = 32 << 20  # kept between epochs: a loop that waits for data cycles through three ranges
_MAX_BODY = 2 << 30  # a batch has at most 1 GiB
_READ_BYTES = 1 << 20  # per read: small enough that the next reader finds the bytes in the CPU cache
_CONNECT_SECONDS = 4.0  # less than a loop that ends waits for its thread
_SILENT_SECONDS = 0.01  # without a response for this long, a server reads or tokenizes; a refusal comes sooner
_CLOSED = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
_PAUSE_SECONDS = 60.0  # without requests ahead, after one failed
_OTHER_CERTIFICATE = "If a private authority issued it, name its certificate, a PEM file, by ca=, PENSTOCK_CA or SSL_CERT_FILE."
_TLS_REMEDIES = {  # by OpenSSL's X509_V_ERR codes
    9: "Set the clock of this machine, or wait until it is valid.",
    10: "Renew it on the server, or set the clock of this machine.",
    62: "Use a name that the certificate has in the address, or issue one for this name.",
    64: "Use a name that the certificate has in the address, or issue one for this address.",
}
_HEADERS = {
    "Accept": "*/*",
    "Prefer": "wait=2",  # seconds until a server that still reads or tokenizes reports its progress
    "User-Agent": f"penstock/{__version__}",
}


class HttpClient:
    """GETs, one at a time, over connections that stay open between them.

    A server is a URL. Its fragment, as in https://data:8000#10.0.0.7, is the IP to connect to; the Host header and the
    certificate have the name. A server may be silent for `silence_seconds`; a lookup of its name takes as long as the system's
    resolver allows.

    A body of known length goes into the memory that `allocate(nbytes)` returns. The default reuses memory once no view of it
    is left. Each request carries the report of `reporter`, which learns what the client does, and the token of `access`. No
    redirect is followed, so no other host gets the token.

    Other threads may call `interrupt`. A fork must not use or close its parent's client.

    status       of the last response; 0 if none arrived
    request_id   names the last request in the server's log; "" if it could not be sent
    is_draining  the server of the last response will stop
    certificate  of the server to which the last connection was opened, as ssl.SSLSocket.getpeercert returns it; {} without TLS
    """

    def __init__(
        self,
        silence_seconds: float,
        allocate: Callable[[int], memoryview] | None = None,
        reporter: Reporter | None = None,
        access: Access | None = None,
    ) -> None:
        self.is_interrupted = self.is_draining = False
        self.status, self.request_id = 0, ""
        self.certificate: dict[str, Any] = {}
        self._access = access or Access()
        self._reporter = reporter or Reporter()
        self._interrupts = SimpleQueue[None]()
        self._silence_seconds = silence_seconds
        self._allocate = allocate or Buffers().allocate
        self._routes: dict[str, _Route] = {}
        self._idle: dict[str, HTTPConnection] = {}  # by server
        self._sockets: list[socket.socket] = []
        self._ahead: tuple[str, HTTPConnection, str] | None = None  # URL, connection and id of the request sent ahead
        self._paused_until = 0.0  # monotonic time; no request is sent ahead before

    def get(self, server: str, target: str, *, then: str | None = None) -> memoryview:
        """Return the body of `target` (path and query) if the status is 200.

        `then` is the likely next target. Its request is sent ahead over a second connection: the server prepares that response
        while this one is received.

        Raises:
            TransientError: no response arrived, or only a part of it.
            WireError: the body does not match the checksum sent with it.
            PenstockError: the subclass that fits the refusal.
        """
        url = server.partition("#")[0] + target.partition("?")[0]
        response: HTTPResponse | None = None
        self.status = 0
        try:
            connection, response = self._respond(server, target, then)
            self.status = response.status
            self.request_id = response.headers.get(REQUEST_ID, self.request_id)  # a proxy may have named it anew
            self.is_draining = DRAINING in response.headers
            # A cache on the way repeats the timing of an old response.
            self._reporter.answered("" if "Age" in response.headers else response.headers.get(TIMING_HEADER, ""))
            if response.status == 200 and then and not self._ahead and not self.is_draining:
                self._send_ahead(server, then)
            body = _receive(response, self._allocate)
        except BaseException as error:
            self.close()  # the rest of the body would pass for the next response
            if not isinstance(error, OSError | HTTPException):
                raise
            if isinstance(error, ssl.SSLError):
                self._access.read_certificates_again()
                self._routes.clear()
                if hint := tls_remedy(server, error):
                    raise UnexpectedServer(hint) from error
            reason = (str(error) or type(error).__name__) + by_proxy(server)
            if isinstance(error, ConnectionResetError | ssl.SSLEOFError):
                reason += self._access.why_closed(server)
            raise TransientError(reason) from error
        finally:
            self._reporter.clock.enter("client")
            if response:
                response.close()
        if response.will_close or server in self._idle:
            connection.close()
        else:
            self._idle[server] = connection
        checksum = response.headers.get("Content-Digest", "")
        if checksum.startswith("sha-256=:") and checksum != content_digest(body):
            raise WireError(f"the answer of {url} was damaged on the way: it does not match its checksum")
        if response.status == 200:
            return body
        headers = {name.lower(): value for name, value in response.headers.items()}
        raise failure_of(url, response.status, headers, bytes(body), by_proxy(server), self._access.remedy(server))

    def interrupt(self) -> None:
        """Make a running `get` or `wait` in another thread fail now; later ones fail, too."""
        self.is_interrupted = True
        self._interrupts.put(None)
        for opened in self._sockets:
            _shut_down(opened)

    def wait(self, seconds: float) -> None:
        """Wait for `seconds` or until an interrupt."""
        with suppress(Empty):
            self._interrupts.get(timeout=seconds)

    def close(self) -> None:
        """Close all connections. Idempotent."""
        self._reporter.failed()
        self._ahead = None
        self._idle.clear()
        for opened in self._sockets:
            _shut_down(opened)  # a response that is not read to its end keeps its socket open
            opened.close()
        self._sockets = []

    def _respond(self, server: str, target: str, then: str | None) -> tuple[HTTPConnection, HTTPResponse]:
        """Return the head of the response, and its connection. While the server is silent, it gets `then` to work on, too."""
        self._reporter.clock.enter("network")
        (ahead_url, ahead, ahead_id), self._ahead = self._ahead or ("", None, ""), None
        if ahead:
            if ahead_url == server + target:
                self.request_id = ahead_id
                if then and not wait_for([ahead.sock], _SILENT_SECONDS):
                    self._send_ahead(server, then)
                with suppress(*_CLOSED):
                    response = ahead.getresponse()
                    # Retry-After: 0 means that the server prepares this response. Any other failure may be due to the response
                    # that the client was reading then: ask again.
                    if response.status == 200 or response.headers.get("Retry-After") == "0":
                        return ahead, response
                    self._paused_until = time.monotonic() + _PAUSE_SECONDS
            ahead.close()
            self._reporter.failed()
        if kept := self._idle.pop(server, None):
            try:
                self.request_id = self._send(kept, server, target)
                return kept, kept.getresponse()
            except _CLOSED:  # the server has closed the idle connection
                self._reporter.failed()
                kept.close()
        self.request_id = ""
        self._reporter.clock.enter("connect")
        connection = self._connect(server)
        self._reporter.clock.enter("network")
        with suppress(*_CLOSED):  # a server that refuses at once has sent the reason, such as an alert of TLS
            self.request_id = self._send(connection, server, target)
        return connection, connection.getresponse()

    def _send_ahead(self, server: str, target: str) -> None:
        if time.monotonic() < self._paused_until:
            return
        try:
            connection = self._idle.pop(server, None) or self._connect(server)
            self._ahead = (server + target, connection, self._send(connection, server, target))
        except OSError:  # a connect may have taken seconds, while a response waits
            self._paused_until = time.monotonic() + _PAUSE_SECONDS

    def _send(self, connection: HTTPConnection, server: str, target: str) -> str:
        """Send a request. Return its id: another for each attempt, since each has its own line in the server's log."""
        route, request_id = self._routes[server], token_hex(6)
        headers = _HEADERS | route.headers | self._access.headers(server) | self._reporter.headers() | {REQUEST_ID: request_id}
        connection.request("GET", route.prefix + target, headers=headers)
        return request_id

    def _connect(self, server: str) -> HTTPConnection:
        if server not in self._routes:
            self._routes[server] = _route_to(server, self._access)
        connection = self._routes[server].connection(timeout=min(_CONNECT_SECONDS, self._silence_seconds))
        if connection.sock is None:
            connection.connect()
        opened: socket.socket = connection.sock
        self.certificate = (opened.getpeercert() or {}) if isinstance(opened, ssl.SSLSocket) else {}
        opened.settimeout(self._silence_seconds)
        self._sockets = [*(known for known in self._sockets if known.fileno() >= 0), opened]
        if self.is_interrupted:  # while it connected
            _shut_down(opened)
        return connection


def _receive(response: HTTPResponse, allocate: Callable[[int], memoryview]) -> memoryview:
    """Return the body. Raises TransientError: it is incomplete. Raises HTTPException: its length is unknown."""
    if response.chunked:
        return _receive_pieces(response)
    length = response.length
    if length is None:  # http.client takes a truncated head for a whole one
        raise HTTPException("the response does not state its length, or is cut short")
    _check_length(length)
    memory = allocate(length)
    num_bytes = 0
    while num_bytes < length:
        try:
            count = response.readinto(memory[num_bytes : num_bytes + _READ_BYTES])
        except OSError as error:
            raise TransientError(str(error), received=memory[:num_bytes]) from error
        if not count:
            reason = f"the connection ended {length - num_bytes} bytes before the end of the response"
            raise TransientError(reason, received=memory[:num_bytes])
        num_bytes += count
    return memory


def _check_length(num_bytes: int) -> None:
    """Raises HTTPException: no server of penstock sends such a body."""
    if num_bytes > _MAX_BODY:
        raise HTTPException(f"the response has more than {_MAX_BODY:,} bytes; no batch has that many")


def _receive_pieces(response: HTTPResponse) -> memoryview:
    """Return a chunked body. Raises as _receive does."""
    body = bytearray()
    try:
        while piece := response.read(_READ_BYTES):
            body += piece
            _check_length(len(body))
    except IncompleteRead as error:
        body += error.partial
        raise TransientError("the connection ended before the last chunk", received=memoryview(body)) from error
    except OSError as error:
        raise TransientError(str(error), received=memoryview(body)) from error
    return memoryview(body)


def _shut_down(opened: socket.socket) -> None:
    # close() does not wake a thread that is blocked in the socket. SSLSocket.shutdown would remove the encryption while that
    # thread still uses it.
    with suppress(OSError):
        socket.socket.shutdown(opened, socket.SHUT_RDWR)


class Buffers:
    """Reused memory for bodies: fresh pages cost as much as a copy. Any thread may use it: it has no lock."""

    def __init__(self) -> None:
        self._buffers: list[bytearray] = []

    def allocate(self, nbytes: int) -> memoryview:
        """Return `nbytes` of memory that no other view uses. Buffers above MAX_BUFFER are not kept."""
        if not nbytes or nbytes > MAX_BUFFER:
            return memoryview(bytearray(nbytes))
        kept = self._take()
        buffer = next((buffer for buffer in kept if nbytes <= len(buffer) and _is_free(buffer)), None)
        if buffer is None:
            buffer = bytearray(nbytes)
            kept = [*(other for other in kept if nbytes <= len(other) or not _is_free(other)), buffer][-_KEPT_BUFFERS:]
        view = memoryview(buffer)[:nbytes]
        self._buffers += kept
        return view

    def trim(self) -> None:
        """Drop the buffers that the start of the next epoch would rarely need."""
        buffers = self._take()
        totals = accumulate(map(len, buffers))
        self._buffers += [buffer for buffer, total in zip(buffers, totals, strict=True) if total <= _SPARE_BYTES]

    def _take(self) -> list[bytearray]:
        """Take all buffers. No other thread gets the same one."""
        taken = list[bytearray]()
        with suppress(IndexError):
            while True:
                taken.insert(0, self._buffers.pop())
        return taken

    def __reduce__(self) -> tuple[type[Buffers], tuple[()]]:
        """A pickled or copied object has no memory yet."""
        return Buffers, ()


def _is_free(buffer: bytearray) -> bool:
    """Whether no view of a buffer exists: with one, Python refuses to change its length."""
    try:
        last = buffer.pop()
    except (BufferError, IndexError):
        return False
    buffer.append(last)  # pop did not release the memory
    return True


class _Route(NamedTuple):
    """How to reach a server: a factory of connections with a `timeout`, the start of each target, and headers."""

    connection: Callable[..., HTTPConnection]
    prefix: str
    headers: dict[str, str]


def _route_to(server: str, access: Access) -> _Route:
    """Raises SpecError: the proxy of the environment is unusable or would read the token, or certificates cannot be read."""
    address, name = urlsplit(server), proxy_of(server)
    is_tls = address.scheme == "https"
    connect = partial(HTTPSConnection, context=access.tls_context()) if is_tls else HTTPConnection

    def to_ip(timeout: float) -> HTTPConnection:
        connection = connect(*_host_and_port(address), timeout=timeout)
        opened = socket.create_connection((address.fragment, connection.port), timeout)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sock = access.tls_context().wrap_socket(opened, server_hostname=connection.host) if is_tls else opened
        return connection

    if name is None:
        return _Route(to_ip if address.fragment else partial(connect, *_host_and_port(address)), address.path, {})
    proxy = urlsplit(getproxies()[name.removesuffix("_PROXY").lower()])
    try:
        host, port = _host_and_port(proxy)
    except ValueError:
        host, port = "", 0
    if proxy.scheme != "http" or not host:
        raise SpecError(f"{name} is not a proxy that can be used: give http://HOST:PORT, or unset it", ("servers",))
    login = f"{unquote(proxy.username or '')}:{unquote(proxy.password or '')}"
    headers = {"Proxy-Authorization": f"Basic {b64encode(login.encode()).decode()}"} if proxy.username else {}
    if not is_tls:
        if access.headers(server):
            raise SpecError(
                f"the token would travel unencrypted through {name}: use an https:// address, or go past the proxy with "
                f"NO_PROXY={address.hostname}.",
                ("servers",),
            )
        return _Route(partial(connect, host, port), server.partition("#")[0], headers)

    def tunnel(timeout: float) -> HTTPConnection:
        connection = connect(host, port, timeout=timeout)
        connection.set_tunnel(*_host_and_port(address), headers)
        return connection

    return _Route(tunnel, address.path, {})


def _host_and_port(address: SplitResult) -> tuple[str, int]:
    return address.hostname or "", address.port or (443 if address.scheme == "https" else 80)


def proxy_of(server: str) -> str | None:
    """Return the environment variable of the proxy for this server; None without a proxy."""
    address, known = urlsplit(server), getproxies()
    host, port = _host_and_port(address)
    if proxy_bypass(host) or proxy_bypass(f"{host}:{port}") or _is_in_networks(host, known.get("no", "")):
        return None
    return next((f"{name.upper()}_PROXY" for name in (address.scheme, "all") if name in known), None)


def _is_in_networks(host: str, no_proxy: str) -> bool:
    """Whether a host is an address in a network of NO_PROXY, such as 10.0.0.0/8, which urllib does not understand."""
    with suppress(ValueError):
        address = ip_address(host)
        for item in no_proxy.split(","):
            with suppress(ValueError):
                if address in ip_network(item.strip(), strict=False):
                    return True
    return False


def by_proxy(server: str) -> str:
    """Return a hint at the proxy to append to a failure; "" without a proxy."""
    variable = proxy_of(server)
    return f" (through {variable}; NO_PROXY={urlsplit(server).hostname} goes past it)" if variable else ""


def tls_remedy(server: str, error: ssl.SSLError) -> str:
    """Return what is wrong with the certificates, or the port, and what to do; "" for another failure of TLS."""
    if isinstance(error, ssl.SSLCertVerificationError):
        what, remedy = error.verify_message, _TLS_REMEDIES.get(error.verify_code, _OTHER_CERTIFICATE)
        return f"the certificate of {server} is not trusted: {what}. {remedy}"
    if error.reason == "WRONG_VERSION_NUMBER":
        return f"{server} does not speak TLS: is {server.replace('https:', 'http:', 1)} meant?"
    if "_ALERT_" in str(error.reason) and ("CERTIFICATE" in error.reason or "UNKNOWN_CA" in error.reason):
        return (
            f"{server} refuses the certificate of this client, or that there is none: {error.reason}. Correct cert= or "
            f"PENSTOCK_CERT."
        )
    return ""
