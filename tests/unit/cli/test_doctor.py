"""The checks of `penstock doctor`: what passes, what is warned of, what fails, and the remedies."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock import __version__, wire
from penstock.cli import connection, doctor
from penstock.cli.doctor import Check, check_bandwidth, check_cache, check_datasets, check_machine, checks
from penstock.client import Steps
from penstock.servers import Servers
from penstock.transport import Transport
from support.servers import pages


def greeter(
    greeting: Mapping[str, Any], delay_seconds: float = 0.0, clock_ahead_seconds: float = 0.0
) -> AbstractContextManager[str]:
    """A server that only greets."""

    def answer(path: str) -> tuple[int, bytes]:
        time.sleep(delay_seconds)
        if path != "/healthz":
            return 404, b"{}"
        return 200, json.dumps({"time": time.time() + clock_ahead_seconds, **greeting}).encode()

    return pages(answer)


GOOD = {"status": "ok", "version": __version__, "wire": wire.VERSION}


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def found(url: str) -> dict[str, Check]:
    return {check.name: check for check in checks(url, None)}


def test_server_check_compares_versions() -> None:
    with greeter(GOOD) as url:
        assert found(url)["server"] == Check(
            "ok", "server", f"penstock {__version__}, wire version {wire.VERSION}, the same as here"
        )
    with greeter({**GOOD, "version": "9.1"}) as url:
        older = found(url)["server"]
        assert older.level == "warn"
        assert older.text.startswith("penstock 9.1 ")
    with greeter({**GOOD, "version": "9.1", "wire": 7}) as url:
        other = found(url)["server"]
        assert (other.level, other.remedy) == ("fail", "install the same penstock on both")
        assert other.text == f"penstock 9.1 with wire version 7 there, penstock {__version__} with {wire.VERSION} here"


def test_server_check_refuses_another_service() -> None:
    with greeter({"status": "up"}) as url:
        other = found(url)
    assert other["server"].text.startswith(f"{url} answers /healthz with status 200, but not as a penstock server does.")
    assert "data" not in other


def test_server_check_names_the_token_that_the_server_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    with pages(lambda _: (200, b'{"status": "ok"}')) as url:
        assert f"{url} does not know this caller. No token was sent. Give a token by" in found(url)["server"].text
        monkeypatch.setenv("PENSTOCK_TOKEN", "wr0ng")
        check = found(url)["server"]
    assert (check.level, "The token came from PENSTOCK_TOKEN" in check.text, "wr0ng" in check.text) == ("fail", True, False)


def test_data_checks_retry_a_response_that_is_not_a_json_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RETRY_SECONDS", 0.3)
    answers = chain([b"{", b"[]"], repeat(b'{"datasets": [], "mixtures": [], "refused": []}'))
    with pages(lambda path: (200, json.dumps({**GOOD, "time": 0}).encode() if path == "/healthz" else next(answers))) as url:
        assert "data" not in found(url)
    with pages(lambda path: (200, json.dumps({**GOOD, "time": 0}).encode() if path == "/healthz" else b"[]")) as url:
        assert "a JSON list" in found(url)["data"].text


def test_data_checks_fail_without_a_dataset_list() -> None:
    with greeter(GOOD) as url:
        assert found(url)["data"].level == "fail"


def test_clock_check_names_the_direction() -> None:
    for seconds, where, level in ((3600.0, "ahead of", "warn"), (-60.0, "behind", "warn"), (2.0, "ahead of", "ok")):
        with greeter(GOOD, clock_ahead_seconds=seconds) as url:
            clock = found(url)["clock"]
        assert clock.level == level
        assert f"s {where} this one" in clock.text
        assert float(clock.text.split()[4].replace(",", "")) == pytest.approx(abs(seconds), abs=1)


def test_latency_check_gives_the_rate_that_it_allows() -> None:
    with greeter(GOOD, delay_seconds=0.08) as url:
        latency = found(url)["latency"]
    assert latency.level == "warn"
    assert "at most 8.4 MB of batches arrive in that time, " in latency.text
    assert 0 < float(latency.text.split(" MB/s")[0].rpartition(" ")[2]) <= 105


def test_proxy_check_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    away = found("http://127.0.0.1:10")
    assert away["server"].level == "fail"
    assert "refused (through HTTP_PROXY; NO_PROXY=127.0.0.1 goes past it)." in away["server"].text
    assert away["proxy"].remedy == "set NO_PROXY=127.0.0.1 where the trainer runs"
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert "proxy" not in found("http://127.0.0.1:10")


def test_machine_is_checked_without_a_server() -> None:
    away = found("http://127.0.0.1:9")
    assert "does not answer" in away["server"].text
    assert (away["client"].level, set(away)) == ("ok", {"server", "client", "memory"})


CACHE = {"used_bytes": 50_000_000, "budget_bytes": 10**9, "configured_bytes": 10**9}


def cache(blocks_bytes: int = 2000, **other: int | str) -> Check:
    [check] = check_cache([{"cache": {**CACHE, **other}, "blocks_bytes": blocks_bytes}])
    return check


def test_cache_check_warns_if_full_lowered_or_too_small() -> None:
    assert cache() == Check("ok", "cache", "50.0 MB of 1.0 GB used")
    lowered = cache(budget_bytes=60_000_000)
    assert (lowered.level, "less than the configured 1.0 GB" in lowered.text) == ("warn", True)
    assert "free some of the disk" in lowered.remedy
    failing = cache(failure="Read-only file system")
    assert (failing.level, "it cannot be written to (Read-only file system): blocks" in failing.text) == ("warn", True)
    full = cache(used_bytes=999_000_000)
    assert (full.level, full.remedy) == ("warn", "raise --cache-bytes if the disk has room")
    small = cache(2 * 10**9)
    assert (small.level, "the datasets take about 2.0 GB: blocks that do not fit are decoded again" in small.text) == (
        "warn",
        True,
    )


BAD_ROWS = {"known": 0, "on_bad_row": "fail", "refusal": None, "unread_row_groups": 0}
ABOUT = {
    "name": "wiki",
    "rows": 1,
    "rows_served": 1,
    "unused_columns": [],
    "shards": 2,
    "tokens": None,
    "index": {"blocks_done": 3, "blocks": 4},
    "bad_rows": BAD_ROWS,
    "snapshot": "3f9c",
    "refresh_error": None,
}


def dataset(monkeypatch: pytest.MonkeyPatch, **about: Any) -> Check:
    monkeypatch.setattr(doctor, "describe_dataset", lambda *_: {**ABOUT, **about})
    known = {"datasets": [{"name": "wiki"}], "mixtures": [], "refused": []}
    with closing(Transport(Servers(("http://host",)), retry_seconds=0)) as transport:
        [check] = check_datasets(transport, known, None)
    return check


def test_dataset_check_reports_bad_rows_and_unserved_data(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "wiki: 1 row in 2 shards, tokens counted in 3 of 4 blocks, snapshot 3f9c"
    assert dataset(monkeypatch) == Check("ok", "dataset", text)
    masked = dataset(monkeypatch, unused_columns=["attention_mask", "labels"])
    assert (masked.level, "labels or masks: attention_mask, labels" in masked.text) == ("warn", True)
    assert "wiki: 1 row before its filter in 2 shards" in dataset(monkeypatch, rows_served=None).text
    assert "wiki: 7 of 9 rows in 2 shards" in dataset(monkeypatch, rows=9, rows_served=7).text
    assert "1,000 tokens, snapshot" in dataset(monkeypatch, tokens=1000).text
    kept_out = dataset(monkeypatch, refresh_error="half a file")
    assert (kept_out.level, "newer data is not served: half a file" in kept_out.text) == ("warn", True)
    bad = dataset(monkeypatch, bad_rows=BAD_ROWS | {"known": 7})
    assert (bad.level, "7 bad rows" in bad.text, "quarantine" in bad.remedy) == ("warn", True, True)
    assert dataset(monkeypatch, bad_rows=BAD_ROWS | {"known": 7, "on_bad_row": "replace"}).level == "ok"
    refused = dataset(monkeypatch, bad_rows=BAD_ROWS | {"known": 7, "refusal": "wiki: 7 of 9 rows are bad."})
    assert refused == Check("fail", "dataset", "every batch is refused. wiki: 7 of 9 rows are bad.")
    unread = dataset(monkeypatch, bad_rows=BAD_ROWS | {"unread_row_groups": 2})
    assert (unread.level, "2 row groups" in unread.text, "quarantine" in unread.remedy) == ("fail", True, True)


def test_bandwidth_check_measures_warm_ranges_and_names_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, now = chain([5.0], repeat(0.5)), [0.0]
    asked: list[tuple[range, range | None]] = []
    transport = SimpleNamespace(num_bytes=0)

    class Pulled:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def resolve(self, spec: Any) -> Any:
            return SimpleNamespace(spec=spec, num_steps=100)

        def frames(self, transport: Any, steps: Steps, then: Steps | None = None) -> list[Any]:
            asked.append((steps.numbers, then.numbers if then else None))
            now[0] += next(seconds)
            transport.num_bytes += len(steps) << 20
            return [SimpleNamespace(nbytes=1 << 20)] * len(steps)

    monkeypatch.setattr(doctor, "Client", Pulled)
    monkeypatch.setattr(doctor, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    known = {"datasets": [{"name": "wiki", "rows_served": 9, "size_bytes": 9}], "mixtures": []}
    [bandwidth] = check_bandwidth("http://host", cast(Transport, transport), known, None)
    assert bandwidth.text.startswith(f"{8 * (1 << 20) / 0.5 / 1e6:,.0f} MB/s: ")
    assert bandwidth.text.endswith("; first batch 5.0 s")
    assert asked[1:] == [(range(8), range(8))] * len(asked[1:])  # as a loop does that is short of batches


def torch_with(monkeypatch: pytest.MonkeyPatch, *, gpu: bool, pins: bool = True) -> Check:
    def empty(*_: Any, **__: Any) -> None:
        if not pins:
            raise RuntimeError("out of resources\nand a trace")

    cuda = SimpleNamespace(is_available=lambda: gpu, get_device_name=lambda: "H200")
    version = SimpleNamespace(cuda="12.9", hip=None)
    fake = SimpleNamespace(__version__="2.9", cuda=cuda, version=version, empty=empty, uint8=None)
    monkeypatch.setitem(__import__("sys").modules, "torch", fake)
    return {check.name: check for check in check_machine()}["memory"]


def test_memory_check_tries_to_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_with(monkeypatch, gpu=False).level == "ok"
    assert torch_with(monkeypatch, gpu=True) == Check("ok", "memory", "H200; batches use pinned memory")
    failed = torch_with(monkeypatch, gpu=True, pins=False)
    assert (failed.level, failed.text) == ("fail", "H200, but memory cannot be pinned: out of resources\nand a trace")
