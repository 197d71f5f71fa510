"""`penstock prepare --store`: the same objects whatever makes them; a lost worker costs its unfinished row groups alone."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from penstock_server import prepare as prepare_module
from penstock_server.blocks import shared as shared_module
from penstock_server.blocks.shared import SeenClaims, SharedStore
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import open_catalog
from penstock_server.catalog.dataset import OpenSnapshot
from penstock_server.cluster import units as units_module
from penstock_server.cluster import worker
from penstock_server.cluster.on_ray import make_unit
from penstock_server.cluster.units import MAX_ATTEMPTS, Failure, Units
from penstock_server.cluster.worker import Worker, run_here
from penstock_server.index import index as index_module
from penstock_server.monitoring.metrics import Metrics
from penstock_server.prepare import NotKept, plan, prepare
from penstock_server.problems import BadParameter, ShardUnavailable, SnapshotGone
from penstock_server.settings import Settings
from penstock_server.sources import remote
from penstock_server.sources.remote import Retryable
from penstock_server.store_command import collect
from support.corpora import write, write_numbered, write_shards
from support.hub import TOKEN, file_server
from support.processes import Fork, until
from support.servers import Serve, penstock
from support.units import NUM_GROUPS, Objects, add_transform, arguments, damage, fill, num_units, objects, run, write_texts


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("units") / "data"
    return write_texts(folder, 25)


@pytest.fixture(scope="module")
def expected(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Objects:
    """What one process writes."""
    folder = tmp_path_factory.mktemp("expected")
    done = run(data, folder, "store", "--pack-seq-len", "64")
    assert done.returncode == 0, done.stderr
    told = re.search(r"texts: 600 rows, ([\d,]+) tokens, 0 bad rows", done.stdout)
    assert told
    assert f"texts: prepared in {folder / 'store'}: 24 row groups, {told[1]} tokens, " in done.stdout
    found = objects(folder / "store")
    kinds = [name.rpartition(".")[2] for name in found]
    assert {kind: kinds.count(kind) for kind in kinds} == {"block": 24, "unit": 24, "lengths": 4, "index": 4, "manifest": 1}
    return found


class Opened:
    """The dataset, opened in this process with an empty cache and a store."""

    def __init__(self, data: Path | list[Path | str], tmp_path: Path, store: str = "store", dataset: str = "texts") -> None:
        self.blocks = BlockStore(tmp_path / f"cache-{time.monotonic_ns()}", shared=tmp_path / store)
        self.snapshot: OpenSnapshot = open_catalog(data, None, self.blocks)[dataset].latest
        assert self.blocks.shared
        self.shared: SharedStore = self.blocks.shared
        self.units = Units(self.snapshot, self.shared)

    def close(self) -> None:
        self.blocks.close()

    def outcomes(self) -> dict[str, float]:
        samples = (sample for metric in self.blocks.metrics.store_requests.collect() for sample in metric.samples)
        return {sample.labels["outcome"]: sample.value for sample in samples if sample.name.endswith("_total")}


@pytest.fixture
def opened(data: Path, tmp_path: Path) -> Iterator[Opened]:
    with closing(Opened(data, tmp_path)) as opened:
        yield opened


def nothing(_: int) -> None:
    pass


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--index", "0"], "--index and --of belong together: workers 0 to N - 1 of N"),
        (["--index", "2", "--of", "2"], "--index and --of belong together: workers 0 to N - 1 of N"),
        (["--index", "0", "--of", "2"], "several machines need a store that all of them reach."),
        (["--ray"], "several machines need a store that all of them reach."),
    ],
)
def test_wrong_flags_are_refused(data: Path, tmp_path: Path, flags: list[str], message: str) -> None:
    done = penstock("prepare", data, "--cache-dir", tmp_path, *flags)
    assert done.returncode == 2
    assert done.stderr.startswith(f"penstock prepare: {message}")


def test_counts_in_the_store_are_those_without_one(data: Path, expected: Objects, tmp_path: Path) -> None:
    assert penstock("prepare", data, "--cache-dir", tmp_path, "--pack-seq-len", "64").returncode == 0
    counts = {name: content for name, content in expected.items() if name.endswith((".block", ".lengths", ".index"))}
    assert {name: (tmp_path / name).read_bytes() for name in counts} == counts


def test_counts_of_prompts_are_joined(tmp_path: Path) -> None:
    columns = {"prompt": [[7] * n for n in range(1, 101)], "response": [[8] * (1 + n % 3) for n in range(100)]}
    write(tmp_path / "data" / "pairs", "validation = 0.2", columns, columns, row_group_size=30)
    assert penstock("prepare", tmp_path / "data", "--cache-dir", tmp_path / "cache").returncode == 0
    assert run(tmp_path / "data", tmp_path, "store").returncode == 0
    lengths = {path.name: path.read_bytes() for path in (tmp_path / "store").glob("*.lengths")}
    assert len(lengths) == 2
    assert {path.name: path.read_bytes() for path in (tmp_path / "cache").glob("*.lengths")} == lengths


def test_three_workers_write_what_one_writes(data: Path, expected: Objects, tmp_path: Path) -> None:
    def work(index: int) -> subprocess.CompletedProcess[str]:
        return run(data, tmp_path, "store", "--pack-seq-len", "64", "--index", str(index), "--of", "3")

    with ThreadPoolExecutor(3) as threads:
        for done in threads.map(work, range(3)):
            assert done.returncode == 0, done.stderr
            assert "texts: prepared in " in done.stdout
    assert objects(tmp_path / "store") == expected


def test_attempt_of_a_worker_that_died_after_its_unit_is_removed_at_the_end(opened: Opened) -> None:
    assert run_here(opened.units, nothing) == []
    opened.shared.write(f"attempts/{opened.units.names[5].removesuffix('.unit')}-1.attempt", [])
    for _ in prepare(opened.snapshot, [], partial(run_here, index=0, of=1)):
        pass
    assert opened.shared.names("attempts") == set()
    assert opened.snapshot.index.prepared


def test_joining_reads_no_block(opened: Opened, tmp_path: Path, expected: Objects) -> None:
    assert run_here(opened.units, nothing) == []
    for path in (tmp_path / "store").glob("*.block"):
        path.unlink()
    opened.snapshot.index.lengths.make(nothing)
    opened.shared.flush()
    lengths = {name: content for name, content in objects(tmp_path / "store").items() if name.endswith(".lengths")}
    assert lengths == {name: content for name, content in expected.items() if name.endswith(".lengths")}


def test_interrupted_preparation_costs_only_the_rest(data: Path, expected: Objects, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with closing(Fork(*arguments(data, tmp_path, "store"))) as process:
        until(lambda: num_units(store) >= 3)
        process.send_signal(signal.SIGTERM)
        status, _, errors = process.communicate(60)
    assert (status, errors) == (130, "penstock: stopped\n")
    assert not [*store.glob("*.claim"), *store.glob("attempts/*")]
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*") if path.is_file()}
    num_before = num_units(store)
    assert num_before < NUM_GROUPS
    again = Opened(data, tmp_path)
    for _ in prepare(again.snapshot, [64]):
        pass
    again.blocks.close()
    after = objects(store)
    assert after == expected
    num_attempts = NUM_GROUPS - num_before
    assert again.outcomes()["written"] == len(after) - len(before) + num_attempts
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_prepared_snapshot_costs_a_request(data: Path, expected: Objects, tmp_path: Path) -> None:
    fill(tmp_path / "store", expected)
    opened = Opened(data, tmp_path)
    [line] = prepare(opened.snapshot, [])
    assert "24 row groups" in line
    assert opened.outcomes() == {"hit": 1}
    opened.blocks.close()


def test_server_with_an_empty_cache_neither_counts_nor_decodes(
    data: Path, expected: Objects, serve: Serve, tmp_path: Path
) -> None:
    fill(tmp_path / "store", expected)
    server = serve(data, "--store", str(tmp_path / "store"))
    facts = server.json("/v1/datasets/texts")
    assert facts["prepared"].keys() == {"row_groups", "rows", "tokens", "bad_rows", "blocks_bytes"}
    assert (facts["prepared"]["row_groups"], facts["prepared"]["rows"]) == (NUM_GROUPS, 600)
    assert facts["tokens"] == facts["prepared"]["tokens"]
    for packing in ("rows", "concat", "best_fit"):
        answer = server.get(
            "/v1/datasets/texts/epochs/0/ranks/0/batches/0", packing=packing, split="all", seq_len=64, batch_size=2
        )
        assert answer.status_code == 200, answer.text
    metrics = server.get("/metrics").text
    assert not re.search(r"^penstock_(decode|tokenize)_seconds_count\{", metrics, re.MULTILINE)
    assert 'penstock_store_requests_total{outcome="written"}' not in metrics
    inspected = penstock("inspect", data, "--store", tmp_path / "store", "--cache-dir", tmp_path / "cache").stdout
    assert "  prepared: the store has 24 row groups and all counts\n" in inspected


def test_dry_run_tells_what_is_to_do_and_writes_nothing(data: Path, expected: Objects, tmp_path: Path) -> None:
    told = run(data, tmp_path, "store", "--dry-run", "--index", "0", "--of", "4").stdout
    assert "texts: 24 row groups, 0 of them done; " in told
    times = r"texts: [\d:]+ on this machine, or [\d:]+ on 4 such machines: about [\d.]+k tokens at [\d.]+\w? a second, "
    assert re.search(times, told)
    assert objects(tmp_path / "store") == {}
    names = sorted(name for name in expected if name.endswith(".unit"))[:6]
    fill(tmp_path / "store", {name: expected[name] for name in names})
    assert "texts: 24 row groups, 6 of them done; " in run(data, tmp_path, "store", "--dry-run").stdout
    cache = tmp_path / "cache"
    penstock("prepare", data, "--cache-dir", cache)
    assert penstock("prepare", data, "--cache-dir", cache, "--dry-run").stdout.startswith(
        "texts: 24 row groups, 24 of them done"
    )


def test_garbage_collection_keeps_counts_and_manifests_of_snapshots(data: Path, expected: Objects, tmp_path: Path) -> None:
    store = tmp_path / "store"
    fill(store, expected)
    [needed] = [name.partition("-")[0] for name in expected if name.endswith(".manifest")]
    names = (f"units/{'0' * 32}-3.unit", f"{'0' * 32}-4.manifest", f"{needed}.claim", f"{needed}-again.claim")
    fill(store, dict.fromkeys(names, b"x" * 1000))
    assert "counts of row groups: 25, " in penstock("store", "usage", "--store", store).stdout
    cleaned = penstock(
        "store", "gc", data, "--store", store, "--cache-dir", tmp_path / "cache", "--older-than", "0", "--delete"
    )
    assert "4 objects of 4,000 bytes removed" in cleaned.stdout
    assert objects(store) == expected


def test_damaged_row_group_fails_after_three_attempts_and_the_rest_is_finished(tmp_path: Path) -> None:
    data, store = write_texts(tmp_path / "data", 5), tmp_path / "store"
    path = data / "texts" / "part-001.parquet"
    whole = path.read_bytes()
    damage(path, 2)
    for index in "01":
        done = run(data, tmp_path, "store", "--index", index, "--of", "2")
        assert done.returncode == 3
        assert "texts: 1 row group failed in each of 3 attempts. All others are done.\n" in done.stderr
        assert "  row group 2 of part-001.parquet: texts: row group 2 of part-001.parquet cannot be read: " in done.stderr
        assert len(list(store.glob("attempts/*"))) == 3
    assert num_units(store) == NUM_GROUPS - 1
    assert not list(store.glob("*.manifest"))
    tried = {path: path.stat().st_mtime_ns for path in store.glob("attempts/*")}
    assert run(data, tmp_path, "store").returncode == 3  # alone it tries again
    assert all(path.stat().st_mtime_ns > before for path, before in tried.items())
    path.write_bytes(whole)
    assert run(data, tmp_path, "store").returncode == 0
    assert len(list(store.glob("*.manifest"))) == 1


def test_unit_of_a_dead_worker_is_made_again(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_module, "_CLAIM_SECONDS", 0.2)
    monkeypatch.setattr(worker, "_POLL_SECONDS", 0.05)
    opened.shared.write(f"{opened.units.claim(5)}.claim", [])
    opened.shared.write(f"attempts/{opened.units.names[5].removesuffix('.unit')}-1.attempt", [])
    assert Worker(opened.units, 1, 2).run(nothing) == []
    assert opened.units.done() == set(range(NUM_GROUPS))
    assert opened.shared.names("attempts") == set()


def test_unit_that_ended_its_process_three_times_is_reported(opened: Opened) -> None:
    stem = opened.units.names[7].removesuffix(".unit")
    for number in (1, 2, 3):
        opened.shared.write(f"attempts/{stem}-{number}.attempt", [])
    [failure] = Worker(opened.units, 0, 2).run(nothing)
    reason = "its process ended in each attempt, as when it takes too much memory"
    assert failure == Failure("row group 1 of part-001.parquet", reason)
    assert opened.units.done() == set(range(NUM_GROUPS)) - {7}


def test_unit_that_takes_another_worker_long_is_made_twice(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(worker, "_LONG_SECONDS", 0.3)
    monkeypatch.setattr(worker, "_POLL_SECONDS", 0.05)
    other = SharedStore(tmp_path / "store", Metrics())
    with other.claimed(opened.units.claim(9)) as is_ours:
        assert is_ours
        assert Worker(opened.units, 0, 2).run(nothing) == []
        assert opened.units.is_done(9)
    other.close()


def test_task_that_sees_other_data_is_refused(opened: Opened, data: Path, tmp_path: Path) -> None:
    settings = Settings.read({"data_dir": str(data), "store": str(tmp_path / "store"), "cache_dir": str(tmp_path)}, {})
    assert make_unit(settings, "texts", 3, opened.units.name(3)) is None
    assert opened.units.done() == {3}
    for unit, name in ((4, opened.units.name(5)), (NUM_GROUPS, opened.units.name(4))):
        with pytest.raises(SnapshotGone, match=f"row group {unit} of texts is not the same on all machines. Wait until no"):
            make_unit(settings, "texts", unit, name)


def test_units_in_another_store_are_reported(opened: Opened) -> None:
    """As on a node where the path of the store is another folder."""
    with pytest.raises(NotKept, match=f"the store {opened.shared.place} lacks 24 row groups that the nodes have made, so they"):
        list(prepare(opened.snapshot, [], lambda _units, _advance: []))
    assert opened.snapshot.index.find_manifest() is None


def test_settings_of_a_task_have_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = {"data_dir": "data\ns3://b/data", "store": "store", "cache_dir": "cache", "assets": "/assets"}
    settings = Settings.read(flags, {}).absolute()
    assert settings.data_dir == (tmp_path / "data", "s3://b/data")
    assert (settings.store, settings.cache_dir, settings.assets) == (f"{tmp_path}/store", tmp_path / "cache", Path("/assets"))
    assert Settings.read(flags | {"store": "s3://b/store"}, {}).absolute().store == "s3://b/store"


def test_outage_of_the_data_is_no_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units_module, "_PAUSE_SECONDS", 0.1)
    data = write_texts(tmp_path / "data", 5)
    with closing(Opened(data, tmp_path)) as opened, ThreadPoolExecutor(1) as threads:
        made, make = list[int](), opened.units.make

        def count(unit: int) -> None:
            made.append(unit)
            make(unit)

        monkeypatch.setattr(opened.units, "make", count)
        (data / "texts").rename(tmp_path / "unmounted")
        (data / "texts").mkdir()
        failures = threads.submit(run_here, opened.units, nothing)
        until(lambda: made.count(0) > MAX_ATTEMPTS)
        (data / "texts").rmdir()
        (tmp_path / "unmounted").rename(data / "texts")
        assert failures.result(60) == []
        assert opened.shared.names("attempts") == set()


def test_long_outage_of_the_data_ends_the_worker_without_an_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units_module, "_PATIENT_SECONDS", 0.0)
    data = write_texts(tmp_path / "data", 5)
    with closing(Opened(data, tmp_path)) as opened:
        (data / "texts").rename(tmp_path / "unmounted")
        (data / "texts").mkdir()
        with pytest.raises(ShardUnavailable, match="No such file or directory. Retry"):
            run_here(opened.units, nothing)
        until(lambda: not opened.shared.names("attempts"))


def test_claim_is_renewed_in_a_pause_of_the_store(opened: Opened, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A worker that fails once must not look dead."""
    monkeypatch.setattr(shared_module, "_RENEW_SECONDS", 0.05)
    other = SharedStore(tmp_path / "store", Metrics())
    with other.claimed("work"):
        other._pause_until = time.monotonic() + 30.0
        before = (tmp_path / "store" / "work.claim").read_bytes()
        until(lambda: (tmp_path / "store" / "work.claim").read_bytes() != before)
    other.close()


