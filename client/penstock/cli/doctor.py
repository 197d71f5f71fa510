"""`penstock doctor`: what is wrong between this machine and a server, and what to do about it."""

from __future__ import annotations

import argparse
import platform
import ssl
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from statistics import median
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from rich.table import Table
from rich.text import Text

from penstock import __version__, wire
from penstock.cli.arguments import add_access_options
from penstock.cli.connection import RETRY_SECONDS, connected, describe_dataset, get_json, greet, parse_address
from penstock.cli.output import set_run, stdout_console
from penstock.client import Client, Steps, decode_object
from penstock.errors import PenstockError
from penstock.http import HttpClient, proxy_of
from penstock.prefetch import RANGE_BYTES
from penstock.responses import TransientError
from penstock.spec import Spec
from penstock.text import counted, printable, rows_kept, size
from penstock.transport import Transport
from penstock.wire.names import DATASETS, dataset_path

_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}
_NUM_PINGS, _PING_SECONDS = 15, 5.0
_SLOW_PING_SECONDS = 0.05
_CLOCK_SECONDS = 5.0
_RENEWAL_DAYS = 14  # before a certificate ends
_FULL = 0.97
_PULLED_BYTES, _PULLED_SECONDS = 4 * RANGE_BYTES, 3.0
_SEQ_LEN = 65_536  # long padded samples: usual ones of a small dataset would measure the request rate instead
_SLOW_BYTES_PER_SECOND = 10e6


