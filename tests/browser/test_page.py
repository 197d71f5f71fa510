"""The page in a real Chromium, against a real server: what people see, do with keys, and send to each other.

Every test fails on an error in the console, such as a violation of the page's policy, and on a request to another host.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pyarrow as pa
import pytest

from penstock import RemoteDataset
from penstock_server.security.tokens import create_token, revoke_token
from support.corpora import write, write_pairs, write_text, write_tokenizer
from support.servers import Serve, Server

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed")]

Page = Any  # of playwright.sync_api, which may be missing
Open = Callable[..., Page]
HTML = '<img src="absent.png" onerror="document.title=1"><b>bold</b>'
BIDI = "left \u202eright\u202c \x00 \x1b[31m zero\u200bwidth"
TEXTS = [HTML, BIDI, "", *(f"story {number} of the quick brown fox" for number in range(61))]
VIEWS = [
    "",
    "#/server",
    "#/datasets",
    "#/dataset/stories",
    "#/batch/stories?batch_size=4",
    "#/row/pairs/3",
    "#/explore/stories",
]


@pytest.fixture(scope="module")
def server(serve: Serve, shared: Path) -> Server:
    toml = 'text = "text"\ncolumns = ["origin"]\non_bad_row = "replace"\nmax_bad_share = 0.5'
    origins = [f"<i>{number}</i>" for number in range(len(TEXTS))]
    write(shared / "stories", toml, {"text": TEXTS, "origin": pa.array(origins)}, row_group_size=16)
    write_pairs(shared / "pairs", [(f"question {number}:", f" answer {number}") for number in range(40)])
    write_text(shared / "more", ["the lazy dog sleeps"] * 30)
    write(shared / "blend", 'mix = "stories:3,more:1"')
    server = serve(shared, "--tokenizer", str(write_tokenizer(shared / "tokenizer.json")))
    server.json_when_ready("/v1/datasets/stories/spec", packing="concat", seq_len=8)
    return server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any, server: Server) -> Iterator[Open]:
    """Opens a view in a fresh profile; afterwards checks what all opened pages did."""
    contexts: list[Any] = []
    faults: list[str] = []

    def note(text: str, is_fault: bool) -> None:
        if is_fault:
            faults.append(text)

    def open_view(view: str = "", url: str = "", jobs: Any = None, refusals: str = "none", **look: Any) -> Page:
        contexts.append(browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | look)))
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        root = url or f"{server.url}/"
        # Chromium notes each refused request as an error.
        page.on(
            "console", lambda message: note(message.text, message.type in ("error", "warning") and refusals not in message.text)
        )
        page.on("pageerror", lambda error: note(str(error), True))
        page.on("request", lambda request: note(request.url, not request.url.startswith((root, "data:"))))
        if jobs:
            page.route("**/v1/jobs*", lambda route: route.fulfill(json=jobs("history" in route.request.url)))
        page.goto(root + view)
        return page

    yield open_view
    for context in contexts:
        context.close()
    assert not faults


@contextmanager
def training(server: Server) -> Iterator[None]:
    """Two ranks that train until the block ends."""
    is_over = Event()

    def train(rank: int) -> None:
        data = RemoteDataset(
            server.url, "stories", rank=rank, world_size=2, batch_size=1, seq_len=32, job="live run", epochs="endless"
        )
        while not is_over.is_set():
            for _ in data:
                if is_over.wait(0.05):
                    break

    threads = [Thread(target=train, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def fake_jobs(has_history: bool) -> dict[str, Any]:
    """A run of 64 ranks, one of them waiting for tokens, and a run that has ended."""
    now = time.time()
    quiet = {
        "epoch": 0, "step": 1422, "lag": 0, "tokens_per_second": 16e3, "wait_fraction": 0.003, "wait_seconds": {"network": 0.1},
        "total_wait_seconds": 3.0, "total_compute_seconds": 800.0, "buffered_bytes": 33_554_432, "retries": 0, "corrupted": 0,
        "last_seen_at": now, "doing": None, "waits_since": None, "history": [None] * 20 + [0, 1] * 50,
    }  # fmt: skip
    waiting = {
        "step": 811, "lag": 611, "wait_fraction": 0.41, "wait_seconds": {"tokenize": 23.0, "decode": 2.0}, "buffered_bytes": 0,
        "doing": {"stage": "tokenize", "shard": "0412.parquet", "since": now - 3}, "waits_since": now - 900,
        "history": [None] * 20 + [0, 1] * 35 + [41] * 30,
    }  # fmt: skip
    special: dict[int, dict[str, Any]] = {17: waiting, 18: {"history": [None] * 120}}
    ranks = [{**quiet, **special.get(rank, {}), "rank": rank} for rank in range(64)]
    job = {
        "job": "llama <b>7b</b>", "dataset": "stories", "snapshot": "0123456789abcdef", "spec_digest": "00", "world_size": 64,
        "spec": {"batch_size": 1, "seq_len": 64, "world_size": 1, "mix": None}, "epoch": 0, "num_steps": 10_000,
        "state": "running", "started_at": now - 3000, "last_seen_at": now, "seconds_left": 18_000.0, "wait_fraction": 0.009,
        "tokens_per_second": 1e6, "wait_seconds": {"tokenize": 22.0, "network": 3.0}, "ranks": ranks,
        "stragglers": [{"rank": 17, "text": "Rank 17 is 611 steps behind rank 3."}],
    }  # fmt: skip
    ended = {**job, "job": "evaluation", "state": "ended", "last_seen_at": now - 1500, "ranks": ranks[:2], "stragglers": []}
    server = {
        "version": "0.1.0", "time": now, "started_at": now - 3540, "processes": 2, "tokens_per_second": 1e6,
        "bytes_per_second": 3e6, "batches_per_second": 41.0, "refusals_per_second": 0.0, "in_flight_bytes": 120_000_000,
        "in_flight_budget_bytes": 10**9, "cache_used_bytes": 3 * 10**9, "cache_budget_bytes": 8 * 10**9,
        "cache_hit_fraction": 0.98, "source_requests_throttled": 12, "source_requests_failed": 0,
    }  # fmt: skip
    if has_history:
        sums = {name: [None] * 20 + [30.0] * 100 for name in ("tokens", "bytes", "batches", "refusals", "hits", "misses")}
        server["history"] = {"seconds": 30.0, "end": now, "cache_used_bytes": [3e9] * 120, **sums}
    text = "Rank 17 of llama <b>7b</b> waits 41 %: the server is tokenizing 0412.parquet."
    return {"caller": "", "verdict": {"state": "waiting", "text": text}, "server": server, "jobs": [job, ended]}


def test_page_follows_a_training_run(server: Server, open_page: Open) -> None:
    with training(server):
        page = open_page()
        page.get_by_role("link", name="live run").click()
        verdict, ranks = page.locator(".verdict"), page.get_by_role("region", name="ranks")
        sync_api.expect(verdict).to_contain_text(re.compile("live run|ranks are fed"))
        sync_api.expect(ranks.locator("tbody tr")).to_have_count(2)
        page.locator(".heat canvas").wait_for()
        before = ranks.inner_text()
        sync_api.expect(ranks).not_to_have_text(before, use_inner_text=True)  # without a reload
        ranks.get_by_title("show this batch").first.click()
        page.locator(".sample").wait_for()
        address = page.locator(".copy pre").first.inner_text()
    other = open_page("#" + address.partition("#")[2])
    other.locator(".sample").wait_for()
    assert other.locator(".sample").all_inner_texts() == page.locator(".sample").all_inner_texts()


def test_waiting_rank_is_explained(open_page: Open) -> None:
    page = open_page(jobs=fake_jobs)
    sync_api.expect(page.locator(".verdict")).to_contain_text("Rank 17 of llama <b>7b</b> waits 41 %")
    page.get_by_text("Rank 17 is 611 steps behind rank 3.").wait_for()
    which = page.locator(".trouble", has_text="Rank 17 waits 41 %").inner_text()
    assert "of its time: tokenizing 38 %, decoding Parquet 3.3 %." in which
    assert re.search(r"It has waited since \d\d:\d\d, 15 min ago\.", which)
    assert "Now: tokenizing (0412.parquet), requested 3 s ago." in which
    bar = page.locator(".why + .legend").inner_text()
    assert all(text in bar for text in ("tokenizing 0.8 %", "the network 0.1 %", "computing 99 %"))
    page.get_by_text("Against waits for tokenizing: run penstock prepare").wait_for()
    page.get_by_text(re.compile(r"the server began \d\d:\d\d, 59 min ago")).wait_for()
    page.get_by_text("The cache is large enough for this job").wait_for()
    assert page.locator("tr.ended").inner_text().startswith("evaluation (ended 25 min ago)")

    first = page.get_by_role("region", name="ranks").locator("tbody tr")
    assert first.count() == 16
    assert [cell.strip() for cell in first.first.locator("td").all_inner_texts()[:3]] == [
        "17",
        "▲ 41 %",
        "tokenizing 38 %, decoding Parquet 3.3 %",
    ]
    page.get_by_role("button", name="Show all 64 ranks").click()
    assert first.count() == 64
    assert "step=811" in str(first.first.get_by_role("link").get_attribute("href"))


@pytest.mark.parametrize(("room", "verdict"), [(10**9, "large enough for"), (1, "small for")])
def test_cache_with_less_room_than_the_order_needs_is_small(open_page: Open, room: int, verdict: str) -> None:
    def estimate(route: Any) -> None:
        route.fulfill(json=route.fetch().json() | {"cache_room_bytes": room})

    page = open_page(jobs=fake_jobs)
    page.route("**/estimate*", estimate)
    page.reload()
    page.get_by_text(f"The cache is {verdict} this job.").wait_for()
    page.goto(page.url.partition("#")[0] + "#/explore/stories")
    page.locator(".stat", has_text="cache needed").get_by_text(f": {verdict.removesuffix(' for')}").wait_for()


def test_page_of_a_server_that_is_away_is_stale(open_page: Open) -> None:
    page = open_page(jobs=fake_jobs, refusals="ERR_FAILED")
    page.locator(".heat canvas").wait_for()
    page.route("**/v1/**", lambda route: route.abort())
    verdict = page.locator(".verdict", has_text=re.compile(r"server does not answer\. .* This page is as of \d\d:\d\d\.$"))
    verdict.wait_for()
    assert page.locator("main").get_attribute("class") == "stale"
    page.unroute("**/v1/**")
    sync_api.expect(page.locator(".verdict")).to_contain_text("Rank 17")
    assert page.locator("main").get_attribute("class") == ""


def test_page_of_a_server_that_hangs_is_stale(open_page: Open) -> None:
    page = open_page(jobs=fake_jobs)
    page.locator(".heat canvas").wait_for()
    page.route("**/v1/**", lambda _: None)
    page.locator(".verdict", has_text="server does not answer").wait_for()


def test_heat_map_is_read_with_keys(open_page: Open) -> None:
    page = open_page(jobs=fake_jobs)
    heat = page.locator(".heat canvas")
    heat.focus()
    for _ in range(17):
        heat.press("ArrowDown")
    page.locator(".readout", has_text=re.compile(r"^rank 17, .*: waits 41 %$")).wait_for()
    heat.press("Enter")
    assert page.locator("tr.chosen td").first.inner_text() == "17"
    heat.press("ArrowDown")
    page.locator(".readout", has_text="no report").wait_for()


def test_server_view_plots_the_last_hour(open_page: Open) -> None:
    page = open_page("#/server", jobs=fake_jobs)
    page.locator(".plots canvas").nth(4).wait_for()
    tiles = page.locator(".stats").inner_text()
    assert all(text in tiles for text in ("120.0 MB", "budget 1.0 GB", "3.0 GB", "room for 8.0 GB", "98 %", "2 processes"))
    [trouble] = page.locator(".trouble").all_inner_texts()
    assert trouble == "▲ The store of the shards throttles this server: 12 requests repeated in the last minute."


def test_batch_shows_the_text_that_the_server_sends(server: Server, open_page: Open) -> None:
    page = open_page("#/batch/stories?step=3&batch_size=4&shuffle=none&pad=longest")
    batch = server.json(
        "/v1/datasets/stories/epochs/0/ranks/0/batches/3", format="json", batch_size=4, shuffle="none", pad="longest"
    )
    page.locator(".sample").nth(3).wait_for()
    for sample, shown in zip(batch["samples"], page.locator(".sample").all(), strict=True):
        assert sample["text"] in shown.inner_text()
        assert sample["columns"]["origin"] in shown.inner_text()
        assert re.search(rf"\b{sample['num_tokens']} tokens", shown.inner_text())
    page.get_by_label("seq_len", exact=True).fill("4")
    page.keyboard.press("Enter")
    row_tokens = batch["samples"][0]["num_tokens"]
    page.get_by_text(f"4 tokens, 4 with loss, ▲ {row_tokens - 4} cut off").first.wait_for()
    assert page.locator(".sample i").count() == 0


def test_hostile_text_is_shown_as_text(open_page: Open) -> None:
    page = open_page("#/batch/stories?batch_size=3&shuffle=none", refusals="status of 404")
    page.locator(".sample").nth(2).wait_for()
    texts = [text.replace("\n", "") for text in page.locator(".sample .text").all_inner_texts()]
    assert texts[0].startswith(HTML)
    assert "left <U+202E>right<U+202C> <U+0000> <U+001B>[31m zero<U+200B>width" in texts[1]
    assert page.locator(".sample img, .sample b, .sample i").count() == 0
    assert "Penstock" in page.title()
    page.goto(page.url.partition("#")[0] + "#/row/stories/0")
    page.get_by_text("row group 0").wait_for()
    assert page.locator("main .text").inner_text().startswith(HTML)
    page.goto(page.url.partition("#")[0] + "#/dataset/%3Cimg%20src=x%20onerror=alert(1)%3E")
    page.locator("h1", has_text="<img src=x onerror=alert(1)>").wait_for()


def test_prompt_without_loss_is_dimmed_and_tokens_are_visible_on_demand(server: Server, open_page: Open) -> None:
    page = open_page("#/batch/pairs?batch_size=1&shuffle=none")
    text = page.locator(".sample .text")
    text.wait_for()
    assert text.locator(".no-loss").all_inner_texts() == ["question 0:"]
    assert text.locator(".in-loss").all_inner_texts() == [" answer 0<|endoftext|>"]
    page.get_by_label("show tokens").check()
    page.wait_for_url("**tokens=1*")
    [sample] = server.json("/v1/datasets/pairs/epochs/0/ranks/0/batches/0", format="tokens", batch_size=1, shuffle="none")[
        "samples"
    ]
    page.locator(".sample .tokens").wait_for()
    assert page.locator(".tokens > .no-loss, .tokens > .in-loss").all_inner_texts() == sample["token_texts"]
    assert page.locator(".padding", has_text=f"{1024 - sample['num_tokens']:,} padding").count() > 0


def test_keys_step_and_the_address_can_be_sent(open_page: Open) -> None:
    page = open_page("#/batch/pairs?batch_size=2&seq_len=32&seed=5")
    page.get_by_text("Step 0 of 20").wait_for()
    page.locator("h1").click()
    for key in ("ArrowRight", "j", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    page.get_by_text("Step 2 of 20").wait_for()
    page.get_by_label("step back").focus()
    page.keyboard.press("Enter")
    page.get_by_text("Step 1 of 20").wait_for()
    texts = page.locator(".sample").all_inner_texts()
    address = page.locator(".copy pre").first.inner_text()
    assert "snapshot=" in address

    other = open_page("#" + address.partition("#")[2])
    other.get_by_text("Step 1 of 20").wait_for()
    assert other.locator(".sample").all_inner_texts() == texts


def test_curl_and_python_give_the_same_batch(server: Server, open_page: Open) -> None:
    spec: dict[str, str | int] = {"batch_size": 2, "seq_len": 16, "world_size": 3, "seed": 2**60, "packing": "concat"}
    query = "&".join(f"{name}={value}" for name, value in spec.items())
    page = open_page(f"#/batch/stories?epoch=1&rank=2&step=1&{query}")
    page.locator(".sample").nth(1).wait_for()
    _, curl, python = page.locator(".copy pre").all_inner_texts()
    expected = server.json("/v1/datasets/stories/epochs/1/ranks/2/batches/1", format="json", **spec)
    ids = [sample["input_ids"] for sample in expected["samples"]]
    assert httpx.get(re.fullmatch("curl '(.*)'", curl)[1]).json() == expected  # type: ignore[index]
    names: dict[str, Any] = {}
    exec(python, names)
    assert names["batch"]["input_ids"].tolist() == ids


def test_row_leads_to_the_steps_that_show_it_and_back(open_page: Open) -> None:
    page = open_page("#/batch/blend?step=2&batch_size=4&seq_len=32")
    source = page.locator(".sample").nth(1).get_by_role("link")
    name = source.inner_text()
    text = page.locator(".sample .text").nth(1).inner_text()
    source.click()
    page.get_by_role("heading", name=re.compile("^Row [0-9]+ of ")).wait_for()
    place = page.get_by_role("region", name="places").locator("tr", has_text="show it").first
    sync_api.expect(place.locator("td")).to_have_text(["show it", "2", "0", "1"])
    place.get_by_role("link").click()
    sync_api.expect(page.locator(".sample.chosen")).to_contain_text(name)
    assert page.locator(".sample.chosen .text").inner_text() == text


def test_boundaries_and_padding_of_packed_rows_are_marked(server: Server, open_page: Open) -> None:
    page = open_page("#/batch/stories?packing=best_fit&seq_len=256&batch_size=1&shuffle=none")
    page.locator(".sample").wait_for()
    spec: dict[str, str | int] = {"packing": "best_fit", "seq_len": 256, "batch_size": 1, "shuffle": "none"}
    [sample] = server.json("/v1/datasets/stories/epochs/0/ranks/0/batches/0/provenance", **spec)["samples"]
    rows = [f"¶ stories row {source['dataset_row']}" for source in sample["sources"]]
    assert len(rows) > 1
    assert [text.strip() for text in page.locator(".text > .boundary").all_inner_texts()] == rows


def test_dataset_view_shows_lengths_bad_rows_and_the_order(open_page: Open) -> None:
    page = open_page("#/dataset/stories")
    page.locator(".plots canvas").wait_for()
    page.get_by_text("Rows that cannot be used").click()
    bad = page.get_by_role("region", name="bad rows").locator("tbody tr")
    sync_api.expect(bad.locator("td")).to_have_text(["2", "part-0.parquet", "0", "text is empty"])
    assert bad.get_by_role("link").get_attribute("href") == "#/row/stories/2"
    page.get_by_label("shuffle", exact=True).select_option("none")
    page.wait_for_url("**shuffle=none*")
    page.get_by_role("button", name="Measure this order").click()
    measures = page.get_by_role("region", name="measures")
    measures.wait_for()
    assert "▲ no" in measures.inner_text()
    page.get_by_label("shuffle", exact=True).select_option("global")
    page.wait_for_url("**shuffle=global*")
    page.get_by_role("button", name="Measure this order").click()
    measures.wait_for()
    assert "▲ no" not in measures.inner_text()


def test_explorer_counts_the_reads_of_a_cache(open_page: Open) -> None:
    page = open_page("#/explore/stories?batch_size=4")
    page.get_by_role("button", name="Count the reads of the shards").click()
    reads = page.get_by_role("region", name="reads").locator("tbody tr")
    reads.first.wait_for()
    everything = page.locator(".stat", has_text="everything").inner_text()
    assert reads.last.locator("td").first.inner_text() in everything
    assert reads.last.locator("td").last.inner_text() == "0"
    page.get_by_label("seq_len", exact=True).fill("16")
    page.keyboard.press("Enter")
    reads.first.wait_for(state="detached")


def test_explorer_says_what_a_trainer_will_get(open_page: Open) -> None:
    page = open_page("#/explore/stories")
    page.get_by_text("steps an epoch").wait_for()
    for name, value in (("batch_size", "3"), ("world_size", "2"), ("seq_len", "16")):
        page.get_by_label(name, exact=True).fill(value)
        page.keyboard.press("Enter")
        page.wait_for_url(f"**{name}={value}*")
    page.get_by_label("packing", exact=True).select_option("best_fit")
    page.locator("pre", has_text='packing="best_fit"').wait_for()
    names: dict[str, Any] = {}
    exec(page.locator("pre").inner_text().replace(")\n", ", rank=1, world_size=2)\n"), names)
    stats = dict(
        zip(page.locator(".stat dt").all_inner_texts(), page.locator(".stat dd:nth-of-type(1)").all_inner_texts(), strict=True)
    )
    assert stats["steps an epoch"] == f"{len(names['data']):,}"
    assert (stats["cut rows"], "%" in stats["padding"]) == ("0 %", True)


def test_refused_parameter_is_explained(open_page: Open) -> None:
    page = open_page("#/explore/stories", refusals="status of 422")
    page.get_by_label("batch_size", exact=True).fill("0")
    page.keyboard.press("Enter")
    page.get_by_role("alert").filter(has_text="batch_size must be from 1 to 65,536, not 0").wait_for()


@pytest.mark.parametrize("view", VIEWS)
def test_view_fits_a_phone_in_the_dark(open_page: Open, view: str) -> None:
    page = open_page(view, jobs=fake_jobs, viewport={"width": 360, "height": 740}, color_scheme="dark")
    page.locator("main h1").wait_for()
    page.wait_for_load_state("networkidle")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    red, green, blue = map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3])
    assert max(red, green, blue) < 50


def test_page_works_below_a_prefix(server: Server, open_page: Open) -> None:
    with proxied(server.url, "/tools/data") as url:
        page = open_page("#/batch/stories?batch_size=1", url=f"{url}/tools/data/")
        page.locator(".sample").wait_for()
        assert page.locator(".copy pre").first.inner_text().startswith(f"{url}/tools/data/#/batch/stories?")
        page.get_by_role("link", name="API").click()
        page.get_by_text("List the datasets").first.wait_for()


def test_page_of_a_server_with_tokens_asks_for_one(serve: Serve, shared: Path, open_page: Open, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    token = create_token(tokens, "watcher", ("stories",), "read", None)
    guarded = serve(shared, "--tokenizer", str(shared / "tokenizer.json"), "--tokens", str(tokens))
    page = open_page(url=f"{guarded.url}/", refusals="status of 401")
    page.get_by_label("Token").fill("a guess")
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("alert").filter(has_text="The token is wrong").wait_for()
    page.get_by_label("Token").fill(token)
    page.keyboard.press("Enter")
    page.get_by_text("Signed in as watcher.").wait_for()
    page.get_by_role("link", name="Datasets").click()
    page.get_by_role("link", name="stories").wait_for()
    assert page.get_by_role("link", name="pairs").count() == 0
    page.get_by_role("link", name="Batches").click()
    page.locator(".copy pre").filter(has_text="curl").filter(has_text="Bearer $PENSTOCK_TOKEN").wait_for()
    page.get_by_role("link", name="Server").click()
    page.get_by_text("Sign in with a token for all datasets to see them.").wait_for()
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_text("Signed in as watcher.").wait_for()
    revoke_token(tokens, "watcher")
    page.get_by_label("Token").wait_for()


@contextmanager
def proxied(target: str, prefix: str) -> Iterator[str]:
    """The address of a proxy that serves the target below a prefix."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = httpx.get(target + self.path.removeprefix(prefix)) if self.path.startswith(prefix) else httpx.Response(404)
            self.send_response(answer.status_code)
            for name in ("content-type", "content-security-policy", "etag"):
                if name in answer.headers:
                    self.send_header(name, answer.headers[name])
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        thread = Thread(target=proxy.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{proxy.server_port}"
        finally:
            proxy.shutdown()
            thread.join()
