"""The socket of a server: bound early, to report a port in use, but listening only when the server is ready."""

from __future__ import annotations

import errno
import socket

from penstock_server.settings import Settings, SettingsError

_BACKLOG = 2048


def bind(settings: Settings) -> socket.socket:
    """Returns a socket bound to the host and port of the settings. Raises SettingsError: it cannot bind."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    made = socket.socket(family)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            is_any = settings.host == "::"  # "::" also accepts IPv4
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not is_any)
        made.bind((settings.host, settings.port))
    except (OSError, TypeError) as error:  # TypeError: an invalid host name, as a..b with an umlaut
        made.close()
        raise _refusal(settings, error) from error
    return made


def listen(listener: socket.socket, settings: Settings) -> None:
    """Starts to listen. Until then connections are refused, and clients try another server. Raises SettingsError."""
    try:
        listener.listen(_BACKLOG)
    except OSError as error:  # two servers that start at once can both bind a port
        raise _refusal(settings, error) from error


def _refusal(settings: Settings, error: OSError | TypeError) -> SettingsError:
    is_of_host = isinstance(error, socket.gaierror | TypeError) or error.errno == errno.EADDRNOTAVAIL
    advice = (
        "Choose another --host, an address of this machine"
        if is_of_host
        else "Choose another --port, or stop what listens there"
    )
    return SettingsError(f"cannot listen on {settings.host}:{settings.port}: {getattr(error, 'strerror', error)}. {advice}.")