def configure(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    command.description = (
        "Checks versions, the certificate, latency, the clock, pinned memory, datasets, the block cache and bandwidth. Says "
        "what to do. The exit status is 1 if a check fails."
    )
    command.add_argument("address", metavar="ADDRESS", help="http://HOST:PORT, or http://HOST:PORT/DATASET to check only that")
    add_access_options(command)
    set_run(command, run)


class Check(NamedTuple):
    """Result of one check: its subject, the finding, and the remedy.

    ok    no problem
    warn  jobs run, but slower than possible, or differently
    fail  jobs do not run
    """

    level: Literal["ok", "warn", "fail"]
    name: str
    text: str
    remedy: str = ""


def run(arguments: argparse.Namespace) -> int:
    """Print one line per check; return 1 if one fails. Raises SpecError: the address is invalid."""
    address = parse_address(arguments.address)
    console = stdout_console()
    console.print(Text(printable(address.server), "bold"))
    found = Counter[str]()
    for check in checks(address.server, address.dataset):
        row = Table.grid(padding=(0, 2, 0, 0))
        for width in (4, 9, None):
            row.add_column(width=width, overflow="fold")
        remedy = Text(f"\n-> {printable(check.remedy)}" if check.remedy else "", "bold")
        row.add_row(Text(check.level, _STYLES[check.level]), check.name, Text.assemble(printable(check.text), remedy))
        console.print(row)
        found[check.level] += 1
    failed, warnings = f"{counted(found['fail'], 'check')} failed", counted(found["warn"], "warning")
    console.print(", ".join([failed] * bool(found["fail"]) + [warnings] * bool(found["warn"])) or "all checks passed")
    return 1 if found["fail"] else 0


def checks(server: str, dataset: str | None) -> Iterator[Check]:
    """Yield all checks, lazily; those of data only for `dataset` if it is given."""
    try:
        greeting = greet(server)
    except PenstockError as error:
        yield Check("fail", "server", str(error))
        yield from _check_proxy(server)
        yield from check_machine()
        return
    yield _check_versions(greeting)
    yield from _check_proxy(server)
    yield from check_connection(server)
    yield from check_machine()
    try:
        with connected(server) as transport:
            known = get_json(transport, DATASETS)
            yield from check_datasets(transport, known, dataset)
            yield from check_cache(known["datasets"])
            yield from check_bandwidth(server, transport, known, dataset)
    except PenstockError as error:
        yield Check("fail", "data", str(error))


def _check_versions(greeting: Mapping[str, Any]) -> Check:
    there, here = (greeting["version"], greeting["wire"]), (__version__, wire.VERSION)
    if there == here:
        return Check("ok", "server", f"penstock {__version__}, wire version {wire.VERSION}, the same as here")
    text = f"penstock {there[0]} with wire version {there[1]} there, penstock {__version__} with {wire.VERSION} here"
    return Check("warn" if there[1] == wire.VERSION else "fail", "server", text, "install the same penstock on both")


def _check_proxy(server: str) -> Iterator[Check]:
    """Warn about a proxy: it mostly comes from an overlooked environment variable."""
    if variable := proxy_of(server):
        remedy = f"set NO_PROXY={urlsplit(server).hostname} where the trainer runs"
        yield Check("warn", "proxy", f"{variable} is set, so batches go through a proxy", remedy)


def check_connection(server: str) -> Iterator[Check]:
    """Check the certificate, the latency and the difference of the clocks, with a few requests over one connection."""
    pings = []  # seconds, and how far the server's clock is ahead
    try:
        with closing(HttpClient(_PING_SECONDS)) as http:
            http.get(server, "/healthz")  # opens the connection
            yield from _check_certificate(http.certificate)
            for _ in range(_NUM_PINGS):
                sent, began = time.time(), time.perf_counter()
                server_time = decode_object(http.get(server, "/healthz"))["time"]
                seconds = time.perf_counter() - began
                pings.append((seconds, server_time - sent - seconds / 2))
    except TransientError as error:
        yield Check("fail", "latency", f"the server answered once, but not again: {error}", "look at its log")
        return
    typical, longest = median(seconds for seconds, _ in pings), max(pings)[0]
    text = f"{1000 * typical:.1f} ms (median of {_NUM_PINGS}; at most {1000 * longest:.1f} ms)"
    if typical < _SLOW_PING_SECONDS:
        yield Check("ok", "latency", text)
    else:
        limit = RANGE_BYTES / typical / 1e6  # two ranges are requested at a time, but socket buffers seldom hold more of them
        text = f"{text}: at most {size(RANGE_BYTES)} of batches arrive in that time, {limit:,.0f} MB/s"
        yield Check("warn", "latency", text, "run a server nearer to the trainers")
    ahead = min(pings)[1]
    text = f"the server's clock is {abs(ahead):,.3f} s {'ahead of' if ahead > 0 else 'behind'} this one"
    if abs(ahead) < _CLOCK_SECONDS:
        yield Check("ok", "clock", text)
    else:
        yield Check("warn", "clock", f"{text}: the times in their logs do not match", "let NTP set both clocks")


def _check_certificate(certificate: Mapping[str, Any]) -> Iterator[Check]:
    """Warn about a certificate that ends soon. Yields nothing without TLS."""
    if not certificate:
        return
    ends_at = datetime.fromtimestamp(ssl.cert_time_to_seconds(certificate["notAfter"]), UTC)
    days = (ends_at - datetime.now(UTC)).days
    text = f"the certificate of the server ends in {counted(days, 'day')}, at {ends_at:%Y-%m-%d %H:%M} UTC"
    if days >= _RENEWAL_DAYS:
        yield Check("ok", "tls", text)
    else:
        remedy = "renew it before then: afterwards no client can connect. penstock serve reads the new file without a restart"
        yield Check("warn", "tls", text, remedy)


def check_machine() -> Iterator[Check]:
    """Check this machine: Python, torch, and whether batches can use pinned memory."""
    here = f"Python {platform.python_version()}, penstock {__version__}"
    try:
        import torch
    except ImportError as error:
        yield Check("warn", "client", f"{here}, no torch ({error})", "RemoteDataset needs it: pip install 'penstock[torch]'")
        return
    yield Check("ok", "client", f"{here}, torch {torch.__version__}")
    if not torch.cuda.is_available():
        build = torch.version.cuda or torch.version.hip or "CPU only"
        yield Check("ok", "memory", f"torch (build: {build}) sees no GPU here: batches use ordinary memory")
        return
    name = torch.cuda.get_device_name()
    try:
        torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
        yield Check("ok", "memory", f"{name}; batches use pinned memory")
    except RuntimeError as error:
        yield Check("fail", "memory", f"{name}, but memory cannot be pinned: {error}", "check nvidia-smi and ulimit -l")


def check_datasets(transport: Transport, known: Mapping[str, Any], dataset: str | None) -> Iterator[Check]:
    """Yield one check per dataset, or one for the named dataset.

    Raises UnknownDataset, and the errors of describe_dataset.
    """
    datasets, mixtures, refused = (
        [entry for entry in known[kind] if dataset in (None, entry["name"])] for kind in ("datasets", "mixtures", "refused")
    )
    if dataset and not (datasets or mixtures or refused):
        describe_dataset(transport, dataset)  # raises, and suggests similar names
    for entry in datasets:
        yield _check_dataset(describe_dataset(transport, entry["name"]))
    for mixture in mixtures:
        yield Check("ok", "dataset", f"{mixture['name']}: a mixture, {mixture['mix']}")
    for entry in refused:
        yield Check("fail", "dataset", f"{entry['name']} is not served: {entry['error']}")


def _check_dataset(about: Mapping[str, Any]) -> Check:
    name, index, bad = about["name"], about["index"], about["bad_rows"]
    tokens = f"tokens counted in {index['blocks_done']:,} of {index['blocks']:,} blocks"
    if about["tokens"] is not None:
        tokens = counted(about["tokens"], "token")
    rows = rows_kept(about["rows"], about["rows_served"])
    text = f"{name}: {rows} in {counted(about['shards'], 'shard')}, {tokens}, snapshot {about['snapshot']}"
    quarantine = f"GET {dataset_path(name)}/quarantine lists them"
    if refusal := bad["refusal"]:
        return Check("fail", "dataset", f"every batch is refused. {refusal}")
    if about["rows_served"] == 0:
        return Check("fail", "dataset", f"{text}; its filter keeps no row", "correct the filter in its penstock.toml")
    if unread := bad["unread_row_groups"]:
        text = f"{text}; {counted(unread, 'row group')} could not be read, and batches that need one fail"
        return Check("fail", "dataset", text, f"{quarantine}; repair the shards, or move them out of the folder")
    if error := about.get("refresh_error"):
        text = f"{text}; newer data is not served: {error}"
        return Check("warn", "dataset", text, "repair the files; until then this snapshot is served")
    if bad["known"] and bad["on_bad_row"] == "fail":
        text = f"{text}; {counted(bad['known'], 'bad row')}, and a batch with a bad row fails"
        return Check("warn", "dataset", text, f'{quarantine}; remove them, or set on_bad_row = "replace" in penstock.toml')
    if unused := about["unused_columns"]:
        text = f"{text}; not used, though their names suggest labels or masks: {', '.join(unused)}"
        return Check("warn", "dataset", text, "the server's log shows how to name them in penstock.toml")
    return Check("ok", "dataset", f"{text}; {counted(bad['known'], 'bad row')} replaced" if bad["known"] else text)


def check_cache(datasets: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """Check the block cache, which all datasets share."""
    if not datasets:
        return
    cache = datasets[0]["cache"]
    used, budget = cache["used_bytes"], cache["budget_bytes"]
    needed = sum(dataset["blocks_bytes"] for dataset in datasets)
    text = f"{size(used)} of {size(budget)} used"
    if failure := cache.get("failure"):
        text = f"{text}; it cannot be written to ({failure}): blocks are decoded again each time"
        yield Check("warn", "cache", text, "repair the disk of --cache-dir")
    elif budget < cache["configured_bytes"]:
        text = f"{text}; its disk was full, so the budget is less than the configured {size(cache['configured_bytes'])}"
        yield Check("warn", "cache", text, "free some of the disk of --cache-dir: the budget rises with the next blocks")
    elif used >= _FULL * budget or needed > budget:
        text = f"{text}; the datasets take about {size(needed)}: blocks that do not fit are decoded again each time"
        yield Check("warn", "cache", text, "raise --cache-bytes if the disk has room")
    else:
        yield Check("ok", "cache", text)


def check_bandwidth(server: str, transport: Transport, known: Mapping[str, Any], dataset: str | None) -> Iterator[Check]:
    """Measure the bandwidth of a few MiB of batches of the largest dataset, fetched as the client does."""
    largest = sorted(known["datasets"], key=lambda entry: -entry["size_bytes"])
    entries = [entry for entry in (*largest, *known["mixtures"]) if entry.get("rows_served") != 0]
    names = [entry["name"] for entry in entries if dataset in (None, entry["name"])]
    if names:
        try:
            yield _pull(server, transport, names[0])
        except PenstockError as error:
            yield Check("fail", "bandwidth", f"{names[0]} gives no batches: {error}")


def _pull(server: str, transport: Transport, dataset: str) -> Check:
    client = Client(server, dataset, rank=0, retry_seconds=RETRY_SECONDS)
    resolved = client.resolve(Spec(seq_len=_SEQ_LEN, drop_last=False))
    if not resolved.num_steps:
        return Check("warn", "bandwidth", f"{dataset} holds no sample", "check its filter and its shards")
    began = time.perf_counter()
    [frame] = client.frames(transport, Steps(resolved.spec, 0, range(1)))
    first = time.perf_counter() - began
    steps = Steps(resolved.spec, 0, range(min(resolved.num_steps, max(2, RANGE_BYTES // max(frame.nbytes, 1)))))
    client.frames(transport, steps, steps)  # warms the server's cache
    before, began = transport.num_bytes, time.perf_counter()
    pulled, elapsed = 0, 0.0
    while pulled < _PULLED_BYTES and elapsed < _PULLED_SECONDS:
        client.frames(transport, steps, steps)
        pulled, elapsed = transport.num_bytes - before, time.perf_counter() - began
    text = f"{pulled / elapsed / 1e6:,.0f} MB/s: {size(pulled)} of {dataset} in {elapsed:.2f} s; first batch {first:.1f} s"
    if pulled / elapsed < _SLOW_BYTES_PER_SECOND:
        remedy = "a million tokens per second take 2 to 4 MB/s; look for a slow link, a busy server, or a small block cache"
        return Check("warn", "bandwidth", text, remedy)
    return Check("ok", "bandwidth", text)
