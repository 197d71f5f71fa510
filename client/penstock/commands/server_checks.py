"""What `penstock doctor` looks at in the server and on the way to it: versions, proxies, latency and clocks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import httpx

from penstock import __version__, wire
from penstock.commands.check import Check
from penstock.feeding.ranges import RUN_BYTES
from penstock.text import size
from penstock.transport.probe import client_aside, proxy_of

_PROBES = 15
_SLOW_SECONDS = 0.05
_CLOCK_SECONDS = 5.0


def check_versions(greeting: Mapping[str, Any]) -> Check:
    """Whether both sides understand each other."""
    theirs, spoken = greeting.get("version"), greeting.get("wire")
    if spoken != wire.VERSION:
        return Check(
            "fail",
            "server",
            f"penstock {theirs} there speaks wire version {spoken}, penstock {__version__} here speaks version {wire.VERSION}",
            "install the same penstock on both",
        )
    if theirs != __version__:
        return Check(
            "warn",
            "server",
            f"penstock {theirs} there, {__version__} here",
            "install the same version on both",
        )
    return Check("ok", "server", f"penstock {theirs}, wire version {spoken}, the same as here")


def check_proxies(server: str) -> Iterator[Check]:
    """Warn about a proxy: it is seldom meant for batches, and mostly comes from an overlooked environment variable."""
    if variable := proxy_of(server):
        yield Check(
            "warn",
            "proxy",
            f"{variable} is set, so batches go through a proxy",
            f"set NO_PROXY={urlsplit(server).hostname} where the trainer runs",
        )


def check_way(server: str) -> Iterator[Check]:
    """Latency, and the difference of the clocks, from a few requests over one connection."""
    seconds, ahead = [], []
    try:
        with client_aside(server) as client:
            client.get(f"{server}/healthz")  # makes the connection
            for _ in range(_PROBES):
                sent, began = time.time(), time.perf_counter()
                told = client.get(f"{server}/healthz").json().get("time")
                seconds.append(time.perf_counter() - began)
                ahead.append(told - sent - seconds[-1] / 2 if isinstance(told, int | float) else None)
    except (httpx.RequestError, ValueError, AttributeError) as error:
        yield Check("fail", "latency", f"the server answered once, but not again: {error}", "look at its log")
        return
    yield _latency(median(seconds), max(seconds))
    quickest = min(range(_PROBES), key=seconds.__getitem__)
    if (difference := ahead[quickest]) is not None:
        yield _clock(difference, seconds[quickest] / 2)


def _latency(typical: float, longest: float) -> Check:
    text = f"{1000 * typical:.1f} ms (median of {_PROBES}; at most {1000 * longest:.1f} ms)"
    if typical < _SLOW_SECONDS:
        return Check("ok", "latency", text)
    most = RUN_BYTES / typical / 1e6  # two are asked for at a time, but socket buffers seldom hold more on the way
    return Check(
        "warn",
        "latency",
        f"{text}: {size(RUN_BYTES)} of batches at most come in that time, {most:,.0f} MB/s",
        "run a server nearer to the trainers; its cache fills from the same shards",
    )


def _clock(difference: float, error: float) -> Check:
    where = "ahead of" if difference > 0 else "behind"
    if abs(difference) <= error:
        return Check("ok", "clock", f"the server's clock agrees with this one to {1000 * error:.1f} ms")
    text = f"the server's clock is {abs(difference):,.3f} s {where} this one"
    if abs(difference) < _CLOCK_SECONDS:
        return Check("ok", "clock", text)
    return Check("warn", "clock", f"{text}: the times in their logs do not match", "let NTP set both clocks")
