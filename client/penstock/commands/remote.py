"""Server access for commands: short timeouts, and one clear sentence if the server does not answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import quote, urlencode

import httpx

from penstock.commands.address import Address
from penstock.errors import PenstockError, ServerUnavailable, SpecError
from penstock.source import decode_object
from penstock.text import listed
from penstock.transport.probe import ask_aside, by_proxy, tls_refusal
from penstock.transport.responses import doubt
from penstock.transport.servers import Servers
from penstock.transport.transport import Transport
from penstock.urls import DATASETS, dataset_path

RETRY_SECONDS = 2.0  # a user waits: long enough for a hiccup, too short for a restart
_GREETING_SECONDS = 5.0


def greet(server: str) -> dict[str, Any]:
    """Return a server's /healthz.

    Raises:
        ServerUnavailable: no server answers.
        PenstockError: the response is not a penstock server's.
    """
    try:
        response = ask_aside(f"{server}/healthz", _GREETING_SECONDS)
    except httpx.RequestError as error:
        if refusal := tls_refusal(server, str(error)):
            raise PenstockError(refusal) from error
        raise ServerUnavailable(
            f"{server} does not answer: {error or type(error).__name__}{by_proxy(server)}. Start a server there (penstock "
            f"serve DATA_DIR), or correct the address."
        ) from error
    try:
        greeting = response.json()
    except ValueError:
        greeting = None
    if response.status_code in (401, 407):
        raise PenstockError(f"{server} answers {response.status_code}. {doubt(server, response.status_code, '')}")
    if response.status_code != 200 or not isinstance(greeting, dict) or "wire" not in greeting:
        what = "no wire version" if response.status_code == 200 else f"status {response.status_code}{by_proxy(server)}"
        raise PenstockError(
            f"{server} answers, but not as a penstock server does: /healthz gave {what}. Correct the address; one looks like "
            f"http://localhost:8000/stories"
        )
    return greeting


@contextmanager
def connected(server: str) -> Iterator[Transport]:
    """Open a transport to a server that answers. Raises what `greet` raises."""
    greet(server)
    with closing(Transport(Servers((server,)), retry_seconds=RETRY_SECONDS, first_contact=True)) as transport:
        yield transport


def get_json(transport: Transport, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Fetch the JSON object at a path. Raises the PenstockError that fits the failure."""
    return transport.get(f"{path}?{urlencode(query)}" if query else path, decode_object)


def describe_dataset(transport: Transport, dataset: str) -> dict[str, Any]:
    """Fetch the description of a dataset or a mixture."""
    return get_json(transport, dataset_path(dataset))


def dataset_of(address: Address, transport: Transport) -> str:
    """Return the dataset of an address. Raises SpecError: it names no dataset; the message lists the server's."""
    if address.dataset is not None:
        return address.dataset
    known = get_json(transport, DATASETS)
    names = [one["name"] for kind in ("datasets", "mixtures") for one in known[kind]]
    example = f"{address.server}/{quote(names[0], safe='')}" if names else ""
    raise SpecError(
        f"which dataset? {address.server} has {listed(names) or 'none that can be served'}."
        + (f" Name it after the server: {example}" if names else ""),
        ("dataset",),
    )
