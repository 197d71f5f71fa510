"""Addresses of commands, and their access to a server."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from penstock.access import Access
from penstock.client import decode_object
from penstock.errors import AccessDenied, PenstockError, ServerUnavailable, SpecError, WireError
from penstock.http import HttpClient, by_proxy
from penstock.responses import TransientError
from penstock.servers import Servers, is_address
from penstock.spec import Spec
from penstock.text import listed
from penstock.transport import Transport
from penstock.wire.names import DATASETS, dataset_path

RETRY_SECONDS = 2.0  # a user waits: long enough for a hiccup, too short for a restart
_GREETING_SECONDS = 5.0
_BATCHES = re.compile(r"epochs/(\d{1,16})/ranks/(\d{1,16})/batches(?:/(\d{1,16})(?:/provenance)?)?")
_WITHOUT_BATCH = ("", "spec", "plan", "shuffle-report", "quarantine")
_NOT_IN_SPEC = ("format", "start", "stop", "stride", "epoch")  # parameters of URLs that do not change a batch's bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Parts of an address.

    server   "http://host:8000", with a path after it if the service stands behind a gateway
    dataset  None if the address names none
    query    the spec's parameters in it, as they are spelled
    """

    server: str
    dataset: str | None = None
    epoch: int = 0
    rank: int = 0
    step: int = 0
    query: tuple[tuple[str, str], ...] = ()

    def with_options(self, arguments: argparse.Namespace) -> Address:
        """Return the address with a command's options, which override its parts.

        Raises SpecError: a parameter is unknown or out of bounds, or they contradict each other.
        """
        given = {name: value for name, value in vars(arguments).items() if value is not None}
        spec = {name.removeprefix("spec_"): value for name, value in given.items() if name.startswith("spec_")}
        query = (*(pair for pair in self.query if pair[0] not in spec), *spec.items())
        Spec.from_query(query)
        return replace(self, query=query, **{name: given[name] for name in ("epoch", "rank", "step") if name in given})


def parse_address(text: str) -> Address:
    """Parse http://host:8000, http://host:8000/stories, or a URL of the service; http:// may be omitted.

    Raises SpecError: the text is not an address.
    """
    text = text.strip()
    split = urlsplit(text if "://" in text else f"http://{text}")
    root = f"{split.scheme}://{split.netloc}"
    if "@" in split.netloc + split.path.partition(DATASETS)[0]:  # not quoted, also where its token has a slash
        raise SpecError(
            "an address must not contain a token: other users of this machine see it. Use --token-file FILE, PENSTOCK_TOKEN or "
            "PENSTOCK_TOKEN_FILE.",
            ("address",),
        )
    if not is_address(root):
        raise SpecError(f"{text!r} is not an address. One looks like http://localhost:8000/stories", ("address",))
    pairs = parse_qsl(split.query, keep_blank_values=True)
    gateway, api, path = split.path.partition(DATASETS)
    if not api:
        gateway, _, path = split.path.rstrip("/").rpartition("/")
    name, _, rest = path.strip("/").partition("/")
    match = _BATCHES.fullmatch(rest)
    if not match and rest not in _WITHOUT_BATCH:
        raise SpecError(f"{text} shows no batch. Give the server and the dataset, or the URL of a batch.", ("address",))
    in_query = {name: value for name, value in pairs if api and value.isdecimal()}
    epoch, rank, step = match.groups() if match else (in_query.get("epoch", 0), 0, 0)
    return Address(
        server=root + gateway,
        dataset=unquote(name) or None,
        epoch=int(epoch),
        rank=int(rank),
        step=int(step or in_query.get("start", 0)),
        query=tuple(pair for pair in pairs if pair[0] not in _NOT_IN_SPEC),
    )


def url(server: str, path: str, query: Mapping[str, str]) -> str:
    """Return a URL that can be pasted; the commas and colons of a mix stay as they are."""
    return f"{server}{path}" + (f"?{urlencode(query, safe=':,;@')}" if query else "")


def curl(url: str) -> str:
    """Return the curl command for a URL, with the certificates and the token of the environment, but without its text."""
    options = []
    if os.environ.get("PENSTOCK_TOKEN"):
        options.append('-H "Authorization: Bearer $PENSTOCK_TOKEN"')
    elif file := os.environ.get("PENSTOCK_TOKEN_FILE"):
        options.append(f'-H "Authorization: Bearer $(cat {shlex.quote(file)})"')
    if ca := os.environ.get("PENSTOCK_CA"):
        options.append(f"--cacert {shlex.quote(ca)}")
    if cert := os.environ.get("PENSTOCK_CERT"):
        options += [f"--{option} {shlex.quote(file)}" for option, file in zip(("cert", "key"), cert.split(","), strict=False)]
    return " ".join(["curl", *options, f"'{url}'"])


def greet(server: str) -> dict[str, Any]:
    """Return a server's /healthz.

    Raises:
        ServerUnavailable: no server answers.
        AccessDenied: the server does not know the token.
        PenstockError: the response is not a penstock server's.
    """
    access = Access()
    with closing(HttpClient(_GREETING_SECONDS, access=access)) as http:
        greeting: dict[str, Any] = {}
        try:
            greeting = decode_object(http.get(server, "/healthz"))
        except TransientError as error:
            if error.refusal and http.status in (0, 401, 407):
                raise error.refusal(str(error)) from error
            if not http.status:
                raise ServerUnavailable(
                    f"{server} does not answer: {str(error).rstrip('.')}. Start a server there (penstock serve DATA_DIR), or "
                    f"correct the address."
                ) from error
        except WireError:
            pass
    if "wire" in greeting:
        return greeting
    if greeting == {"status": "ok"}:  # all that strangers get
        raise AccessDenied(f"{server} does not know this caller. {access.remedy(server)}")
    raise PenstockError(
        f"{server} answers /healthz with status {http.status}{by_proxy(server)}, but not as a penstock server does. Correct "
        f"the address; one looks like http://localhost:8000/stories"
    )


@contextmanager
def connected(server: str, retry_seconds: float = RETRY_SECONDS) -> Iterator[Transport]:
    """Open a transport to a server that answers, and may work on a request for `retry_seconds`. Raises what `greet` raises."""
    greet(server)
    with closing(Transport(Servers((server,)), retry_seconds=retry_seconds, first_contact=True)) as transport:
        yield transport


def get_json(transport: Transport, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Fetch the JSON object at a path. Raises the PenstockError that fits the failure."""
    return transport.get(url("", path, query or {}), decode_object)


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
