"""The socket of a server."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from penstock_server.serving.listener import bind, listen
from penstock_server.settings import Settings

LOOPBACKS = ("127.0.0.1", "::1")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize(("host", "reached"), [("0.0.0.0", {"127.0.0.1"}), ("::1", {"::1"}), ("::", {"127.0.0.1", "::1"})])
def test_listener_is_reached_by_the_addresses_of_its_host(host: str, reached: set[str]) -> None:
    settings = Settings.read({"data_dir": "data", "host": host, "port": "0"}, {})
    with closing(bind(settings)) as listener:
        listen(listener, settings)
        port = listener.getsockname()[1]
        found = set[str]()
        for address in LOOPBACKS:
            with closing(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)) as probe:
                if not probe.connect_ex((address, port)):
                    found.add(address)
    assert found == reached
