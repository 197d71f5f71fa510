"""Shards in an object store, on the hub and on a web server are served as those of a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pyarrow as pa
import pytest

import penstock_server.sources.remote as remote
import penstock_server.sources.remote_file as remote_file
from penstock.spec import Spec
from penstock_server.api.admission import InFlight
from penstock_server.api.shown import ShownPaths
from penstock_server.app import create_app
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import Catalog, open_catalog
from penstock_server.problems import DatasetInvalid, DatasetUnavailable, ShardUnavailable, SnapshotGone
from penstock_server.recipes.allowed import AllowedFiles
from penstock_server.settings import Settings
from support.corpora import write, write_numbered, write_shards, write_tokenizer
from support.engine import rows_of
from support.hub import TOKEN, FileServer, file_server
from support.servers import Serve, pages, serving_app
from support.stores import Uploaded, object_store

TEXTS = [f"the {word} fox number {n}" for n in range(200) for word in ("quick", "brown")]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Token ids in a/ids; and texts, whose recipe names a tokenizer in another folder."""
    write_ids(tmp_path / "data", 0, 9)
    (tmp_path / "data" / "files").mkdir()
    write_tokenizer(tmp_path / "data" / "files" / "tokenizer.json", TEXTS)
    write(tmp_path / "data" / "texts", 'tokenizer = "../files/tokenizer.json"', {"text": TEXTS}, row_group_size=50)
    return tmp_path / "data"


def write_ids(data: Path, *firsts: int) -> None:
    """Write a shard of three row groups for each number."""
    shards = [[[first + n % 7, first + n, 3] for n in range(60)] for first in firsts]
    write_shards(data / "a" / "ids", "input_ids", shards, type_=pa.list_(pa.int32()), row_group_size=20)


@pytest.fixture
def open_url(tmp_path: Path) -> Iterator[Callable[..., Catalog]]:
    stores = list[BlockStore]()

    def run(*places: Path | str, allowed: AllowedFiles | None = None, waits: bool = False) -> Catalog:
        stores.append(BlockStore(tmp_path / f"cache-{len(stores)}"))
        return open_catalog(places, None, stores[-1], allowed, waits=waits)

    yield run
    for store in stores:
        store.close()


@pytest.fixture
def uploaded(data: Path) -> Iterator[Uploaded]:
    uploaded = Uploaded(data)
    yield uploaded
    uploaded.close()


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def tokens_of(catalog: Catalog, name: str) -> list[list[int]]:
    opened = catalog[name].latest
    blocks = opened.blocks.get(range(opened.snapshot.num_blocks))
    return [row for block in blocks for row in rows_of(block)]


def requests(catalog: Catalog, outcome: str = "ok") -> float:
    """The number of requests to sources with an outcome."""
    samples = (sample for metric in catalog.store.metrics.source_requests.collect() for sample in metric.samples)
    return sum(each.value for each in samples if each.name.endswith("_total") and each.labels["outcome"] == outcome)


def assert_same(catalog: Catalog, local: Catalog) -> None:
    assert catalog.refused == {}
    assert list(catalog.datasets) == list(local.datasets) == ["a.ids", "texts"]
    for name in local.datasets:
        assert tokens_of(catalog, name) == tokens_of(local, name)


def test_object_store_is_served_as_a_folder(data: Path, uploaded: Uploaded, open_url: Callable[..., Catalog]) -> None:
    assert_same(open_url(uploaded.url), open_url(data))


def test_footer_takes_one_request(data: Path, uploaded: Uploaded, open_url: Callable[..., Catalog]) -> None:
    catalog = open_url(uploaded.url)
    before = requests(catalog)
    catalog.poll()
    assert requests(catalog) - before == 2  # a page of the listing, and its end
    write_ids(data, 0, 9, 20)
    uploaded.update()
    before = requests(catalog)
    catalog.refresh("a.ids")
    assert requests(catalog) - before <= 5  # the listing, the schema of the first shard, and the new footer
    assert catalog["a.ids"].latest.snapshot.num_rows == 180


def test_trainer_reads_an_object_store(serve: Serve, tmp_path: Path) -> None:
    write_numbered(tmp_path / "numbers", 400, row_group_size=50)
    place = Uploaded(tmp_path)
    try:
        far, near = serve(place.url), serve(tmp_path)
        path = "/v1/datasets/numbers/epochs/0/ranks/0/batches/0"
        query: dict[str, str | int] = {"batch_size": 8, "shuffle": "none"}
        batches = [[frame.tensors["input_ids"].tolist() for frame in server.frames(path, **query)] for server in (far, near)]
        assert batches[0] == batches[1]
    finally:
        place.close()


