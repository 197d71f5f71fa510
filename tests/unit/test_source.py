"""What a source makes of answers: what is sound and was asked for is kept, the rest is asked for again and counted."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import httpx
import pytest

import penstock.source
import penstock.transport.transport
import penstock.wire.frame
from answering import pages, problem, response, server
from ledgers import behind, round_at
from penstock import DataError, PenstockError, ServerUnavailable, SnapshotGone, Spec, SpecError, VersionMismatch, wire
from penstock.audit.compare import compare
from penstock.ledger.recorder import Recorder
from penstock.row_lengths import RowLength
from penstock.source import Source
from penstock.transport.transport import Transport

SPEC = Spec(snapshot="5eed")
STEPS = range(4, 12, 2)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.transport.transport, "_FIRST_DELAY_SECONDS", 0.01)


def frame(step: int, **other: int | str) -> bytes:
    layout = wire.Layout.of([("input_ids", "uint16", (2, 3))])
    payload = step.to_bytes(2, "little") * (layout.nbytes // 2)
    address = wire.Address(dataset="docs", snapshot="5eed", spec_digest=SPEC.digest, epoch=1, rank=0, step=step)
    address = address._replace(**other)  # type: ignore[arg-type]
    return wire.Heads(address, layout).head(address.step, wire.digest(payload)) + payload


def run(steps: Sequence[int]) -> bytes:
    return b"".join(map(frame, steps))


def frames(*answers: bytes, steps: range = STEPS) -> tuple[list[int], int, int]:
    """The steps that came, and how many attempts failed and were damaged."""
    with server(*answers) as url:
        source = Source(url, "docs", rank=0, retry_seconds=9)
        with closing(source.connect()) as transport:
            found = source.frames(transport, SPEC, 1, steps)
            return [frame.step for frame in found], transport.num_retries, transport.num_corrupted


def test_a_run_is_one_request() -> None:
    assert frames(response(run(STEPS))) == ([4, 6, 8, 10], 0, 0)


def test_what_comes_next_is_told_also_with_a_run_of_one_step_and_ends_within_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def get_some(transport: Transport, target: str, decode: object, *, then: str | None) -> list[list[str]]:
        asked.append((target, then))
        return [["a frame"]]

    monkeypatch.setattr(Transport, "get_some", get_some)
    source = Source("http://a:1", "docs", rank=0, retry_seconds=9)
    with closing(source.connect()) as transport:
        for steps, then in ((range(2, 3), range(5, 11, 3)), (range(2, 11, 3), range(0))):
            assert source.frames(transport, SPEC, 1, steps, then)
    found = [[target and dict(parse_qsl(httpx.URL(target).query.decode())) for target in targets] for targets in asked]
    expected = [("2", "3", "1"), ("5", "9", "3"), ("2", "9", "3")]
    assert [(t["start"], t["stop"], t["stride"]) for targets in found for t in targets if t] == expected
    assert found[1][1] is None


def test_of_a_run_that_breaks_off_the_whole_frames_are_kept() -> None:
    whole = response(run(STEPS))
    head, size = len(whole) - len(run(STEPS)), len(frame(4))
    for num_frames in (1, 2, 3):
        assert frames(whole[: head + num_frames * size]) == ([4, 6, 8, 10][:num_frames], 1, 0)
        assert frames(whole[: head + (num_frames + 1) * size - 1]) == ([4, 6, 8, 10][:num_frames], 1, 0)
    for cut in (head, head + 1, head + size - 1):
        assert frames(whole[:cut], response(frame(4))) == ([4], 1, 0)


def test_of_a_run_with_a_damaged_frame_those_before_it_are_kept() -> None:
    size = len(frame(4))
    for num_sound in range(4):
        body = bytearray(run(STEPS))
        body[(num_sound + 1) * size - 1] ^= 1
        again = [] if num_sound else [response(frame(4))]
        assert frames(response(bytes(body)), *again) == ([4, 6, 8, 10][: max(num_sound, 1)], 1, 1)


@pytest.mark.parametrize(
    "other",
    [frame(5), frame(6), frame(4, rank=1), frame(4, epoch=0), frame(4, snapshot="old"), frame(4, dataset="numbers"),
     frame(4, spec_digest=Spec(snapshot="5eed", seed=1).digest),
     b"", frame(4)[:-1], frame(4) + frame(5), b"<html>", frame(4)[64:]],
    ids=["another step", "the next step", "another rank", "another epoch", "another snapshot", "another dataset",
         "another seed", "nothing", "a part", "two", "a page", "an end"],
)  # fmt: skip
def test_what_was_not_asked_for_is_asked_for_again_and_counted(other: bytes) -> None:
    assert frames(response(other), response(frame(4)), steps=range(4, 5)) == ([4], 1, 1)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (frame(5), "step 4 was asked for, but another came. Does a cache on the way .* by\\? A run resumes"),
        (frame(4, spec_digest="5eed"), "step 4 was asked for, but another came, of other parameters. Does a cache on the way"),
    ],
)
def test_of_a_batch_of_another_address_a_cache_is_suspected(other: bytes, reason: str) -> None:
    with pages(lambda _: (200, other)) as url:
        source = Source(url, "docs", rank=0, retry_seconds=0)
        with closing(source.connect()) as transport, pytest.raises(ServerUnavailable, match=reason):
            source.frames(transport, SPEC, 1, range(4, 5))


@pytest.mark.parametrize("spec", [SPEC, Spec()], ids=["of a snapshot", "of the latest"])
def test_a_server_that_failed_once_is_asked_first_by_no_later_transport(spec: Spec) -> None:
    asked: list[str] = []

    def home(path: str) -> tuple[int, bytes]:
        asked.append(path)
        return 500, b""

    def other(path: str) -> tuple[int, bytes]:
        return 200, json.dumps({**ANSWER, "spec": SPEC.to_dict()}).encode() if path.endswith("/spec") else run(STEPS)

    with pages(home) as first, pages(other) as second:
        source = Source([first, second], "docs", rank=0, retry_seconds=9)
        source.resolve(spec)
        for _ in range(2):
            with closing(source.connect()) as transport:
                assert len(source.frames(transport, SPEC, 1, STEPS)) == len(STEPS)
                assert transport.num_retries == 0
    assert asked == ["/v1/datasets/docs/spec"]


def test_what_is_known_of_servers_stays_on_the_machine_that_found_out() -> None:
    source = Source("http://a:1", "docs", rank=0, retry_seconds=9)
    source._servers.failed("http://a:1", after_seconds=3600)
    elsewhere = pickle.loads(pickle.dumps(source))
    assert (source._servers.turn(), elsewhere._servers.turn()) == ([], ["http://a:1"])


ASKED = {"skip": "1-2", "mix": "docs:2,more:1"}
ANSWER = {"spec": ASKED, "num_steps": 3, "num_samples": 24, "vocab_size": None, "tensors": [], "advice": []}


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        ("<html>", VersionMismatch, "is not a spec of this version of penstock .* server of the same version"),
        ([], VersionMismatch, "is not a spec of this version"),
        ({**ANSWER, "num_steps": "many"}, VersionMismatch, "is not a spec of this version"),
        ({**ANSWER, "spec": {"colour": "blue"}}, VersionMismatch, "is not a spec of this version .*colour"),
        ({**ANSWER, "spec": {"shuffle": "spiral"}}, VersionMismatch, "is not a spec of this version .*spiral"),
        ({**ANSWER, "spec": ASKED | {"skip": "3-4"}}, ServerUnavailable, r"for other parameters, skip=3-4\. Does a cache"),
        ({**ANSWER, "spec": ASKED | {"mix": "docs:1,more:2"}}, ServerUnavailable, r"other parameters, mix=docs:1,more:2\. D"),
    ],
)
def test_a_server_of_another_version_and_an_answer_to_another_question_are_named(
    answer: object, kind: type[PenstockError], message: str
) -> None:
    body = json.dumps(answer).encode() if answer != "<html>" else b"<html>"
    with pages(lambda _: (200, body)) as url, pytest.raises(kind, match=message):
        Source(url, "docs", rank=0, retry_seconds=0).resolve(Spec.from_query(ASKED.items()))


@pytest.mark.parametrize("others", [{"skip": "1-2"}, {"dataset_index": True}, {"seed": 1}])
def test_an_answer_to_who_asked_for_more_than_this_one_is_none(others: dict[str, Any]) -> None:
    body = json.dumps({**ANSWER, "spec": Spec(**others).to_dict()}).encode()
    [(name, value)] = others.items()
    with pages(lambda _: (200, body)) as url, pytest.raises(ServerUnavailable, match=f"for other parameters, {name}={value}"):
        Source(url, "docs", rank=0, retry_seconds=0).resolve(Spec())


def test_a_provenance_that_is_no_object_is_asked_for_again() -> None:
    with server(*map(response, (b"<html>", b"[]", b'{"step": 4}'))) as url:
        source = Source(url, "docs", rank=0, retry_seconds=9)
        with closing(source.connect()) as transport:
            assert source.provenance(transport, SPEC, 1, 4) == {"step": 4}
            assert transport.num_corrupted == 2


def test_fewer_and_more_than_was_asked_for_is_told_and_what_fits_is_kept() -> None:
    assert frames(response(run(STEPS[:2]))) == ([4, 6], 1, 1)
    assert frames(response(run([*STEPS, 12]))) == ([4, 6, 8, 10], 1, 1)
    assert frames(response(run([4, 8, 6, 10]))) == ([4], 1, 1)


def test_what_one_step_of_a_run_is_refused_for_is_told_to_who_asks_for_that_step() -> None:
    assert frames(problem("bad-row", 500), response(frame(4))) == ([4], 0, 0)
    with pytest.raises(DataError, match="this is bad-row"):
        frames(problem("bad-row", 500), problem("bad-row", 500))
    with pytest.raises(SnapshotGone, match="this is snapshot-gone"):
        frames(problem("snapshot-gone", 409), problem("snapshot-gone", 409))


def test_a_step_that_is_refused_says_nothing_of_those_behind_it_when_a_ledger_is_compared(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    ledger = Recorder(path, "docs", 0).open(SPEC, 100, round_at(epoch=1), behind(0))
    for given in wire.decode(run(range(4, 8))):
        ledger.record(given.step, given.digest)
    ledger.close()
    cut = response(run([4, 5]))[:-1]
    refused = problem("bad-row", 500)
    with server(cut, refused, refused, response(run([6, 7]))) as url:
        compared = compare([path], 4, [url], None)
    assert [(batch.step, batch.now) for batch in compared.differing] == [(5, "this is bad-row")]


def test_data_that_cannot_be_opened_now_is_awaited_by_a_run_alone() -> None:
    away = problem("dataset-unavailable", 503)
    assert frames(away, away, response(frame(4))) == ([4], 2, 0)
    with server(away, away) as url:
        source = Source(url, "docs", rank=0, retry_seconds=9)
        with pytest.raises(DataError, match="this is dataset-unavailable"):
            source.resolve(SPEC)
        with (
            closing(source.connect(is_awaited=False)) as transport,
            pytest.raises(DataError, match="this is dataset-unavailable"),
        ):
            source.frames(transport, SPEC, 1, range(4, 5))


def test_an_answer_that_tells_its_digest_is_held_to_it() -> None:
    body = b'{"hello": "world"}\n'  # the example of RFC 9530
    digest = f"Content-Digest: {wire.content_digest(body)}"
    assert digest == "Content-Digest: sha-256=:RK/0qy18MlBSVnWgjwz6lZEWjP/lF5HF9bvEF8FabDg=:"
    answers = [response(body.upper(), "200 OK", digest), response(body, "200 OK", digest)]
    with server(*answers) as url, closing(Source(url, "docs", rank=0, retry_seconds=9).connect()) as transport:
        assert transport.get("/", bytes) == body
        assert transport.num_corrupted == 1


def test_a_length_that_no_answer_has_is_a_fault_as_any_other() -> None:
    absurd = b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\nx"
    with (
        server(absurd, response(b"sound")) as url,
        closing(Source(url, "docs", rank=0, retry_seconds=9).connect()) as transport,
    ):
        assert transport.get("/", bytes) == b"sound"
        assert transport.num_retries == 1


@pytest.mark.parametrize(
    "given",
    [
        "", " ", "ftp://a:1", "http://", "::1", "a:port", "a:65536", "a:0", "http://a..b:80", "a" * 64, [], ["a:1", 3], None,
        "a:1?x=1", "a:1/b#c", "http:/a:1", "http//a:1", "http://http://a:1", "a b:1", "a:1 /b", "a:1?", "a:1#",
    ],
)  # fmt: skip
def test_what_is_no_address_of_a_server_is_refused(given: object) -> None:
    with pytest.raises(SpecError, match="servers must be addresses such as"):
        Source(given, "docs", rank=0, retry_seconds=9)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("http://me:secret@host:99999", "'http://host:99999'"),
        ("me:secret@host:8000/?x=1", "'host:8000/?x=1'"),
        (["a:1", " me:secr/et@host:0"], "['a:1', ' host:0']"),
        ("https://me:sec ret@host:1", "'https://host:1'"),
    ],
)
def test_an_address_that_is_refused_tells_no_password(given: str | list[str], told: str) -> None:
    with pytest.raises(SpecError, match=f"not {re.escape(told)}$"):
        Source(given, "docs", rank=0, retry_seconds=9)


def test_servers_have_an_order_and_the_name_of_a_scheme_is_a_host_if_it_has_a_port() -> None:
    with pytest.raises(SpecError, match="servers must be a list: a set has no order"):
        Source({"a:1"}, "docs", rank=0, retry_seconds=9)  # type: ignore[arg-type]
    assert Source({"http:80": 1}.keys(), "docs", rank=0, retry_seconds=9)._addresses == ("http://http:80",)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["", ".", "..", "a/b", None, 3])
def test_what_is_no_name_of_a_dataset_is_refused(given: object) -> None:
    with pytest.raises(SpecError, match="dataset must be a name"):
        Source("http://a:1", given, rank=0, retry_seconds=9)  # type: ignore[arg-type]


def test_http_may_be_left_out_of_an_address() -> None:
    with server(response(frame(4))) as url:
        source = Source([url.removeprefix("http://"), url], "docs", rank=0, retry_seconds=9)
        with closing(source.connect()) as transport:
            assert len(source.frames(transport, SPEC, 1, range(4, 5))) == 1
            assert transport.num_retries == 0


def test_a_server_that_is_named_twice_is_one() -> None:
    with server(problem("unknown-dataset", 404)) as url:
        source = Source([url.removeprefix("http://"), f" {url} ", f"{url}/", url.upper()], "docs", rank=1, retry_seconds=9)
        with pytest.raises(PenstockError, match="^this is unknown-dataset$"):
            source.resolve(Spec())


def test_all_ranks_ask_the_same_server_what_the_latest_snapshot_is() -> None:
    asked: list[str] = []

    def away(name: str) -> tuple[int, bytes]:
        asked.append(name)
        return 404, b""

    with pages(lambda _: away("first")) as first, pages(lambda _: away("second")) as second:
        source = Source([first, second], "docs", rank=1, retry_seconds=9)
        for spec in (Spec(), SPEC):
            with suppress(PenstockError):
                source.resolve(spec)
    assert asked == ["first", "second", "second", "first"]  # a snapshot that is named is the same everywhere: ranks are spread


def test_how_overflow_are_is_asked_of_the_first_of_the_epoch_whatever_a_batch_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[httpx.URL] = []

    def ask_aside(url: str, seconds: float) -> httpx.Response:
        asked.append(httpx.URL(url))
        raise httpx.ConnectError("away")

    monkeypatch.setattr(penstock.source, "ask_aside", ask_aside)
    spec = Spec(snapshot="5eed", seed=3, batch_size=2, world_size=4, offset=8, skip="1-2", length_bucket_size=8)
    assert Source("http://a:1", "docs", rank=1, retry_seconds=9).some_lengths(spec, 5) == []
    assert asked[0].path == "/v1/datasets/docs/epochs/5/ranks/0/batches/0/provenance"
    few = Spec(snapshot="5eed", seed=3, batch_size=64, drop_last=False)
    assert Spec.from_query(parse_qsl(asked[0].query.decode())) == few


def test_a_row_that_is_in_two_samples_has_one_length_and_what_is_no_answer_none(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [("a", "x", 0, 0), ("b", "x", 0, 0), ("a", "y", 0, 0), ("a", "x", 1, 0), ("a", "x", 0, 1)]
    rows = [
        dict(
            zip(("dataset", "shard", "row_group", "row"), place, strict=True),
            row_tokens=number,
            side_tokens=None,
            prompt_tokens=number // 2,
        )
        for number, place in enumerate(places)
    ]
    body = json.dumps({"samples": [{"sources": rows[:3]}, {"sources": rows[2:]}]})

    def lengths_of(status: int, body: str) -> list[RowLength]:
        answer = httpx.Response(status, text=body, request=httpx.Request("GET", "http://a:1"))
        monkeypatch.setattr(penstock.source, "ask_aside", lambda *_: answer)
        return Source("http://a:1", "docs", rank=1, retry_seconds=9).some_lengths(SPEC, 5)

    assert lengths_of(200, body) == [RowLength((n,), n // 2) for n in range(5)]
    assert [lengths_of(*no) for no in ((503, body), (200, "away"), (200, "[]"), (200, "{}"))] == [[], [], [], []]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            response(b"", "302 Found", "Location: https://other:8/v1/datasets/docs/spec?seed=0"),
            "leads to https://other:8: give",
        ),
        (
            response(b"", "302 Found", "Location: /login?next=/v1/datasets"),
            r"sends elsewhere, to /login\?next=/v1/datasets: to a",
        ),
        (response(b"", "407 Proxy"), "The proxy asks for a name and a password: give them in HTTP_PROXY"),
        (response(b"", "401 Unauthorized"), "asks for a name and a password: put NAME:PASSWORD@ before the host"),
    ],
)
def test_who_is_sent_elsewhere_or_asked_for_a_password_is_told_so(answer: bytes, message: str) -> None:
    with server(answer) as url, pytest.raises(PenstockError, match=message):
        Source(url, "docs", rank=0, retry_seconds=60).resolve(Spec())


@pytest.mark.parametrize(
    ("scheme", "path", "message"),
    [
        ("https", "", r"https://127.0.0.1:\d+ does not speak TLS: is http://127.0.0.1:\d+ meant\?"),
        ("http", "/v1/datasets/docs", r"The address has a path, /v1/datasets/docs: is http://127.0.0.1:\d+ meant\?"),
        ("http", "/docs", r"The address has a path, /docs: is http://127.0.0.1:\d+ meant\?"),
        ("http", "", r"Is there a penstock server at this address\?"),
    ],
)
def test_an_address_that_can_never_work_is_told_at_once(scheme: str, path: str, message: str) -> None:
    with server(response(b"not here", "404 Not Found")) as url:
        source = Source(url.replace("http", scheme) + path, "docs", rank=0, retry_seconds=60)
        with pytest.raises(PenstockError, match=message):
            source.resolve(Spec())


def test_a_skip_that_makes_no_url_is_refused_before_it_is_asked_for() -> None:
    ranges = ",".join(f"{step}-{step + 1}" for step in range(0, 24_000, 4))
    with pytest.raises(SpecError, match=r"skip and mix make URLs of [\d,]+ bytes, and servers take 60,000"):
        Source("http://127.0.0.1:9", "docs", rank=0, retry_seconds=9).resolve(Spec(skip=ranges))
