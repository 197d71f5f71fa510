"""Addresses of commands, and their access to a server."""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import httpx

from penstock.cli.output import allow_closed_pipe, complain
from penstock.client import decode_object, is_address
from penstock.errors import PenstockError, ServerUnavailable, SpecError
from penstock.http import by_proxy, tls_remedy
from penstock.responses import remedy
from penstock.spec import Spec
from penstock.text import listed
from penstock.transport import Servers, Transport
from penstock.wire.names import DATASETS, dataset_path

RETRY_SECONDS = 2.0  # a user waits: long enough for a hiccup, too short for a restart
_GREETING_SECONDS = 5.0
_BATCHES = re.compile(r"epochs/(\d{1,16})/ranks/(\d{1,16})/batches(?:/(\d{1,16})(?:/provenance)?)?")
_WITHOUT_BATCH = ("", "spec", "shuffle-report", "quarantine")
_NOT_IN_SPEC = ("format", "start", "stop", "stride", "epoch")  # parameters of URLs that do not change a batch's bytes


def set_run(command: argparse.ArgumentParser, name: str, run: Callable[[argparse.Namespace], int]) -> None:
    """Set what a command runs. A PenstockError becomes one line on stderr, and status 2."""

    def run_command(arguments: argparse.Namespace) -> int:
        # On one line: the place of a warning in this package is no help at a terminal.
        warnings.showwarning = lambda message, *_: complain(name, message)
        status = 0
        try:
            with allow_closed_pipe():
                status = run(arguments)
        except PenstockError as error:
            complain(name, error)
            return 2
        return status

    command.set_defaults(run=run_command)


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Parts of an address; None, or an empty query, for a part that it leaves out.

    server  "http://host:8000", with a path after it if the service stands behind a gateway
    query   the spec's parameters in it, as they are spelled
    """

    server: str
    dataset: str | None = None
    epoch: int | None = None
    rank: int | None = None
    step: int | None = None
    query: tuple[tuple[str, str], ...] = ()


def parse_address(text: str) -> Address:
    """Parse http://host:8000, http://host:8000/stories, or a URL of the service; http:// may be omitted.

    Raises SpecError: the text is not an address.
    """
    text = text.strip()
    split = urlsplit(text if "://" in text else f"http://{text}")
    root = f"{split.scheme}://{split.netloc}"
    if not is_address(root):
        raise SpecError(f"{text!r} is not an address. One looks like http://localhost:8000/stories", ("address",))
    pairs = parse_qsl(split.query, keep_blank_values=True)
    query = tuple(pair for pair in pairs if pair[0] not in _NOT_IN_SPEC)
    gateway, api, path = split.path.partition(DATASETS)
    if not api:
        gateway, _, name = split.path.rstrip("/").rpartition("/")
        return Address(server=root + gateway, dataset=unquote(name) or None, query=query)
    name, _, rest = path.strip("/").partition("/")
    match = _BATCHES.fullmatch(rest)
    if not match and rest not in _WITHOUT_BATCH:
        raise SpecError(f"{text} shows no batch. Give the server and the dataset, or the URL of a batch.", ("address",))
    in_query = {name: value for name, value in pairs if value.isdecimal()}
    epoch, rank, step = match.groups() if match else (in_query.get("epoch"), None, None)
    step = step or in_query.get("start")
    return Address(
        server=root + gateway,
        dataset=unquote(name) or None,
        epoch=int(epoch) if epoch else None,
        rank=int(rank) if rank else None,
        step=int(step) if step else None,
        query=query,
    )


def first_given(option: int | None, in_address: int | None) -> int:
    """Return the option's value, else the address's, else 0."""
    return option if option is not None else in_address or 0


def spec_query(arguments: argparse.Namespace, address: Address) -> dict[str, str]:
    """Return the spec's parameters in the address and the options, as a URL's query spells them; options override.

    Raises SpecError: one is unknown or out of bounds, or they contradict each other.
    """
    options = {
        name.removeprefix("spec_"): value
        for name, value in vars(arguments).items()
        if name.startswith("spec_") and value is not None
    }
    pairs = [(name, value) for name, value in address.query if name not in options]
    Spec.from_query([*pairs, *options.items()])
    return {**dict(pairs), **options}


def url(server: str, path: str, query: Mapping[str, str]) -> str:
    """Return a URL that can be pasted; the commas and colons of a mix stay as they are."""
    return f"{server}{path}" + (f"?{urlencode(query, safe=':,;@')}" if query else "")


def greet(server: str) -> dict[str, Any]:
    """Return a server's /healthz.

    Raises:
        ServerUnavailable: no server answers.
        PenstockError: the response is not a penstock server's.
    """
    try:
        response = httpx.get(f"{server}/healthz", timeout=_GREETING_SECONDS)
    except httpx.RequestError as error:
        if refusal := tls_remedy(server, str(error)):
            raise PenstockError(refusal) from error
        raise ServerUnavailable(
            f"{server} does not answer: {error or type(error).__name__}{by_proxy(server)}. Start a server there (penstock "
            f"serve DATA_DIR), or correct the address."
        ) from error
    status = response.status_code
    if status in (401, 407):
        raise PenstockError(f"{server} answers {status}. {remedy(status)}")
    with suppress(ValueError):
        if status == 200 and "wire" in (greeting := response.json()):
            return dict(greeting)
    raise PenstockError(
        f"{server} answers /healthz with status {status}{by_proxy(server)}, but not as a penstock server does. Correct the "
        f"address; one looks like http://localhost:8000/stories"
    )


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
    names = [dataset["name"] for kind in ("datasets", "mixtures") for dataset in known[kind]]
    example = f" Add one to the address: {address.server}/{quote(names[0], safe='')}" if names else ""
    raise SpecError(f"which dataset? {address.server} has {listed(names) or 'none that can be served'}.{example}", ("dataset",))