def test_gap_between_looks_makes_no_claim_dead(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an outage of the store, in which nobody can renew a claim."""
    monkeypatch.setattr(shared_module, "_RENEW_SECONDS", 0.05)
    monkeypatch.setattr(shared_module, "_CLAIM_SECONDS", 0.1)
    opened.shared.write("work.claim", [])
    seen: SeenClaims = {}
    assert opened.shared.is_claimed("work", seen)
    time.sleep(0.3)
    assert opened.shared.is_claimed("work", seen)
    until(lambda: not opened.shared.is_claimed("work", seen))


def test_failed_request_of_a_preparation_is_repeated(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a claim of another worker would look like none."""
    create, failures = opened.shared._objects.create, [Retryable("no connection"), Retryable("503", is_throttled=True)]
    opened.shared.write("work.claim", [])

    def fail_twice(key: str, content: bytes) -> bool:
        if failures:
            raise failures.pop()
        return create(key, content)

    monkeypatch.setattr(opened.shared._objects, "create", fail_twice)
    with opened.shared.claimed("work") as is_ours:
        assert not is_ours
    assert not failures
    assert [record.message for record in caplog.records] == [
        f"the store {opened.shared.place} fails: no connection; the request is repeated for up to ten minutes"
    ]


def test_data_that_goes_away_can_be_tried_again_later(tmp_path: Path) -> None:
    data = write_texts(tmp_path / "data", 5)
    folder, other = data / "texts", tmp_path / "unmounted"
    add_transform(data, "40 ", f"os.path.exists('{other}') or (os.rename('{folder}', '{other}'), os.mkdir('{folder}'))")
    done = penstock("prepare", data, "--cache-dir", tmp_path / "cache", "--allow-transforms")
    assert done.returncode == 2
    assert "cannot be read now: No such file or directory. Retry; " in done.stderr


@pytest.mark.parametrize("is_alive", [True, False])
def test_unit_has_not_failed_while_another_worker_makes_it_a_second_time(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_alive: bool
) -> None:
    """The claim of a dead worker ends."""
    monkeypatch.setattr(shared_module, "_CLAIM_SECONDS", 0.3)
    monkeypatch.setattr(shared_module, "_RENEW_SECONDS", 0.1)
    monkeypatch.setattr(worker, "_POLL_SECONDS", 0.05)
    again = f"{opened.units.claim(7)}-again"
    for number in (1, 2, 3):
        opened.shared.write(f"attempts/{opened.units.names[7].removesuffix('.unit')}-{number}.attempt", [])
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(1))
        if is_alive:
            other = stack.enter_context(closing(SharedStore(tmp_path / "store", Metrics())))
            stack.enter_context(other.claimed(again))
        else:
            opened.shared.write(f"{again}.claim", [])
        failures = threads.submit(Worker(opened.units, 0, 2).run, nothing)
        until(lambda: len(opened.units.done()) == NUM_GROUPS - 1)
        if is_alive:
            time.sleep(1.0)
            opened.units.make(7)
        assert [failure.place for failure in failures.result(30)] == ([] if is_alive else ["row group 1 of part-001.parquet"])


