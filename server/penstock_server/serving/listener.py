"""The socket of a server: bound early, to report a port in use, but listening only when the server is ready."""

from __future__ import annotations

import errno
import socket

from penstock_server.settings import Settings, SettingsError

STALLED_SECONDS = 300  # a client that reads nothing for that long is disconnected
_BACKLOG = 2048


def bind(settings: Settings) -> socket.socket:
    """Return a socket bound to the host and port of the settings. Raises SettingsError: it cannot bind."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        disconnect_stalled(listener, STALLED_SECONDS)
        if family == socket.AF_INET6:
            is_any = settings.host == "::"  # "::" also accepts IPv4
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not is_any)
        listener.bind((settings.host, settings.port))
    except (OSError, TypeError) as error:  # TypeError: an invalid host name, as a..b with an umlaut
        listener.close()
        raise _refusal(settings, error) from error
    return listener


def listen(listener: socket.socket, settings: Settings) -> None:
    """Start to listen. Until then connections are refused, and clients try another server. Raises SettingsError."""
    try:
        listener.listen(_BACKLOG)
    except OSError as error:  # two servers that start together can both bind a port
        raise _refusal(settings, error) from error


def disconnect_stalled(listener: socket.socket, seconds: float) -> None:
    """Let the kernel abort accepted connections whose client reads nothing: their responses hold memory that others need."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # only on Linux
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))


def _refusal(settings: Settings, error: OSError | TypeError) -> SettingsError:
    is_host = isinstance(error, socket.gaierror | TypeError) or error.errno == errno.EADDRNOTAVAIL
    remedy = (
        "another --host, an address of this machine" if is_host else "another --port, or stop the program that listens there"
    )
    return SettingsError(
        f"cannot listen on {settings.host}:{settings.port}: {getattr(error, 'strerror', error)}. Choose {remedy}."
    )