def test_replaced_object_ends_the_snapshot(data: Path, uploaded: Uploaded, open_url: Callable[..., Catalog]) -> None:
    catalog = open_url(uploaded.url)
    blocks = catalog["a.ids"].latest.blocks
    blocks.get([0])
    for shard in (data / "a" / "ids").glob("*.parquet"):
        shard.unlink()
    write_ids(data, 40)
    uploaded.update()
    with pytest.raises(SnapshotGone, match=r"part-000.parquet changed since the server read it"):
        blocks.get([1])
    with pytest.raises(SnapshotGone, match=r"part-001.parquet was removed since the server read it"):
        blocks.get([4])


def test_large_row_group_is_read_in_windows(
    data: Path, uploaded: Uploaded, open_url: Callable[..., Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_file, "_MAX_FETCHED_BYTES", 10)
    monkeypatch.setattr(remote_file, "_PART_BYTES", 64)
    monkeypatch.setattr(remote_file, "_MAX_WINDOWS", 2)
    assert_same(open_url(uploaded.url), open_url(data))


def test_recipe_names_where_its_shards_lie(
    data: Path, uploaded: Uploaded, tmp_path: Path, open_url: Callable[..., Catalog]
) -> None:
    folder = tmp_path / "recipes" / "texts"
    folder.mkdir(parents=True)
    write_tokenizer(folder / "tokenizer.json", TEXTS)
    url = f"{uploaded.url}/texts"
    (folder / "penstock.toml").write_text(f'shards = "{url}"\ntokenizer = "tokenizer.json"\n')
    allowed = AllowedFiles((tmp_path / "recipes",), sources=(uploaded.url,))
    assert tokens_of(open_url(tmp_path / "recipes", allowed=allowed), "texts") == tokens_of(open_url(data), "texts")
    with pytest.raises(DatasetInvalid, match=f"Start with --allow-sources .* such as --allow-sources {url}"):
        open_url(tmp_path / "recipes", allowed=AllowedFiles((tmp_path / "recipes",), sources=(f"{uploaded.url}/te",)))


def test_several_places_are_served_together(
    data: Path, uploaded: Uploaded, tmp_path: Path, open_url: Callable[..., Catalog]
) -> None:
    write_numbered(tmp_path / "other" / "numbers", 20)
    assert list(open_url(uploaded.url, tmp_path / "other").datasets) == ["a.ids", "numbers", "texts"]
    twice = open_url(uploaded.url, data, tmp_path / "other")
    assert list(twice.datasets) == ["numbers"]
    assert f"{uploaded.url}/texts and {data / 'texts'} would both be the dataset 'texts'" in twice.refused["texts"]


def test_bucket_without_shards_is_refused(open_url: Callable[..., Catalog]) -> None:
    object_store()
    with pytest.raises(DatasetInvalid, match=r"s3://penstock/nothing holds no file that ends in \.parquet"):
        open_url("s3://penstock/nothing")


def test_hub_is_served_as_a_folder(data: Path, open_url: Callable[..., Catalog], monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(data, monkeypatch) as served:
        catalog = open_url("hf://datasets/org/name")
        assert_same(catalog, open_url(data))
        trees = served.seen["api"]
        catalog.poll()
        assert served.seen["api"] == trees + 1  # the commit alone
        assert set(served.tokens) == {f"api Bearer {TOKEN}", f"datasets Bearer {TOKEN}", "cdn "}  # which is not the hub's


def test_hub_folder_at_a_commit_is_never_polled(
    data: Path, open_url: Callable[..., Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub(data, monkeypatch) as served:
        catalog = open_url(f"hf://datasets/org/name@{served.commit_id}/a")
        asked = served.seen["api"]
        served.commit({})
        catalog.poll()
        assert served.seen["api"] == asked
        assert tokens_of(catalog, "ids") == tokens_of(open_url(data), "a.ids")


def test_run_on_an_older_commit_of_the_hub_goes_on(
    data: Path, open_url: Callable[..., Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub(data, monkeypatch) as served:
        catalog = open_url("hf://datasets/org/name")
        expected = tokens_of(open_url(data), "a.ids")
        write_ids(data, 0, 9, 20)
        served.commit(files_below(data))
        before = catalog["a.ids"].latest
        read = served.seen["cdn"]
        change = catalog.refresh("a.ids")
        assert (change.added, change.rewritten) == (1, 0)
        assert served.seen["cdn"] - read <= 3  # the schema and the new footer; the others keep their version
        plan = catalog.plan("a.ids", Spec(batch_size=2, snapshot=before.snapshot.fingerprint))
        assert plan.snapshot == before.snapshot.fingerprint
        assert len(tokens_of(catalog, "a.ids")) == 180
        assert tokens_of(catalog, "a.ids")[:120] == expected


def hub(data: Path, monkeypatch: pytest.MonkeyPatch) -> FileServerContext:
    return FileServerContext(data, monkeypatch)


class FileServerContext:
    """A stand-in of the hub with the files of a folder, at the address that the environment names."""

    def __init__(self, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._context, self._monkeypatch = file_server(files_below(data)), monkeypatch

    def __enter__(self) -> FileServer:
        served = self._context.__enter__()
        self._monkeypatch.setenv("HF_ENDPOINT", served.url)
        self._monkeypatch.setenv("HF_TOKEN", TOKEN)
        return served

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(None, None, None)


@pytest.mark.parametrize("key", ["x/../../penstock.toml", "/penstock.toml", "x//penstock.toml", ".x/penstock.toml"])
def test_copies_of_recipes_stay_in_their_folder(
    data: Path, tmp_path: Path, open_url: Callable[..., Catalog], monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    with hub(data, monkeypatch) as served:
        served.commit({**files_below(data), key: b'tokenizer = "other.json"'})
        assert list(open_url("hf://datasets/org/name").datasets) == ["a.ids", "texts"]
    assert [path.parent.name for path in (tmp_path / "cache-0").rglob("penstock.toml")] == ["texts"]
    assert not [path for path in tmp_path.rglob("penstock.toml") if path.read_text() == 'tokenizer = "other.json"']


def test_recipe_of_a_source_names_no_file_of_the_server(
    data: Path, uploaded: Uploaded, tmp_path: Path, open_url: Callable[..., Catalog]
) -> None:
    write_tokenizer(tmp_path / "private.json", TEXTS)
    (data / "texts" / "penstock.toml").write_text(f'tokenizer = "{tmp_path / "private.json"}"')
    uploaded.update()
    settings = Settings.read({"data_dir": uploaded.url}, {})
    catalog = open_url(*settings.data_dir, allowed=settings.allowed_files)
    assert list(catalog.datasets) == ["a.ids"]
    assert "private.json is outside the data folder" in catalog.refused["texts"]


def test_callers_do_not_learn_where_the_data_lies(uploaded: Uploaded, open_url: Callable[..., Catalog]) -> None:
    catalog = open_url(uploaded.url)
    shown = ShownPaths(catalog.folders)
    shard = catalog["a.ids"].latest.snapshot.shards[0]
    assert shown.shorten(f"{shard.path} is damaged") == "a/ids/part-000.parquet is damaged"


def test_shards_directly_in_a_source_are_named_after_it(
    data: Path, open_url: Callable[..., Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    with file_server(files_below(data / "a" / "ids")) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert list(open_url("hf://datasets/org/name").datasets) == ["name"]
        assert list(open_url(f"hf://datasets/org/name@{served.commit_id}").datasets) == ["name"]


def test_list_of_urls_is_a_dataset(data: Path, open_url: Callable[..., Catalog]) -> None:
    files = files_below(data / "a" / "ids")
    with file_server({**files, "ids.txt": "\n".join(["# shards", *sorted(files)]).encode()}) as served:
        catalog = open_url(f"{served.url}/files/ids.txt")
        assert list(catalog.datasets) == ["ids"]
        assert tokens_of(catalog, "ids") == tokens_of(open_url(data), "a.ids")
        catalog, name = open_url(f"{served.url}/files/ids.txt"), min(files)
        blocks = catalog["ids"].latest.blocks
        served.ignores_conditions = True
        served.commit({**served.commits[-1], name: files[name][:50] + bytes(20) + files[name][70:]})
        with pytest.raises(SnapshotGone, match=f"{name} changed since the server read it"):
            blocks.get([1])
        served.commit({**served.commits[-1], "ids.txt": max(files).encode()})
        catalog.poll()
        with pytest.raises(SnapshotGone, match=f"{name} was removed since the server read it"):
            blocks.get([1])
        served.commit(served.commits[0])
        served.commit({**served.commits[-1], name: files[name] + b"more"})
        with pytest.raises(DatasetInvalid, match=f"{name} is truncated, damaged, or not a supported Parquet file"):
            open_url(f"{served.url}/files/ids.txt")


def test_throttled_requests_are_repeated(data: Path, open_url: Callable[..., Catalog], monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(data, monkeypatch) as served:
        catalog = open_url("hf://datasets/org/name")
        served.failures = [503, 429, 500]
        assert tokens_of(catalog, "a.ids") == tokens_of(open_url(data), "a.ids")
        assert (requests(catalog, "throttled"), requests(catalog, "failed")) == (2, 1)


def test_store_that_is_away_is_waited_for(
    data: Path, open_url: Callable[..., Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_RETRY_SECONDS", 0.3)
    with hub(data, monkeypatch) as served:
        catalog = open_url("hf://datasets/org/name")
        opened = catalog["a.ids"].latest
        [cached] = opened.blocks.get([0])
        served.failures = [503] * 1000
        catalog.poll()
        assert catalog["a.ids"].latest is opened
        assert "does not respond as expected: 503" in str(catalog["a.ids"].error)
        assert opened.blocks.get([0])[0].num_rows == cached.num_rows
        with pytest.raises(ShardUnavailable, match="cannot be read now: .* does not respond as expected: 503"):
            opened.blocks.get([1])
        served.failures = []
        assert opened.blocks.get([1])[0].num_rows == 20
        catalog.refresh("a.ids")
        assert catalog["a.ids"].error is None


def test_server_starts_while_its_source_is_away(
    data: Path, open_url: Callable[..., Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_RETRY_SECONDS", 0.3)
    with hub(data, monkeypatch) as served:
        served.failures = [503] * 1000
        with pytest.raises(DatasetInvalid, match="does not respond as expected: 503"):
            open_url("hf://datasets/org/name")
        catalog = open_url("hf://datasets/org/name", waits=True)
        with serving_app(create_app(catalog, InFlight(1 << 30))) as url:
            assert httpx.get(f"{url}/readyz").status_code == 503
            problem = httpx.get(f"{url}/v1/datasets/a.ids/spec").json()
            assert (problem["status"], problem["type"]) == (503, "urn:penstock:problem:dataset-unavailable")
            assert "does not respond as expected: 503" in problem["detail"]
            assert httpx.get(f"{url}/metrics").text.count('penstock_source_requests_total{outcome="throttled"}') == 1
            served.failures = []
            catalog.poll()
            catalog.refresh("a.ids")
            assert httpx.get(f"{url}/readyz").status_code == 200
            monkeypatch.setattr(remote, "_RETRY_SECONDS", 20.0)
            served.failures = [503, 429, 500]
            assert tokens_of(catalog, "a.ids") == tokens_of(open_url(data), "a.ids")
            server = httpx.get(f"{url}/v1/jobs").json()["server"]
            assert (server["source_requests_throttled"], server["source_requests_failed"]) == (2, 1)


def test_recipe_whose_source_is_away_is_waited_for(
    data: Path, tmp_path: Path, open_url: Callable[..., Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_RETRY_SECONDS", 0.3)
    (tmp_path / "recipes" / "ids").mkdir(parents=True)
    (tmp_path / "recipes" / "ids" / "penstock.toml").write_text('shards = "hf://datasets/org/name/a/ids"\n')
    with hub(data, monkeypatch) as served:
        served.failures = [500] * 1000
        allowed = AllowedFiles((tmp_path / "recipes",), sources=("hf://datasets/org",))
        catalog = open_url(tmp_path / "recipes", allowed=allowed, waits=True)
        with pytest.raises(DatasetUnavailable, match="does not respond as expected: 500"):
            catalog.plan("ids", Spec(batch_size=2))
        served.failures = []
        catalog.refresh("ids")
        assert tokens_of(catalog, "ids") == tokens_of(open_url(data), "a.ids")


def test_bucket_in_another_region_is_reported(open_url: Callable[..., Catalog], monkeypatch: pytest.MonkeyPatch) -> None:
    with pages(lambda _: (301, b"<Error><Code>PermanentRedirect</Code></Error>")) as store:
        for name, value in (("ENDPOINT_URL", store), ("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret")):
            monkeypatch.setenv(f"AWS_{name}", value)
        with pytest.raises(DatasetInvalid, match="the bucket is in another region; set AWS_REGION"):
            open_url("s3://bucket/corpus", waits=True)


@pytest.mark.parametrize("answer", [b"no", b"{}", b"[]", b'[{"type": "file"}]', b'{"sha": "x"}', b"\xff"])
def test_wrong_answer_of_the_hub_is_reported(
    data: Path, open_url: Callable[..., Catalog], monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    with hub(data, monkeypatch) as served:
        served.answer = answer
        with pytest.raises(DatasetInvalid, match="name cannot be read: 127.0.0.1:[0-9]+ does not answer as the hub does"):
            open_url("hf://datasets/org/name", waits=True)


def test_refused_credentials_are_reported_without_them(
    data: Path, open_url: Callable[..., Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub(data, monkeypatch):
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        with pytest.raises(DatasetInvalid, match="the store answered 401 Unauthorized") as refused:
            open_url("hf://datasets/org/name")
    assert "hf_wrong" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("ftp://host/data", r"the scheme ftp is not supported. Supported: s3://"),
        ("https://me:secret@host/list.txt", "the URL of host/list.txt has a password in it"),
        ("hf://models/org/name", "is not the URL of a dataset. Write hf://datasets/"),
    ],
)
def test_invalid_url_is_refused(url: str, reason: str, open_url: Callable[..., Catalog]) -> None:
    with pytest.raises(DatasetInvalid, match=reason) as refused:
        open_url(url)
    assert "secret" not in str(refused.value)