def test_worker_ends_though_a_thread_hangs_if_another_worker_made_its_unit(
    data: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(worker, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(worker, "_REFRESH_SECONDS", 0.2)
    may_end, make = threading.Event(), opened.units.make

    def hang(unit: int) -> None:
        if unit == 4:
            may_end.wait(60)
        make(unit)

    monkeypatch.setattr(opened.units, "make", hang)
    with closing(Opened(data, tmp_path)) as other, ThreadPoolExecutor(1) as threads:
        failures = threads.submit(Worker(opened.units, 0, 2).run, nothing)
        until(lambda: len(other.units.done()) == NUM_GROUPS - 1)
        other.units.make(4)
        assert failures.result(30) == []
        may_end.set()


def test_task_waits_for_a_source_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_RETRY_SECONDS", 0.1)
    monkeypatch.setattr(units_module, "_PAUSE_SECONDS", 0.1)
    shards = write_numbered(tmp_path / "numbers", 90)
    with file_server({f"numbers/{path.name}": path.read_bytes() for path in shards.iterdir()}) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        url, cache = "hf://datasets/org/name", str(tmp_path / "other")
        with closing(Opened([url], tmp_path, dataset="numbers")) as opened:
            served.failures = [503] * 20
            settings = Settings.read({"data_dir": url, "store": opened.shared.place, "cache_dir": cache}, {})
            assert make_unit(settings, "numbers", 1, opened.units.name(1)) is None
            assert not served.failures
            assert opened.units.done() == {1}


def test_bad_rows_of_a_prepared_snapshot_are_refused_if_the_recipe_changes(tmp_path: Path) -> None:
    rows = [[[1, 2], [None], [3]] * 20]
    numbers = write_shards(tmp_path / "data" / "numbers", "input_ids", rows, type_=pa.list_(pa.int32()), row_group_size=20)
    allowed, statuses, told = 'on_bad_row = "replace"\nmax_bad_share = 0.5', [], ""
    for rule in (allowed, 'on_bad_row = "replace"\nmax_bad_share = 0.1', 'on_bad_row = "fail"', allowed):
        (numbers / "penstock.toml").write_text(rule)
        done = run(tmp_path / "data", tmp_path, "store")
        statuses.append(done.returncode)
        told += done.stderr
    assert statuses == [0, 1, 1, 0]
    assert "numbers: 20 of 60 rows (33.33%) are known to be bad, more than max_bad_share = 0.1 allows to replace." in told
    assert "numbers: row 1 of row group 0 in part-000.parquet: " in told


def test_manifest_is_written_though_a_packing_fails(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_FEW_PARTS", 0)
    with pytest.raises(BadParameter, match="packing=best_fit with samples of 1 token cuts"):
        list(prepare(opened.snapshot, [1]))
    assert opened.snapshot.index.find_manifest()


def test_more_packings_than_memory_keeps_are_stored(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that the background could not write."""
    monkeypatch.setattr(index_module, "_BINS_KEPT", 1)
    monkeypatch.setattr(opened.shared, "put_file", nothing)
    assert sum("of them padding" in line for line in prepare(opened.snapshot, [32, 64, 96])) == 9  # of 3 splits
    assert all(opened.shared.has(opened.snapshot.index.bins_path("all", seq_len).name) for seq_len in (32, 64, 96))


def test_dry_run_counts_rows_that_the_filter_leaves_out(tmp_path: Path) -> None:
    data = write_texts(tmp_path / "data", 25)
    with (data / "texts" / "penstock.toml").open("a") as recipe:
        recipe.write("\nfilter = \"text = ''\"")
    with closing(Opened(data, tmp_path)) as opened:
        [_, told] = plan(opened.snapshot, None)
        assert told.startswith("texts: 0:00:01 on this machine: ")


def test_wrong_address_of_ray_is_refused(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'penstock[ray]'")
    done = run(data, tmp_path, "store", "--ray", "http://127.0.0.1:8265")
    assert done.returncode == 2
    assert "prepare: the Ray cluster at http://127.0.0.1:8265 cannot be used: Invalid Ray address: " in done.stderr
    assert "Give the address of its head node, such as HOST:6379, and use the cluster's versions of Ray and" in done.stderr


def test_interrupted_garbage_collection_leaves_no_manifest_without_blocks(
    opened: Opened, expected: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "store", expected)
    other, removed = write_numbered(tmp_path / "data" / "numbers", 9).parent, list[str]()
    monkeypatch.setattr(opened.shared, "remove", removed.append)
    with closing(BlockStore(tmp_path / "other")) as store:
        list(collect(opened.shared, open_catalog(other, None, store), datetime.now(UTC), timedelta(0), deletes=True))
    assert [name.rpartition(".")[2] for name in removed[: 1 + NUM_GROUPS]] == ["manifest", *["unit"] * NUM_GROUPS]
    assert {*removed} == {*expected}


def test_progress_is_printed_without_a_terminal(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prepare_module, "_LINE_SECONDS", 0.0)
    monkeypatch.setattr(worker, "_POLL_SECONDS", 0.01)
    for _ in prepare(opened.snapshot, []):
        pass
    printed = capsys.readouterr().out.splitlines()
    told = r"texts: preparing: \d+%, \d+ of 24 row groups, +[\d.?]+ row groups/s, [\d:?]+ left"
    assert re.fullmatch(told, printed[0])


def test_failing_store_ends_the_worker(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_module, "_PATIENT_SECONDS", 0.0)

    def fail(*_: object, **__: object) -> bool:
        raise PermissionError(13, "the store answered 403")

    monkeypatch.setattr(opened.shared._objects, "create", fail)
    with pytest.raises(PermissionError, match="the store answered 403"):
        Worker(opened.units, 0, 1).run(nothing)


@pytest.mark.slow
def test_killed_worker_is_replaced_by_the_others(tmp_path: Path) -> None:
    data = write_texts(tmp_path / "data", 200)
    assert run(data, tmp_path, "expected").returncode == 0
    first, second = (arguments(data, tmp_path, "store", "--index", index, "--of", "2") for index in "01")
    with closing(Fork(*first)) as killed, closing(Fork(*second)) as left:
        until(lambda: num_units(tmp_path / "store") >= 4)
        killed.kill()
        status, out, errors = left.communicate(120)
    assert status == 0, errors
    assert "texts: prepared in " in out
    assert objects(tmp_path / "store") == objects(tmp_path / "expected")


@pytest.mark.slow
def test_row_that_kills_its_process_fails_alone(tmp_path: Path) -> None:
    """Its neighbours, which die with it at first, are finished."""
    data = write_texts(tmp_path / "data", 5)
    add_transform(data, "40 ", "os.kill(os.getpid(), 9)")
    flags = ("--allow-transforms", "--index", "0", "--of", "1")
    statuses = []
    while True:
        done = run(data, tmp_path, "store", *flags)
        statuses.append(done.returncode)
        if done.returncode != -signal.SIGKILL:
            break
    assert statuses == [-signal.SIGKILL] * 3 + [3]
    assert "row group 2 of part-001.parquet: its process ended in each attempt" in done.stderr
    assert num_units(tmp_path / "store") == NUM_GROUPS - 1
