"""A dataset on its servers: requested frames are kept, others are fetched again and counted."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest

import penstock.transport
from penstock import DataError, PenstockError, ServerUnavailable, SnapshotGone, Spec, SpecError, VersionMismatch, wire
from penstock.audit.compare import compare
from penstock.client import Client, Steps
from penstock.http import HttpClient
from penstock.ledger.recorder import Recorder
from penstock.responses import TransientError
from penstock.row_lengths import RowLength
from penstock.servers import by_preference
from penstock.waits import NOTHING
from penstock.wire.report import Report
from support.ledgers import pass_at
from support.servers import pages, problem, rank_that_prefers, response, server

SPEC = Spec(snapshot="5eed")
STEPS = range(4, 12, 2)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.transport, "_FIRST_DELAY_SECONDS", 0.01)


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
        client = Client(url, "docs", rank=0, retry_seconds=9)
        with closing(client.connect()) as transport:
            found = client.frames(transport, Steps(SPEC, 1, steps))
            return [frame.step for frame in found], transport.num_retries, transport.num_corrupted


def test_range_is_one_request() -> None:
    assert frames(response(run(STEPS))) == ([4, 6, 8, 10], 0, 0)


def test_whole_frames_of_a_truncated_range_are_kept() -> None:
    whole = response(run(STEPS))
    head, size = len(whole) - len(run(STEPS)), len(frame(4))
    for num_frames in (1, 2, 3):
        assert frames(whole[: head + num_frames * size]) == ([4, 6, 8, 10][:num_frames], 1, 0)
        assert frames(whole[: head + (num_frames + 1) * size - 1]) == ([4, 6, 8, 10][:num_frames], 1, 0)
    for cut in (head, head + 1, head + size - 1):
        assert frames(whole[:cut], response(frame(4))) == ([4], 1, 0)


def test_frames_before_a_corrupted_one_are_kept() -> None:
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
def test_frame_of_another_address_is_fetched_again_and_counted(other: bytes) -> None:
    assert frames(response(other), response(frame(4)), steps=range(4, 5)) == ([4], 1, 1)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (frame(5), "step 4, received another. Perhaps a cache .* a run resumes"),
        (frame(4, spec_digest="5eed"), "step 4, received another, of other parameters. Perhaps a cache"),
    ],
)
def test_frame_of_another_address_suspects_a_cache(other: bytes, reason: str) -> None:
    with pages(lambda _: (200, other)) as url:
        client = Client(url, "docs", rank=0, retry_seconds=0)
        with closing(client.connect()) as transport, pytest.raises(ServerUnavailable, match=reason):
            client.frames(transport, Steps(SPEC, 1, range(4, 5)))


def test_later_transports_avoid_a_failed_server() -> None:
    asked: list[str] = []

    def answer(name: str, path: str) -> tuple[int, bytes]:
        asked.append(name)
        if name == failing:
            return 500, b""
        return 200, json.dumps({**ANSWER, "spec": SPEC.to_dict()}).encode() if path.endswith("/spec") else run(STEPS)

    with pages(lambda path: answer("one", path)) as one, pages(lambda path: answer("two", path)) as two:
        failing, other = ("one", "two") if by_preference([one, two], 0, 1)[0] == one else ("two", "one")
        client = Client([one, two], "docs", rank=0, retry_seconds=9)
        client.resolve(SPEC)
        for _ in range(2):
            with closing(client.connect()) as transport:
                assert len(client.frames(transport, Steps(SPEC, 1, STEPS))) == len(STEPS)
                assert transport.num_retries == 0
    assert asked == [failing, other, other, other]


def test_fork_does_not_report_the_amounts_of_its_parent() -> None:
    client = Client("host:1", "docs", rank=0, retry_seconds=9)
    client.unreported = report = Report(job="run", compute_seconds=5.0)
    child = os.fork()
    if not child:
        os._exit(client.unreported is not NOTHING)
    assert os.waitpid(child, 0)[1] == 0
    assert client.unreported is report
    assert pickle.loads(pickle.dumps(client)).unreported == NOTHING


def test_pickle_forgets_the_health_of_servers() -> None:
    with server(problem("busy", 503, "Retry-After: 3600"), response(frame(4))) as url:
        client = Client(url, "docs", rank=0, retry_seconds=9)
        with closing(client.connect()) as transport:
            assert transport.get_some("/", wire.decode) == []
        with closing(pickle.loads(pickle.dumps(client)).connect()) as transport:
            assert len(transport.get_some("/", wire.decode)) == 1


ASKED = {"skip": "1-2", "mix": "docs:2,more:1"}
ANSWER = {"spec": ASKED, "num_steps": 3, "num_samples": 24, "vocab_size": None, "tensors": [], "advice": []}


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        ("<html>", VersionMismatch, "is not a spec of this version of penstock .* same version"),
        ([], VersionMismatch, "is not a spec of this version"),
        ({**ANSWER, "num_steps": "many"}, VersionMismatch, "is not a spec of this version"),
        ({**ANSWER, "spec": {"colour": "blue"}}, VersionMismatch, "is not a spec of this version .*colour"),
        ({**ANSWER, "spec": {"shuffle": "spiral"}}, VersionMismatch, "is not a spec of this version .*spiral"),
        ({**ANSWER, "spec": ASKED | {"skip": "3-4"}}, ServerUnavailable, r"for other parameters\. Perhaps a cache"),
        ({**ANSWER, "spec": ASKED | {"mix": "docs:1,more:2"}}, ServerUnavailable, r"other parameters\. P"),
    ],
)
def test_resolve_names_another_version_and_other_parameters(answer: object, kind: type[PenstockError], message: str) -> None:
    body = json.dumps(answer).encode() if answer != "<html>" else b"<html>"
    with pages(lambda _: (200, body)) as url, pytest.raises(kind, match=message):
        Client(url, "docs", rank=0, retry_seconds=0).resolve(Spec.from_query(ASKED.items()))


@pytest.mark.parametrize("others", [{"skip": "1-2"}, {"dataset_index": True}, {"seed": 1}])
def test_resolve_refuses_parameters_that_were_not_requested(others: dict[str, Any]) -> None:
    body = json.dumps({**ANSWER, "spec": Spec(**others).to_dict()}).encode()
    with pages(lambda _: (200, body)) as url, pytest.raises(ServerUnavailable, match="for other parameters"):
        Client(url, "docs", rank=0, retry_seconds=0).resolve(Spec())


def test_requested_frames_among_fewer_or_more_are_kept() -> None:
    assert frames(response(run(STEPS[:2]))) == ([4, 6], 1, 1)
    assert frames(response(run([*STEPS, 12]))) == ([4, 6, 8, 10], 1, 1)
    assert frames(response(run([4, 8, 6, 10]))) == ([4], 1, 1)


def test_refusal_of_a_late_step_does_not_hide_the_earlier_ones() -> None:
    assert frames(problem("bad-row", 500), response(frame(4))) == ([4], 0, 0)
    with pytest.raises(DataError, match="this is bad-row"):
        frames(problem("bad-row", 500), problem("bad-row", 500))
    with pytest.raises(SnapshotGone, match="this is snapshot-gone"):
        frames(problem("snapshot-gone", 409), problem("snapshot-gone", 409))


def test_compare_continues_after_a_refused_step(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    record = Recorder(path, "docs", 0).open(SPEC, 100, pass_at(epoch=1))
    assert record
    for given in wire.decode(run(range(4, 8))):
        record.record(1, given.step, given.digest)
    cut = response(run([4, 5]))[:-1]
    refused = problem("bad-row", 500)
    with server(cut, refused, refused, response(run([6, 7]))) as url:
        compared = compare([path], 4, [url], None)
    [batch] = compared.differing
    assert (batch.step, str(batch.now).partition(" (request ")[0]) == (5, "this is bad-row")


def test_unavailable_data_is_awaited_by_a_running_loop_only() -> None:
    away = problem("dataset-unavailable", 503)
    assert frames(away, away, response(frame(4))) == ([4], 2, 0)
    with server(away, away) as url:
        client = Client(url, "docs", rank=0, retry_seconds=9)
        with pytest.raises(DataError, match="this is dataset-unavailable"):
            client.resolve(SPEC)
        with (
            closing(client.connect(first_contact=True)) as transport,
            pytest.raises(DataError, match="this is dataset-unavailable"),
        ):
            client.frames(transport, Steps(SPEC, 1, range(4, 5)))


def test_content_digest_is_checked() -> None:
    body = b'{"hello": "world"}\n'  # the example of RFC 9530
    digest = f"Content-Digest: {wire.content_digest(body)}"
    assert digest == "Content-Digest: sha-256=:RK/0qy18MlBSVnWgjwz6lZEWjP/lF5HF9bvEF8FabDg=:"
    answers = [response(body.upper(), "200 OK", digest), response(body, "200 OK", digest)]
    with server(*answers) as url, closing(Client(url, "docs", rank=0, retry_seconds=9).connect()) as transport:
        assert transport.get("/", bytes) == body
        assert transport.num_corrupted == 1


@pytest.mark.parametrize("given", ["", ".", "..", "a/b", None, 3])
def test_invalid_dataset_name_is_refused(given: object) -> None:
    with pytest.raises(SpecError, match="dataset must be a name"):
        Client("http://a:1", given, rank=0, retry_seconds=9)  # type: ignore[arg-type]


def test_http_may_be_omitted_from_an_address() -> None:
    with server(response(frame(4))) as url:
        client = Client([url.removeprefix("http://"), url], "docs", rank=0, retry_seconds=9)
        with closing(client.connect()) as transport:
            assert len(client.frames(transport, Steps(SPEC, 1, range(4, 5)))) == 1
            assert transport.num_retries == 0


def test_addresses_of_one_server_are_one() -> None:
    with server(problem("unknown-dataset", 404)) as url:
        client = Client([url.removeprefix("http://"), f" {url} ", f"{url}/"], "docs", rank=1, retry_seconds=9)
        with pytest.raises(PenstockError, match=r"^this is unknown-dataset \(request [0-9a-f]{12}\)$"):
            client.resolve(Spec())


def test_all_ranks_resolve_the_latest_snapshot_on_the_same_server() -> None:
    asked: list[str] = []

    def away(name: str) -> tuple[int, bytes]:
        asked.append(name)
        return 404, b""

    with pages(lambda _: away("one")) as one, pages(lambda _: away("two")) as two:
        names = {one: "one", two: "two"}
        latest = by_preference(names, 0, 1)
        client = Client([*names], "docs", rank=rank_that_prefers(*reversed(latest)), retry_seconds=9)
        for spec in (Spec(), SPEC):
            with suppress(PenstockError):
                client.resolve(spec)
    # A snapshot that is named is the same everywhere: ranks are spread.
    assert asked == [names[url] for url in (*latest, *reversed(latest))]


def test_sample_lengths_are_of_the_epochs_first_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def get(_: HttpClient, server: str, target: str) -> memoryview:
        asked.append(target)
        raise TransientError("away")

    monkeypatch.setattr(HttpClient, "get", get)
    spec = Spec(snapshot="5eed", seed=3, batch_size=2, world_size=4, offset=8, skip="1-2", length_bucket_size=8)
    assert Client("http://a:1", "docs", rank=1, retry_seconds=9).sample_lengths(spec, 5) == []
    [(path, query)] = [target.split("?") for target in asked]
    assert path == "/v1/datasets/docs/epochs/5/ranks/0/batches/0/provenance"
    first = Spec(snapshot="5eed", seed=3, batch_size=64, drop_last=False)
    assert Spec.from_query(parse_qsl(query)) == first


def test_sample_lengths_counts_a_row_once_and_ignores_failures() -> None:
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
        with pages(lambda _: (status, body.encode())) as url:
            return Client(url, "docs", rank=1, retry_seconds=9).sample_lengths(SPEC, 5)

    assert lengths_of(200, body) == [RowLength((n,), n // 2) for n in range(5)]
    assert [lengths_of(*no) for no in ((503, body), (200, "away"), (200, "[]"), (200, "{}"))] == [[], [], [], []]
